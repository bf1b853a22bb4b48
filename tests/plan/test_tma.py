"""TMA planning: boxes, chunks and coordinates, checked by carrying the copies out on bytes."""

from __future__ import annotations

import types

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mosaic_gpu.errors import IllegalInstruction, UnsupportedCall
from mosaic_gpu.layouts.shared import SharedLayout, itemsize
from mosaic_gpu.memory import MemorySpace
from mosaic_gpu.plan.model import MapDim, SharedBuffer, TensorMapPlan
from mosaic_gpu.plan.tma import TmaCopy, plan_copy, tensor_map_arguments
from mosaic_gpu.program import Affine, DimIndex, Value, View
from mosaic_gpu.simulator.memory import GlobalArray
from mosaic_gpu.simulator.tma import box_bytes, chunk_index, read_box

INDEX = Value(99, (), "int32")


class Context:
    """What plan_copy asks of a plan: one SMEM buffer, one GMEM array, a cluster."""

    def __init__(self, layout: SharedLayout, cluster: tuple[int, ...] = ()) -> None:
        self.smem = Value(1, layout.shape, layout.dtype, MemorySpace("smem"))
        self.buffers = {1: SharedBuffer(self.smem, layout, 0)}
        self.maps: list[TensorMapPlan] = []
        names = tuple("abc"[: len(cluster)])
        self.program = types.SimpleNamespace(cluster=cluster, cluster_names=names)

    def tensor_map(self, plan: TensorMapPlan) -> int:
        self.maps.append(plan)
        return len(self.maps) - 1

    def input_index(self, ref: Value, line: object) -> int:
        return 0

    def pointer(self, ref: Value, line: object) -> int:
        return 0


def whole(n: int) -> DimIndex:
    return DimIndex(Affine(0), n)


def at(start: int, size: int | None = None) -> DimIndex:
    return DimIndex(Affine(start), size)


def view(ref: Value, *dims: DimIndex) -> View:
    dims = dims or tuple(map(whole, ref.shape))
    return View(ref, dims, tuple(range(sum(d.size is not None for d in dims))))


def gmem(shape: tuple[int, ...], dtype: str) -> Value:
    return Value(2, shape, dtype, MemorySpace("gmem"))


def plan(
    layout: SharedLayout, source: View, target: tuple[DimIndex, ...] = (), multicast=(), cluster=()
) -> tuple[TmaCopy, TensorMapPlan]:
    ctx = Context(layout, cluster)
    copy = plan_copy(ctx, source, view(ctx.smem, *target), None, multicast, adds=not multicast)
    return copy, ctx.maps[copy.map]


def check(
    layout: SharedLayout, source: View, target: tuple[DimIndex, ...] = (), value: int = 0, **options
) -> tuple[TmaCopy, TensorMapPlan]:
    """Carry out all instructions of a copy and compare every element of the SMEM view with the array's."""
    copy, tensor_map = plan(layout, source, target, **options)
    dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[itemsize(layout.dtype)]
    data = (np.arange(np.prod(source.ref.shape)) % 251 + 1).astype(dtype).reshape(source.ref.shape)
    array = GlobalArray("x", data, None)
    memory = np.zeros((layout.nbytes + 4096) // 16 * 16, np.uint8)
    moved = 0

    def number(a: Affine) -> int:
        return a.const + sum(f * value for _, f in a.terms)

    for issue in copy.issues:
        coordinates = tuple(number(c.start) // c.step for c in issue.coordinates)
        assert len(coordinates) == len(tensor_map.dims) == len(tensor_map.box) <= 5
        assert all(1 <= n <= 256 for n in tensor_map.box)
        box = read_box(array, tensor_map, coordinates)
        chunks = chunk_index(number(issue.shared), box.nbytes, tensor_map.swizzle)
        memory.reshape(-1, 16)[chunks] = box.reshape(-1).view(np.uint8).reshape(-1, 16)
        moved += box_bytes(tensor_map)
    index = tuple(
        number(d.start) if d.size is None else slice(number(d.start), number(d.start) + d.size)
        for d in (target or map(whole, layout.shape))
    )
    offsets = layout.byte_offsets()[index]
    found = memory.view(dtype)[offsets // itemsize(layout.dtype)]
    starts = [number(d.start) for d in source.dims]
    padded = np.pad(
        data, [(0, max(0, s + (d.size or 1) - n)) for s, d, n in zip(starts, source.dims, data.shape, strict=True)]
    )
    expected = padded[
        tuple(s if d.size is None else slice(s, s + d.size) for s, d in zip(starts, source.dims, strict=True))
    ]
    np.testing.assert_array_equal(found, expected)
    assert copy.nbytes == moved == expected.nbytes
    run = copy.run
    inside = all(0 <= s and s + (d.size or 1) <= n for s, d, n in zip(starts, source.dims, data.shape, strict=True))
    if run is not None and inside:  # the same bytes, from the one place to the other
        assert run.sizes == tuple(d.size or 1 for d in source.dims)
        first = np.ravel_multi_index([number(a) for a in run.starts], data.shape)
        place = number(copy.issues[0].shared)
        taken = data.reshape(-1)[first : first + expected.size].view(np.uint8)
        np.testing.assert_array_equal(memory[place : place + moved], taken)
    return copy, tensor_map


# ---- runs of memory ---------------------------------------------------------------------------------------------------------
ROWS = SharedLayout((64, 128), "float32")
RUNS = {
    "whole rows": (ROWS, (200, 128), (at(100, 64), whole(128)), ()),
    "past the end": (ROWS, (200, 128), (at(150, 64), whole(128)), ()),
    "a piece of one row": (SharedLayout((128,), "float32"), (7, 500), (at(3), at(200, 128)), ()),
    "one plane of many": (ROWS, (9, 64, 128), (at(8), whole(64), whole(128)), ()),
    "two planes, in two instructions": (SharedLayout((2, 512), "float32"), (9, 512), (at(3, 2), whole(512)), ()),
    "into one slot of many": (SharedLayout((3, 64), "float32"), (4, 64), (at(3), whole(64)), (at(2), whole(64))),
}
NO_RUNS = {
    "half of each row": (ROWS, (200, 256), (at(0, 64), at(128, 128)), ()),
    "half of the rows of two planes": (
        SharedLayout((2, 32, 64), "float32"),
        (2, 64, 64),
        (whole(2), at(0, 32), whole(64)),
        (),
    ),
    "a swizzle": (SharedLayout((64, 64), "bfloat16", (64, 64), 128), (64, 64), (whole(64), whole(64)), ()),
    "tiles": (SharedLayout((64, 128), "bfloat16", (64, 64)), (64, 128), (whole(64), whole(128)), ()),
    "into half of each row": (ROWS, (64, 64), (whole(64), whole(64)), (whole(64), at(64, 64))),
}


@pytest.mark.parametrize("name", [*RUNS, *NO_RUNS])
def test_runs(name):
    layout, shape, dims, target = (RUNS | NO_RUNS)[name]
    copy, _ = check(layout, view(gmem(shape, layout.dtype), *dims), target)
    assert (copy.run is not None) == (name in RUNS)


# ---- boxes ------------------------------------------------------------------------------------------------------------------
def test_plain_tile():
    """One instruction, one dimension of the map per axis, innermost first."""
    copy, m = check(SharedLayout((64, 32), "float32"), view(gmem((128, 64), "float32"), at(64, 64), at(32, 32)))
    assert m == TensorMapPlan(0, (MapDim(1), MapDim(0)), (32, 64), 0, "float32")
    assert [c.start.const for c in copy.issues[0].coordinates] == [32, 64] and len(copy.issues) == 1


def test_tiles_of_all_rows_are_one_copy():
    """(rows, 64) tiles: chunk, rows and the row of chunks are three dimensions of one box."""
    copy, m = check(
        SharedLayout((128, 256), "bfloat16", (128, 64), 128),
        view(gmem((256, 512), "bfloat16"), at(128, 128), at(256, 256)),
    )
    assert m.dims == (MapDim(1, 1, 64), MapDim(0), MapDim(1, 64)) and m.box == (64, 128, 4) and m.swizzle == 128
    assert [c.start.const for c in copy.issues[0].coordinates] == [0, 128, 4]


def test_tiles_of_eight_rows():
    """Chunk, 8 rows, chunks, groups of rows: rank 4, if the array's rows are a multiple of 8."""
    copy, m = check(SharedLayout((64, 128), "bfloat16", (8, 64), 128), view(gmem((64, 128), "bfloat16")))
    assert (
        m.box == (64, 8, 2, 8)
        and m.dims == (MapDim(1, 1, 64), MapDim(0, 1, 8), MapDim(1, 64), MapDim(0, 8))
        and len(copy.issues) == 1
    )


def test_tiles_of_eight_rows_of_an_array_of_any_length():
    """A row count that 8 does not divide has no map with groups of 8: one copy for each."""
    copy, m = check(
        SharedLayout((64, 128), "bfloat16", (8, 64), 128), view(gmem((100, 128), "bfloat16"), at(32, 64), whole(128))
    )
    assert m.dims == (MapDim(1, 1, 64), MapDim(0), MapDim(1, 64)) and len(copy.issues) == 8


def test_a_tail_is_filled_with_zeros():
    check(SharedLayout((64, 64), "bfloat16", (64, 64), 128), view(gmem((100, 64), "bfloat16"), at(64, 64), whole(64)))
    check(SharedLayout((64, 64), "float32"), view(gmem((100, 100), "float32"), at(64, 64), at(64, 64)))
    check(
        SharedLayout((64, 128), "bfloat16", (64, 64), 128), view(gmem((64, 192), "bfloat16"), whole(64), at(128, 128))
    )


def test_more_than_256():
    """A box has at most 256 elements along a dimension; what is longer is cut."""
    copy, m = check(SharedLayout((512, 16), "float32"), view(gmem((512, 16), "float32")))
    assert m.box == (16, 256) and len(copy.issues) == 2
    copy, m = check(SharedLayout((2, 512), "float32"), view(gmem((2, 512), "float32")))
    assert m.box[0] == 256 and len(copy.issues) == 4


def test_many_groups_of_eight_rows():
    """More than 256 groups: the second copy starts at the right group of the map's own dimension."""
    check(SharedLayout((2400, 16), "bfloat16", (8, 16), 32), view(gmem((2400, 16), "bfloat16")))


def test_squeezed_dimensions_on_both_sides():
    source = view(gmem((3, 128, 5, 64), "bfloat16"), at(2), at(64, 64), at(3), whole(64))
    copy, m = check(SharedLayout((2, 64, 64), "bfloat16", (64, 64), 128), source, (at(1), whole(64), whole(64)))
    assert m.dims == (MapDim(3), MapDim(1), MapDim(2), MapDim(0)) and m.box == (64, 64, 1, 1)
    assert copy.issues[0].shared == Affine(64 * 128)


def test_run_time_starts():
    """i * 64 rows, chunk i * 2: coordinates stay affine, in units of the map's dimension."""
    rows, columns = DimIndex(Affine(0, ((INDEX, 64),)), 64), DimIndex(Affine(0, ((INDEX, 128),)), 128)
    copy, _ = check(
        SharedLayout((64, 128), "bfloat16", (64, 64), 128), view(gmem((256, 512), "bfloat16"), rows, columns), value=3
    )
    assert [c.start for c in copy.issues[0].coordinates] == [
        Affine(0),
        Affine(0, ((INDEX, 64),)),
        Affine(0, ((INDEX, 2),)),
    ]


def test_part_of_a_buffer():
    layout = SharedLayout((128, 128), "bfloat16", (8, 64), 128)
    for rows, columns in (((0, 64), (64, 64)), ((64, 64), (0, 128)), ((8, 16), (64, 64))):
        source = view(gmem((128, 128), "bfloat16"), at(*rows), at(*columns))
        check(layout, source, (at(*rows), at(*columns)))


SHAPES = st.sampled_from([(32, 32), (64, 16), (16, 64), (8, 128), (40, 48)])


@settings(deadline=None, max_examples=150)
@given(
    box=SHAPES,
    lead=st.sampled_from([(), (2,)]),
    tile_rows=st.sampled_from([0, 1, 4, 8, 16]),
    swizzle=st.sampled_from([0, 32, 64, 128]),
    extra=st.tuples(st.integers(0, 40), st.integers(0, 3)),
    start=st.tuples(st.integers(0, 3), st.integers(0, 2)),
    dtype=st.sampled_from(["uint8", "bfloat16", "float32"]),
    parts=st.sampled_from([1, 2, 4]),
)
def test_any_copy_that_is_planned_is_right(box, lead, tile_rows, swizzle, extra, start, dtype, parts):
    """Property: carried out, the instructions put every element where the buffer has it, multicast shares included."""
    size = itemsize(dtype)
    chunk = (swizzle or 32) // size
    tile = (tile_rows, chunk) if tile_rows else ()
    assume(not tile or (box[0] % tile_rows == 0 and box[1] % chunk == 0))
    assume(tile or not swizzle or box[1] * size == swizzle)
    layout = SharedLayout((*lead, *box), dtype, tile, swizzle)
    row, column = start[0] * (tile_rows or 1), start[1] * chunk
    shape = (*lead, max(row + 1, box[0] + extra[0]), -(-(column + box[1] + extra[1] * 16) // 16) * 16)
    source = view(gmem(shape, dtype), *map(whole, lead), at(row, box[0]), at(column, box[1]))
    cluster = (parts,) if parts > 1 else ()
    try:
        copy, _ = plan(layout, source, (), ("a",) if parts > 1 else (), cluster)
    except (IllegalInstruction, UnsupportedCall):
        return
    assert len(copy.issues) % copy.parts == 0 and copy.parts == parts
    check(layout, source, (), multicast=("a",) if parts > 1 else (), cluster=cluster)


@pytest.mark.parametrize("tile", [(), (8, 64), (64, 64)])
@pytest.mark.parametrize("blocks", [2, 4])
def test_multicast_shares(tile, blocks):
    """Each block loads one piece of the tile's outermost dimension; together they are the tile."""
    layout = SharedLayout((64, 64 * blocks), "bfloat16", tile, 128 if tile else 0)
    copy, m = check(
        layout,
        view(gmem((128, 64 * blocks), "bfloat16"), at(64, 64), whole(64 * blocks)),
        multicast=("b",),
        cluster=(3, blocks),
    )
    assert copy.parts == blocks and len(copy.issues) % blocks == 0 and copy.multicast == ("b",)
    assert copy.nbytes == 64 * 64 * blocks * 2, "every block's barrier sees the whole tile"


def test_arguments_of_the_map():
    """Extents and byte strides at launch; a fixed extent stays, the others follow the array's shape."""
    m = TensorMapPlan(0, (MapDim(1, 1, 64), MapDim(0), MapDim(1, 64)), (64, 128, 4), 128, "bfloat16")
    assert tensor_map_arguments(m, (300, 200), 2) == ((64, 300, 4), (400, 128))


# ---- refusals ---------------------------------------------------------------------------------------------------------------
X = gmem((128, 128), "bfloat16")
B64 = SharedLayout((64, 64), "bfloat16")


@pytest.mark.parametrize(
    ("layout", "source", "target", "error", "words"),
    [
        (
            B64,
            view(X, at(0, 64), at(0, 32)),
            (),
            IllegalInstruction,
            r"between %2, GMEM bfloat16\[64, 32\], and %1, SMEM bfloat16\[64, 64\].*must match",
        ),
        (
            SharedLayout((64, 64), "float16"),
            view(X, at(0, 64), at(0, 64)),
            (),
            IllegalInstruction,
            "shapes and dtypes must match",
        ),
        (
            SharedLayout((64, 4), "bfloat16"),
            view(X, at(0, 64), at(0, 4)),
            (),
            IllegalInstruction,
            "multiples of 16 bytes; this copy's are 4 x 2 = 8",
        ),
        (B64, view(X, DimIndex(Affine(0), 64, 2), at(0, 64)), (), UnsupportedCall, "strided slice of GMEM"),
        (
            B64,
            view(gmem((64, 100), "bfloat16"), at(0, 64), at(0, 64)),
            (),
            UnsupportedCall,
            "has 200: pad .*multiple of 8",
        ),
        (B64, view(gmem((0, 64), "bfloat16"), at(0, 64), at(0, 64)), (), UnsupportedCall, "no elements"),
        (
            SharedLayout((128, 64), "bfloat16"),
            view(X, at(0, 64), at(0, 64)),
            (DimIndex(Affine(0), 64, 2), whole(64)),
            UnsupportedCall,
            "strided slice of shared",
        ),
        (
            SharedLayout((64,), "bfloat16"),
            view(X, at(0, 64), at(0)),
            (),
            IllegalInstruction,
            "innermost dimension of the copy must be the array's last one",
        ),
        (
            SharedLayout((64, 64), "bfloat16", (64, 64), 128),
            view(X, at(0, 64), at(0, 32)),
            (whole(64), at(0, 32)),
            IllegalInstruction,
            "128-byte swizzle needs rows of 128 bytes; this copy's have 64",
        ),
        (
            SharedLayout((64, 128), "bfloat16", (64, 64), 128),
            view(X, at(0, 64), DimIndex(Affine(0, ((INDEX, 32),)), 128)),
            (),
            IllegalInstruction,
            "stored in chunks of 64: its start along axis 1.*must be written as a multiple of 64",
        ),
        (
            SharedLayout((64, 64), "bfloat16", (8, 64), 128),
            view(X, at(0, 12), at(0, 64)),
            (at(0, 12), whole(64)),
            IllegalInstruction,
            "not made of whole tiles of 8$",
        ),
        (
            SharedLayout((64, 64), "bfloat16", (8, 64), 128),
            view(X, at(0, 16), at(0, 64)),
            (DimIndex(Affine(0, ((INDEX, 4),)), 16), whole(64)),
            IllegalInstruction,
            r"not made of whole tiles of 8; where the start always is a multiple, write plgpu.multiple_of\(start, 8\)$",
        ),
    ],
)
def test_refused(layout, source, target, error, words):
    with pytest.raises(error, match=words):
        plan(layout, source, target)


@pytest.mark.parametrize(
    ("layout", "source", "target"),
    [
        (SharedLayout((2, 300), "float32"), view(gmem((2, 300), "float32")), ()),
        (SharedLayout((4, 48), "bfloat16"), view(X, at(1, 1), at(0, 48)), (at(1, 1), whole(48))),
        (
            SharedLayout((4, 48), "bfloat16"),
            view(X, at(1, 1), at(0, 48)),
            (DimIndex(Affine(0, ((INDEX, 1),)), 1), whole(48)),
        ),
        (SharedLayout((64, 64), "bfloat16"), view(X, at(0, 64), at(0, 32)), (whole(64), at(32, 32))),
    ],
)
def test_places_in_shared_memory_that_tma_cannot_address(layout, source, target):
    """Every instruction's address is a multiple of 128 bytes; a row that is not is refused, not left to the GPU."""
    with pytest.raises(IllegalInstruction, match="multiples of 128 bytes.*pad its rows"):
        plan(layout, source, target)


def test_transposed_copies_are_refused():
    t = View(X, (at(0, 64), at(0, 64)), (1, 0))
    with pytest.raises(IllegalInstruction, match="TMA does not transpose; transpose the operand of the MMA"):
        plan(B64, t)


def test_rank_above_five_is_refused():
    source = view(gmem((2, 2, 2, 2, 64, 64), "bfloat16"), at(0), at(1), at(0), at(1), whole(64), whole(64))
    with pytest.raises(UnsupportedCall, match="tensor map of rank 6, TMA has 5: reshape the array.*merged"):
        plan(B64, source)


def test_a_multicast_that_cannot_be_shared_out():
    with pytest.raises(IllegalInstruction, match="multicast over 3 blocks"):
        plan(B64, view(X, at(0, 64), at(0, 64)), multicast=("a",), cluster=(3,))


def test_equal_maps_are_made_once(array):
    """Copies through the same box of the same array share a descriptor."""
    import jax.numpy as jnp

    import mosaic_gpu as plgpu
    from mosaic_gpu.plan.build import build_plan

    def body(x, y, s, b):
        for i in range(2):
            plgpu.copy_gmem_to_smem(x.at[plgpu.ds(i * 64, 64)], s.at[i], b.at[i])
        plgpu.copy_smem_to_gmem(s.at[0], y.at[plgpu.ds(0, 64)])

    scratch = [plgpu.SMEM((2, 64, 64), jnp.float32), plgpu.Barrier(num_barriers=2)]
    k = plgpu.kernel(body, array(128, 64), scratch_types=scratch)
    p = build_plan(k.program(array(128, 64)), "sm_90a")
    assert [m.input for m in p.maps] == [0, 1]
