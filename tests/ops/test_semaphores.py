"""Semaphores: values, blocks that wait for each other, what a wait orders and what not, sabotages, machine code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import Deadlock, OutOfBounds, Race, UnsupportedCall
from mosaic_gpu.simulator import SimulatorParams, simulate
from tests.support import out
from tests.support import randoms as numbers

F = np.float32
STRIDED = plgpu.Layout.WG_STRIDED
SEMAPHORE = plgpu.SemaphoreType.REGULAR
WAYS = [dict(), dict(timing="early"), dict(shadow="bytes"), *(dict(seed=s) for s in range(1, 7))]


def found(plan, arrays, kind):
    """The error, which every order of events gives."""
    errors = []
    for way in WAYS:
        with pytest.raises(kind) as e:
            simulate(plan, arrays, SimulatorParams(**way))
        errors.append(e.value)
    return errors[0]


def split_k(defect=""):
    """Every block of a grid adds up a part; the first one waits for the others and adds up their sums."""

    def body(x, start, parts, o, done):
        b, n = lax.axis_index("b"), 4
        total = plgpu.load(x.at[b, 0], layout=STRIDED)
        for i in range(1, 3):
            total = total + plgpu.load(x.at[b, i], layout=STRIDED)
        if defect == "signals first":
            plgpu.semaphore_signal(done)
        parts[b] = total  # write
        if defect not in ("signals first", "no signal"):
            plgpu.semaphore_signal(done, memory_scope="gpu")

        @plgpu.when(b == 0)
        def _():
            if defect not in ("no wait", "no signal"):
                plgpu.semaphore_wait(done, n - 1 if defect == "one too few" else n, memory_scope="gpu")
            total = plgpu.load(parts.at[0], layout=STRIDED)
            for i in range(1, n):
                total = total + plgpu.load(parts.at[i], layout=STRIDED)  # read
            o[...] = total

    # What `parts` is before it is written is no matter of luck, so that a race is one in every order.
    return body, dict(
        grid=(4,),
        grid_names=("b",),
        scratch_types=[SEMAPHORE],
        out=[out(4, 256), out(256)],
        input_output_aliases={1: 0},
    )


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_split_k(plan, way):
    body, options = split_k()
    x = numbers(4, 3, 256)
    _, got = simulate(plan(body, x, x[:, 0], **options), [x, x[:, 0]], SimulatorParams(**way))
    np.testing.assert_allclose(got, x.sum((0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("defect", ["no wait", "no signal", "signals first", "one too few"])
def test_split_k_sabotaged(plan, defect, line_of):
    """A wait or a signal is missing, the signal comes before the write, the wait is for fewer than all: found in every order."""
    body, options = split_k(defect)
    x = numbers(4, 3, 256)
    error = found(plan(body, x, x[:, 0], **options), [x, x[:, 0]], Race)
    lines = {error.line.number, error.other_line.number}
    assert error.between == "grid" and line_of(body, "write") in lines and line_of(body, "read") in lines
    assert "semaphore" in error.remedy


def ring(*, free=True, decrement=True, wait=True):
    """Block 0 makes tiles for block 1 in two slots, which block 1 hands back."""

    def body(x, start, slots, o, ready, empty):
        b = lax.axis_index("b")

        @plgpu.when(b == 0)
        def _():
            def step(i, _):
                slot = lax.rem(i, 2)
                if free:
                    plgpu.when(i >= 2)(lambda: plgpu.semaphore_wait(empty))
                slots[slot] = plgpu.load(x.at[i], layout=STRIDED) * 2  # fill
                plgpu.semaphore_signal(ready)

            lax.fori_loop(0, 5, step, None)

        @plgpu.when(b == 1)
        def _():
            def step(i, _):
                slot = lax.rem(i, 2)
                if wait:
                    plgpu.semaphore_wait(ready, 1 if decrement else i + 1, decrement=decrement)
                o[i] = plgpu.load(slots.at[slot], layout=STRIDED) + 1  # use
                plgpu.semaphore_signal(empty)

            lax.fori_loop(0, 5, step, None)

    return body, dict(
        grid=(2,),
        grid_names=("b",),
        scratch_types=[SEMAPHORE, SEMAPHORE],
        out=[out(2, 128), out(5, 128)],
        input_output_aliases={1: 0},
    )


@pytest.mark.parametrize("decrement", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ring(plan, way, decrement):
    """A producer that is ahead: the wait of a round is for this round's signal, whether earlier ones are taken off or not."""
    body, options = ring(decrement=decrement)
    x = numbers(5, 128)
    got = simulate(plan(body, x, x[:2], **options), [x, x[:2]], SimulatorParams(**way))[1]
    np.testing.assert_array_equal(got, 2 * x + 1)


@pytest.mark.parametrize("defect", ["free", "wait"])
def test_ring_sabotaged(plan, defect, line_of):
    """A slot is filled before it is free, or used before it is full."""
    body, options = ring(**{defect: False})
    x = numbers(5, 128)
    error = found(plan(body, x, x[:2], **options), [x, x[:2]], Race)
    assert {error.line.number, error.other_line.number} == {line_of(body, "fill"), line_of(body, "use")}


def test_a_wait_for_any_orders_none(plan, line_of):
    """Two blocks signal, the third waits for one signal and reads what both have written: the other may not have come."""

    def body(start, parts, o, done):
        b = lax.axis_index("b")

        @plgpu.when(b > 0)
        def _():
            parts[b] = jnp.full((128,), 1.0, F)  # write
            plgpu.semaphore_signal(done)

        @plgpu.when(b == 0)
        def _():
            plgpu.semaphore_wait(done, 1)
            o[...] = plgpu.load(parts.at[1], layout=STRIDED) + plgpu.load(parts.at[2], layout=STRIDED)  # read

    options = dict(
        grid=(3,),
        grid_names=("b",),
        scratch_types=[SEMAPHORE],
        out=[out(3, 128), out(128)],
        input_output_aliases={0: 0},
    )
    start = numbers(3, 128)
    error = found(plan(body, start, **options), [start], Race)
    assert {error.line.number, error.other_line.number} == {line_of(body, "write"), line_of(body, "read")}


def test_a_signal_says_what_came_before_it_only(plan):
    """B waits for A and signals, C waits for B: what A wrote before its signal is handed on to C, too."""

    def body(parts, o, first, second):
        b = lax.axis_index("b")

        @plgpu.when(b == 0)
        def _():
            parts[...] = jnp.full((128,), 3.0, F)
            plgpu.semaphore_signal(first)

        @plgpu.when(b == 1)
        def _():
            plgpu.semaphore_wait(first)
            plgpu.semaphore_signal(second)

        @plgpu.when(b == 2)
        def _():
            plgpu.semaphore_wait(second)
            o[...] = plgpu.load(parts, layout=STRIDED)

    options = dict(grid=(3,), grid_names=("b",), scratch_types=[SEMAPHORE, SEMAPHORE], out=[out(128), out(128)])
    p = plan(body, **options)
    for way in WAYS:
        np.testing.assert_array_equal(simulate(p, [], SimulatorParams(**way))[1], np.full(128, 3, F))


def stored_by_tma(*, wait=True):
    """A tile written by TMA in one block and read by TMA in another."""

    def body(x, t, o, s, full, done):
        b = lax.axis_index("b")

        @plgpu.when(b == 0)
        def _():
            plgpu.copy_gmem_to_smem(x, s, full)
            plgpu.barrier_wait(full)
            plgpu.copy_smem_to_gmem(s, t)  # store
            if wait:
                plgpu.wait_smem_to_gmem(0)
            plgpu.semaphore_signal(done)
            if not wait:
                plgpu.wait_smem_to_gmem(0)

        @plgpu.when(b == 1)
        def _():
            plgpu.semaphore_wait(done)
            plgpu.copy_gmem_to_smem(t, s, full)  # load
            plgpu.barrier_wait(full)
            plgpu.copy_smem_to_gmem(s, o)
            plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((64, 64), F), plgpu.Barrier(), SEMAPHORE]
    return body, dict(grid=(2,), grid_names=("b",), scratch_types=scratch, out=[out(64, 64), out(64, 64)])


def test_tiles_of_tma(plan, line_of):
    x = numbers(64, 64)
    body, options = stored_by_tma()
    for way in WAYS:
        np.testing.assert_array_equal(simulate(plan(body, x, **options), [x], SimulatorParams(**way))[1], x)
    body, options = stored_by_tma(wait=False)  # the store may still be under way
    error = found(plan(body, x, **options), [x], Race)
    assert {error.line.number, error.other_line.number} == {line_of(body, "store"), line_of(body, "load")}


def test_within_a_block(plan):
    """Two warpgroups of one block, and a warp: a semaphore orders them as it orders blocks."""

    def body(t, o, sems):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            t[...] = jnp.full((128,), 2.0, F)
            plgpu.semaphore_signal_parallel(plgpu.SemaphoreSignal(sems.at[0]), plgpu.SemaphoreSignal(sems.at[1], inc=3))

        @plgpu.when(wg == 1)
        def _():
            @plgpu.warp_map
            def _(warp):
                plgpu.when(warp == 0)(lambda: plgpu.semaphore_wait(sems.at[1], 3))

            plgpu.semaphore_wait(sems.at[0])
            o[...] = plgpu.load(t, layout=STRIDED)

    options = dict(
        num_threads=2, thread_name="wg", scratch_types=[plgpu.SemaphoreType.REGULAR((2,))], out=[out(128), out(128)]
    )
    p = plan(body, **options)
    for way in WAYS:
        np.testing.assert_array_equal(simulate(p, [], SimulatorParams(**way))[1], np.full(128, 2, F))


def test_values(plan):
    """Reads of a semaphore, get_global, signals and waits of several, and what is left."""

    def body(o, s):
        g = plgpu.get_global(SEMAPHORE)
        h = plgpu.get_global(plgpu.SemaphoreType.REGULAR((2, 2)))
        plgpu.semaphore_signal(s, 5)
        plgpu.semaphore_signal(g, 7)
        plgpu.semaphore_signal(h.at[1, 0], jnp.int32(2))
        plgpu.semaphore_wait(s, 2)
        plgpu.semaphore_wait(g, 7, decrement=False)
        for i, ref in enumerate((s, g, h.at[1, 0], h.at[0, 1])):
            o[i] = plgpu.semaphore_read(ref)

    p = plan(body, out=out(4, dtype=np.int32), scratch_types=[SEMAPHORE])
    assert simulate(p, [])[0].tolist() == [3, 7, 2, 0]
    signature = next(s for s in emit(p).splitlines() if s.startswith("kernel("))
    assert signature.count("int* p") == 4  # the output and three arrays of semaphores


def polled():
    """A block polls until the other one has signalled."""

    def body(o, s):
        b = lax.axis_index("b")
        plgpu.when(b == 1)(lambda: plgpu.semaphore_signal(s, 4))

        @plgpu.when(b == 0)
        def _():
            seen = lax.while_loop(lambda v: v < 4, lambda v: plgpu.semaphore_read(s), jnp.int32(0))
            o[...] = jnp.full((128,), seen)

    return body, dict(grid=(2,), grid_names=("b",), scratch_types=[SEMAPHORE], out=out(128, dtype=np.int32))


def test_polling(plan):
    body, options = polled()
    for way in WAYS:
        assert (simulate(plan(body, **options), [], SimulatorParams(**way))[0] == 4).all()


def test_deadlocks(plan, assert_at):
    """Nobody signals; and a block waits for one that has no place until it ends."""

    def body(o, s):
        plgpu.semaphore_wait(s, 2)  # here
        o[...] = jnp.zeros((128,), F)

    error = found(plan(body, out=out(128), scratch_types=[SEMAPHORE]), [], Deadlock)
    assert_at(error, body, "here")
    assert "semaphore s" in str(error) and "is 2; it is 0" in str(error) and "no line of the kernel" in str(error)

    def backwards(o, s):
        b, n = lax.axis_index("b"), plgpu.num_programs(0)
        plgpu.when(b < n - 1)(lambda: plgpu.semaphore_wait(s.at[b + 1]))  # there
        plgpu.semaphore_signal(s.at[b])
        o[b] = jnp.int32(1)

    def of(blocks):
        return plan(
            backwards,
            out=out(blocks, dtype=np.int32),
            grid=(blocks,),
            grid_names=("b",),
            scratch_types=[plgpu.SemaphoreType.REGULAR((blocks,))],
        )

    assert simulate(of(132), [])[0].all()
    with pytest.raises(Deadlock, match=r"1 clusters more have not begun: 132 run at once") as e:
        simulate(of(133), [])
    assert_at(e.value, backwards, "there")


def test_a_ring_of_blocks_is_no_circle_of_two(plan):
    """Which block would signal is in the slot, which the line does not tell: each may be the one, and none is said to be."""

    def body(o, sem):
        g = lax.axis_index("g")
        plgpu.semaphore_wait(sem.at[plgpu.rem(g + 1, 4)])
        plgpu.semaphore_signal(sem.at[g])
        o[g] = jnp.ones((128,), F)

    of = plan(body, out=out(4, 128), grid=(4,), grid_names=("g",), scratch_types=[SEMAPHORE((4,))])
    error = found(of, [], Deadlock)
    assert "stuck, see block (0,), warpgroup0, warpgroup 0 and 3 more" in str(error)
    assert "waits for each other" not in str(error)


def test_out_of_bounds(plan):
    def body(o, s):
        plgpu.semaphore_signal(s.at[lax.axis_index("b") + 1])

    with pytest.raises(OutOfBounds, match="semaphore s"):
        simulate(
            plan(body, out=out(), grid=(2,), grid_names=("b",), scratch_types=[plgpu.SemaphoreType.REGULAR((2,))]), []
        )


def test_through_jax():
    """Called, under jit and vmap: each call, and each element of a batch, has semaphores of its own."""
    body, options = split_k()
    kernel = plgpu.kernel(body, options.pop("out"), interpret=True, **options)
    x = numbers(4, 3, 256)
    want = x.sum((0, 1))
    for _ in range(2):
        np.testing.assert_allclose(kernel(x, x[:, 0])[1], want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(jax.jit(kernel)(x, x[:, 0])[1], want, rtol=1e-5, atol=1e-5)
    many = jax.vmap(kernel, (0, None))(np.stack([x, -2 * x, x]), x[:, 0])[1]
    np.testing.assert_allclose(many, np.stack([want, -2 * want, want]), rtol=1e-5, atol=1e-5)


def test_launch():
    """What the launcher gets: zeros for each semaphore, in whose place the semaphore is."""
    from mosaic_gpu.plan.build import build_plan
    from mosaic_gpu.runtime.execute import launch_spec
    from mosaic_gpu.runtime.launch_spec import BufferPointer

    body, options = split_k()
    kernel = plgpu.kernel(body, options.pop("out"), **options)
    spec = launch_spec(build_plan(kernel.program(out(4, 3, 256), out(4, 256)), "sm_90a"))
    # x, start, the semaphore's zeros, parts, o, the semaphore
    assert sorted(p.buffer for p in spec.parameters if isinstance(p, BufferPointer)) == [0, 3, 4, 5]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("make", [split_k, ring, stored_by_tma, polled], ids=lambda f: f.__name__)
def test_machine_code(plan, compiled, arch, make):
    body, options = make()
    arrays = {
        "split_k": [numbers(4, 3, 256), numbers(4, 256)],
        "ring": [numbers(5, 128), numbers(2, 128)],
        "stored_by_tma": [numbers(64, 64)],
        "polled": [],
    }
    p = plan(body, *arrays[make.__name__], arch=arch, **options)
    report = compiled(p)
    assert report.complaints() == []
    names = report.mnemonics
    assert names.get("MEMBAR", 0) >= 1, (
        names
    )  # the release; an acquire that ptxas knows to be covered has none of its own
    assert sum(n for name, n in names.items() if name in ("RED", "REDG", "ATOMG")) >= 1, names


def test_scopes(plan):
    """The fences are for the GPU or the system, as asked for."""

    def body(o, s):
        plgpu.semaphore_signal(s, memory_scope="gpu")
        plgpu.semaphore_wait(s, memory_scope="sys")
        o[...] = jnp.zeros((128,), F)

    text = emit(plan(body, out=out(128), scratch_types=[SEMAPHORE]))
    kernel = text[text.index("/mosaic_gpu/kernel.cu") :]
    assert kernel.count("semaphore_fence();") == 1 and kernel.count("semaphore_fence_sys();") == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: plgpu.semaphore_signal(s, device_id=1), "semaphores of other devices"),
    ],
)
def test_other_devices(plan, call, message):
    def body(o, s):
        call(s)

    with pytest.raises(UnsupportedCall, match=message):
        plan(body, out=out(128), scratch_types=[SEMAPHORE])


def test_arguments(plan):
    def run(call):
        plan(lambda o, s: (call(s), None)[1], out=out(128), scratch_types=[plgpu.SemaphoreType.REGULAR((2,))])

    with pytest.raises(UnsupportedCall, match=r"select one with semaphore.at\[index\]"):
        run(lambda s: plgpu.semaphore_wait(s))
    with pytest.raises(TypeError, match='memory_scope must be "sys" or "gpu"'):
        run(lambda s: plgpu.semaphore_wait(s.at[0], memory_scope="cta"))
    with pytest.raises(TypeError, match="inc must be an int32 scalar"):
        run(lambda s: plgpu.semaphore_signal(s.at[0], 1.5))
    with pytest.raises(TypeError, match="what must be SemaphoreType"):
        run(lambda s: plgpu.get_global(plgpu.SMEM((4,), F)))
    with pytest.raises(UnsupportedCall, match="semaphore_read"):
        run(lambda s: s.at[0][...])
