"""What processes run in `test_verify.py` instead of kernels: they end well, fail, die or never answer."""

from __future__ import annotations

import os
import time

from mosaic_gpu.bundle.verify import Result

DEVICE = ("device", "sm_90a", {"name": "made up", "multiprocessors": 3}, {"jax": "0"})


def well(path, indices, benchmark, pipe):
    pipe.send(DEVICE)
    for i in indices:
        pipe.send(("start", i))
        pipe.send(("done", i, Result(f"e{i}", "ok", 1e-3, 2e-3, 1e-3 if benchmark else None)))
    pipe.send(("end",))


def second_dies(path, indices, benchmark, pipe):
    pipe.send(DEVICE)
    for i in indices:
        pipe.send(("start", i))
        if i == 1:
            os._exit(3)
        pipe.send(("done", i, Result(f"e{i}", "ok")))
    pipe.send(("end",))


def second_hangs(path, indices, benchmark, pipe):
    pipe.send(DEVICE)
    for i in indices:
        pipe.send(("start", i))
        if i == 1:
            time.sleep(600)
        pipe.send(("done", i, Result(f"e{i}", "ok")))
    pipe.send(("end",))


def dies_at_once(path, indices, benchmark, pipe):
    os._exit(1)


def other_gpu(path, indices, benchmark, pipe):
    pipe.send(("device", "sm_80", {}, {}))
