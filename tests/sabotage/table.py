"""`python -m tests.sabotage.table`: run everything and write docs/sabotage.md.  `--check` only prints what differs from the
expectations."""

from __future__ import annotations

import collections
import datetime
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from . import on_gpu
from .defects import BENIGN, SABOTAGES
from .expectations import EQUIVALENT, KNOWN_MISSES, VALUE
from .kernels import MUTATED, NAMES, case
from .mutate import Mutant, mutants, run_mutant, same_code
from .rules import RULES, UNWRITABLE
from .sabotages import run_sabotage, verdict
from .verdict import Finding, configurations, judge

CLEAN_SEEDS = 100  # for good kernels
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "sabotage.md"


def outcome(m: Mutant, finding: Finding | None) -> str:
    """The column of a mutant."""
    if m.stronger or str(m) in EQUIVALENT or (finding is None and same_code(m)):
        return "harmless" if finding is None else "false alarm"
    if finding is None:
        return "missed"
    if finding.kind == "value":
        return "value" if str(m) in VALUE else "value, no report"
    return {"error": "found", "refused": "refused"}.get(finding.kind, "crash")


def rows(head: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *lines)]


def grouped(reasons: Iterable[tuple[str, object]]) -> list[str]:
    """What shares a reason, in one row."""
    groups: dict[str, list[str]] = {}
    for reason, what in reasons:
        groups.setdefault(reason, []).append(str(what))
    return rows(("why", "which"), [[reason, "<br>".join(sorted(what))] for reason, what in groups.items()])


def counted(pairs: Iterable[tuple[str, str]], columns: Sequence[str], first: str) -> list[str]:
    """A table of counts with a last row of sums; columns that are empty throughout stay out."""
    count = collections.Counter(pairs)
    keys = list(dict.fromkeys(k for k, _ in count))
    columns = [c for c in columns if any(count[k, c] for k in keys)]
    lines = [[k, sum(count[k, c] for c in columns), *(count[k, c] or "" for c in columns)] for k in keys]
    sums = ["**all**", sum(count.values()), *(sum(count[k, c] for k in keys) for c in columns)]
    return rows([first, "all", *columns], [*lines, sums])


def _on_gpu() -> list[str]:
    """What `tests.sabotage.on_gpu` measured when it last ran."""
    path = pathlib.Path(__file__).with_name("on_gpu.json")
    if not path.exists():
        return []
    return ["## On a GPU", "", *on_gpu.markdown(json.loads(path.read_text())), ""]


def main() -> None:
    start = time.time()
    dirty = [n for n in NAMES if judge(case(n), case(n).program, CLEAN_SEEDS) is not None]
    alarms = [(b, f) for b in BENIGN if (f := run_sabotage(b)) is not None]
    named = [(s, f, verdict(s, f)) for s in SABOTAGES for f in [run_sabotage(s)]]
    mechanical = [(m, f, outcome(m, f)) for n in MUTATED for m in mutants(n) for f in [run_mutant(m)]]
    unexpected = [f"{s}: {v}" for s, _, v in named if bool(v) != (str(s) in KNOWN_MISSES)]
    good = ("found", "refused", "harmless", "value")
    unexpected += [f"{m}: {o} {f}" for m, f, o in mechanical if (o not in good) != (str(m) in KNOWN_MISSES)]
    unexpected += [f"{n} is not clean" for n in dirty] + [f"false alarm {b}: {f} {f.message}" for b, f in alarms]
    print("\n".join(unexpected) or "as expected")
    print(f"{time.time() - start:.0f} s")
    if "--check" in sys.argv:
        raise SystemExit(bool(unexpected))

    commit = subprocess.run(["git", "log", "-1", "--format=%h"], capture_output=True, text=True, check=True).stdout
    ways = ", ".join(name for name, _ in configurations())
    found = sum(not v for _, _, v in named)
    first = collections.Counter(f.how for _, f, v in named if f is not None and not v)
    columns = ("found", "refused", "value", "harmless", "value, no report", "missed", "false alarm", "crash")
    outcomes = collections.Counter(o for _, _, o in mechanical)
    out = [
        "# Sabotage: what the simulator finds, and what it does not",
        "",
        "Written by `python -m tests.sabotage.table` on "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, at commit {commit.strip()}. Each program was simulated "
        f"with asynchronous work done in these ways: {ways}; the good kernels under {CLEAN_SEEDS} seeds.",
        "",
        *rows(
            ["programs", "all", "found", "missed", "rightly silent", "false alarms"],
            [
                ["good kernels", len(NAMES), "", "", len(NAMES) - len(dirty), len(dirty)],
                ["harmless changes of them", len(BENIGN), "", "", len(BENIGN) - len(alarms), len(alarms)],
                ["named sabotages", len(named), found, len(named) - found, "", ""],
                [
                    "mechanical mutants",
                    len(mechanical),
                    sum(outcomes[o] for o in ("found", "refused", "value")),
                    sum(outcomes[o] for o in ("missed", "value, no report", "crash")),
                    outcomes["harmless"],
                    outcomes["false alarm"],
                ],
            ],
        ),
        "",
        f"The good kernels: {', '.join(NAMES)}. Of the mutants found, {outcomes['refused']} are refused by the planner and in "
        f"{outcomes['value']} nothing but the result is wrong, which a comparison shows. `pytest -m slow -k 100_seeds` runs the "
        "good kernels and eighteen variants of attention under 100 seeds each.",
        "",
        "## Named sabotages",
        "",
        "Found: the error has the right class, names a line of the defect, and of a race both ends. A wrong result alone does "
        "not count, but for one where nothing else is wrong (an accumulator that starts from the tile before). The way in "
        "which they were found first: " + ", ".join(f"{how} {n}" for how, n in first.most_common()) + ".",
        "",
        *counted(((s.kernel, "not found" if v else "found") for s, _, v in named), ("found", "not found"), "kernel"),
        "",
        *counted(
            (
                (f"{s.rule} {RULES[s.rule]}", "not found" if v else "found")
                for s, _, v in sorted(named, key=lambda x: x[0].rule)
            ),
            ("found", "not found"),
            "rule that is broken",
        ),
        "",
        "## Mechanical mutants",
        "",
        "found: reported by the simulator; refused: by the planner; value: another result, and nothing else is wrong; harmless: "
        "nothing is wrong (stricter waits, the same code, or a reason below); the rest are failures of the simulator.",
        "",
        *counted(((m.kernel, o) for m, _, o in mechanical), columns, "kernel"),
        "",
        *counted(((m.kind, o) for m, _, o in mechanical), columns, "change"),
        "",
        "## Not found",
        "",
        *(
            grouped(
                [
                    *((KNOWN_MISSES.get(str(s), s.rule), f"{s} ({v})") for s, _, v in named if v),
                    *((KNOWN_MISSES.get(str(m), "?"), f"{m} ({o})") for m, _, o in mechanical if o not in good),
                ]
            )
            if found < len(named) or any(o not in good for _, _, o in mechanical)
            else ["Nothing."]
        ),
        "",
        "## Harmless mutants, and why",
        "",
        *grouped((why, what) for what, why in EQUIVALENT.items()),
        "",
        f"Besides, {sum(m.stronger for m, _, _ in mechanical)} mutants only wait for more than they must, and "
        f"{sum(o == 'harmless' and not m.stronger and str(m) not in EQUIVALENT for m, _, o in mechanical)} are emitted as the "
        "same code as the good kernel.",
        "",
        "## Mutants that only the result shows",
        "",
        *grouped((why, what) for what, why in VALUE.items()),
        "",
        *_on_gpu(),
        "## Rules without a sabotage",
        "",
        "No kernel of this version of the language can break them:",
        "",
        *rows(("rule", "why"), UNWRITABLE.items()),
        "",
    ]
    PAGE.write_text("\n".join(out))


if __name__ == "__main__":
    main()
