"""What simulations report beside errors: bank conflicts, uncoalesced accesses, boxes outside arrays, unwritten outputs."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.layouts.conflicts import wavefronts
from mosaic_gpu.simulator import Report, SimulatorParams, UnwrittenOutput
from mosaic_gpu.simulator.traffic import sectors

LANES = np.arange(32)


# ---- the counting, on patterns whose cost is known ------------------------------------------------------------------------
@pytest.mark.parametrize(
    "addresses,nbytes,expected",
    [
        (LANES * 4, 4, 1),  # a row of words
        (LANES * 0, 4, 1),  # one word for all
        (LANES * 8, 4, 2),  # every other word
        (LANES * 128, 4, 32),  # a column of rows of 128 bytes
        (LANES * 132, 4, 1),  # the same, padded by a word
        (LANES * 2, 2, 1),  # two lanes share a word
        (LANES * 256, 2, 32),
        (LANES * 8, 8, 2),  # 64 bits a lane: two halves
        (LANES * 16, 16, 4),  # 128 bits a lane: four quarters
        (LANES * 128, 16, 32),  # each lane the first 16 bytes of a row
        (LANES * 128 + LANES % 8 * 16, 16, 4),  # the same with the swizzle of 128 bytes
        (LANES * 128 + LANES % 4 * 16, 16, 8),  # with that of 64 bytes
    ],
)
def test_wavefronts(addresses: Any, nbytes: int, expected: int) -> None:
    assert wavefronts(addresses.reshape(1, 32), nbytes) == (1, expected, max(1, nbytes // 4))


@pytest.mark.parametrize(
    "addresses,nbytes,actual,ideal",
    [
        (LANES * 4, 4, 4, 4),
        (LANES * 4 + 16, 4, 5, 4),  # not aligned
        (LANES * 64, 4, 32, 4),
        (LANES * 16, 16, 16, 16),
        (LANES * 0, 4, 1, 1),
        (LANES * 2, 2, 2, 2),
    ],
)
def test_sectors(addresses: Any, nbytes: int, actual: int, ideal: int) -> None:
    everybody = np.ones((1, 32), np.bool_)
    assert sectors(addresses.reshape(1, 32), everybody, nbytes) == (1, actual, ideal)
    assert sectors(addresses.reshape(1, 32), ~everybody, nbytes) == (0, 0, 0)


# ---- kernels ------------------------------------------------------------------------------------------------------------
def report_of(run: Any, kernel: Any, *arrays: np.ndarray, **options: Any) -> Report:
    report = Report()
    run(kernel, *arrays, params=SimulatorParams(report=report, **options))
    return report


def cost(report: Report, op: str, place: str) -> tuple[int, int, int]:
    (t,) = [t for t in report.traffic.values() if (t.op, t.place) == (op, place)]
    return t.instructions, t.actual, t.ideal


def staged(transforms: Any, dtype: Any, columns: int = 64) -> tuple[Any, np.ndarray]:
    """x goes through a tile of shared memory in WGMMA layout."""

    def body(x: Any, y: Any, tile: Any) -> None:
        tile[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA)  # store
        plgpu.commit_smem()
        y[...] = plgpu.load(tile, layout=plgpu.Layout.WGMMA)

    x = np.arange(64 * columns).reshape(64, columns).astype(dtype)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype, transforms=transforms)],
    )
    return kernel, x


SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def test_matrices_of_a_swizzled_tile_have_no_conflicts(run: Any) -> None:
    kernel, x = staged(SWIZZLED, jnp.bfloat16)
    report = report_of(run, kernel, x)
    assert cost(report, "store", "tile") == (4 * 4, 64, 64)  # 4 warps, 64 / 16 stmatrix of 4 pieces
    assert cost(report, "load", "tile") == (4 * 4, 64, 64)  # as many ldmatrix


def test_matrices_in_rows_of_128_bytes(run: Any) -> None:
    kernel, x = staged((), jnp.bfloat16)
    report = report_of(run, kernel, x)
    assert cost(report, "store", "tile") == (16, 8 * 64, 64)  # the 8 rows of a piece are in the same banks
    assert cost(report, "load", "tile") == (16, 8 * 64, 64)
    store = next(t for t in report.slow() if t.op == "store")
    assert store.factor == 8 and "8 times the wavefronts" in str(store)


def test_float32_in_rows_of_256_bytes(run: Any) -> None:
    """Pairs of 8 bytes; a half warp has 4 rows of 32 bytes, all at the same banks."""
    kernel, x = staged((), np.float32)
    assert cost(report_of(run, kernel, x), "load", "tile") == (4 * 16, 4 * 16 * 2 * 4, 4 * 16 * 2)


def test_global_memory(run: Any) -> None:
    """Four lanes have a row's 32 bytes in float32, but 16 bytes, half a sector, in bfloat16."""
    kernel, x = staged((), np.float32)
    assert cost(report_of(run, kernel, x), "load", "x") == (64, 8 * 64, 8 * 64)
    kernel, x = staged(SWIZZLED, jnp.bfloat16)
    report = report_of(run, kernel, x)
    assert cost(report, "load", "x") == cost(report, "store", "y") == (64, 8 * 64, 4 * 64)


def test_rows_behind_the_array_are_not_loaded(run: Any) -> None:
    def body(x: Any, y: Any) -> None:
        i = lax.axis_index("i")
        y[plgpu.ds(i * 64, 64)] = plgpu.load(x.at[plgpu.ds(i * 64, 64)], layout=plgpu.Layout.WGMMA)

    x = np.zeros((64 + 16, 8), np.float32)
    kernel = plgpu.kernel(body, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(2,), grid_names=("i",))
    # The second block has rows for one warp of four.
    assert cost(report_of(run, kernel, x), "load", "x") == (8 + 2, 8 * 10, 8 * 10)


@pytest.mark.parametrize("dtype,actual", [(np.float32, 4), (jnp.bfloat16, 4)])
def test_transposed_load(run: Any, dtype: Any, actual: int) -> None:
    """One element a lane; of 32, 8 are neighbours in each of 4 rows: a sector in float32, half of one in bfloat16."""

    def body(x: Any, y: Any) -> None:
        y[...] = plgpu.load(x.T, layout=plgpu.Layout.WGMMA)

    x = np.zeros((64, 64), dtype)
    kernel = plgpu.kernel(body, jax.ShapeDtypeStruct(x.shape, x.dtype))
    ideal = 32 * x.dtype.itemsize // 32
    assert cost(report_of(run, kernel, x), "load", "x") == (128, 128 * actual, 128 * ideal)


def test_the_line_of_an_access(run: Any, line_of: Any) -> None:
    kernel, x = staged(SWIZZLED, jnp.bfloat16)
    report = report_of(run, kernel, x)
    (store,) = [t for t in report.traffic.values() if (t.op, t.memory) == ("store", "smem")]
    assert store.line is not None and store.line.number == line_of(staged, "store")


# ---- boxes outside, outputs unwritten ---------------------------------------------------------------------------------------
def outside(x_start: int, y_start: int) -> Any:
    def body(x: Any, y: Any, tile: Any, full: Any) -> None:
        zero = lax.axis_index("i")
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(zero + x_start, 64)], tile, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile, y.at[plgpu.ds(zero + y_start, 64)])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((64, 16), jnp.float32),
        scratch_types=[plgpu.SMEM((64, 16), jnp.float32), plgpu.Barrier()],
        grid=(1,),
        grid_names=("i",),
    )


X = np.ones((64, 16), np.float32)


def test_boxes_outside(run: Any) -> None:
    report = report_of(run, outside(64, 0), X)
    (found,) = report.outside.values()
    assert (found.op, found.array, found.count) == ("copy_gmem_to_smem", "input 0", 1)
    assert not report.unwritten
    report = report_of(run, outside(0, 64), X)
    (found,) = report.outside.values()
    assert found.op == "copy_smem_to_gmem" and "writes nothing" in str(found)
    assert report.unwritten["output 0 (y)"].count == X.size
    assert not report_of(run, outside(32, 0), X).outside  # half of it is inside


def test_a_copy_of_several_boxes_is_outside_as_a_whole(run: Any) -> None:
    """Columns in chunks of the swizzle: of a tile of two boxes the second is outside, which is an ordinary tail."""

    def body(x: Any, y: Any, tile: Any, full: Any, *, start: int) -> None:
        columns = plgpu.ds(lax.axis_index("i") * 64 + start, 128)
        plgpu.copy_gmem_to_smem(x.at[:, columns], tile, full)
        plgpu.barrier_wait(full)
        y[...] = plgpu.load(tile, layout=plgpu.Layout.WGMMA)

    def kernel(start: int) -> Any:
        scratch = [plgpu.SMEM((64, 128), jnp.bfloat16, transforms=SWIZZLED), plgpu.Barrier()]
        out = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
        grid = dict(grid=(1,), grid_names=("i",))
        return plgpu.kernel(functools.partial(body, start=start), out, scratch_types=scratch, **grid)

    x = np.ones((64, 64), jnp.bfloat16)
    assert not report_of(run, kernel(0), x).outside
    assert [o.count for o in report_of(run, kernel(64), x).outside.values()] == [1]


def test_unwritten_elements_are_nan_and_a_warning(run: Any) -> None:
    with pytest.warns(UnwrittenOutput, match=r"unwritten: 256 of 1024 elements of output 0 \(y\)"):
        (y,) = run(outside(0, 16), X)
    assert np.isnan(y[:16]).all() and (y[16:] == 1).all()
    with pytest.warns(UnwrittenOutput):  # on the way that a call takes where there is no GPU
        outside(0, 16)(X)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, lambda f: jax.jit(lambda x: 2 * f(x))], ids=["", "jit", "in jit"]
)
def test_the_warning_is_at_the_users_call(wrap: Any) -> None:
    """Where it is called, also when jit has compiled it before, and as often as Python shows one of a line."""
    f = wrap(outside(0, 16))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            y = f(X)
            jax.block_until_ready(y)
        jax.block_until_ready(f(X))
    lines, first = inspect.getsourcelines(test_the_warning_is_at_the_users_call)
    calls = [first + i for i, text in enumerate(lines) if text.strip() in ("y = f(X)", "jax.block_until_ready(f(X))")]
    assert [(w.filename, w.lineno) for w in said] == [(__file__, n) for n in calls]
    body = inspect.getsourcelines(outside)[1] + 1
    assert all(re.search(rf"the kernel is at \S*test_report.py:{body} in ", str(w.message)) for w in said)


def test_whole_outputs_do_not_warn(run: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(outside(0, 0), X)
        run(outside(0, 16), X, uninitialized="zero")  # what is unwritten is not known then


def test_a_call_fills_a_report() -> None:
    report = Report()
    with plgpu.simulator_params(report=report):
        jax.jit(outside(64, 0))(X)
    assert [o.count for o in report.outside.values()] == [1]
    data = report.to_json()
    assert data["outside"][0]["line"] > 0 and data["unwritten"] == []


def test_reports_add_up(run: Any) -> None:
    kernel, x = staged((), jnp.bfloat16)
    one, two = report_of(run, kernel, x), report_of(run, kernel, x)
    expected = {k: 2 * t.actual for k, t in one.traffic.items()}
    one.merge(two)
    assert {k: t.actual for k, t in one.traffic.items()} == expected
