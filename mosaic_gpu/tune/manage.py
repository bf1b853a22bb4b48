"""Work on whole cache files: merging, comparing, pruning, exporting, and how well the shortcuts of past searches did."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CacheInvalid, UnsupportedCall
from . import cache, schema
from .cache import Cache
from .chip import Chip, chip_of
from .schema import canonical
from .tunable import Tunable, find_tunable


def tunable_of(data: Mapping[str, Any]) -> Tunable | None:
    """The kernel of a file where it is one of ours; a user's is not known from its name."""
    header = data["header"]["kernel"]
    try:
        return find_tunable(header["name"], header["generation"])
    except (ValueError, NotImplementedError):
        return None


def read_any(path: Path) -> Cache:
    """A cache file wherever it lies, one of schema 1 brought to today's.  CacheInvalid for what is none."""
    try:
        data: Any = cache.parsed(path.read_text())
    except (OSError, ValueError) as error:
        raise CacheInvalid(f"{path} cannot be read as a tuning cache: {error}") from error
    if isinstance(data, dict) and data.get("schema") == 1:
        try:
            return schema.migrate(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CacheInvalid(f"{path} is of schema 1, and cannot be brought to {schema.SCHEMA}: {error}") from error
    entries = data.get("entries") if isinstance(data, dict) else None
    if found := schema.problems({**data, "entries": []} if isinstance(entries, list) else data):
        raise CacheInvalid(f"{path} does not keep the schema: {'; '.join(found[:3])}")
    return dict(data)


def good_entries(data: Cache) -> list[Cache]:
    """Those that keep the schema."""
    return [e for e in data["entries"] if not schema.problems(e, "entry")]


def what_is_wrong(data: Cache, entry: Cache, tunable: Tunable | None) -> str | None:
    """With an entry that keeps the schema: a key or config that today's kernel does not have, a provenance that is not there."""
    try:
        if tunable is not None:
            workload = tunable.workload(entry["workload"])
            if tunable.key(workload) != entry["key"]:
                return "its key is not that of its workload"
            if entry["best"]:
                tunable.fits(workload, tunable.from_json(entry["best"]["config"]))
    except (KeyError, TypeError, ValueError, UnsupportedCall) as error:
        return str(error)
    used = (entry["best"] or {}).get("provenance")
    return None if used in (None, *data["header"]["provenances"]) else f"the header has no provenance {used}"


def merge(files: Sequence[tuple[str, Cache]]) -> Cache:
    """All entries and trials of files of one device and kernel; of a trial that several have, the newest.

    The best of an entry is found again, by the provenance of its newest trial.  CacheInvalid for files that do not belong
    together.
    """
    (first_name, first), *_ = files
    merged: Cache = {**first, "entries": []}
    for name, data in files:
        for what, place in (
            ("device", ("device", "name")),
            ("kernel", ("kernel", "name")),
            ("generation", ("kernel", "generation")),
        ):
            a, b = (d["header"][place[0]][place[1]] for d in (first, data))
            if a != b:
                raise CacheInvalid(
                    f"{name} is of {what} {b}, {first_name} of {a}: timings of one {what} are not another's"
                )
        header = merged["header"]
        newer = data["header"] if data["header"]["date"] >= header["date"] else header
        device = {
            k: newer["device"][k] if newer["device"][k] is not None else header["device"][k] for k in header["device"]
        }
        provenances = {**header["provenances"], **data["header"]["provenances"]}
        merged["header"] = {**newer, "device": device, "provenances": provenances}
        for entry in good_entries(data):
            old = cache.find_entry(merged, entry["key"], entry["workload"])
            merged = cache.with_entry(merged, _joined(old, entry, tunable_of(data)))
    return merged


def _joined(old: Cache | None, new: Cache, tunable: Tunable | None) -> Cache:
    if old is None:
        return new
    joined: Cache = {**old, "best": None}
    for trial in new["trials"]:
        known = next((t for t in joined["trials"] if _name(t) == _name(trial)), None)
        if known is None or trial["date"] >= known["date"]:
            joined = cache.with_trial(joined, trial)
    flops = _flops(old, tunable)
    made = cache.with_best(joined, flops)
    # Exported files have no trials: the newer best of the two.
    kept = [e["best"] for e in (old, new) if e["best"]]
    return made if made["best"] else {**joined, "best": max(kept, key=lambda b: str(b["date"]), default=None)}


def _name(trial: Mapping[str, Any]) -> str:
    return canonical([trial["config"], trial["provenance"]])


def _flops(entry: Mapping[str, Any], tunable: Tunable | None) -> float | None:
    if tunable is not None:
        return float(tunable.workload(entry["workload"]).flops)
    best = entry["best"]
    return best["tflops"] * best["seconds"] * 1e12 if best and best["tflops"] else None


def prune(data: Cache, *, stale: str | None = None, fastest: int | None = None) -> tuple[Cache, dict[str, int]]:
    """The file with less in it, and what was dropped.

    Always: entries that `validate` refuses, provenances that nothing refers to.  stale: trials, and entries without
    others, that were timed with another source of the kernel than this hash.  fastest: of right trials, all but so many.
    """
    dropped: Counter[str] = Counter()
    entries = []
    tunable = tunable_of(data)
    for entry in data["entries"]:
        if schema.problems(entry, "entry") or what_is_wrong(data, entry, tunable):
            dropped["broken entries"] += 1
            continue
        trials = entry["trials"]
        if stale is not None:
            fresh = {i for i, p in data["header"]["provenances"].items() if p["source"] == stale}
            kept = [t for t in trials if t["provenance"] in fresh]
            dropped["stale trials"] += len(trials) - len(kept)
            if not kept and (entry["best"] or {}).get("provenance") not in fresh:
                dropped["stale entries"] += 1
                continue
            best = entry["best"] if (entry["best"] or {}).get("provenance") in fresh else None
            entry = {**entry, "trials": kept, "best": best}
            entry = entry if best else cache.with_best(entry, _flops(entry, tunable))
            trials = kept
        if fastest is not None:
            right = sorted(
                (t for t in trials if t["status"] == "ok"), key=lambda t: (-(t.get("stage") or 0), t["seconds"])
            )
            kept = right[:fastest]
            dropped["slower trials"] += len(trials) - len(kept)
            entry = {**entry, "trials": kept}
        entries.append(entry)
    used = {t["provenance"] for e in entries for t in e["trials"]} | {
        (e["best"] or {}).get("provenance") for e in entries
    }
    provenances = {i: p for i, p in data["header"]["provenances"].items() if i in used}
    dropped["provenances"] += len(data["header"]["provenances"]) - len(provenances)
    made = {**data, "header": {**data["header"], "provenances": provenances}, "entries": entries}
    return made, {k: n for k, n in dropped.items() if n}


def differences(a: Cache, b: Cache) -> list[dict[str, Any]]:
    """A row for each workload of two files: the fields of the best config that differ, and by how much b is faster than a.

    only: 'a' or 'b' where the other has no best; ratio: seconds of a over seconds of b.
    """
    rows = []
    names = {canonical([e["key"], e["workload"]]): e for d in (a, b) for e in good_entries(d)}
    for key in sorted(names):
        entry = names[key]
        bests = [(cache.find_entry(d, entry["key"], entry["workload"]) or {}).get("best") for d in (a, b)]
        if bests == [None, None]:
            continue
        row: dict[str, Any] = {
            "key": entry["key"],
            "workload": entry["workload"],
            "only": "",
            "ratio": None,
            "changed": {},
        }
        row |= {"a": bests[0] and bests[0]["seconds"], "b": bests[1] and bests[1]["seconds"]}
        if bests[0] is None or bests[1] is None:
            row["only"] = "b" if bests[0] is None else "a"
        else:
            one, two = bests[0]["config"], bests[1]["config"]
            row["changed"] = {
                f: [one.get(f), two.get(f)] for f in sorted(one.keys() | two.keys()) if one.get(f) != two.get(f)
            }
            row["ratio"] = bests[0]["seconds"] / bests[1]["seconds"]
        rows.append(row)
    return rows


def export(data: Cache) -> Cache:
    """The best configs alone, without trials: a small file for a repository, still of the schema."""
    small, _ = prune({**data, "entries": [{**e, "trials": []} for e in good_entries(data) if e["best"]]})
    return small


def _estimate(tunable: Tunable | None, entry: Cache, chip: Chip) -> Callable[[Cache], Any]:
    """What orders trials: today's cost estimate of a kernel of ours, else the recorded rank; None where there is none."""

    def of(trial: Cache) -> Any:
        if tunable is None:
            return trial.get("rank")
        try:
            return tunable.cost(tunable.workload(entry["workload"]), tunable.from_json(trial["config"]), chip)
        except (TypeError, ValueError):  # no config of today's kernel
            return None

    return of


def ranking(data: Cache) -> dict[str, Any]:
    """How well the cost estimate ordered what was timed, over the entries with at least four right trials of one provenance.

    in_top_quarter: of how many entries the fastest was in the first quarter by rank; lost_by_first: how much slower the first by
    rank is than the fastest (median over entries); seconds: wall time of the trials.  By itself this says nothing of configs that
    were never timed: `tune run --exhaustive` times them all.
    """
    rows = []
    tunable, chip = tunable_of(data), chip_of(data["header"]["device"]["name"])
    for entry in good_entries(data):
        newest = (entry["best"] or {}).get("provenance")
        estimate = _estimate(tunable, entry, chip)
        timed = [
            t for t in entry["trials"] if t["provenance"] == newest and t.get("seconds") and estimate(t) is not None
        ]
        if len(timed) < 4:
            continue
        by_rank = sorted(timed, key=estimate)
        fastest = min((t for t in timed if t["status"] == "ok"), key=lambda t: t["seconds"])
        place = by_rank.index(fastest)
        rows.append(
            {
                "workload": entry["workload"],
                "timed": len(timed),
                "place": place,
                "in_top_quarter": place < math.ceil(len(timed) / 4),
                "lost_by_first": by_rank[0]["seconds"] / fastest["seconds"] - 1,
                "seconds": round(sum(t.get("took") or 0.0 for t in entry["trials"]), 2),
            }
        )
    lost = [float(r["lost_by_first"]) for r in rows]
    return {
        "entries": rows,
        "in_top_quarter": sum(bool(r["in_top_quarter"]) for r in rows),
        "of": len(rows),
        "lost_by_first": statistics.median(lost) if lost else None,
    }


def savings(short: Cache, exhaustive: Cache) -> dict[str, Any]:
    """What ranking and halving saved, and cost, by two searches of the same workloads: a usual one and an exhaustive one.

    A row for each workload of both: trials and their seconds of wall time (checks, timings, waiting for the compiler) of each,
    saved: the share of the time; found: whether the usual one's best is the exhaustive one's; lost: how much slower it is than
    that one, by the exhaustive one's timings (None if that did not time it; what is no further than its noise is 0: a config
    that was timed but not confirmed met a cooler chip).  Over all: saved, how often found, and the largest loss.
    CacheInvalid for files of different devices or kernels.
    """
    for part, name in (("device", "name"), ("kernel", "name")):
        a, b = (d["header"][part][name] for d in (short, exhaustive))
        if a != b:
            raise CacheInvalid(f"one search is of {part} {a}, the other of {b}: they cannot be compared")
    rows = []
    for entry in good_entries(short):
        other = cache.find_entry(exhaustive, entry["key"], entry["workload"])
        if other is None or not entry["best"] or not other["best"]:
            continue
        mine, theirs = _of_best(entry), _of_best(other)
        spent, whole = (sum(t.get("took") or 0.0 for t in some) for some in (mine, theirs))
        config = canonical(entry["best"]["config"])
        seconds = {canonical(t["config"]): t["seconds"] for t in theirs if t["status"] == "ok"}
        rows.append(
            {
                "workload": entry["workload"],
                "trials": [len(mine), len(theirs)],
                "seconds": [round(spent, 2), round(whole, 2)],
                "saved": 1 - spent / whole if whole else None,
                "found": config == canonical(other["best"]["config"]),
                "lost": max(seconds[config] / other["best"]["seconds"] - 1, 0.0) if config in seconds else None,
            }
        )
    totals = [sum(r["seconds"][i] for r in rows) for i in (0, 1)]
    return {
        "entries": rows,
        "saved": 1 - totals[0] / totals[1] if rows and totals[1] else None,
        "found": sum(bool(r["found"]) for r in rows),
        "of": len(rows),
        "lost": max((r["lost"] for r in rows if r["lost"] is not None), default=None),
    }


def _of_best(entry: Cache) -> list[Mapping[str, Any]]:
    """The trials that were compared with the best: those of its provenance."""
    return [t for t in entry["trials"] if t["provenance"] == entry["best"]["provenance"]]
