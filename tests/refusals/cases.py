"""One kernel for each way in which front half and emitter refuse."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as stock
import jax.experimental.pallas.mosaic_gpu as stock_gpu
import jax.numpy as jnp
import numpy as np
from jax import lax

import mosaic_gpu as plgpu

F, BF, I8 = jnp.float32, jnp.bfloat16, jnp.int8
WGMMA, STRIDED = plgpu.Layout.WGMMA, plgpu.Layout.WG_STRIDED
ds = plgpu.ds


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """name: what is refused; body, options: of `plgpu.kernel`; arrays: its arguments; x64: with JAX's 64-bit types."""

    name: str
    body: Callable[..., Any]
    arrays: tuple[Any, ...]
    options: dict[str, Any]
    arch: str
    x64: bool


CASES: list[Case] = []


def case(
    name: str, body: Callable[..., Any], *arrays: Any, out: Any = (), arch: str = "sm_90a", **options: Any
) -> None:
    scratch = options.pop("scratch", ())
    x64 = any(a.dtype == np.float64 for a in arrays)
    params = plgpu.CompilerParams(arch=arch)
    options = dict(out_type=out, scratch_types=scratch, compiler_params=params, **options)

    @functools.wraps(body)
    def quiet(*refs: Any) -> None:
        body(*refs)

    CASES.append(Case(name, quiet, arrays, options, arch, x64))


def x(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def o(*shape: int, dtype: Any = F) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def smem(*shape: int, dtype: Any = F, tile: tuple[int, ...] = (), swizzle: int = 0) -> Any:
    transforms: tuple[Any, ...] = (plgpu.TilingTransform(tile),) if tile else ()
    return plgpu.SMEM(shape, dtype, transforms=(*transforms, *([plgpu.SwizzleTransform(swizzle)] if swizzle else [])))


def mma(*shape: int, dtype: Any = BF, rows: int = 8) -> Any:
    """An operand of products."""
    return smem(*shape, dtype=dtype, tile=(rows, 128 // np.dtype(dtype).itemsize), swizzle=128)


def nothing(*refs: Any) -> None:
    pass


WG2 = dict(num_threads=2, thread_name="wg")
GRID = dict(grid=(2,), grid_names=("g",))
PAIR = dict(cluster=(2,), cluster_names=("c",))
BAR = plgpu.Barrier()


# ---- the call -----------------------------------------------------------------------------------------------------------------
case("a cluster of 17", nothing, cluster=(17,), cluster_names=("c",))
case("an accumulator of the whole kernel", nothing, scratch=[plgpu.ACC((64, 64))])
case("nine warpgroups", nothing, num_threads=9, thread_name="wg")
case("a long first axis of the grid", nothing, grid=(70000, 2), grid_names=("a", "b"))
case("tensor memory on Hopper", nothing, scratch=[plgpu.TMEM((128, 64), F)])
case("a cluster barrier along no axis", nothing, scratch=[plgpu.ClusterBarrier(collective_axes="x")], **PAIR)

case(
    "more elements than there should be code for",
    lambda b: b.__setitem__(..., plgpu.broadcasted_iota(jnp.int32, (4096, 128), 0, layout=WGMMA)),
    out=o(4096, 128, dtype=jnp.int32),
)

# ---- tracing ------------------------------------------------------------------------------------------------------------------
CAPTURED = np.arange(2048.0, dtype=np.float32)
case("a captured array", lambda a, b: b.__setitem__(..., a[...] + jnp.asarray(CAPTURED)), x(2048), out=o(2048))
case(
    "a static slice outside",
    lambda a, s, b: plgpu.copy_gmem_to_smem(a.at[ds(64, 64)], s, b),
    x(100, 32),
    scratch=[smem(64, 32), BAR],
)
case("a static index outside", lambda s: s.at[-1][...], scratch=[smem(8, 64, 32)])
case("a store of another shape", lambda a, b: b.__setitem__(..., a[:2]), x(4, 128), out=o(4, 128))
case("a store of a scalar", lambda b: b.__setitem__(..., 1.0), out=o(4, 128))
case("a store of another dtype", lambda a, b: b.__setitem__(..., a[...].astype(BF)), x(4, 128), out=o(4, 128))
case("more indices than dimensions", lambda a, b: b.__setitem__(0, a[0, 0]), x(8), out=o(8))
case("a step back", lambda a, b: b.__setitem__(..., a[::-1]), x(8), out=o(8))
case(
    "no branch for this platform",
    lambda a, b: b.__setitem__(..., lax.platform_dependent(a[...], cpu=jnp.sin, tpu=jnp.cos)),
    x(8),
    out=o(8),
)
case("an index of floats", lambda a, b: b.__setitem__(0, a[a[0]]), x(8), out=o(8))
case("a flag as an index", lambda a, b: b.__setitem__(0, a[True]), x(8), out=o(8))
case("a Ref as an operand", lambda a, b: b.__setitem__(..., a + 1), x(8), out=o(8))
case("a Ref as an argument of jnp", lambda a, b: b.__setitem__(0, jnp.sum(a)), x(8), out=o(8))
case("a reshaped view", lambda s: s.reshape((64, 4))[...], scratch=[smem(8, 32)])
case(
    "an array as an index of a copy",
    lambda a, i, s, b: plgpu.copy_gmem_to_smem(a.at[i[...]], s, b),
    x(256, 32),
    x(8, dtype=np.int32),
    scratch=[smem(8, 32), BAR],
)
case(
    "an index array into an accumulator",
    lambda i, c: plgpu.run_scoped(lambda acc: c.__setitem__(..., acc[i[...]]), plgpu.ACC((64, 32))),
    x(8, dtype=np.int32),
    out=o(8, 32),
)
ROW = lax.GatherDimensionNumbers((1,), (0,), (0,))
case(
    "a gather by one-hot products",
    lambda a, i, c: c.__setitem__(..., lax.gather(a[...], i[...], ROW, (1, 8), mode=lax.GatherScatterMode.ONE_HOT)),
    x(8, 8),
    x(4, 1, dtype=np.int32),
    out=o(4, 8),
)
case(
    "keys split in a kernel",
    lambda a, b: b.__setitem__(0, jax.random.uniform(jax.random.split(jax.random.key(a[0]), 65)[0], ())),
    x(1, dtype=np.int32),
    out=o(1),
)
case(
    "a key made of data",
    lambda a, b: b.__setitem__(..., jax.random.bits(jax.random.wrap_key_data(a[...]), (128,))),
    x(2, dtype=np.uint32),
    out=o(128, dtype=jnp.uint32),
)
case(
    "a key of another generator",
    lambda a, b: b.__setitem__(..., jax.random.bits(jax.random.key(a[0], impl="rbg"), (128,))),
    x(1, dtype=np.int32),
    out=o(128, dtype=jnp.uint32),
)
case("a transform of real values", lambda a, b: b.__setitem__(..., jnp.abs(jnp.fft.fft(a[...]))), x(128), out=o(128))
case(
    "complex values",
    lambda a, b: b.__setitem__(..., a[...] + a[...]),
    x(128, dtype=np.complex64),
    out=o(128, dtype=np.complex64),
)
case("an unknown primitive", lambda a, b: b.__setitem__(..., lax.linalg.cholesky(a[...])), x(8, 8), out=o(8, 8))
case(
    "a clamp of bools",
    lambda a, b: b.__setitem__(..., lax.clamp(False, a[...] > 0, True)),
    x(128),
    out=o(128, dtype=bool),
)
case(
    "an operand in registers of another layout",
    lambda g, s: plgpu.run_scoped(lambda c: plgpu.wgmma(c, plgpu.load(g, layout=STRIDED), s), plgpu.ACC((64, 64))),
    x(64, 64, dtype=BF),
    scratch=[mma(64, 64)],
)
case("an odd precision", lambda a, b: b.__setitem__(..., lax.reduce_precision(a[...], 6, 9)), x(128), out=o(128))
case("an input that is written", lambda a, b: a.__setitem__(..., b[...]), x(64, 64), out=o(64, 64))
case("an axis that does not exist", lambda a, b: b.__setitem__(0, a[plgpu.program_id(1)]), x(8), out=o(8), **GRID)

case("an axis by a name that is none", lambda a, b: b.__setitem__(0, a[lax.axis_index("h")]), x(8), out=o(8), **GRID)


# ---- register layouts ------------------------------------------------------------------------------------------
def two_layouts(a: Any, b: Any) -> None:
    b[...] = plgpu.load(a, layout=WGMMA) + plgpu.load(a, layout=STRIDED)


def layouts_of_a_reduction(a: Any, v: Any, b: Any) -> None:
    b[...] = jnp.max(plgpu.load(a, layout=WGMMA), axis=1) + plgpu.load(v, layout=STRIDED)


def cast_twice(a: Any, b: Any) -> None:
    y = plgpu.load(a, layout=WGMMA)
    b[...] = plgpu.layout_cast(y, STRIDED)


def store_of_one_value(to: str) -> Any:
    return lambda b, s: (b if to == "gmem" else s).__setitem__(..., jnp.zeros((64, 16), F))


case("two layouts meet", two_layouts, x(64, 64), out=o(64, 64))
case(
    "a layout for another shape",
    lambda a, b: b.__setitem__(..., plgpu.layout_cast(a[...], WGMMA)),
    x(64, 12),
    out=o(64, 12),
)


case("values of a type", lambda a, b: b.__setitem__(0, (a[0].astype(jnp.float8_e8m0fnu)).astype(F)), x(8), out=o(8))

# ---- Refs ---------------------------------------------------------------------------------------------------------------------
case("a barrier that is read", lambda s: s[...], scratch=[BAR])
case(
    "tensor memory that is read",
    lambda t, b: b[...],
    out=o(128, 64),
    scratch=[plgpu.TMEM((128, 64), F)],
    arch="sm_100a",
)


def scoped(use: Callable[..., Any], acc: Any) -> Callable[..., None]:
    return lambda *refs: plgpu.run_scoped(lambda c: (use(c, *refs), None)[1], acc)


case("a part of an accumulator", scoped(lambda c: c[0:32], plgpu.ACC((64, 64))))
case("an array by a single warp", lambda s: plgpu.warp_map(lambda w: (s[...], None)[1]), scratch=[smem(64, 64)])
case("global memory of its own", scoped(lambda g: g[0], plgpu.GMEM((8,), F)))
case("what a single warp has not", lambda: plgpu.warp_map(lambda w: plgpu.commit_smem()))
case("a slice of barriers", lambda b: plgpu.barrier_wait(b), scratch=[plgpu.Barrier(num_barriers=2)])
case(
    "a named barrier for three of two",
    lambda b: plgpu.named_barrier_sync(b),
    scratch=[plgpu.NamedBarrier(num_warpgroups=3)],
    **WG2,
)


def branch(condition: Any, use: Callable[..., Any]) -> Callable[..., None]:
    return lambda a, b, bar: plgpu.when_any_in_warp(condition(plgpu.load(a, layout=WGMMA)))(lambda: use(bar))


case("a branch on no array", lambda a, b: plgpu.when_any_in_warp(a[0] > 0)(lambda: None), x(8), out=o(8))
case(
    "what warps must do together",
    branch(lambda y: y > 0, plgpu.barrier_arrive),
    x(64, 64),
    out=o(64, 64),
    scratch=[BAR],
)

# ---- resources ----------------------------------------------------------------------------------------------------------------
case("too much shared memory", nothing, scratch=[smem(300, 256)])
case("33 barriers", nothing, scratch=[plgpu.Barrier(num_barriers=33)])
case("16 named barriers", nothing, scratch=[plgpu.NamedBarrier(num_warpgroups=1, num_barriers=8)] * 2)
case(
    "14 named barriers and two to meet",
    lambda *n: plgpu.commit_smem(),
    scratch=[plgpu.NamedBarrier(num_warpgroups=1, num_barriers=7)] * 2,
    **WG2,
)
case("520 columns", nothing, scratch=[plgpu.TMEM((128, 512), F), plgpu.TMEM((128, 8), F)], arch="sm_100a")
case("a tile with too many dimensions", nothing, scratch=[smem(64, tile=(8, 64))])
case("a tile that does not divide", nothing, scratch=[smem(20, 64, dtype=BF, tile=(8, 64), swizzle=128)])
case("a swizzle of other rows", nothing, scratch=[smem(64, 64, swizzle=128)])


def scope_of_two(a: Any, b: Any) -> None:
    wg = lax.axis_index("wg")
    plgpu.when(wg < 2)(lambda: plgpu.run_scoped(lambda s: b.__setitem__(0, a[0]), smem(64)))
    plgpu.when(wg == 2)(lambda: b.__setitem__(1, a[1]))


case("memory of one role of two", scope_of_two, x(8), out=o(8), num_threads=3, thread_name="wg")


def budgets(*requests: tuple[int, str]) -> Callable[..., None]:
    def body(a: Any, b: Any) -> None:
        for i, (n, action) in enumerate(requests):

            @plgpu.when(lax.axis_index("wg") == i)
            def _(i: int = i, n: int = n, action: str = action) -> None:
                plgpu.set_max_registers(n, action=action)
                b[i] = a[i]

    return body


UP, DOWN = "increase", "decrease"
WG3 = dict(num_threads=3, thread_name="wg")
case("registers above the pool", budgets((240, UP), (240, UP), (32, DOWN)), x(8), out=o(8), **WG3)
case("an increase below the launch", budgets((232, UP), (160, UP), (24, DOWN)), x(8), out=o(8), **WG3)
case("a decrease above the launch", budgets((200, DOWN), (200, DOWN), (24, DOWN)), x(8), out=o(8), **WG3)
case("100 registers", budgets((100, DOWN), (232, UP)), x(8), out=o(8), **WG2)
case("a budget in a loop", lambda: lax.fori_loop(0, 2, lambda i, _: plgpu.set_max_registers(232, action=UP), None))


# ---- TMA ----------------------------------------------------------------------------------------------------------------------
def load(index: Any = lambda a: a, to: Any = lambda s: s, **options: Any) -> Callable[..., None]:
    return lambda a, s, b: plgpu.copy_gmem_to_smem(index(a), to(s), b, **options)


def at_block(rows: int = 64, factor: int = 64) -> Callable[..., Any]:
    return lambda a: a.at[ds(lax.axis_index("g") * factor, rows)]


case("a copy between shapes", load(), x(64, 32), scratch=[smem(64, 64), BAR])
case("a copy that transposes", load(lambda a: a.T), x(64, 64), scratch=[smem(64, 64), BAR])
case("a copy of a column", load(lambda a: a.at[:, 0]), x(64, 64), scratch=[smem(64), BAR])
case("a copy of rows of 12 bytes", load(), x(64, 3), scratch=[smem(64, 3), BAR])
case("a copy from 8 bytes on", load(lambda a: a.at[:, ds(2, 4)]), x(64, 8), scratch=[smem(64, 4), BAR])
case(
    "a copy of half a swizzle",
    load(lambda a: a.at[:, ds(0, 32)], lambda s: s.at[:, ds(0, 32)]),
    x(64, 64, dtype=BF),
    scratch=[mma(64, 64), BAR],
)
case("a multicast of an odd tile", load(collective_axes="c"), x(63, 32), scratch=[smem(63, 32), BAR], **PAIR)
case(
    "a multicast of an odd number of pieces",
    load(collective_axes="c"),
    x(768, 32, dtype=F),
    scratch=[smem(768, 32), BAR],
    **PAIR,
)
case("a copy of rank 6", load(lambda a: a.at[0, 1, 0, 1]), x(2, 2, 2, 2, 64, 64), scratch=[smem(64, 64), BAR])
case("a copy of nothing", load(at_block()), x(0, 32), scratch=[smem(64, 32), BAR], **GRID)
case("rows of 36 bytes in memory", load(lambda a: a.at[:, ds(0, 8)]), x(64, 9), scratch=[smem(64, 8), BAR])
case("a strided slice of shared memory", load(to=lambda s: s.at[::2]), x(32, 32), scratch=[smem(64, 32), BAR])
case("a strided slice of global memory", load(lambda a: a.at[::2]), x(128, 32), scratch=[smem(64, 32), BAR])
case(
    "a piece at byte 96",
    load(lambda a: a.at[ds(1, 1)], lambda s: s.at[ds(1, 1)]),
    x(4, 48, dtype=BF),
    scratch=[smem(4, 48, dtype=BF), BAR],
)
case(
    "a slice through tiles",
    load(lambda a: a.at[ds(0, 12)], lambda s: s.at[ds(0, 12)]),
    x(64, 64, dtype=BF),
    scratch=[mma(64, 64), BAR],
)
case(
    "chunks that start anywhere",
    load(lambda a: a.at[:, ds(lax.axis_index("g") * 32, 128)]),
    x(64, 256, dtype=BF),
    scratch=[mma(64, 128, rows=64), BAR],
    **GRID,
)
case("a copy along no axis", load(collective_axes="x"), x(64, 64), scratch=[smem(64, 64), BAR])


case(
    "more shared memory than there is for an exchange",
    lambda a, r: r.__setitem__(..., a[...].T),
    x(512, 256),
    out=o(256, 512),
)


# ---- barriers that never complete --------------------------------------------------------------------------------------------
def _arrives(times: int) -> Callable[..., Any]:
    """Waits after so many arrivals in branches that depend on the data."""

    def body(a: Any, c: Any, barrier: Any) -> None:
        for i in range(times):
            plgpu.when(a[i] > 0)(lambda: plgpu.barrier_arrive(barrier.at[0]))
        plgpu.barrier_wait(barrier.at[0])
        c[...] = a[...]

    return body


case("a barrier on which nothing arrives", _arrives(0), x(128), out=o(128), scratch=[plgpu.Barrier()])
case("a barrier with too few arrivals", _arrives(2), x(128), out=o(128), scratch=[plgpu.Barrier(num_arrivals=3)])


# ---- prints ------------------------------------------------------------------------------------------------------------------
case("a print of too many values", lambda a: plgpu.debug_print("{}", a[0], a[1]), x(4))
case("a print of a field by name", lambda a: plgpu.debug_print("{a}", a[0]), x(4))
case("a print of a float in whole numbers", lambda a: plgpu.debug_print("{:d}", a[0]), x(4))
case("a print without a closing brace", lambda a: plgpu.debug_print("{", a[0]), x(4))
case("a print of a layout by name", lambda a: plgpu.print_layout("{layout}", a[...]), x(4))
case("a print of something static", lambda a: jax.debug.print("{}", "text"), x(4))


# ---- random keys -------------------------------------------------------------------------------------------------------------
def _carried_key(a, c):
    key = lax.fori_loop(0, 4, lambda i, k: jax.random.fold_in(k, i), jax.random.key(0))
    c[...] = a[...] + jax.random.uniform(key, a.shape)


case("a key that a loop carries", _carried_key, x(4), out=o(4))


# ---- accuracy ----------------------------------------------------------------------------------------------------------------
EXACT = lax.Tolerance(atol=1e-12, rtol=0.0, ulps=0)
case("an exponential without error", lambda a, c: c.__setitem__(..., lax.exp(a[...], accuracy=EXACT)), x(4), out=o(4))


# ---- float8 ----------------------------------------------------------------------------------------------------------------
FLOAT8 = jnp.float8_e5m2
case("a sum of float8", lambda a, c: c.__setitem__(..., a[...] + a[...]), x(8, dtype=FLOAT8), out=o(8, dtype=FLOAT8))
case(
    "float64 to float8",
    lambda a, c: c.__setitem__(..., a[...].astype(FLOAT8)),
    x(8, dtype=np.float64),
    out=o(8, dtype=FLOAT8),
)


# ---- JAX's own Pallas in a body ---------------------------------------------------------------------------------------------
def theirs(r: Any) -> None:
    def scoped(s: Any) -> None:
        s[...] = jnp.zeros(8)
        r[...] = s[...]

    stock.run_scoped(scoped, stock_gpu.SMEM((8,), F))


case("run_scoped of JAX's", theirs, out=o(8))
case("program_id of JAX's", lambda r: r.__setitem__(0, stock.program_id(0).astype(F)), out=o(8), grid=(2,))
