"""Good kernels and harmless changes give no report; every named sabotage gives the right one, at the right line."""

from __future__ import annotations

import collections

import pytest

from mosaic_gpu.errors import MosaicGpuError
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

from .defects import BENIGN, SABOTAGES
from .expectations import KNOWN_MISSES
from .kernels import NAMES, case
from .rewrite import Editor
from .sabotages import Benign, Sabotage, run_sabotage, verdict
from .verdict import configurations, judge

SEEDS = 12  # for kernels that must be clean


@pytest.mark.parametrize("name", NAMES)
def test_good_kernel_is_clean(name: str) -> None:
    finding = judge(case(name), case(name).program, SEEDS)
    assert finding is None, finding.message if finding else ""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_good_kernel_is_clean_under_100_seeds(name: str) -> None:
    finding = judge(case(name), case(name).program, 100)
    assert finding is None, finding.message if finding else ""


@pytest.mark.parametrize("name", NAMES)
def test_reference_is_sharp(name: str) -> None:
    """The comparison with the reference sees one wrong element."""
    c = case(name)
    outputs = [x.copy() for x in simulate(build_plan(c.program, c.arch), c.arrays, **configurations()[0][1])]
    assert c.right(outputs)
    flat = outputs[0].reshape(-1)
    flat[flat.size // 2] += 1
    assert not c.right(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_good_kernel_compiles(name: str, compiled) -> None:
    compiled(build_plan(case(name).program, case(name).arch))


def _parameters(sabotages: list[Sabotage]) -> list:
    return [
        pytest.param(s, id=str(s), marks=[pytest.mark.xfail(strict=True, reason=KNOWN_MISSES[str(s)])])
        if str(s) in KNOWN_MISSES
        else pytest.param(s, id=str(s))
        for s in sabotages
    ]


@pytest.mark.parametrize("sabotage", _parameters(SABOTAGES))
def test_sabotage_is_found(sabotage: Sabotage) -> None:
    finding = run_sabotage(sabotage)
    wrong = verdict(sabotage, finding)
    assert not wrong, f"{sabotage} (rule {sabotage.rule}): {wrong}\n{finding.message if finding else ''}"


@pytest.mark.parametrize("change", BENIGN, ids=str)
def test_harmless_change_is_clean(change: Benign) -> None:
    finding = run_sabotage(change)
    assert finding is None, f"{change}: {change.why}, but {finding}\n{finding.message if finding else ''}"


def test_findings_are_the_same_in_several_processes() -> None:
    c, seen = case("persistent"), set()
    for s in (s for s in SABOTAGES if s.kernel == "persistent"):
        editor = Editor(c.program, c.names)
        s.edit(editor)
        try:
            plan = build_plan(editor.program, c.arch)
        except MosaicGpuError:
            continue
        found = []
        for processes in (1, 2):
            error = None
            try:
                simulate(plan, c.arrays, processes=processes)
            except MosaicGpuError as e:
                error = (type(e), str(e), vars(e))
            found.append(error)
        assert found[0] is not None and found[0] == found[1], s
        seen.add(found[0][0].__name__)
    assert seen >= {"Race", "Deadlock", "BarrierMisuse", "Leak"}


def test_table_is_whole() -> None:
    names = collections.Counter(map(str, (*SABOTAGES, *BENIGN)))
    assert [n for n, count in names.items() if count > 1] == []
    assert len(SABOTAGES) >= 100
    assert {s.kernel for s in SABOTAGES} == set(NAMES)
