"""Every mechanical mutant is found, or it is known why there is nothing to find.

By default a sample; the rest, and all of the attention kernels, which take longest, are marked slow.
"""

from __future__ import annotations

import zlib

import pytest

from .defects import SABOTAGES
from .expectations import EQUIVALENT, KNOWN_MISSES, VALUE
from .kernels import MUTATED
from .mutate import Mutant, mutants, run_mutant, same_code

MUTANTS = [m for name in MUTATED for m in mutants(name)]
SAMPLE = 4  # one mutant of so many runs by default


def _parameters() -> list:
    out = []
    for m in MUTANTS:
        chosen = zlib.crc32(str(m).encode()) % SAMPLE == 0 and "attention" not in m.kernel
        marks = [] if chosen else [pytest.mark.slow]
        if str(m) in KNOWN_MISSES:
            marks.append(pytest.mark.xfail(strict=True, reason=KNOWN_MISSES[str(m)]))
        out.append(pytest.param(m, id=str(m), marks=marks))
    return out


@pytest.mark.parametrize("mutant", _parameters())
def test_mutant_is_found(mutant: Mutant) -> None:
    finding = run_mutant(mutant)
    message = f"{mutant}, line {mutant.line}: {finding}\n{finding.message if finding else ''}"
    if mutant.stronger or str(mutant) in EQUIVALENT:
        assert finding is None, f"false alarm: {message}"
    elif str(mutant) in VALUE:
        assert finding is not None and finding.kind == "value", message
    elif finding is None and same_code(mutant):
        pass  # the planner puts back what was taken away
    else:
        assert finding is not None and finding.kind in ("error", "refused"), message
        assert finding.line is not None, f"no line: {message}"


def test_tables_name_what_exists() -> None:
    known = {*map(str, MUTANTS), *map(str, SABOTAGES)}
    named = [*EQUIVALENT, *VALUE, *KNOWN_MISSES]
    assert [n for n in named if n not in known] == []
    assert len(set(named)) == len(named)
