"""The way from `jax.jit` through XLA to the driver, on the CPU backend."""

from __future__ import annotations

import dataclasses
import threading

import jax
import jax.numpy as jnp
import pytest

from mosaic_gpu import errors
from mosaic_gpu.runtime import device, jax_ffi
from mosaic_gpu.runtime.launch_spec import BufferPointer, Extent, Scalar, ShapedMap, TensorMap

OUT = jax.ShapeDtypeStruct((8, 32), jnp.float32)


@pytest.fixture(autouse=True, scope="module")
def cpu_target() -> None:
    for _ in range(2):  # a second registration does nothing
        jax_ffi.register_cpu_test_target()


def tensor_map(buffer: int) -> TensorMap:
    return TensorMap(buffer=buffer, dtype="float32", dims=(32, 8), strides=(128,), box=(32, 8), swizzle=128)


def address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


def test_buffers_count_inputs_then_outputs(driver, make_spec):
    spec = make_spec(tensor_map(0), BufferPointer(1), tensor_map(2), Scalar(5, "int32"), shared_bytes=999)
    driver.parameters(128, 8, 128, 4)
    call = jax.jit(lambda a, b: jax_ffi.launch_call(spec, [a, b], [OUT]))
    x, y = jnp.zeros((8, 32)), jnp.ones(7, jnp.bfloat16)
    (result,) = call(x, y)
    assert result.shape == (8, 32) and result.dtype == jnp.float32
    jax.block_until_ready(call(x, y))
    assert len(driver.calls("cuLaunchKernelEx")) == 2
    assert len(driver.calls("cuLibraryLoadData")) == 1
    assert driver.calls("cuTensorMapEncodeTiled")[0]["address"] == f"{address(x):x}"
    first = driver.calls("cuLaunchKernelEx")[0]["parameters"].split(",")
    values = [int.from_bytes(bytes.fromhex(text), "little") for text in first]
    assert values[0] == address(x) and values[1] == address(y) and values[2] == address(result) and values[3] == 5


def test_extents_come_from_the_arrays_of_the_call(driver, make_spec):
    """One exported program, its shapes symbols, on arrays of several shapes."""
    dims = ((2, 1, 32), (1, 1, None), (0, 1, None), (2, 32, None))
    shaped = ShapedMap(0, "float32", dims, box=(32, 8, 1, 1), swizzle=128)
    spec = make_spec(shaped, Extent(0, 1), Extent(1, 0), BufferPointer(1))
    driver.parameters(128, 4, 4, 8)
    a, b, c = jax.export.symbolic_shape("a, b, c", constraints=["mod(c, 32) == 0"])

    def call(x):
        return jax_ffi.launch_call(spec, [x], [jax.ShapeDtypeStruct((x.shape[1], 7), jnp.float32)])

    exported = jax.export.export(
        jax.jit(call), disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(jax_ffi.TARGET)]
    )(jax.ShapeDtypeStruct((a, b, c), jnp.float32))
    for shape in ((3, 5, 64), (2, 300, 32)):
        (result,) = exported.call(jnp.zeros(shape))
        assert result.shape == (shape[1], 7)
        a, b, c = shape
        made = driver.calls("cuTensorMapEncodeTiled")[-1]
        assert made["dims"] == f"32,{b},{a},{c // 32}"
        assert made["strides"] == f"{4 * c},{4 * b * c},128"
        values = driver.calls("cuLaunchKernelEx")[-1]["parameters"].split(",")
        assert [int.from_bytes(bytes.fromhex(v)[:4], "little") for v in values[1:3]] == [b, b]
    assert len(driver.calls("cuLibraryLoadData")) == 1
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="UnsupportedCall.*buffer 0 is empty, which TMA cannot describe"
    ):
        jax.block_until_ready(jax.jit(call)(jnp.zeros((0, 5, 64))))
    beyond = make_spec(Extent(0, 3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="needs the extents of buffer 0, which has 1 here"):
        jax.block_until_ready(jax.jit(lambda x: jax_ffi.launch_call(beyond, [x], [OUT]))(jnp.zeros(4)))


def test_executables_with_one_cubin_load_it_once(driver, make_spec):
    spec = make_spec(BufferPointer(0))
    for size in (1, 2, 3):
        jax.block_until_ready(jax.jit(lambda a: jax_ffi.launch_call(spec, [a], [OUT]))(jnp.zeros(size)))
    assert len(driver.calls("cuLaunchKernelEx")) == 3
    assert len(driver.calls("cuLibraryLoadData")) == 1
    assert not driver.calls("cuLibraryUnload")


def test_what_launches_of_one_cubin_allow_only_grows(driver, make_spec):
    spec = make_spec(BufferPointer(0), grid=(16, 1, 1))
    changes = [
        {"shared_bytes": 2000},
        {"shared_bytes": 1000},
        {"shared_bytes": 3000},
        {"shared_bytes": 1000, "cluster": (16, 1, 1)},
        {"shared_bytes": 2000, "cluster": (16, 1, 1)},
    ]
    for change in changes:
        changed = dataclasses.replace(spec, **change)
        jax.block_until_ready(jax.jit(lambda a, s=changed: jax_ffi.launch_call(s, [a], [OUT]))(jnp.zeros(4)))
    allowed = [(call["attribute"], call["value"]) for call in driver.calls("cuKernelSetAttribute")]
    assert allowed == [("8", "2000"), ("8", "3000"), ("14", "1")]
    assert len(driver.calls("cuLaunchKernelEx")) == len(changes)


def test_a_real_cubin_arrives_byte_for_byte(driver, scale_tiles):
    spec = scale_tiles("sm_90a", blocks=1, factor=2.0)
    driver.parameters(128, 8, 4, 4)
    jax.block_until_ready(jax.jit(lambda a: jax_ffi.launch_call(spec, [a], [OUT]))(jnp.zeros((8, 32))))
    (load,) = driver.calls("cuLibraryLoadData")
    size = int(load["bytes"])
    assert len(spec.cubin) - 16 < size <= len(spec.cubin)
    assert int(load["sum"]) == sum((i + 1) * byte for i, byte in enumerate(spec.cubin[:size])) % (1 << 64)


def test_aliased_output_lies_on_its_donated_input(driver, make_spec):
    spec = make_spec(BufferPointer(0), BufferPointer(1))
    driver.parameters(8, 8)
    call = jax.jit(lambda a: jax_ffi.launch_call(spec, [a], [OUT], {0: 0}), donate_argnums=0)
    jax.block_until_ready(call(jnp.zeros((8, 32))))
    (launch,) = driver.calls("cuLaunchKernelEx")
    source, target = launch["parameters"].split(",")
    assert source == target


def test_operands_come_in_row_major_order(driver, make_spec):
    spec = make_spec(BufferPointer(0))
    text = jax.jit(lambda a: jax_ffi.launch_call(spec, [a.T], [OUT])).lower(jnp.zeros((2, 3))).as_text()
    (line,) = [line for line in text.splitlines() if jax_ffi.TARGET in line]
    assert "operand_layouts = [dense<[1, 0]>" in line and "result_layouts = [dense<[1, 0]>" in line


def test_lowers_for_cuda_without_a_gpu(make_spec):
    spec = make_spec(BufferPointer(0))
    traced = jax.jit(lambda a: jax_ffi.launch_call(spec, [a], [OUT])).trace(jnp.zeros(4))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert jax_ffi.TARGET in text and "sm_90a" in text


def test_errors_come_out_as_ours(driver, make_spec):
    spec = make_spec(BufferPointer(0))
    driver.fail("cuLibraryLoadData", 209)
    with pytest.raises(Exception, match="ToolchainError") as caught:
        jax.block_until_ready(jax.jit(lambda a: jax_ffi.launch_call(spec, [a], [OUT]))(jnp.zeros(4)))
    ours = jax_ffi.translate_error(caught.value)
    assert isinstance(ours, errors.ToolchainError) and ours.__cause__ is caught.value
    assert str(ours).startswith("cuLibraryLoadData failed") and "CUDA 12.8" in str(ours)
    assert jax_ffi.translate_error(ValueError("of another kind")) is None


def test_a_damaged_specification_fails_when_the_program_is_compiled(make_spec):
    call = jax.jit(lambda a: jax.ffi.ffi_call(jax_ffi.TARGET, OUT)(a, spec=b"damaged"))
    with pytest.raises(Exception, match="damaged launch specification"):
        jax.block_until_ready(call(jnp.zeros(4)))


def test_a_call_with_too_few_buffers_is_refused_when_traced(make_spec):
    with pytest.raises(errors.UnsupportedCall, match="buffer 3.*1 inputs and 1 outputs"):
        jax.jit(lambda a: jax_ffi.launch_call(make_spec(BufferPointer(3)), [a], [OUT])).lower(jnp.zeros(4))


def test_an_empty_grid(driver, make_spec):
    spec = make_spec(BufferPointer(0), grid=(0, 1, 1))
    jax.block_until_ready(jax.jit(lambda a: jax_ffi.launch_call(spec, [a], [OUT]))(jnp.zeros(4)))
    assert not driver.calls("cuLaunchKernelEx")


def test_registering_from_many_threads() -> None:
    threads = [threading.Thread(target=jax_ffi.register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    jax_ffi.register()


def test_what_the_machine_has() -> None:
    assert device.gpu_devices() == []
    assert device.driver_version() == (12, 8)
    assert device.compute_capability(jax.devices("cpu")[0]) is None
