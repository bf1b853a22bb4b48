"""Products, index arrays, accuracy, prints on a GPU: the bodies that simulator and host have tried, against NumPy and JAX."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.runtime.device import gpu_devices
from tests.host_gpu import test_dot as dots
from tests.host_gpu import test_gather as gathers
from tests.host_gpu import test_register_ops as moves
from tests.ops import test_accuracy as accuracy
from tests.ops import test_indexed as indexed
from tests.ops import test_jnp_functions as functions
from tests.ops import test_products as products

pytestmark = pytest.mark.gpu
if not gpu_devices():
    pytest.skip("needs a GPU", allow_module_level=True)
HOPPER = [d for d in gpu_devices() if str(getattr(d, "compute_capability", "")) == "9.0"]


def run(f: Callable[..., Any], *arrays: np.ndarray, out: Any = None, scratch: Any = ()) -> list[np.ndarray]:
    """f of loaded arrays (or with `scratch` of Refs: f(refs, outs, scratch)) on the GPU."""
    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    outs = jax.tree.leaves(jax.eval_shape(f, *abstract) if out is None else out)

    def body(*refs: Any) -> None:
        n = len(arrays)
        for o, x in zip(refs[n:], jax.tree.leaves(f(*(r[...] for r in refs[:n]))), strict=True):
            o[...] = x

    return [np.asarray(x) for x in jax.jit(plgpu.kernel(body, outs))(*arrays)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "uint8", "int32"])
@pytest.mark.parametrize("name", dots.SHAPES)
def test_products(name, dtype):
    f, left, right = dots.SHAPES[name]
    arrays = [dots.numbers(dtype, *left), dots.numbers(dtype, *right, seed=4)]
    (found,) = run(f, *arrays)
    if found.dtype.kind in "iu":
        exact = np.asarray(dots_exact(f, arrays))
        np.testing.assert_array_equal(found, exact)
    else:
        dots.right(found, f, *arrays, tf32=dtype == "float32")


def dots_exact(f: Callable[..., Any], arrays: list[np.ndarray]) -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        return f(*map(jnp.asarray, arrays))


def test_exact_float32():
    arrays = [dots.numbers("float32", 64, 72), dots.numbers("float32", 72, 24, seed=4)]
    f = dots.dot(*dots.PLAIN, precision=lax.Precision.HIGHEST)
    dots.right(run(f, *arrays)[0], lambda x, y: x @ y, *arrays)


def test_sums_that_start_somewhere():
    arrays = [
        dots.numbers("bfloat16", 64, 64),
        dots.numbers("bfloat16", 64, 32, seed=4),
        dots.numbers("float32", 64, 32),
    ]

    def f(x: Any, y: Any, z: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, acc: acc + jnp.dot(x, y, preferred_element_type=jnp.float32), z)

    (found,) = run(f, *arrays)
    exact = 3 * (np.asarray(arrays[0], np.float64) @ np.asarray(arrays[1], np.float64)) + arrays[2]
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-3)


@pytest.mark.skipif(not HOPPER, reason="wgmma exists on Hopper")
@pytest.mark.parametrize("name", [n for n, c in products.CASES.items() if c[3]])
def test_products_of_tiles_in_shared_memory(name):
    """As wgmma, whose operands TMA brings."""
    f, left, right, _ = products.CASES[name]
    a, b = products.random(jnp.bfloat16, *left), products.random(jnp.bfloat16, *right, seed=1)
    out = jax.eval_shape(f, jnp.asarray(a), jnp.asarray(b))

    def body(a_gmem: Any, b_gmem: Any, o: Any, a_tile: Any, b_tile: Any, full: Any) -> None:
        plgpu.copy_gmem_to_smem(a_gmem, a_tile, full)
        plgpu.copy_gmem_to_smem(b_gmem, b_tile, full)
        plgpu.barrier_wait(full)
        o[...] = f(a_tile, b_tile)

    scratch = [products.smem(x.shape, x.dtype) for x in (a, b)]
    kernel = plgpu.kernel(body, out, scratch_types=[*scratch, plgpu.Barrier(num_arrivals=2)])
    reference = np.asarray(f(a.astype(np.float64), b.astype(np.float64)))
    np.testing.assert_allclose(np.float64(jax.jit(kernel)(a, b)), reference, rtol=2**-7, atol=0.25)


@pytest.mark.parametrize("dtype", gathers.TYPES)
def test_index_arrays(dtype):
    functions, x = gathers.table(dtype), gathers.numbers(dtype)
    found = run(lambda x, i: [f(x, i) for f in functions.values()], x, gathers.INDICES)
    with jax.default_device(jax.devices("cpu")[0]):
        gathers.right(functions, x, found)


@pytest.mark.parametrize("smem", [False, True])
def test_refs_by_index_arrays(smem):
    x, i = indexed.table("float32"), indexed.DIFFERENT

    def body(x_ref: Any, i_ref: Any, o: Any, end: Any, back: Any, tile: Any) -> None:
        ref = x_ref
        if smem:
            tile[...] = x_ref[...]
            plgpu.commit_smem()
            ref = tile
        rows = ref[i_ref[...]]
        o[...] = rows
        end[...] = ref[-i_ref[...]] + ref.at[plgpu.ds(0, 8)][-1 - i_ref[...] % 8]
        back[i_ref[...]] = rows

    outs = [jax.ShapeDtypeStruct((n, 32), x.dtype) for n in (8, 8, 16)]
    kernel = plgpu.kernel(body, outs, scratch_types=[plgpu.SMEM(x.shape, x.dtype, transforms=indexed.TILE)])
    found, end, back = jax.jit(kernel)(x, i)
    np.testing.assert_array_equal(found, x[i])
    np.testing.assert_array_equal(end, x[-i] + x[:8][-1 - i % 8])
    np.testing.assert_array_equal(np.asarray(back)[i], x[i])


@pytest.mark.parametrize("name", functions.CASES)
def test_functions_of_several_operations(name):
    f, arrays = functions.CASES[name]
    (found,) = run(f, *arrays)
    np.testing.assert_array_equal(found, functions.expected(name))


@pytest.mark.parametrize("dtype", moves.TABLES)
def test_what_moves_and_combines(dtype):
    functions, x = moves.TABLES[dtype], moves.numbers(dtype, 24, 12)
    names = list(functions)
    for k in range(0, len(names), 8):
        part = {n: functions[n] for n in names[k : k + 8]}
        found = run(lambda v, part=part: [f(v) for f in part.values()], x)
        with jax.default_device(jax.devices("cpu")[0]):
            moves.right(part, x, found)


@pytest.mark.parametrize("name", accuracy.WITH)
def test_accuracy(name):
    """The full function within its ulps, the approximation within its bound where it has one."""
    from mosaic_gpu.ops.elementwise import ELEMENTWISE, EPSILON

    row, f = ELEMENTWISE[name], getattr(lax, name)
    x = np.random.default_rng(0).uniform(0.05, 3, (64, 64)).astype(np.float32)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = np.asarray(f(jnp.asarray(x.astype(np.float64))))
    (full,) = run(lambda v: f(v, accuracy=lax.AccuracyMode.HIGHEST), x)
    # CUDA counts units in the last place from the correctly rounded result, which is half a one from the exact one.
    off = np.max(np.abs(full - exact) / np.abs(exact)) / EPSILON["float32"]
    assert off <= max(row.ulps, 1) + 0.5, f"{off:.2f} units in the last place"
    if row.error is not None:
        relative, absolute = row.error
        tolerance = lax.Tolerance(atol=absolute, rtol=relative, ulps=0)
        (loose,) = run(lambda v: f(v, accuracy=tolerance), x)
        assert np.all(np.abs(loose - exact) <= relative * np.abs(exact) + absolute)


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
import mosaic_gpu as plgpu

@plgpu.kernel(out_type=jax.ShapeDtypeStruct((16, 4), jnp.float32))
def kernel(x, o):
    v = x[...]
    plgpu.debug_print("sum {} of {:d}", jnp.sum(v), jnp.int32(64))
    plgpu.debug_print("v{}", v)
    plgpu.debug_check(v >= 0, "not negative")
    o[...] = v

x = np.arange(64, dtype=np.float32).reshape(16, 4)
jax.block_until_ready(jax.jit(kernel)(x))
print("done", flush=True)
jax.block_until_ready(jax.jit(kernel)(-x))
print("not reached", flush=True)
"""


def test_prints_and_checks(tmp_path):
    """In a process of its own: a failed check ends the GPU's context."""
    script = tmp_path / "prints.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert "sum 2016 of 64" in lines and "done" in lines and "not reached" not in lines
    printed = sorted(line for line in lines[: lines.index("done") + 65] if line.startswith("v[") and "-" not in line)
    assert printed == sorted(f"v[{i}, {j}]: {4 * i + j}" for i in range(16) for j in range(4))
    assert done.returncode != 0
    assert "debug_check: not negative" in done.stdout + done.stderr
    assert f"{script}:10" in done.stdout + done.stderr
