"""The search for the fastest config of one workload on one GPU.

    enumerate and rank -> compile (in other processes) -> check -> successive halving -> confirm the last few, interleaved

The state of a search is its trials on disk: each is written when it has ended, and a search begins by reading them.  So it can be
stopped anywhere, goes on where it was, and measures only what is new when a value is added to the space.  Only trials of one
provenance (device, toolchain, kernel source, protocol) are compared with each other.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from . import cache
from .chip import Chip, chip_of
from .header import empty_cache, provenance
from .measure_types import Measurement, Timer
from .schema import canonical
from .tunable import Tunable

Trial = dict[str, Any]
DONE = ("wrong", "refused", "spilled", "crashed", "slow")  # nothing more is to be learned of such a config


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a search goes about it.

    stages: timings of each config in each stage of the halving; keep: the share that goes on to the next, the fastest.
    stop_above: a config whose first timing is so many times the fastest's is stopped there.
    slack: configs whose cost estimate is more than so many times the lowest are left out; None: as the kernel says.
    confirm, rounds: how many are timed against each other in the end, and in how many rounds.
    exhaustive: everything to the last stage, nothing left out or stopped: to see what the shortcuts cost.
    guided: choose by Optuna what to time in the first stage, so many configs (0: all of them, by rank).
    """

    stages: tuple[int, ...] = (1, 3)
    keep: float = 0.25
    stop_above: float = 1.5
    slack: float | None = None
    confirm: int = 4
    rounds: int = 12
    exhaustive: bool = False
    guided: int = 0


@dataclasses.dataclass(frozen=True)
class Event:
    """Progress.  done of total trials; best: seconds of the fastest so far; left: seconds until the end, roughly."""

    what: str
    done: int = 0
    total: int = 0
    best: float | None = None
    left: float | None = None
    config: Any = None
    trial: Trial | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a search came to.  best: of the cache entry, None where no config was right.  heuristic: seconds of the kernel's
    default, None where it was not timed.  left: configs that time did not reach."""

    workload: Any
    measured: int
    known: int
    left: int
    best: dict[str, Any] | None
    heuristic: float | None
    path: Path


class Store:
    """The entry of one workload in a cache file; every change is on disk when it returns."""

    def __init__(
        self,
        folder: Path,
        tunable: Tunable,
        workload: Any,
        device: Mapping[str, Any],
        toolchain: Mapping[str, Any],
        protocol: Any,
    ) -> None:
        self.tunable, self.workload, self.device = tunable, workload, device
        self.path = cache.cache_file(folder, str(device["name"]), tunable.name)
        self.provenance = provenance(tunable, toolchain, protocol)
        self.id = cache.provenance_id(self.provenance)
        self.key, self.fields = tunable.key(workload), workload.to_json()
        self.entry = self._read()

    def _read(self) -> cache.Cache:
        data = cache.read(self.path) if self.path.exists() else None
        found = cache.find_entry(data, self.key, self.fields)
        return found or {"key": self.key, "workload": self.fields, "best": None, "trials": []}

    def trials(self) -> dict[str, Trial]:
        """What is known under this provenance, by config."""
        return {canonical(t["config"]): t for t in self.entry["trials"] if t.get("provenance") == self.id}

    @property
    def best(self) -> dict[str, Any] | None:
        """Of the entry, whatever it was measured with."""
        found: dict[str, Any] | None = self.entry["best"]
        return found

    def add(self, trials: Sequence[Trial], forget: bool = False) -> None:
        """Write trials that have ended, and the best config that follows.  forget: drop what this provenance had before."""

        def change(data: cache.Cache | None) -> cache.Cache:
            data = data or empty_cache(self.tunable, self.device)
            header = data["header"]
            header = {
                "device": dict(self.device),
                "kernel": {**header["kernel"], "space": self.tunable.space_hash},
                "provenances": {**header["provenances"], self.id: self.provenance},
                "date": cache.now(),
            }
            fresh: cache.Cache = {"key": self.key, "workload": self.fields, "best": None, "trials": []}
            entry = cache.find_entry(data, self.key, self.fields) or fresh
            if forget:
                entry = {**entry, "trials": [t for t in entry["trials"] if t.get("provenance") != self.id]}
            for t in trials:
                entry = cache.with_trial(entry, {**t, "provenance": self.id, "date": cache.now()})
            self.entry = cache.with_best(entry, self.workload.flops, self.id)
            return cache.with_entry({**data, "header": header}, self.entry)

        cache.update(self.path, change)


class Compiler(Protocol):
    """Compiles configs of one workload, in other processes perhaps."""

    def start(self, configs: Sequence[Any]) -> None:
        """Begin with these, in this order."""

    def result(self, config: Any) -> Mapping[str, Any]:
        """`status` (ok, refused, spilled), `message`, `registers`, `spills`, `shared_bytes`; waits for it."""

    def stop(self) -> None:
        """What has not begun is no longer wanted."""


def search(
    store: Store,
    make_timer: Callable[[], Timer],
    compiler: Compiler,
    *,
    arch: str = "sm_90a",
    settings: Settings = Settings(),  # noqa: B008  (frozen)
    budget: float = math.inf,
    fresh: bool = False,
    only: Sequence[Any] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Search for `budget` seconds at most.  What was measured before under the store's provenance is not measured again.

    make_timer: called only if something is left to time.  fresh: forget what was known, measure everything again.
    only: these configs, in this order, instead of the ranked space.
    """
    chip = chip_of(store.device["name"], arch)
    run = _Search(store, make_timer, compiler, chip, settings, budget, fresh, only, on_event, clock)
    try:
        return run.run()
    finally:
        compiler.stop()


class _Search:
    def __init__(
        self,
        store: Store,
        make_timer: Callable[[], Timer],
        compiler: Compiler,
        chip: Chip,
        settings: Settings,
        budget: float,
        fresh: bool,
        only: Sequence[Any] | None,
        on_event: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self.store, self.make_timer, self.compiler, self.s = store, make_timer, compiler, settings
        self.forget = fresh
        self.on_event, self.clock, self.begun = on_event, clock, clock()
        self.end, self.stage_begun = self.begun + budget, self.begun
        tunable, w = store.tunable, store.workload
        ranked = list(only) if only is not None else tunable.candidates(w, chip)
        self.rank = {c: i for i, c in enumerate(ranked)}
        self.default = tunable.default(w)
        self.candidates = self._chosen(
            ranked, {c: tunable.cost(w, c, chip) for c in ranked}, everything=only is not None
        )
        self.trials: dict[Any, Trial] = {}
        known = {} if fresh else store.trials()
        for c in self.candidates:
            if trial := known.get(canonical(c.to_json())):
                self.trials[c] = trial
        self.known = len(self.trials)
        self.measured: set[Any] = set()
        self.built: dict[Any, Mapping[str, Any]] = {}
        self.timer: Timer | None = None
        self.checked: set[Any] = set()

    def _chosen(self, ranked: list[Any], cost: Mapping[Any, float], everything: bool) -> list[Any]:
        """In the order of trying: the best of before and the default first, so that a search that is cut short never makes
        things worse; then by rank, without those that cannot win by the estimate."""
        before = (self.store.best or {}).get("config")
        first = [c for c in ranked if c.to_json() == before] + [c for c in ranked if c == self.default]
        first = list(dict.fromkeys(first))
        lowest = min(cost.values(), default=0.0)
        slack = self.store.tunable.slack if self.s.slack is None else self.s.slack
        likely = [c for c in ranked if everything or self.s.exhaustive or cost[c] <= slack * lowest]
        return [*first, *(c for c in likely if c not in first)]

    # ---- the steps ----
    def run(self) -> Outcome:
        waiting = [c for c in self.candidates if c not in self.trials]
        if not waiting and self._settled():
            return self._outcome()
        if waiting and self.clock() < self.end:
            self._tell("compiling", 0, len(waiting))
            self.compiler.start(waiting)
        stages = list(enumerate(self.s.stages))[-1 if self.s.exhaustive else 0 :]
        alive = self._guided(stages[0][1]) if self.s.guided else self.candidates
        for stage, repeats in stages:
            self.stage_begun = self.clock()
            # With a budget, the last stages and the confirmation keep their share of it.
            share = 0.85 if self.s.exhaustive else (0.6, 0.8)[min(stage, 1)]
            until = self.begun + share * (self.end - self.begun) if math.isfinite(self.end) else math.inf
            for number, c in enumerate(alive):
                if self.clock() >= until:
                    break
                self._time(c, stage, repeats)
                self._tell("timing", number + 1, len(alive), until, c)
            alive = self._fastest(alive, stage)
            if stage + 1 < len(self.s.stages):
                alive = alive[: max(math.ceil(self.s.keep * len(alive)), self.s.confirm)]
        # Time was up before any came so far: those that are right at all.
        self._confirm(self._with_default(alive if len(alive) > 1 else self._fastest(self.candidates, 0)))
        return self._outcome()

    def _settled(self) -> bool:
        """Whether the best was confirmed.  Who was timed longest, on the hottest chip, looks slower than who was timed once: by
        these numbers the next search would find others to time again, and the one after that others still."""
        best = (self.store.best or {}).get("config")
        return any(c.to_json() == best and t.get("stage", -1) >= len(self.s.stages) for c, t in self.trials.items())

    def _outcome(self) -> Outcome:
        left = [c for c in self.candidates if c not in self.trials]
        default = self.trials.get(self.default, {}).get("seconds")
        return Outcome(
            self.store.workload, len(self.measured), self.known, len(left), self.store.best, default, self.store.path
        )

    def _write(self, trials: Sequence[Trial]) -> None:
        self.store.add(trials, self.forget)
        self.forget = False

    def _trial(self, c: Any, fields: Mapping[str, Any]) -> Trial:
        known = {**self.trials.get(c, {}), **self.built.get(c, {})}
        resources = {k: known.get(k) for k in ("registers", "spills", "shared_bytes")}
        plain = {"config": c.to_json(), "rank": self.rank.get(c), "message": "", **resources, **fields}
        return {k: v for k, v in plain.items() if v is not None}

    def _time(self, c: Any, stage: int, repeats: int) -> None:
        """One config to one stage, and onto the disk."""
        before = self.trials.get(c)
        if before is not None and (before["status"] in DONE or before.get("stage", -1) >= stage):
            return
        begun = self.clock()
        if before is None and not self._compiled(c):
            return
        found = self._check(c)
        if found.status != "ok":
            spilled = found.status == "refused" and "spill" in found.message  # compiled here, not ahead
            judged = {"error": found.error, "allowed": found.allowed, "message": found.message}
            self._keep(c, {"status": "spilled" if spilled else found.status, **judged}, begun)
            return
        best = min((t["seconds"] for t in self.trials.values() if t["status"] == "ok"), default=math.inf)
        limit = math.inf if self.s.exhaustive or stage > 0 or c == self.default else self.s.stop_above * best
        assert self.timer is not None
        samples = self.timer.samples(c, repeats, limit)
        slow = samples[0] > limit
        middle, spread = _median_and_spread(samples)
        fields = {
            "status": "slow" if slow else "ok",
            "seconds": middle,
            "spread": spread,
            "repeats": len(samples),
            "stage": stage,
            "error": found.error if found.error is not None else (before or {}).get("error"),
            "allowed": found.allowed if found.allowed is not None else (before or {}).get("allowed"),
        }
        self._keep(c, fields, begun)
        if slow:
            self.timer.forget(c)

    def _compiled(self, c: Any) -> bool:
        """Whether the compiler takes it and keeps everything in registers; else that is how its trial ends."""
        self.on_event(Event("waiting", config=c))
        built = self.built[c] = self.compiler.result(c)
        if built["status"] == "ok":
            return True
        self.trials[c] = self._trial(c, {k: built.get(k) for k in ("status", "message")})
        self._write([self.trials[c]])
        self.measured.add(c)
        self.on_event(Event("trial", config=c, trial=self.trials[c]))
        return False

    def _check(self, c: Any) -> Measurement:
        """Judged once in each process; the timer then has it ready."""
        if self.timer is None:
            self._tell("reference", 0, 0)
            self.timer = self.make_timer()
        self.on_event(Event("trying", config=c))  # should it take the process with it, this one did
        if c in self.checked:
            return Measurement("ok")
        found = self.timer.check(c)
        if found.status == "ok":
            self.checked.add(c)
        return found

    def _keep(self, c: Any, fields: Mapping[str, Any], begun: float) -> None:
        took = self.clock() - begun + (self.trials.get(c, {}).get("took") or 0.0)
        self.trials[c] = self._trial(c, {**fields, "took": round(took, 4)})
        self._write([self.trials[c]])
        self.measured.add(c)
        self.on_event(Event("trial", config=c, trial=self.trials[c]))

    def _fastest(self, configs: Sequence[Any], stage: int) -> list[Any]:
        """The right ones that reached a stage, the fastest first."""
        right = [
            c for c in configs if (t := self.trials.get(c)) and t["status"] == "ok" and t.get("stage", -1) >= stage
        ]
        return sorted(right, key=lambda c: float(self.trials[c]["seconds"]))

    def _with_default(self, ranked: list[Any]) -> list[Any]:
        """The first few, and the kernel's default, which was timed first, on a cooler chip than all others: only side by side can
        it be said whether one of them is faster."""
        few = ranked[: self.s.confirm]
        right = self.trials.get(self.default, {}).get("status") == "ok"
        return few if self.default in few or not right else [*few[: max(self.s.confirm - 1, 1)], self.default]

    def _confirm(self, finalists: list[Any]) -> None:
        """The last few against each other, in turns, so that all meet the same clocks and temperatures."""
        stage = len(self.s.stages)
        done = all(self.trials[c].get("stage", -1) >= stage for c in finalists)
        if len(finalists) < 2 or done or self.clock() >= self.end:
            return
        self._tell("confirming", 0, len(finalists))
        begun = self.clock()
        ready = [c for c in finalists if self._check(c).status == "ok"]
        if len(ready) < 2 or self.timer is None:
            return
        found = self.timer.interleaved(ready, self.s.rounds)
        took = (self.clock() - begun) / len(ready)
        fresh = []
        for c, samples in zip(ready, found, strict=True):
            middle, spread = _median_and_spread(samples)
            old = {k: self.trials[c].get(k) for k in ("error", "allowed")}
            fields = {
                "status": "ok",
                "seconds": middle,
                "spread": spread,
                "repeats": len(samples),
                "stage": stage,
                **old,
            }
            self.trials[c] = self._trial(c, {**fields, "took": round(took + (self.trials[c].get("took") or 0.0), 4)})
            fresh.append(self.trials[c])
            self.measured.add(c)
        self._write(fresh)  # all at once: they are compared with each other only
        for c in ready:
            self.on_event(Event("trial", config=c, trial=self.trials[c]))

    def _guided(self, repeats: int) -> list[Any]:
        """The configs that Optuna asked for in the first stage, timed as it asks."""
        from .guided import propose

        asked: list[Any] = []

        def seconds(c: Any) -> float | None:
            self._time(c, 0, repeats)
            asked.append(c)
            self._tell("timing", len(asked), self.s.guided, self.end, c)
            t = self.trials.get(c, {})
            return t.get("seconds")

        first = [c for c in self.candidates[:2]]
        propose(
            self.candidates,
            first,
            self.s.guided,
            seconds,
            lambda: self.clock() >= self.begun + 0.6 * (self.end - self.begun),
        )
        return list(dict.fromkeys(asked))

    def _tell(self, what: str, done: int, total: int, until: float = math.inf, config: Any = None) -> None:
        best = min((t["seconds"] for t in self.trials.values() if t["status"] == "ok"), default=None)
        left = None
        if done:
            left = (self.clock() - self.stage_begun) / done * (total - done)
            left = min(left, max(until - self.clock(), 0.0))
        self.on_event(Event(what, done, total, best, left, config))


def _median_and_spread(samples: Sequence[float]) -> tuple[float, float]:
    """The median, and how far apart the samples are: (highest - lowest) / median."""
    middle = statistics.median(samples)
    return middle, (max(samples) - min(samples)) / middle
