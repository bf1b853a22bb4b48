"""What the launcher hands to the driver."""

from __future__ import annotations

import struct
import threading

from mosaic_gpu.runtime.launch_spec import BufferPointer, Scalar, TensorMap
from mosaic_gpu.runtime.native import Launcher

MAP = TensorMap(buffer=0, dtype="bfloat16", dims=(128, 512, 3), strides=(256, 131072), box=(64, 128, 1), swizzle=128)
BYTES = 3 * 131072


def test_many_calls_load_once(driver, make_spec):
    with Launcher(make_spec(BufferPointer(0), shared_bytes=1000)) as launcher:
        for _ in range(5):
            launcher.launch([0x100], [16])
        assert len(driver.calls("cuLaunchKernelEx")) == 5
        assert len(driver.calls("cuLibraryLoadData")) == 1
        assert len(driver.calls("cuKernelSetAttribute")) == 1
        assert not driver.calls("cuLibraryUnload")
    assert len(driver.calls("cuLibraryUnload")) == 1


def test_each_device_is_made_ready_once(driver, make_spec):
    with Launcher(make_spec(shared_bytes=200_000)) as launcher:
        for stream in (1, 2, 1, 3, 2):
            launcher.launch([], [], stream)
    assert len(driver.calls("cuLibraryLoadData")) == 1
    allowed = [(call["attribute"], call["value"], call["device"]) for call in driver.calls("cuKernelSetAttribute")]
    assert allowed == [("8", "200000", "0"), ("8", "200000", "1"), ("8", "200000", "2")]
    assert [call["device"] for call in driver.calls("cuKernelGetFunction")] == ["0", "1", "2"]
    assert [call["stream"] for call in driver.calls("cuLaunchKernelEx")] == ["1", "2", "1", "3", "2"]
    assert len(driver.calls("cuCtxPushCurrent")) == len(driver.calls("cuCtxPopCurrent")) == 5


def test_arguments_of_a_tensor_map(driver, make_spec):
    with Launcher(make_spec(MAP)) as launcher:
        launcher.launch([0x7000], [BYTES])
    (call,) = driver.calls("cuTensorMapEncodeTiled")
    assert call == {
        "dtype": "9",
        "address": "7000",
        "dims": "128,512,3",
        "strides": "256,131072",
        "box": "64,128,1",
        "element_strides": "1,1,1",
        "interleave": "0",
        "swizzle": "3",
        "promotion": "3",
        "fill": "0",
    }


def test_maps_are_encoded_again_only_for_new_addresses(driver, make_spec):
    def encoded() -> int:
        return len(driver.calls("cuTensorMapEncodeTiled"))

    with Launcher(make_spec(MAP, BufferPointer(1))) as launcher:
        driver.parameters(128, 8)
        launcher.launch([0x1000, 0x40], [BYTES, 16])
        launcher.launch([0x1000, 0x80], [BYTES, 16])  # another address, but not of the map's buffer
        assert encoded() == 1
        launcher.launch([0x2000, 0x80], [BYTES, 16])
        assert encoded() == 2
        launcher.launch([0x1000, 0x80], [BYTES, 16])
        assert encoded() == 2
        launcher.launch([0x1000, 0x80], [BYTES, 16], stream=2)  # another device
        assert encoded() == 3
    given = [
        struct.unpack("<Q", bytes.fromhex(c["parameters"].split(",")[0])) for c in driver.calls("cuLaunchKernelEx")
    ]
    assert [address for (address,) in given] == [0x1000, 0x1000, 0x2000, 0x1000, 0x1000]


def test_the_cache_of_maps_is_bounded_and_keeps_what_is_used(driver, make_spec):
    with Launcher(make_spec(MAP)) as launcher:
        for i in range(100):
            launcher.launch([0x10000 * (i + 1)], [BYTES])
            launcher.launch([0x10000], [BYTES])
        assert len(driver.calls("cuTensorMapEncodeTiled")) == 100
        launcher.launch([0x10000 * 100], [BYTES])
        assert len(driver.calls("cuTensorMapEncodeTiled")) == 100
        launcher.launch([0x10000 * 2], [BYTES])
        assert len(driver.calls("cuTensorMapEncodeTiled")) == 101


def test_parameters_arrive_in_order(driver, make_spec):
    spec = make_spec(
        Scalar(-7, "int32"), BufferPointer(1, offset=32), Scalar(1 << 40, "int64"), MAP, Scalar(0.5, "float32")
    )
    driver.parameters(4, 8, 8, 128, 4)
    with Launcher(spec) as launcher:
        launcher.launch([0x5000, 0x6000], [BYTES, 64])
    (call,) = driver.calls("cuLaunchKernelEx")
    values = [bytes.fromhex(text) for text in call["parameters"].split(",")]
    forms = ("<i", "<Q", "<q", "<Q", "<f")
    assert [struct.unpack(form, value)[0] for form, value in zip(forms, values, strict=True)] == [
        -7,
        0x6020,
        1 << 40,
        0x5000,
        0.5,
    ]


def test_shape_of_the_launch(driver, make_spec):
    with Launcher(make_spec(grid=(6, 4, 2), threads=160, cluster=(2, 1, 1), shared_bytes=4096)) as launcher:
        launcher.launch([], [], stream=1)
    (call,) = driver.calls("cuLaunchKernelEx")
    assert (call["grid"], call["block"], call["shared"]) == ("6,4,2", "160,1,1", "4096")
    assert call["cluster"] == "2,1,1"


def test_a_cluster_of_one_is_no_attribute(driver, make_spec):
    with Launcher(make_spec()) as launcher:
        launcher.launch([], [])
    assert driver.calls("cuLaunchKernelEx")[0]["cluster"] == "none"


def test_a_kernel_that_may_begin_early(driver, make_spec):
    """Programmatic stream serialization, alone and beside a cluster; never unasked."""
    for early, cluster, seen in ((True, (1, 1, 1), "none"), (True, (2, 1, 1), "2,1,1"), (False, (2, 1, 1), "2,1,1")):
        with Launcher(make_spec(grid=(2, 1, 1), cluster=cluster, early=early)) as launcher:
            launcher.launch([], [])
        call = driver.calls("cuLaunchKernelEx")[-1]
        assert (call["early"], call["cluster"]) == (str(int(early)), seen)


def test_clusters_above_eight_are_allowed_explicitly(driver, make_spec):
    for cluster, attributes in (((8, 1, 1), []), ((16, 1, 1), [("14", "1")])):
        before = len(driver.calls("cuKernelSetAttribute"))
        with Launcher(make_spec(grid=(16, 1, 1), cluster=cluster)) as launcher:
            launcher.launch([], [])
        calls = driver.calls("cuKernelSetAttribute")[before:]
        assert [(call["attribute"], call["value"]) for call in calls] == attributes


def test_an_empty_grid_launches_nothing(driver, make_spec):
    for axis in range(3):
        grid = tuple(0 if i == axis else 2 for i in range(3))
        with Launcher(make_spec(MAP, grid=grid)) as launcher:
            launcher.launch([0], [0])
    assert not driver.calls("cuLaunchKernelEx") and not driver.calls("cuLibraryLoadData")


def test_an_output_may_replace_its_input(driver, make_spec):
    spec = make_spec(BufferPointer(0), BufferPointer(1))
    driver.parameters(8, 8)
    with Launcher(spec) as launcher:
        launcher.launch([0x900, 0x900], [64, 64])
    (call,) = driver.calls("cuLaunchKernelEx")
    assert len(set(call["parameters"].split(","))) == 1


def test_threads_share_a_launcher(driver, make_spec):
    with Launcher(make_spec(MAP, shared_bytes=1 << 16)) as launcher:
        failures: list[BaseException] = []

        def work(stream: int) -> None:
            try:
                for i in range(200):
                    launcher.launch([0x1000 * (1 + i % 50)], [BYTES], stream)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(1 + i % 3,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert len(driver.calls("cuLaunchKernelEx")) == 1200
    assert len(driver.calls("cuLibraryLoadData")) == 1


def test_a_real_cubin_is_taken(driver, scale_tiles):
    driver.parameters(128, 8, 4, 4)
    with Launcher(scale_tiles("sm_90a", blocks=2, factor=3.0)) as launcher:
        launcher.launch([0x1000, 0x2000], [2048, 2048])
    assert len(driver.calls("cuLaunchKernelEx")) == 1
