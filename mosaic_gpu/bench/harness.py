"""Measures one cell: every provider's result is judged, then all are timed by both protocols and compared.

Nothing here imports PyTorch or JAX: a `Device` has the clocks, and tests have a fake one.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .model import Cell, Device, DeviceLost, Options, Provider, Unsupported, first_line
from .protocols import Session
from .verdicts import compare, overall

CONTENDER = 0.9  # peers slower than this share of the fastest one, interleaved, are not measured alone


def prepare_all(
    cell: Cell, problem: Any, providers: Sequence[Provider], device: Device, log: Callable[[str], None]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Prepare and judge every provider: a row for each, and the calls of those that are right."""
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Any] = {}
    for p in providers:
        row: dict[str, Any] = {"ours": p.ours, "host_timed": p.host_timed, "status": "ok", "message": ""}
        rows[p.name] = row
        try:
            row["version"] = p.version()
            call = p.prepare(cell, problem)
            accuracy = problem.judge(call.first())
            device.synchronize()
        except Unsupported as error:
            row |= {"status": "unsupported", "message": first_line(error)}
        except DeviceLost as error:
            raise DeviceLost(f"{p.name}: {error}") from error
        except Exception as error:  # a library that fails is a line in the table, whatever it raises
            row |= {"status": "failed", "message": f"{type(error).__name__}: {first_line(error)}"}
            _check_alive(device, p.name, row["message"])
        else:
            row |= {"error": accuracy.error, "allowed": accuracy.allowed}
            if used := p.config(cell):
                row["config"] = used
            if accuracy.right:
                calls[p.name] = call
            else:
                row |= {"status": "wrong", "message": f"error {accuracy.error:.2e}, allowed {accuracy.allowed:.2e}"}
        log(f"    {p.name}: {row['status']} {row['message']}".rstrip())
    return rows, calls


def _check_alive(device: Device, name: str, message: str) -> None:
    try:
        device.synchronize()
    except Exception as error:
        raise DeviceLost(f"after {name} failed ({message}): {first_line(error)}") from error


def measure_cell(
    cell: Cell,
    problem: Any,
    providers: Sequence[Provider],
    device: Device,
    options: Options,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Everything about one cell as plain data; `verdict` is won, tied, lost, unsupported (ours cannot), wrong, failed or
    alone (no peer can)."""
    rows, calls = prepare_all(cell, problem, providers, device, log)
    record: dict[str, Any] = {
        "cell": cell.name,
        "flops": cell.flops,
        "bytes": cell.bytes,
        "providers": rows,
        "comparison": {},
    }
    record["verdict"] = _missing_side(rows)
    if not calls:
        return record

    def rates(samples: Mapping[str, list[float]]) -> dict[str, list[float]]:
        return {name: [cell.flops / s / 1e12 for s in times] for name, times in samples.items()}

    session = Session(device, calls)
    begin = device.now()
    found = rates(session.interleaved(options.rounds))
    record["readings"] = device.readings(begin, device.now())
    record["host_bound"] = session.host_bound
    for name, samples in found.items():
        timed = session.timed[name]
        rows[name] |= {"interleaved": summary(samples), "enqueue_microseconds": timed.enqueue * 1e6}
        if timed.call.host_timed:
            rows[name]["host_overhead"] = timed.call.overhead / (timed.loops * timed.call.calls * timed.seconds)
    median = {name: statistics.median(s) for name, s in found.items()}
    log("    interleaved TFLOP/s: " + ", ".join(f"{n} {m:.0f}" for n, m in median.items()))
    ours = [n for n in median if rows[n]["ours"]]
    peers = [n for n in median if not rows[n]["ours"]]
    chosen = max(ours, key=median.__getitem__, default=None)
    fastest = max((median[n] for n in peers), default=0.0)
    alone_names = [n for n in peers if median[n] >= CONTENDER * fastest] + ([chosen] if chosen else [])
    alone_times, readings = session.alone(alone_names, options.alone_seconds, options.alone_repeats)
    alone = rates(alone_times)
    for name, samples in alone.items():
        rows[name] |= {"alone": summary(samples), "readings": readings[name]}
    for name, call in calls.items():
        if call.repeatable is not None and not call.repeatable():  # after all that load
            rows[name] |= {"status": "wrong", "message": "the same inputs gave other bits: it has a race"}
    log("    alone TFLOP/s: " + ", ".join(f"{n} {statistics.median(s):.0f}" for n, s in alone.items()))
    for name in ours:
        ratios = {"interleaved": compare(found[name], {p: found[p] for p in peers}, paired=True)} if peers else {}
        if peers and name == chosen:
            contenders = {p: alone[p] for p in alone_names if p in peers}
            ratios["alone"] = compare(alone[name], contenders, paired=False)
        record["comparison"][name] = {k: dataclasses.asdict(r) | {"verdict": r.verdict} for k, r in ratios.items()}
        if peers and name == chosen:
            record["verdict"] = overall(r.verdict for r in ratios.values())
    if chosen:
        record |= {"chosen": chosen, "chosen_of": len(ours)}
        if rows[chosen]["status"] == "wrong":
            record["verdict"] = "wrong"
    return record


def _missing_side(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """What to say of a cell in which ours and the peers cannot be compared."""
    ours = [r["status"] for r in rows.values() if r["ours"]]
    if "ok" in ours:
        return "alone"
    return next((s for s in ("wrong", "failed") if s in ours), "unsupported")


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Of rates in TFLOP/s."""
    return {
        "median": statistics.median(samples),
        "best": max(samples),
        "worst": min(samples),
        "samples": [float(f"{s:.5g}") for s in samples],
    }
