"""The search: measures candidates until time is up, and writes the cache file after each, so that nothing is ever lost.

A cache file holds, besides `schema`, `device` and `kernel`:

    best[key]    the fastest right config of a key: `config`, `tflops`, and where and when that was
    trials[key]  every measurement: workload, config, status, seconds, tflops, error, message, environment, date

Only trials of one workload in one environment (driver, compiler, package) are compared with each other.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import cache
from .measure import Measurement
from .workload import Attention

Measure = Callable[[Any], Measurement]


@dataclasses.dataclass(frozen=True)
class Environment:
    """What a measurement depends on besides workload and config."""

    driver: str
    toolchain: str
    package: str

    @staticmethod
    def here() -> Environment:
        """This process's."""
        import mosaic_gpu

        from ..codegen.nvrtc import driver_version, find_nvrtc

        driver = driver_version()
        return Environment(
            "CUDA {}.{}".format(*driver) if driver else "none", find_nvrtc().toolchain, mosaic_gpu.__version__
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a search of one workload came to.  best: the entry written for its key, None where no candidate was right."""

    workload: Attention
    measured: int
    skipped: int
    left: int
    best: dict[str, Any] | None


def search(
    workload: Attention,
    candidates: Sequence[Any],
    make_measure: Callable[[], Measure],
    *,
    device: str,
    kernel: str,
    environment: Environment,
    budget: float,
    resume: bool = False,
    on_trial: Callable[[int, int, Any, Measurement], None] = lambda done, total, config, result: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Measure candidates for `budget` seconds; the best so far is in the cache file after each.

    make_measure: makes the function that measures a config; called only if there is something to measure.
    resume: keep what was measured before for this workload in this environment; else it is measured anew.
    The best config of before is tried first: a search that is cut short never makes things worse.
    """
    end = clock() + budget
    data = cache.load_for_update(device, kernel)
    key = workload.key
    same = {"workload": workload.to_json(), "environment": dataclasses.asdict(environment)}
    trials = data["trials"].setdefault(key, [])
    if not resume:
        trials[:] = [t for t in trials if t["workload"] != same["workload"]]
    ours = [t for t in trials if all(t[name] == same[name] for name in same)]
    known = [t["config"] for t in ours]
    waiting = [c for c in _best_first(candidates, data["best"].get(key)) if c.to_json() not in known]
    measure = make_measure() if waiting else None
    measured = 0
    for config in waiting:
        if measure is None or clock() >= end:
            break
        result = measure(config)
        measured += 1
        trial = {
            **same,
            "config": config.to_json(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **dataclasses.asdict(result),
            "tflops": round(workload.flops / result.seconds / 1e12, 1) if result.seconds else None,
        }
        trials.append(trial)
        ours.append(trial)
        if found := best_of(ours):
            data["best"][key] = found
        cache.store(data)
        on_trial(measured, len(waiting), config, result)
    return Outcome(workload, measured, len(known), len(waiting) - measured, best_of(ours))


def best_of(trials: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The entry for the fastest right trial; None if none is right."""
    right = [t for t in trials if t["status"] == "ok" and t["seconds"]]
    if not right:
        return None
    fastest = min(right, key=lambda t: float(t["seconds"]))
    return {name: fastest[name] for name in ("config", "tflops", "seconds", "workload", "environment", "date")}


def _best_first(candidates: Sequence[Any], best: dict[str, Any] | None) -> list[Any]:
    before = [c for c in candidates if best is not None and c.to_json() == best.get("config")]
    return before + [c for c in candidates if c not in before]
