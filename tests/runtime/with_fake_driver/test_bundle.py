"""A bundle from its file to the driver: what is launched is what was compiled."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from mosaic_gpu.bundle import files, make, verify
from mosaic_gpu.bundle.cases import Case
from mosaic_gpu.runtime import jax_ffi
from tests.gpu import replay


@pytest.fixture(autouse=True, scope="module")
def cpu_target() -> None:
    jax_ffi.register_cpu_test_target()


@pytest.mark.parametrize(
    "case",
    [Case("matmul", "m200n136k72", benchmark=True), Case("attention", "b1s300h2kv1d64", causal=True)],
    ids=["matmul", "attention"],
)
def test_from_the_file_to_the_driver(driver, tmp_path, case):
    """Cubin, grid, threads, shared memory and boxes of the file arrive; nothing is computed, and that is found to be wrong."""
    files.write(make.make([case], "sm_90a", 5), tmp_path / "bundle.zip")
    (entry,) = files.load(tmp_path / "bundle.zip").entries
    driver.parameters(*(128 if hasattr(p, "box") else 8 if hasattr(p, "offset") else 4 for p in entry.spec.parameters))
    found = verify.check(entry)
    assert found.status == "wrong" and found.seconds is None
    (load,) = driver.calls("cuLibraryLoadData")
    size = int(load["bytes"])
    assert len(entry.spec.cubin) - 16 < size <= len(entry.spec.cubin)
    assert int(load["sum"]) == sum((i + 1) * byte for i, byte in enumerate(entry.spec.cubin[:size])) % (1 << 64)
    launches = driver.calls("cuLaunchKernelEx")
    assert len(launches) == 2, "twice, to compare the bits"
    spec = entry.spec
    assert launches[0]["grid"] == ",".join(map(str, spec.grid)) and launches[0]["block"] == f"{spec.threads},1,1"
    assert launches[0]["shared"] == str(spec.shared_bytes)
    boxes = [c["box"] for c in driver.calls("cuTensorMapEncodeTiled")]
    assert boxes[: len(boxes) // 2] == [",".join(map(str, p.box)) for p in spec.parameters if hasattr(p, "box")]


def test_a_recording_is_replayed_into_nan(driver):
    """One jitted function launches a group, on the recorded arrays; what no kernel writes is found to be NaN."""
    (entry,) = make.make([Case("matmul", "m200n136k72", benchmark=True)], "sm_90a", 5).entries
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((200, 72), (72, 136), (200, 136)))
    numbered = {o: x for o, x in zip((o for o in entry.operands if isinstance(o, int)), (a, b), strict=True)}
    operands = tuple(numbered[o] if isinstance(o, int) else o for o in entry.operands)
    recorded = dataclasses.replace(entry, case={"test": "tests/x.py::y"}, operands=operands, expected=(c,))
    lines = replay.run_group([recorded, dataclasses.replace(recorded, expected=(c + c,))], replay.launch_group)
    assert len(driver.calls("cuLaunchKernelEx")) == 2
    assert [x["status"] for x in lines] == ["wrong", "wrong"]
    assert all("27200 of 27200 elements are NaN or infinite on one side only" in x["message"] for x in lines)
