"""What the launcher refuses and what it says; nothing may end the process."""

from __future__ import annotations

import dataclasses
import random

import pytest

from mosaic_gpu import errors
from mosaic_gpu.runtime.launch_spec import BufferPointer, Extent, Scalar, ShapedMap, TensorMap, serialize
from mosaic_gpu.runtime.native import Launcher

MAP = TensorMap(buffer=0, dtype="float32", dims=(32, 8), strides=(128,), box=(32, 8), swizzle=128)
SHAPED = ShapedMap(0, "float32", ((1, 1, None), (0, 1, None)), (32, 8), 128)


@pytest.mark.parametrize("result", [200, 209, 218, 222, 300, 801])
def test_a_cubin_the_driver_refuses_is_a_matter_of_versions(driver, make_spec, result):
    driver.fail("cuLibraryLoadData", result)
    with Launcher(make_spec()) as launcher, pytest.raises(errors.ToolchainError) as caught:
        launcher.launch([], [])
    text = str(caught.value)
    assert "NVRTC 13.0 sm_90a" in text and "driver for CUDA 12.8." in text and f"({result})" in text
    assert not driver.calls("cuLaunchKernelEx")


def test_a_refused_cubin_is_tried_again(driver, make_spec):
    with Launcher(make_spec()) as launcher:
        driver.fail("cuLibraryLoadData", 2)
        with pytest.raises(errors.MosaicGpuError, match=r"cuLibraryLoadData.*\(2\)"):
            launcher.launch([], [])
        driver.fail("", 0)
        launcher.launch([], [])
    assert len(driver.calls("cuLaunchKernelEx")) == 1


def test_an_entry_that_is_not_there(driver, make_spec):
    driver.fail("cuLibraryGetKernel", 500)
    with Launcher(make_spec(entry="attention")) as launcher, pytest.raises(errors.ToolchainError, match="attention"):
        launcher.launch([], [])
    assert len(driver.calls("cuLibraryUnload")) == 1


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100a", (9, 0), False),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_100f", (12, 0), False),
        ("sm_103f", (10, 0), False),
        ("sm_90", (9, 0), True),
    ],
)
def test_a_device_of_another_generation(driver, make_spec, arch, capability, runs):
    driver.capability(0, *capability)
    with Launcher(make_spec(arch=arch)) as launcher:
        if runs:
            launcher.launch([], [])
            return
        with pytest.raises(errors.DeviceMismatch) as caught:
            launcher.launch([], [])
    assert arch in str(caught.value) and f"sm_{capability[0] * 10 + capability[1]}" in str(caught.value)
    assert not driver.calls("cuLibraryLoadData")


def test_only_the_device_that_does_not_fit_is_refused(driver, make_spec):
    driver.capability(1, 10, 0)
    with Launcher(make_spec()) as launcher:
        launcher.launch([], [], stream=1)
        with pytest.raises(errors.DeviceMismatch, match="GPU 1"):
            launcher.launch([], [], stream=2)
        launcher.launch([], [], stream=1)


def test_an_unaligned_array_is_refused(driver, make_spec):
    with Launcher(make_spec(MAP)) as launcher:
        launcher.launch([0x1010], [1024])
        with pytest.raises(errors.UnsupportedCall, match="0x1008") as caught:
            launcher.launch([0x1008], [1024])
    assert "16 bytes" in str(caught.value) and "buffer 0" in str(caught.value)
    assert len(driver.calls("cuLaunchKernelEx")) == 1


def test_a_pointer_need_not_be_aligned(driver, make_spec):
    with Launcher(make_spec(BufferPointer(0))) as launcher:
        launcher.launch([0x1001], [1])
    assert len(driver.calls("cuLaunchKernelEx")) == 1


def test_a_buffer_smaller_than_its_map_is_refused(driver, make_spec):
    with Launcher(make_spec(MAP)) as launcher:
        with pytest.raises(errors.MosaicGpuError, match="1024 bytes into buffer 0, which has 1023"):
            launcher.launch([0x1000], [1023])
    assert not driver.calls("cuLaunchKernelEx")


def test_a_buffer_that_is_not_there(driver, make_spec):
    with Launcher(make_spec(BufferPointer(2))) as launcher:
        with pytest.raises(errors.MosaicGpuError, match="buffer 2 of a call with 1"):
            launcher.launch([0x1000], [16])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((128,), "has fewer parameters than the 2"),
        ((128, 4, 8), "has more parameters than the 2"),
        ((128, 8), "parameter 1 has 8 bytes in the cubin and 4"),
    ],
)
def test_a_kernel_with_other_parameters_than_its_spec(driver, make_spec, sizes, message):
    driver.parameters(*sizes)
    with Launcher(make_spec(MAP, Scalar(1, "int32"))) as launcher:
        with pytest.raises(errors.MosaicGpuError, match=message):
            launcher.launch([0x1000], [1024])
    assert not driver.calls("cuLaunchKernelEx")


@pytest.mark.parametrize(
    ("function", "details"),
    [
        ("cuTensorMapEncodeTiled", ["dims 32 8", "strides 128", "box 32 8"]),
        ("cuKernelSetAttribute", ["5000 bytes"]),
        ("cuLaunchKernelEx", ["grid (4, 2, 1)", "384 threads", "5000 bytes"]),
        ("cuDeviceGetAttribute", []),
        ("cuStreamGetCtx", []),
    ],
)
def test_any_failure_of_the_driver_is_an_error(driver, make_spec, function, details):
    with Launcher(make_spec(MAP, shared_bytes=5000)) as launcher:
        driver.fail(function, 719)
        with pytest.raises(errors.MosaicGpuError) as caught:
            launcher.launch([0x1000], [1024])
        assert type(caught.value) is errors.MosaicGpuError
        for part in (function, "(719)", *details):
            assert part in str(caught.value)
        driver.fail("", 0)
        launcher.launch([0x1000], [1024])


def test_a_cubin_that_is_none(make_spec):
    for cubin in (b"no cubin", b"\x7fELF", b"\x7fELF".ljust(64, b"\xff")):
        with Launcher(make_spec(cubin=cubin)) as launcher, pytest.raises(errors.ToolchainError, match="ELF"):
            launcher.launch([], [])


def test_damaged_specifications_are_refused(make_spec):
    blob = serialize(make_spec(MAP, BufferPointer(1, 8), Scalar(3, "int64"), SHAPED, Extent(0, 1)))
    for size in range(len(blob)):
        with pytest.raises(errors.MosaicGpuError, match="damaged"):
            Launcher(blob[:size])
    with pytest.raises(errors.MosaicGpuError, match="damaged"):
        Launcher(blob + b"\0")
    with pytest.raises(errors.MosaicGpuError, match="version is 4, this launcher reads version 3"):
        Launcher(blob[:4] + b"\4\0\0\0" + blob[8:])


def test_random_damage_never_ends_the_process(driver, make_spec):
    random.seed(20)
    blob = serialize(make_spec(MAP, BufferPointer(1, 8), Scalar(3, "int64"), SHAPED, Extent(0, 1)))
    for _ in range(3000):
        damaged = bytearray(blob)
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        try:
            with Launcher(bytes(damaged)) as launcher:
                launcher.launch([0x1000, 0x2000], [1024, 64])
        except errors.MosaicGpuError:
            pass


def test_a_closed_launcher(make_spec):
    launcher = Launcher(make_spec())
    launcher.close()
    launcher.close()
    with pytest.raises(errors.MosaicGpuError, match="closed"):
        launcher.launch([], [])


def test_a_cut_off_cubin_is_refused(driver, scale_tiles):
    whole = scale_tiles("sm_90a", blocks=1, factor=1.0)
    for size in (64, len(whole.cubin) // 2, len(whole.cubin) - 1):
        with Launcher(dataclasses.replace(whole, cubin=whole.cubin[:size])) as launcher:
            with pytest.raises(errors.ToolchainError, match=f"its {size} bytes are no complete ELF image"):
                launcher.launch([0x1000, 0x2000], [1024, 1024])
    assert not driver.calls("cuLibraryLoadData")
