"""The GPU as PyTorch shows it: events, the idle state, and what its sensors say (nvidia-ml-py, where installed)."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import pathlib
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from .model import DeviceLost

HANG_SECONDS = 20.0
REST_SECONDS = 0.4  # until the clock has fallen from its highest state
COLD_SECONDS = 1.5  # at most, for the power to fall to about what it was before anything ran
SAMPLE_SECONDS = 0.05
POWER_CAP = 0x4  # NVML's reason "software power cap"


class NoGpu(Exception):
    """There is nothing to measure on."""


def require_gpu() -> Any:
    """PyTorch, if it sees a Hopper GPU.  Raises NoGpu with one line that says what is missing."""
    try:
        import torch
    except ImportError:
        raise NoGpu("an NVIDIA Hopper GPU and PyTorch are needed; PyTorch is not installed") from None
    if not torch.cuda.is_available():
        raise NoGpu("an NVIDIA Hopper GPU is needed; PyTorch sees no GPU")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        raise NoGpu(
            f"an NVIDIA Hopper GPU is needed; {torch.cuda.get_device_name()} is sm_{capability[0]}{capability[1]}"
        )
    return torch


class Sensors:
    """Samples clock, power and temperature in a thread.  Does nothing where NVML is not to be had."""

    def __init__(self, uuid: str) -> None:
        self.samples: list[tuple[float, int, float, int, bool]] = []
        self.limit: float | None = None
        self.driver = ""
        try:
            import pynvml

            pynvml.nvmlInit()
            # By its id where there are several: NVML counts all GPUs of the machine, PyTorch only the visible ones.
            self._handle = (
                pynvml.nvmlDeviceGetHandleByIndex(0)
                if pynvml.nvmlDeviceGetCount() == 1
                else pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
            )
            self.limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3
            self.driver = str(pynvml.nvmlSystemGetDriverVersion())
            self._nvml = pynvml
            self._sample()
        except Exception:  # not installed, not permitted, another GPU's id: readings are left out
            self._nvml = None
            return
        threading.Thread(target=self._run, daemon=True).start()

    def _sample(self) -> None:
        n = self._nvml
        reasons = (
            getattr(n, "nvmlDeviceGetCurrentClocksEventReasons", None) or n.nvmlDeviceGetCurrentClocksThrottleReasons
        )
        self.samples.append(
            (
                time.perf_counter(),
                n.nvmlDeviceGetClockInfo(self._handle, n.NVML_CLOCK_SM),
                n.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
                n.nvmlDeviceGetTemperature(self._handle, n.NVML_TEMPERATURE_GPU),
                bool(reasons(self._handle) & POWER_CAP),
            )
        )

    def _run(self) -> None:
        while True:
            time.sleep(SAMPLE_SECONDS)
            try:
                self._sample()
            except Exception:  # the driver stopped answering: what was sampled stays
                return

    @property
    def watts(self) -> float | None:
        """The last power reading."""
        return self.samples[-1][2] if self.samples else None

    def between(self, begin: float, end: float) -> dict[str, Any]:
        """[lowest, median, highest] of each sensor and the share of samples with the power cap at work; {} of none."""
        inside = [s for s in self.samples if begin <= s[0] <= end]
        if not inside:
            return {}

        def three(values: Sequence[float]) -> list[float]:
            return [min(values), statistics.median(values), max(values)]

        _, clocks, watts, degrees, capped = zip(*inside, strict=True)
        return {
            "sm_mhz": three(clocks),
            "watts": three(watts),
            "celsius": three(degrees),
            "power_capped": sum(capped) / len(capped),
        }


class TorchDevice:
    """The current GPU of PyTorch, its current stream."""

    def __init__(self) -> None:
        self.torch = require_gpu()
        self.torch.backends.cuda.matmul.allow_tf32 = False  # of the references
        properties = self.torch.cuda.get_device_properties(0)
        self.sensors = Sensors(str(getattr(properties, "uuid", "")))
        self.torch.zeros(1, device="cuda")  # makes the context, with which an idle GPU takes more power than without
        self.torch.cuda.synchronize()
        time.sleep(REST_SECONDS)
        self._idle_watts = self.sensors.watts

    def now(self) -> float:
        """The host's clock, in seconds."""
        return time.perf_counter()

    def mark(self) -> Any:
        """An event, recorded."""
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two events."""
        return float(begin.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for the queue; DeviceLost if it does not end, since a kernel that hangs never gives the GPU back."""
        event = self.torch.cuda.Event()
        event.record()
        deadline = time.perf_counter() + HANG_SECONDS
        while not event.query():
            if time.perf_counter() > deadline:
                raise DeviceLost(f"the GPU has not finished after {HANG_SECONDS:.0f} s: a kernel hangs")

    def hold(self, seconds: float) -> None:
        """A kernel that only waits, so that the host can enqueue what follows."""
        self.torch.cuda._sleep(int(seconds * 1.98e9))  # cycles at the highest clock

    def rest(self) -> None:
        """Idle, and until the power has fallen to about what it was at the start."""
        self.synchronize()
        begin = time.perf_counter()
        time.sleep(REST_SECONDS)
        limit = None if self._idle_watts is None else 1.5 * self._idle_watts
        while limit and (self.sensors.watts or 0) > limit and time.perf_counter() - begin < COLD_SECONDS:
            time.sleep(SAMPLE_SECONDS)

    def readings(self, begin: float, end: float) -> dict[str, Any]:
        """What the sensors saw between two `now()`."""
        return self.sensors.between(begin, end)

    def release(self) -> None:
        """Give back the memory of the last cell, to JAX perhaps."""
        gc.collect()
        self.torch.cuda.empty_cache()

    def describe(self) -> dict[str, Any]:
        """The machine and the versions, for the head of a result file."""
        torch = self.torch
        return {
            "device": torch.cuda.get_device_name(),
            "driver": self.sensors.driver,
            "power_limit_watts": self.sensors.limit,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "jax": package_version("jax"),
            "mosaic_gpu": commit(),
        }


def package_version(name: str) -> str:
    """Of an installed distribution; 'not installed'."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """Of this source tree, with a + where it was changed."""
    folder = pathlib.Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("MOSAIC_GPU_COMMIT", "unknown")
