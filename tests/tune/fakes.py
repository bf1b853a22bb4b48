"""A kernel that does not exist, and a timer that makes its times up.  No JAX.  Tests load it as users' files are loaded."""

from __future__ import annotations

import dataclasses
import time
from typing import ClassVar

from mosaic_gpu.kernels.config import Config
from mosaic_gpu.tune.measure_types import Measurement
from mosaic_gpu.tune.tunable import Tunable

DEVICE = {
    "name": "nvidia_h200",
    "compute_capability": "9.0",
    "multiprocessors": 132,
    "memory_bytes": 150 << 30,
    "power_limit_watts": 700.0,
}
TOOLCHAIN = {"driver": "580.1", "cuda": "13.0", "nvrtc": "NVRTC 13.0.88", "mosaic_gpu": "0.1.0", "jax": "0.11.2"}
PROTOCOL = {"timer": "fake"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeConfig(Config):
    generation: ClassVar[str] = "sm90"
    kernel: ClassVar[str] = "fake"
    a: int = 1
    b: int = 1

    def __post_init__(self) -> None:
        if self.a * self.b > 64:
            raise ValueError(f"a={self.a} b={self.b}: at most 64 together")


def true_seconds(c: FakeConfig) -> float:
    """The fastest is a=8, b=4."""
    return 1e-3 * (1 + abs(c.a - 8) / 8 + abs(c.b - 4) / 16)


class Fake(Tunable):
    name = "fake"
    config = FakeConfig
    space = {"a": (1, 2, 4, 8, 16), "b": lambda c: (1, 2, 4, 8) if c["a"] < 16 else (1, 8)}
    letters = {"m": "rows", "n": "columns"}

    def flops(self, w):
        return 1e9 * w["m"]

    def cost(self, w, config, chip):
        return 1e-3 * (1 + abs(config.a - 4) / 16)  # finds the right neighbourhood, not the best


class Timer:
    """Knows the answers; asked: what it was asked, in order.  special: status of some configs.  pause: seconds of a timing."""

    def __init__(self, special=(), pause=0.0, now=None):
        self.asked, self.special, self.pause, self.now = [], dict(special), pause, now

    def check(self, config):
        self.asked.append(("check", config))
        status = self.special.get(config, "ok")
        if isinstance(status, Exception):
            raise status
        return Measurement(status, error=1e-3, allowed=2e-3, message="" if status == "ok" else f"it is {status}")

    def samples(self, config, repeats, stop_above):
        self.asked.append(("time", config))
        if self.pause:
            time.sleep(self.pause)
        if self.now is not None:
            self.now[0] += 1.0
        seconds = true_seconds(config)
        return [seconds] if seconds > stop_above else [seconds * (1 + 0.001 * i) for i in range(repeats)]

    def interleaved(self, configs, rounds):
        self.asked.append(("interleaved", tuple(configs)))
        return [[true_seconds(c)] * rounds for c in configs]

    def forget(self, config):
        pass

    def timed(self):
        return [c for what, c in self.asked if what == "time"]


class Compiler:
    """Takes what it is told to refuse."""

    def __init__(self, refuse=()):
        self.refuse, self.started, self.stopped = dict(refuse), [], False

    def start(self, configs):
        self.started = list(configs)

    def result(self, config):
        if config in self.refuse:
            return {"status": self.refuse[config], "message": "the compiler says so", "spills": 8}
        return {"status": "ok", "message": "", "registers": 168, "spills": 0, "shared_bytes": 1024}

    def stop(self):
        self.stopped = True


def make_timer(tunable, workload, arch, seed):
    """For workers: chosen by --timer in tests."""
    return Timer(pause=0.002)
