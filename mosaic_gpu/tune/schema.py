"""The format of tuning caches: the published JSON schema, what does not keep it in words, and the text that is written.

`cache.schema.json` beside this file is the schema, version 2.  `migrate` brings version 1 to it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 2
SCHEMA_FILE = Path(__file__).parent / "cache.schema.json"


@functools.cache
def _validator(part: str) -> Any:
    """Of the whole file (''), or of one definition of the schema."""
    import jsonschema

    schema = json.loads(SCHEMA_FILE.read_text())
    wanted = schema if not part else {"$defs": schema["$defs"], "$ref": f"#/$defs/{part}"}
    return jsonschema.Draft202012Validator(wanted)


def problems(data: Any, part: str = "") -> list[str]:
    """What is wrong with a file, or with one `part` of it (header, entry, trial, ...): one line each, with its place."""
    return [line for error in _validator(part).iter_errors(data) for line in _lines(error)]


def _lines(error: Any) -> Iterator[str]:
    if error.context:  # a `oneOf`: say what is wrong with the alternative that was meant, not that none fits
        from jsonschema.exceptions import best_match

        yield from _lines(best_match([error]) if best_match([error]) is not error else error.context[-1])
        return
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path).lstrip(".")
    yield f"{place or 'the file'}: {error.message[:200]}"


def canonical(data: Any) -> str:
    """The same text for the same data: what is hashed, compared and sorted by."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def dump(data: Mapping[str, Any]) -> str:
    """A cache file's text: keys, entries and trials in a fixed order, one trial, key or config a line, so that a diff of two
    files shows what changed and nothing else."""
    whole = dict(data)
    whole["entries"] = sorted((_sorted_trials(e) for e in data["entries"]), key=_entry_order)
    return _format(whole, "") + "\n"


def _sorted_trials(entry: Any) -> Any:
    if not isinstance(entry, dict) or not isinstance(entry.get("trials"), list):
        return entry  # broken: kept as it is, for people to look at
    return {**entry, "trials": sorted(entry["trials"], key=_trial_order)}


def _entry_order(entry: Any) -> str:
    return canonical([entry.get("key"), entry.get("workload")] if isinstance(entry, dict) else entry)


def _trial_order(trial: Any) -> str:
    return canonical([trial.get("config"), trial.get("provenance")] if isinstance(trial, dict) else trial)


def _format(value: Any, indent: str, name: str = "") -> str:
    deeper = indent + " "
    if isinstance(value, dict) and value and name != "trial" and not _flat(value):
        parts = [f"{deeper}{json.dumps(k)}: {_format(value[k], deeper, k)}" for k in sorted(value)]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(value, list) and value:
        of = "trial" if name == "trials" else ""
        return "[\n" + ",\n".join(deeper + _format(v, deeper, of) for v in value) + f"\n{indent}]"
    return json.dumps(value, sort_keys=True)


def _flat(value: Mapping[str, Any]) -> bool:
    return not any(isinstance(v, (dict, list)) for v in value.values())


def migrate(data: Any) -> dict[str, Any]:
    """A file of schema 1 as one of schema 2: its measurements as they are, and null for what it did not record.

    Schema 1 had no hash of the kernel's source, so its trials are never compared with newer ones, and a lookup that takes one
    says that the kernel has changed, or may have, since.  ValueError for what is no file of schema 1.
    """
    if not isinstance(data, dict) or data.get("schema") != 1 or not isinstance(data.get("trials"), dict):
        raise ValueError("this is no tuning cache of schema 1")
    from .cache import provenance_id, with_best
    from .tunable import find_tunable

    capability = {"nvidia_h200": ("9.0", "sm90"), "nvidia_h100_80gb_hbm3": ("9.0", "sm90")}
    if data.get("device") not in capability:
        raise ValueError(
            f"schema 1 did not record the compute capability of {data.get('device')!r}, and it is not known"
        )
    number, generation = capability[data["device"]]
    tunable = find_tunable(data["kernel"], generation)
    entries: dict[str, dict[str, Any]] = {}
    provenances: dict[str, Any] = {}
    latest = ""
    for old in (t for trials in data["trials"].values() for t in trials):
        environment = old["environment"]
        provenance = {
            "toolchain": {
                "driver": None,
                "cuda": environment["driver"].removeprefix("CUDA "),
                "nvrtc": environment["toolchain"],
                "mosaic_gpu": environment["package"],
                "jax": None,
            },
            "source": None,
            "protocol": {"name": "schema 1", "timer": "host", "repeats": 7, "sets": "twice the L2"},
        }
        provenances[name := provenance_id(provenance)] = provenance
        workload = tunable.workload(old["workload"])
        plain = {"key": tunable.key(workload), "workload": workload.to_json()}
        entry = entries.setdefault(canonical(plain), {**plain, "best": None, "trials": []})
        kept = {k: old[k] for k in ("config", "status", "seconds", "error", "allowed", "message", "date")}
        entry["trials"].append({**kept, "provenance": name, "stage": 0 if old["seconds"] else None})
        latest = max(latest, old["date"])
    return {
        "schema": SCHEMA,
        "header": {
            "device": {
                "name": data["device"],
                "compute_capability": number,
                "multiprocessors": None,
                "memory_bytes": None,
                "power_limit_watts": None,
            },
            "kernel": {"name": data["kernel"], "generation": generation, "space": None},
            "provenances": provenances,
            "date": latest,
        },
        "entries": [with_best(e, tunable.workload(e["workload"]).flops) for e in entries.values()],
    }
