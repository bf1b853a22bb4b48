"""Blackwell matmul: a TMA warp, an MMA warp and an epilogue warpgroup, on a walk over tiles.

The accumulator is in tensor memory twice, so that the products of the next tile run while the epilogue carries out the last one.
With `pair`, two neighbouring blocks multiply together: each has its 128 rows of A and half of B's columns in shared memory and
its 128 rows of the result in tensor memory, so every element of B is read once for 256 rows; the first block's MMA warp issues
for both.  `scaled_matmul` takes operands of 8 and 4 bits with a factor for each 32 or 16 elements of K (mxfp8, mxfp4, nvfp4):
factors travel with the operands, and the MMA warp copies them to tensor memory in front of each product.  Compiled, checked in
the disassembly and simulated; no Blackwell GPU has run it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import ResourceExceeded, UnsupportedCall
from mosaic_gpu.frontend.tracebacks import located_at_its_call
from mosaic_gpu.kernels.config import Config
from mosaic_gpu.kernels.operands import check_matmul
from mosaic_gpu.plan.resources import SHARED_LIMIT
from mosaic_gpu.runtime.device import blackwell_arch, multiprocessors

TMA_WARP, MMA_WARP = 0, 1
ISSUE_WARPGROUP, EPILOGUE_WARPGROUP = 0, 1
ROWS = 128  # of a block's tile: the lanes of tensor memory
ACCUMULATORS = 2
TMEM_COLUMNS = 512
EPILOGUE_COLUMNS = 64  # that leave together
FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig(Config):
    """tile_n: columns of a tile, a multiple of 64 up to 256 (of 128 for float8, and with `pair`); tile_k: depth of a stage in
    bytes, a multiple of 128; num_slots: stages in flight; pair: two blocks of 128 rows multiply together; group: rows of tiles
    that are walked side by side, for the L2 cache; persistent: a block (or pair) per multiprocessor walks over tiles."""

    generation: ClassVar[str] = "sm100"
    kernel: ClassVar[str] = "matmul"
    tile_n: int = 128
    tile_k: int = 128
    num_slots: int = 5
    pair: bool = False
    group: int = 8
    persistent: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile_n % 64 or not 64 <= self.tile_n <= 256:
            raise ValueError(f"tile_n={self.tile_n}: 64, 128, 192 or 256")
        if self.pair and self.tile_n % 128:
            raise ValueError(
                f"tile_n={self.tile_n}: with pair each block has half of the columns, in chunks of 64: 128 or 256"
            )
        if self.tile_k % 128 or self.tile_k < 128:
            raise ValueError(f"tile_k={self.tile_k}: a multiple of 128 bytes")
        for name in ("num_slots", "group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1")
        if self.shared_bytes > SHARED_LIMIT:
            raise ResourceExceeded(
                f"{self.num_slots} slots of {self.tile_k} bytes x ({ROWS} + {self.columns}) and an epilogue of 2 x {ROWS} x "
                f"{EPILOGUE_COLUMNS} take {self.shared_bytes} bytes of shared memory, a block has {SHARED_LIMIT}"
            )

    @property
    def blocks(self) -> int:
        """That multiply together."""
        return 2 if self.pair else 1

    @property
    def columns(self) -> int:
        """Of B that a block has in shared memory."""
        return self.tile_n // self.blocks

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory."""
        barriers = 8 * (2 * self.num_slots + 2 * ACCUMULATORS) + 8
        return self.num_slots * self.tile_k * (ROWS + self.columns) + 2 * 2 * ROWS * EPILOGUE_COLUMNS + barriers

    def check_scaled(self, per_byte: float) -> None:
        """Raise UnsupportedCall or ResourceExceeded where scaled products cannot be made; per_byte: factors for a byte of K."""
        if self.tile_n % ROWS:
            raise UnsupportedCall(
                f"scaled_matmul with tile_n={self.tile_n}: factors come for {ROWS} columns, so 128 or 256"
            )
        cells = round(self.tile_k * per_byte) // 4 * (ROWS + self.tile_n) // 32 * self.num_slots
        columns = accumulators(self, True) * self.tile_n + cells
        if columns > TMEM_COLUMNS:
            raise ResourceExceeded(
                f"{accumulators(self, True)} accumulators of {self.tile_n} columns and {self.num_slots} slots of factors, "
                f"{cells} columns, take {columns} columns of tensor memory, which has {TMEM_COLUMNS}"
            )
        shared = self.shared_bytes + 128 * cells
        if shared > SHARED_LIMIT:
            raise ResourceExceeded(
                f"{self.num_slots} slots with their factors take {shared} bytes of shared memory, a block has {SHARED_LIMIT}"
            )


def accumulators(c: MatmulConfig, scaled: bool) -> int:
    """How many there are: two, but one where two leave no tensor memory for factors."""
    return 1 if scaled and ACCUMULATORS * c.tile_n == TMEM_COLUMNS else ACCUMULATORS


def matmul(a: jax.Array, b: jax.Array, config: MatmulConfig | None = None) -> jax.Array:
    """a @ b for (m, k) and (k, n) arrays, sums in float32.

    float16 or bfloat16, both alike: the result has their dtype; any m; k and n multiples of 8 (TMA moves rows of 16 bytes).
    float8_e4m3fn and float8_e5m2, in any mix: the result is bfloat16; k and n multiples of 16.
    Raises UnsupportedCall for anything else.
    """
    _check(a, b)
    c = config or MatmulConfig()
    out = jnp.dtype(jnp.bfloat16 if a.dtype in FLOAT8 else a.dtype)
    if a.dtype in FLOAT8 and c.columns % 128:
        raise UnsupportedCall(
            f"matmul of float8 with tile_n={c.tile_n}: a block needs 128 columns of B, a row of the swizzle"
        )
    if 0 in (*a.shape, *b.shape):
        return jnp.zeros((a.shape[0], b.shape[1]), out)
    types = (jnp.dtype(a.dtype), jnp.dtype(b.dtype), out)
    result: jax.Array = _kernel(
        a.shape[0], b.shape[1], _walkers(a.shape[0], b.shape[1], c), types, c, None, blackwell_arch()
    )(a, b)
    return result


def _walkers(m: int, n: int, c: MatmulConfig) -> int:
    tiles = plgpu.cdiv(m, ROWS * c.blocks) * plgpu.cdiv(n, c.tile_n)
    return min(tiles, max(multiprocessors() // c.blocks, 1)) if c.persistent else tiles


@located_at_its_call
def scaled_matmul(
    a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, config: MatmulConfig | None = None
) -> jax.Array:
    """(a * a_scale) @ (b * b_scale).T of block-scaled operands, sums in float32: the arguments of `jax.nn.scaled_matmul`, in 2-D.

    a: (m, k); b: (n, k); a_scale: (m, k / block); b_scale: (n, k / block); returns (m, n) bfloat16.
    float8_e4m3fn and float8_e5m2 in any mix with float8_e8m0fnu, block 32 (mxfp8); float4_e2m1fn with float8_e8m0fnu, block 32 or
    16 (mxfp4), or float8_e4m3fn, block 16 (nvfp4).  k a multiple of 128, n of 8, any m.
    config: as of `matmul`; tile_n 128 or 256, tile_k in bytes.  Raises UnsupportedCall for anything else.
    """
    c = config or MatmulConfig()
    fits = a.ndim == b.ndim == a_scale.ndim == b_scale.ndim == 2 and a.shape[1] == b.shape[1]
    if (
        not fits
        or (a.shape[0], b.shape[0]) != (a_scale.shape[0], b_scale.shape[0])
        or a_scale.shape[1] != b_scale.shape[1]
    ):
        raise UnsupportedCall(
            f"scaled_matmul of a {a.shape}, b {b.shape}, a_scale {a_scale.shape}, b_scale {b_scale.shape}: it takes (m, k), "
            "(n, k), (m, k / block) and (n, k / block)"
        )
    (m, k), n, per_row = a.shape, b.shape[0], a_scale.shape[1]
    if 0 in (m, n, k):
        return jnp.zeros((m, n), jnp.bfloat16)
    packed = a.dtype == b.dtype == jnp.float4_e2m1fn
    block = k // per_row if per_row and k % per_row == 0 else 0
    scale = a_scale.dtype if a_scale.dtype == b_scale.dtype else None
    kinds = {32: [jnp.float8_e8m0fnu], 16: [jnp.float8_e8m0fnu, jnp.float8_e4m3fn] if packed else []}
    if not (packed or (a.dtype in FLOAT8 and b.dtype in FLOAT8)) or scale not in kinds.get(block, []):
        raise UnsupportedCall(
            f"scaled_matmul of {a.dtype} and {b.dtype} with {per_row} factors {a_scale.dtype} and {b_scale.dtype} for k = {k}: "
            "float8 with float8_e8m0fnu for each 32; float4_e2m1fn with that for each 32 or 16, or float8_e4m3fn for each 16"
        )
    if k % 128 or n % 8:
        raise UnsupportedCall(f"scaled_matmul with k = {k} and n = {n}: k is a multiple of 128, n of 8; pad them")
    c.check_scaled((2 if packed else 1) / block)
    if packed:
        a, b = (lax.bitcast_convert_type(x.reshape(x.shape[0], k // 2, 2), jnp.uint8) for x in (a, b))
    types = (jnp.dtype(a.dtype), jnp.dtype(b.dtype), jnp.dtype(jnp.bfloat16))
    scaled = (jnp.dtype(a_scale.dtype), c.tile_k * (2 if packed else 1) // block)
    kernel = _kernel(m, n, _walkers(m, n, c), types, c, scaled, blackwell_arch())
    result: jax.Array = kernel(a, b, *(tiled_factors(x) for x in (a_scale, b_scale)))
    return result


def tiled_factors(scale: jax.Array) -> jax.Array:
    """Factors (rows, n) as `async_copy_scales_to_tmem` takes them: (rows / 128, n / 4, 32, 16), filled up with zeros."""
    rows, n = scale.shape
    raw = jnp.pad(lax.bitcast_convert_type(scale, jnp.uint8), ((0, -rows % ROWS), (0, -n % 4)))
    blocks = raw.reshape(-1, 4, 32, (n + 3) // 4, 4).transpose(0, 3, 2, 1, 4)
    return lax.bitcast_convert_type(blocks.reshape(-1, (n + 3) // 4, 32, 16), scale.dtype)


def _check(a: jax.Array, b: jax.Array) -> None:
    if a.dtype not in FLOAT8 or b.dtype not in FLOAT8:
        check_matmul(a, b)
        return
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise UnsupportedCall(f"matmul of {a.shape} and {b.shape}: it takes (m, k) and (k, n)")
    if a.shape[1] % 16 or b.shape[1] % 16:
        raise UnsupportedCall(
            f"matmul of float8 with k = {a.shape[1]} and n = {b.shape[1]}: multiples of 16 only, since TMA moves rows of 16 "
            "bytes; pad them"
        )


@functools.lru_cache(maxsize=256)
def _kernel(
    m: int,
    n: int,
    walkers: int,
    types: tuple[Any, Any, Any],
    c: MatmulConfig,
    scaled: tuple[Any, int] | None,
    arch: str,
) -> Any:
    """scaled: type of the factors, and how many a row of a tile has; B is then (n, k), else (k, n)."""
    a_type, b_type, out_type = types
    number, per_row = accumulators(c, scaled is not None), scaled[1] if scaled else 0
    chunk = 128 // a_type.itemsize  # elements of a row of the swizzle
    tile_k, tile_m = c.tile_k // a_type.itemsize, ROWS * c.blocks
    pair = dict(collective_axis="pair") if c.pair else {}
    halves = {
        name: dict(collective_axes="pair", leader_tracked=plgpu.CopyPartition.PARTITIONED(axis)) if c.pair else {}
        for name, axis in (("a", 0), ("b", 0 if scaled else 1))
    }
    whole = dict(collective_axes="pair", leader_tracked=plgpu.CopyPartition.REPLICATED) if c.pair else {}

    def tile(rows: int, columns: int) -> tuple[Any, Any]:
        return plgpu.TilingTransform((rows, columns)), plgpu.SwizzleTransform(128)

    def each_tile(a: Any, b: Any, work: Any) -> None:
        """work(count, row, column) of the tiles of this block (or pair): columns of `group` tiles, one after the other."""
        tiles_m = plgpu.cdiv(plgpu.dim_size(a, 0), tile_m)
        tiles_n = plgpu.cdiv(plgpu.dim_size(b, 0 if scaled else 1), c.tile_n)
        me, step = lax.axis_index("walker"), plgpu.num_programs(0)

        def one(count: Any, _: None) -> None:
            number = me + count * step
            group = plgpu.div(number, c.group * tiles_n)
            rest = number - group * (c.group * tiles_n)
            height = jnp.minimum(tiles_m - group * c.group, c.group)
            row, column = group * c.group + plgpu.rem(rest, height), plgpu.div(rest, height)
            work(count, row * tile_m, column * c.tile_n)

        lax.fori_loop(0, plgpu.cdiv(tiles_m * tiles_n - me, step), one, None)

    def steps(a: Any) -> Any:
        return plgpu.cdiv(plgpu.dim_size(a, 1), tile_k)

    def copy(a: Any, b: Any, scales: Any, a_tile: Any, b_tile: Any, scale_tiles: Any, full: Any, empty: Any) -> None:
        """The TMA warp fills the ring; of a pair each block its own half, but all factors of B."""

        def work(count: Any, row: Any, column: Any) -> None:
            def step(i: Any, _: None) -> None:
                before = count * steps(a) + i
                slot = plgpu.rem(before, c.num_slots)

                @plgpu.when(before >= c.num_slots)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                k = plgpu.ds(i * tile_k, tile_k)
                rows, columns = plgpu.ds(row, tile_m), plgpu.ds(column, c.tile_n)
                plgpu.copy_gmem_to_smem(a.at[rows, k], a_tile.at[slot], full.at[slot], **halves["a"])
                b_part = b.at[columns, k] if scaled else b.at[k, columns]
                plgpu.copy_gmem_to_smem(b_part, b_tile.at[slot], full.at[slot], **halves["b"])
                if scaled:
                    groups = plgpu.ds(i * (per_row // 4), per_row // 4)
                    places = ((row, c.blocks, halves["a"]), (column, c.tile_n // ROWS, whole))
                    for x, x_tile, (start, count_, how) in zip(scales, scale_tiles, places, strict=True):
                        part = x.at[plgpu.ds(plgpu.div(start, ROWS), count_), groups]
                        plgpu.copy_gmem_to_smem(part, x_tile.at[slot], full.at[slot], **how)

            lax.fori_loop(0, steps(a), step, None)

        each_tile(a, b, work)

    def multiply(a: Any, b: Any, acc: Any, a_tile: Any, b_tile: Any, factors: Any, bars: Any) -> None:
        """The MMA warp; each product frees its slot when it has ended, the last one of a tile hands over the accumulator."""
        full, empty, ready, drained = bars

        def work(count: Any, row: Any, column: Any) -> None:
            own = plgpu.rem(count, number)
            plgpu.when(count >= number)(lambda: plgpu.barrier_wait(drained.at[own]))

            def step(i: Any, _: None) -> None:
                before = count * steps(a) + i
                slot = plgpu.rem(before, c.num_slots)
                plgpu.barrier_wait(full.at[slot])
                b_block, extra = b_tile.at[slot], dict(pair)
                if scaled:  # tensor memory of the factors is free when the product that read them has ended
                    plgpu.when(before >= c.num_slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    for source, place in zip(*factors, strict=True):
                        plgpu.async_copy_scales_to_tmem(source.at[slot], place.at[slot], **pair)
                    b_block = b_block.transpose((1, 0))
                    extra |= dict(a_scale=factors[1][0].at[slot], b_scale=factors[1][1].at[slot])
                plgpu.tcgen05_mma(acc.at[own], a_tile.at[slot], b_block, empty.at[slot], accumulate=i > 0, **extra)

            lax.fori_loop(0, steps(a), step, None)
            plgpu.tcgen05_commit_arrive(ready.at[own], **pair)

        each_tile(a, b, work)

    def carry_out(a: Any, b: Any, o: Any, acc: Any, o_tile: Any, ready: Any, drained: Any) -> None:
        """The epilogue: 64 columns at a time, by TMA from two buffers in turn."""
        own_row = lax.axis_index("pair") * ROWS if c.pair else 0
        pieces = range(0, c.tile_n, EPILOGUE_COLUMNS)

        def work(count: Any, row: Any, column: Any) -> None:
            own = plgpu.rem(count, number)
            plgpu.barrier_wait(ready.at[own])
            for piece, start in enumerate(pieces):
                part = plgpu.async_load_tmem(acc.at[own, :, plgpu.ds(start, EPILOGUE_COLUMNS)])
                plgpu.wait_load_tmem()
                if start == pieces[-1]:
                    plgpu.barrier_arrive(drained.at[own])
                buffer = o_tile.at[plgpu.rem(count * len(pieces) + piece, 2)]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before the last has left this buffer
                buffer[...] = part.astype(out_type)
                plgpu.commit_smem()
                place = o.at[plgpu.ds(row + own_row, ROWS), plgpu.ds(column + start, EPILOGUE_COLUMNS)]
                plgpu.copy_smem_to_gmem(buffer, place)

        each_tile(a, b, work)
        plgpu.wait_smem_to_gmem(0)

    def body(a: Any, b: Any, *rest: Any) -> None:
        scales, rest = (rest[:2], rest[2:]) if scaled else ((), rest)
        o, a_tile, b_tile, o_tile, acc, full, empty, ready, drained, *factors = rest
        bars = full, empty, ready, drained
        scale_tiles, in_tmem = factors[:2], factors[2:]
        wg = lax.axis_index("wg")

        @plgpu.when(wg == ISSUE_WARPGROUP)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Any) -> None:
                plgpu.when(warp == TMA_WARP)(lambda: copy(a, b, scales, a_tile, b_tile, scale_tiles, full, empty))

                @plgpu.when(warp == MMA_WARP)
                def _() -> None:
                    issue = functools.partial(multiply, a, b, acc, a_tile, b_tile, (scale_tiles, in_tmem), bars)
                    if c.pair:  # the first block issues for both
                        plgpu.when(lax.axis_index("pair") == 0)(issue)
                    else:
                        issue()

        @plgpu.when(wg == EPILOGUE_WARPGROUP)
        def _() -> None:
            carry_out(a, b, o, acc, o_tile, ready, drained)

    drained: Any = plgpu.Barrier(num_barriers=number, orders_tensor_core=True)
    if c.pair:  # both epilogues tell the block that issues
        drained = plgpu.ClusterBarrier(collective_axes="pair", num_barriers=number, orders_tensor_core=True)
    slots = c.num_slots
    b_tile = (tile_k, c.columns)
    factors: list[Any] = []
    if scaled:
        b_tile = (c.columns, tile_k)
        rows = (ROWS, c.tile_n)
        layout = plgpu.TMEMLayout.SCALES_LAYOUT
        factors = [plgpu.SMEM((slots, r // ROWS, per_row // 4, 32, 16), scaled[0]) for r in rows]
        factors += [plgpu.TMEM((slots, r, per_row), scaled[0], layout=layout, collective=c.pair) for r in rows]
    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((m, n), out_type),
        scratch_types=[
            plgpu.SMEM((slots, ROWS, tile_k), a_type, transforms=tile(ROWS, chunk)),
            plgpu.SMEM((slots, *b_tile), b_type, transforms=tile(b_tile[0], chunk)),
            plgpu.SMEM((2, ROWS, EPILOGUE_COLUMNS), out_type, transforms=tile(ROWS, EPILOGUE_COLUMNS)),
            plgpu.TMEM((number, ROWS, c.tile_n), jnp.float32, collective=c.pair),
            plgpu.Barrier(num_arrivals=4 if scaled else 2, num_barriers=slots),
            plgpu.Barrier(num_barriers=slots, orders_tensor_core=scaled is not None),
            plgpu.Barrier(num_barriers=number, orders_tensor_core=True),
            drained,
            *factors,
        ],
        grid=(walkers,),
        grid_names=("walker",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(arch=arch, strict=True),
        name="matmul_sm100",
        **(dict(cluster=(2,), cluster_names=("pair",)) if c.pair else {}),
    )
