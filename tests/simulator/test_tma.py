"""The TMA engine against plain slices: tiles, swizzles, chunks, clipping, stores."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_gpu.errors import IllegalInstruction, UninitializedRead
from mosaic_gpu.layouts.shared import SharedLayout, itemsize
from mosaic_gpu.memory import GMEM_SPACE, MemorySpace
from mosaic_gpu.ops.elementwise import numpy_dtype
from mosaic_gpu.plan.model import SharedBuffer, TensorMapPlan
from mosaic_gpu.plan.tma import TmaCopy, plan_copy
from mosaic_gpu.program import Affine, DimIndex, Program, Value, View
from mosaic_gpu.simulator import memory, tma
from mosaic_gpu.simulator.barriers import Arrival, MBarrier
from mosaic_gpu.simulator.scheduler import Scheduler


@dataclasses.dataclass
class Context:
    """As much of the planner as `plan_copy` asks for."""

    buffers: dict[int, SharedBuffer]
    program: Program = dataclasses.field(default_factory=lambda: Program("k", (), 0, (), ()))
    maps: list[TensorMapPlan] = dataclasses.field(default_factory=list)

    def input_index(self, ref: Value, line: Any) -> int:
        return 0

    def tensor_map(self, m: TensorMapPlan) -> int:
        self.maps.append(m)
        return len(self.maps) - 1


def part(ref: Value, starts: tuple[int, ...], sizes: tuple[int | None, ...]) -> View:
    kept = sum(n is not None for n in sizes)
    return View(ref, tuple(DimIndex(Affine(a), n) for a, n in zip(starts, sizes, strict=True)), tuple(range(kept)))


def boxes(copy: TmaCopy, offset: int) -> list[tuple[tuple[int, ...], int]]:
    return [(tuple(c.start.const // c.step for c in i.coordinates), offset + i.shared.const) for i in copy.issues]


def everything(layout: SharedLayout) -> tuple[str, Callable[[], memory.Array]]:
    """A store's source that is a whole buffer at address 0."""
    return "all of s", lambda: layout.byte_offsets() // layout.itemsize


def run_engine(engine: tma.TmaEngine) -> None:
    scheduler = Scheduler(lambda stuck: AssertionError(stuck))
    scheduler.add(engine.run(), background=True)
    scheduler.run()


def make(
    dtype: str, shape: tuple[int, ...], layout: SharedLayout, starts: tuple[int, ...], sizes: tuple[int | None, ...]
):
    gmem, smem = Value(1, shape, dtype, GMEM_SPACE), Value(2, layout.shape, dtype, MemorySpace("smem"))
    context = Context({2: SharedBuffer(smem, layout, 0)})
    copy = plan_copy(context, part(gmem, starts, sizes), View.whole(smem), None)
    return context.maps[copy.map], copy


def random_array(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 100, shape).astype(numpy_dtype(dtype))


def clipped(x: np.ndarray, starts: tuple[int, ...], sizes: tuple[int | None, ...]) -> np.ndarray:
    """x[starts : starts + sizes] with zeros where x ends."""
    padded = np.zeros([s + (n or 1) for s, n in zip(starts, sizes, strict=True)], x.dtype)
    inside = tuple(slice(0, min(a, b)) for a, b in zip(padded.shape, x.shape, strict=True))
    padded[inside] = x[inside]
    return padded[tuple(s if n is None else slice(s, s + n) for s, n in zip(starts, sizes, strict=True))]


def read_layout(shared: memory.SharedMemory, layout: SharedLayout, offset: int) -> np.ndarray:
    index = (layout.byte_offsets() + offset) // layout.itemsize
    return memory.from_raw(shared.read(index, layout.itemsize, lambda: "test"), layout.dtype)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(("float32", "float16", "bfloat16", "float8_e4m3fn", "int32", "uint8")),
    swizzle=st.sampled_from((32, 64, 128)),
    high_tiles=st.booleans(),
    row_tiles=st.integers(1, 4),
    column_tiles=st.integers(1, 3),
    over=st.sampled_from((0, 5, 11)),
    data=st.data(),
)
def test_load_tiled(dtype, swizzle, high_tiles, row_tiles, column_tiles, over, data):
    """A tile that may stick out at the end of the rows lands where the layout says."""
    chunk = swizzle // itemsize(dtype)
    rows, columns = 16 * row_tiles, chunk * column_tiles
    layout = SharedLayout((rows, columns), dtype, (rows if high_tiles else 8, chunk), swizzle)
    shape = (3, rows * 2 - over, 4 * chunk)
    starts = (
        data.draw(st.integers(0, 2)),
        data.draw(st.sampled_from((0, 8, rows))),
        chunk * data.draw(st.integers(0, 4 - column_tiles)),
    )
    sizes = (None, rows, columns)
    m, copy = make(dtype, shape, layout, starts, sizes)
    x = random_array(dtype, shape)
    offset = 4096
    shared = memory.SharedMemory(offset + layout.nbytes, poison=True)
    engine = tma.TmaEngine([memory.GlobalArray.of_input("x", x)], shared)
    barrier = MBarrier("b[0]", 1)
    barrier.expect_tx(copy.nbytes)
    barrier.arrive(Arrival("test", None, 1))
    for coordinates, address in boxes(copy, offset):
        engine.queue.append(tma.Load(m, coordinates, address, ((shared, barrier),), None))
    run_engine(engine)
    assert barrier.phase == 1 and barrier.tx == 0
    np.testing.assert_array_equal(read_layout(shared, layout, offset), clipped(x, starts, sizes))


def test_load_plain_rows():
    layout = SharedLayout((24, 48), "float32")
    m, copy = make("float32", (40, 48), layout, (32, 0), (24, 48))
    x = random_array("float32", (40, 48))
    shared = memory.SharedMemory(layout.nbytes, poison=True)
    engine = tma.TmaEngine([memory.GlobalArray.of_input("x", x)], shared)
    barrier = MBarrier("b[0]", 1)
    for coordinates, address in boxes(copy, 0):
        engine.queue.append(tma.Load(m, coordinates, address, ((shared, barrier),), None))
    run_engine(engine)
    assert barrier.tx == -copy.nbytes
    np.testing.assert_array_equal(read_layout(shared, layout, 0), clipped(x, (32, 0), (24, 48)))


@pytest.mark.parametrize("tile_rows", [8, 64])
@pytest.mark.parametrize("start", [0, 40])
def test_store_clips(tile_rows, start):
    layout = SharedLayout((64, 128), "bfloat16", (tile_rows, 64), 128)
    m, copy = make("bfloat16", (80, 256), layout, (start, 128), (64, 128))
    shared = memory.SharedMemory(layout.nbytes, poison=True)
    data = random_array("bfloat16", (64, 128))
    shared.write(layout.byte_offsets() // 2, 2, memory.to_raw(data, "bfloat16", data.shape))
    out = memory.GlobalArray.of_output("out", (80, 256), "bfloat16", poison=True)
    engine = tma.TmaEngine([out], shared)
    stores = [tma.Store(m, coordinates, address, None, everything(layout)) for coordinates, address in boxes(copy, 0)]
    engine.queue.extend(stores)
    run_engine(engine)
    assert all(s.read and s.done for s in stores)
    end = min(80, start + 64)
    np.testing.assert_array_equal(out.data[start:end, 128:], data[: end - start])
    assert out.written is not None
    assert out.written.sum() == (end - start) * 128
    assert np.isnan(out.data[:, :128].astype(np.float32)).all()


def test_store_of_unwritten_memory():
    layout = SharedLayout((64, 64), "bfloat16", (8, 64), 128)
    m, copy = make("bfloat16", (64, 64), layout, (0, 0), (64, 64))
    engine = tma.TmaEngine(
        [memory.GlobalArray.of_output("out", (64, 64), "bfloat16", True)], memory.SharedMemory(layout.nbytes, True)
    )
    engine.queue.extend(tma.Store(m, c, a, None, everything(layout)) for c, a in boxes(copy, 0))
    with pytest.raises(UninitializedRead, match="all of s: reads shared memory .* 4096 of 4096 elements"):
        run_engine(engine)


def test_addresses_must_be_aligned():
    with pytest.raises(IllegalInstruction, match="128"):
        tma.chunk_index(64, 128, 0)


def test_swizzle_acts_on_absolute_addresses():
    """The same box half a pattern further on is XORed with other rows."""
    here, there = tma.chunk_index(0, 1024, 128), tma.chunk_index(512, 1024, 128)
    assert not np.array_equal(here + 32, there)
    assert sorted(there) == list(range(32, 96))


@pytest.mark.parametrize(
    "store, row, column, wrong",
    [
        (False, -1, 0, ""),
        (False, 7, -4, ""),
        (False, 0, 2, "8 bytes past one.*start it at a multiple of 4"),
        (False, 0, -2, "8 bytes past one"),
        (True, 7, 4, ""),
        (True, 0, 5, "20 bytes past one"),
        (True, -1, 0, r"in front of an array, from \(-1, 0\)"),
        (True, 0, -4, r"in front of an array, from \(0, -4\)"),
    ],
)
def test_coordinates_that_end_a_kernel(store, row, column, wrong):
    """What an H200 did with boxes of 2 x 4 int32 of a (7, 8) array: each of these was launched."""
    layout = SharedLayout((2, 4), "int32")
    m, copy = make("int32", (7, 8), layout, (0, 0), (2, 4))
    shared = memory.SharedMemory(128, poison=False)
    shared.write(layout.byte_offsets() // 4, 4, memory.to_raw(random_array("int32", (2, 4)), "int32", (2, 4)))
    array = memory.GlobalArray.of_input("x", random_array("int32", (7, 8)))
    engine = tma.TmaEngine([array], shared)
    ((_, address),) = boxes(copy, 0)
    if store:
        engine.queue.append(tma.Store(m, (column, row), address, None, everything(layout)))
    else:
        engine.queue.append(tma.Load(m, (column, row), address, ((shared, MBarrier("b[0]", 1)),), None))
    with pytest.raises(IllegalInstruction, match=wrong) if wrong else contextlib.nullcontext():
        run_engine(engine)
