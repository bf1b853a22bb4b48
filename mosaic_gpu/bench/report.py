"""What result files say: the share of the roofline, tables over generations of GPUs, and what changed between two runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..tune.chip import Chip, chip_of
from .verdicts import compare as ratio_of

GENERATIONS = {"Hopper": ("h100", "h200", "gh200"), "Blackwell": ("b100", "b200", "b300", "gb200", "gb300")}
# Between two runs a chip's clock differs by some percent; relative to a peer that was measured in both, it does not.
NOISE, NOISE_TO_PEER = 0.05, 0.02

Results = Mapping[str, Any]


def read_results(path: Path) -> dict[str, Any]:
    """A result file.  ValueError for what is none."""
    try:
        data: Any = json.loads(path.read_text())
        machine, cells = data["machine"], data["cells"]
        if data["schema"] != 1 or not isinstance(machine, dict) or not isinstance(cells, dict):
            raise ValueError("not of schema 1")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result file of `mosaic-gpu bench`: {error}") from error
    return dict(data)


def chip_for(results: Results) -> Chip:
    """The roof of the GPU that a file was measured on."""
    return chip_of(str(results["machine"].get("device", "")).lower().replace(" ", "_"))


def generation_of(results: Results) -> str:
    """'Hopper', 'Blackwell' or '' by the name of the GPU."""
    name = str(results["machine"].get("device", "")).lower()
    return next((g for g, chips in GENERATIONS.items() if any(chip in name for chip in chips)), "")


def rate(record: Results, name: str, protocol: str = "interleaved") -> float | None:
    """Median TFLOP/s of a provider in a cell; None where it was not measured."""
    row = record.get("providers", {}).get(name, {})
    return float(row[protocol]["median"]) if protocol in row else None


def ours_of(record: Results) -> str | None:
    """The provider of ours that stands for the cell."""
    if record.get("chosen"):
        return str(record["chosen"])
    return next((n for n, row in record.get("providers", {}).items() if row["ours"] and "interleaved" in row), None)


def best_peer(record: Results) -> str | None:
    """The fastest of the others, interleaved."""
    peers = {n: r for n, row in record.get("providers", {}).items() if not row["ours"] and (r := rate(record, n))}
    return max(peers, key=peers.__getitem__, default=None)


def roofline(record: Results, chip: Chip) -> float | None:
    """The share of what the chip could do at most that ours reached: the least time of its operations and bytes over its time."""
    name = ours_of(record)
    value = rate(record, name) if name else None
    if not value or record["flops"] <= 1:
        return None
    seconds = record["flops"] / (value * 1e12)
    return float(chip.bound(record["flops"], record.get("bytes", 0)) / seconds)


def markdown(files: Sequence[Results]) -> str:
    """One table over result files of different GPUs: for each generation ours, the best peer, the ratio with its interval, and
    the share of the roofline.  What nobody has measured is an empty column."""
    groups = {g: [f for f in files if generation_of(f) == g] for g in GENERATIONS}
    others = [f for f in files if not generation_of(f)]
    if others:
        groups["other"] = others
    heads = ["cell"]
    for g in groups:
        devices = ", ".join(dict.fromkeys(str(f["machine"]["device"]) for f in groups[g])) or "not measured"
        heads += [f"{g} ({devices}): ours", "best peer", "ratio, interleaved", "of roofline"]
    lines = ["TFLOP/s, medians of the interleaved protocol.", "", _line(heads), "|" + "---|" * len(heads)]
    for cell in dict.fromkeys(c for f in files for c in f["cells"]):
        entries = [cell]
        for some in groups.values():
            entries += _entries(next((f for f in some if cell in f["cells"]), None), cell)
        lines.append(_line(entries))
    return "\n".join(lines) + "\n"


def rows(files: Sequence[Results]) -> list[dict[str, Any]]:
    """The same as plain data, a row for each cell of each file; None is what was not measured."""
    found = []
    for f in files:
        for cell, record in f["cells"].items():
            ours, peer = ours_of(record), best_peer(record)
            found.append(
                {
                    "device": f["machine"].get("device"),
                    "generation": generation_of(f) or None,
                    "cell": cell,
                    "ours": rate(record, ours) if ours else None,
                    "best_peer": peer,
                    "peer": rate(record, peer) if peer else None,
                    "ratio": record.get("comparison", {}).get(ours, {}).get("interleaved"),
                    "of_roofline": roofline(record, chip_for(f)),
                }
            )
    return found


def _entries(f: Results | None, cell: str) -> list[str]:
    if f is None:
        return ["–"] * 4
    record = f["cells"][cell]
    ours, peer = ours_of(record), best_peer(record)
    ratio = record.get("comparison", {}).get(ours, {}).get("interleaved")
    share = roofline(record, chip_for(f))
    return [
        f"{rate(record, ours):.0f}" if ours else str(record.get("verdict", "–")),
        f"{rate(record, peer):.0f} ({peer})" if peer else "–",
        f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else "–",
        f"{share:.0%}" if share else "–",
    ]


def _line(entries: Sequence[str]) -> str:
    return "| " + " | ".join(entries) + " |"


@dataclasses.dataclass(frozen=True)
class Change:
    """Of ours in one cell between two files.

    ratio: new speed over old, with its 95 % interval, relative to `peer` where that was measured in both.
    verdict: faster, slower, same (within the noise), broken (it was right, and is not), fixed, only old, only new, not measured.
    """

    cell: str
    verdict: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    peer: str = ""
    message: str = ""

    @property
    def regression(self) -> bool:
        """Whether somebody should look."""
        return self.verdict in ("slower", "broken")


def changes(old: Results, new: Results) -> list[Change]:
    """Cell by cell.  ValueError for files of different benchmarks or GPUs."""
    for what, a, b in (
        ("benchmark", old["benchmark"], new["benchmark"]),
        ("GPU", old["machine"].get("device"), new["machine"].get("device")),
    ):
        if a != b:
            raise ValueError(f"the two files are of different {what}s: {a} and {b}")
    return [_change(c, old["cells"].get(c), new["cells"].get(c)) for c in dict.fromkeys([*old["cells"], *new["cells"]])]


def _change(cell: str, old: Results | None, new: Results | None) -> Change:
    if old is None or new is None:
        return Change(cell, "only new" if old is None else "only old")
    a, b = ours_of(old), ours_of(new)
    right_a, right_b = (n is not None and r["providers"][n]["status"] == "ok" for n, r in ((a, old), (b, new)))
    if not right_a or not right_b or a is None or b is None:
        verdict = "broken" if right_a else "fixed" if right_b else "not measured"
        return Change(cell, verdict, message=f"{old.get('verdict')} -> {new.get('verdict')}")
    peer = _common_peer(old, new)
    one, two = (r["providers"][n]["interleaved"]["samples"] for r, n in ((old, a), (new, b)))
    if peer:  # sample by sample: a round is one state of the chip
        one, two = (
            [x / y for x, y in zip(s, r["providers"][peer]["interleaved"]["samples"], strict=False)]
            for s, r in ((one, old), (two, new))
        )
    found = ratio_of(two, {"old": one}, paired=False)
    noise = NOISE_TO_PEER if peer else NOISE
    if found.low > 1 and found.value > 1 + noise:
        verdict = "faster"
    elif found.high < 1 and found.value < 1 - noise:
        verdict = "slower"
    else:
        verdict = "same"
    return Change(cell, verdict, found.value, found.low, found.high, peer or "")


def _common_peer(old: Results, new: Results) -> str | None:
    """The fastest peer that both runs have in the same version."""
    name = best_peer(old)
    if name is None or rate(new, name) is None:
        return None
    same = old["providers"][name].get("version") == new["providers"][name].get("version")
    return name if same else None
