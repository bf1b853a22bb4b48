"""A fake GPU with its clock, and providers that do nothing but take time on it."""

from __future__ import annotations

import pathlib
import random
import sys
import types

import pytest

# In importlib mode tests see what is installed, and benchmarks are not: last, so that the installed package comes first.
sys.path.append(str(pathlib.Path(__file__).parents[2]))

from mosaic_gpu.bench.model import Accuracy, Cell, DeviceCall, DeviceLost, HostCall, Provider, Unsupported  # noqa: E402


class FakeDevice:
    """Two clocks: the host's, and until when the GPU has work."""

    def __init__(self):
        self.host = self.gpu = 0.0
        self.holds = self.rests = 0
        self.launched = []
        self.lost = False

    def now(self):
        return self.host

    def mark(self):
        return max(self.gpu, self.host)

    def seconds(self, begin, end):
        return end - begin

    def synchronize(self):
        if self.lost:
            raise DeviceLost("gone")
        self.host = self.gpu = max(self.host, self.gpu)

    def hold(self, seconds):
        self.holds += 1
        self.gpu = max(self.gpu, self.host) + seconds

    def rest(self):
        self.synchronize()
        self.host += 1
        self.rests += 1

    def readings(self, begin, end):
        return {"watts": [begin, end]}

    def release(self):
        pass

    def describe(self):
        return {"device": "fake"}

    def launch(self, name, i, seconds, enqueue):
        self.launched.append((name, i))
        self.host += enqueue
        self.gpu = max(self.gpu, self.host) + seconds


class FakeProblem:
    def __init__(self, device, cell, seed):
        self.cell = cell

    def judge(self, output):
        return Accuracy(output, 1e-3)


class Fake(Provider):
    """seconds: of a call, or a function of the cell's name; noise: relative; error: of its result."""

    def __init__(
        self, device, name, seconds, *, ours=False, error=1e-4, enqueue=1e-6, noise=0.0, refuse=None, again=True
    ):
        self.device, self.name, self.seconds, self.ours = device, name, seconds, ours
        self.error, self.enqueue, self.noise, self.refuse, self.again = error, enqueue, noise, refuse, again
        self.chance = random.Random(name)
        self.prepared = []

    def version(self):
        return "1"

    def prepare(self, cell, problem):
        self.prepared.append(cell.name)
        error = self.refuse(cell) if self.refuse else None
        if error:
            raise error
        seconds = self.seconds(cell.name) if callable(self.seconds) else self.seconds

        def enqueue(i):
            assert self.prepared and self.judged, "nothing is timed before it was judged"
            noisy = seconds * (1 + self.noise * self.chance.uniform(-1, 1))
            self.device.launch(self.name, i, noisy, self.enqueue)

        def first():
            self.judged = True
            return self.error

        return DeviceCall(enqueue, first, lambda: self.again)


class FakeHost(Fake):
    host_timed = True

    def prepare(self, cell, problem):
        def run(loops):
            self.device.synchronize()
            for _ in range(loops):
                for _ in range(2):
                    self.device.launch(self.name, -1, self.seconds, 0)
            self.device.synchronize()
            self.device.host += 50e-6

        return HostCall(run, 2, lambda: self.error, 50e-6)


@pytest.fixture
def fakes():
    """The fakes by name, and `cells(*names)` of 1 TFLOP each."""
    return types.SimpleNamespace(
        Device=FakeDevice,
        Problem=FakeProblem,
        Provider=Fake,
        HostProvider=FakeHost,
        Lost=DeviceLost,
        Unsupported=Unsupported,
        cells=lambda *names: [Cell(name, 10**12) for name in names],
    )
