"""The emitted C++: frame, parameters, roles, barriers, lines; key lines only, and all of it through NVRTC."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen import sass
from mosaic_gpu.codegen.emitter import Parameter, emit, launch_grid, parameters
from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.codegen.text import literal
from mosaic_gpu.errors import ResourceExceeded, UnsupportedPrimitive
from mosaic_gpu.program import Literal
from tests.codegen.emitted import body_lines, text

F, BF = jnp.float32, jnp.bfloat16
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


# ---- the frame -------------------------------------------------------------------------------------------------------
def test_signature(plan, array):
    """Descriptors, addresses, extents: in that order, only what is used; one block of 128 x warpgroups threads."""

    def body(x, y, o, s, b):
        plgpu.copy_gmem_to_smem(x, s, b)
        o[0, 0] = y[0, 0]

    scratch = [plgpu.SMEM((64, 64), F), plgpu.Barrier()]
    p = plan(
        body,
        array(64, 64),
        array(4, 4, dtype=BF),
        out=array(4, 4, dtype=BF),
        scratch_types=scratch,
        num_threads=3,
        thread_name="wg",
    )
    assert parameters(p) == (
        Parameter("map", 0),
        Parameter("pointer", 1),
        Parameter("pointer", 2),
        Parameter("dim", 1, 0),
        Parameter("dim", 1, 1),
        Parameter("dim", 2, 0),
        Parameter("dim", 2, 1),
    )
    assert (
        "kernel(const __grid_constant__ TensorMap map0, u16* p1, u16* p2, int n1_0, int n1_1, int n2_0, int n2_1) {"
        in text(p)
    )
    assert "__launch_bounds__(384, 1)" in text(p)


def test_the_shape_is_not_in_the_text(plan, array):
    """Extents are parameters: two lengths, one source."""

    def body(x, o):
        rows = plgpu.ds(plgpu.program_id(0) * 64, 64)
        o[rows] = plgpu.load(x.at[rows], layout=plgpu.Layout.WGMMA) * 2.0

    sources = {emit(plan(body, array(n, 16), out=array(n, 16), grid=(plgpu.cdiv(n, 64),))) for n in (64, 1000, 2**20)}
    assert len(sources) == 1


def test_prologue_initialises_barriers(plan, array):
    def body(x, o, a, b):
        plgpu.barrier_arrive(b)
        plgpu.barrier_arrive(b)
        plgpu.barrier_wait(b)
        o[0] = x[0]

    p = plan(body, array(8), out=array(8), scratch_types=[plgpu.Barrier(num_barriers=3), plgpu.Barrier(num_arrivals=2)])
    inits = body_lines(p, "mbarrier_init(smem")
    assert inits == ["mbarrier_init(smem + 0 + 8 * i, 1);", "mbarrier_init(smem + 24 + 8 * i, 2);"]
    body_text = text(p)
    assert (
        body_text.index("mbarrier_init(")
        < body_text.index("fence_mbarrier_init();")
        < body_text.index("__syncthreads();")
    )


def test_roles_are_arms_of_one_if(plan, array, compiled):
    """setmaxnreg is honoured only so; each stands once, in its role."""

    def body(x, o):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 2)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            o[2] = x[2]

        @plgpu.when(wg < 2)
        def _():
            plgpu.set_max_registers(240, action="increase")
            o[...] = x[...] + 1.0

    p = plan(body, array(128), out=array(128), num_threads=3, thread_name="wg")
    heads = [t for t in body_lines(p) if t.startswith(("if (wg", "else"))]
    assert heads == ["if (wg == 0 || wg == 1) {", "else {"]
    report = compiled(p)
    assert sorted((b.kind, b.requested) for b in report.budgets) == [("decrease", 24), ("increase", 240)]
    assert report.complaints() == [] and report.entry_registers == 168


def test_the_budget_is_set_before_a_thread_is_elected(plan, array, compiled):
    """A role of one thread: setmaxnreg is for the whole warpgroup."""

    def body(x, s, b):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            plgpu.copy_gmem_to_smem(x, s, b)

    p = plan(
        body, array(64, 64), scratch_types=[plgpu.SMEM((64, 64), F), plgpu.Barrier()], num_threads=2, thread_name="wg"
    )
    lines = body_lines(p)
    assert (
        lines.index("set_max_registers_decrease<40>();")
        < lines.index("if (tid == 0) {")
        < lines.index("tma_load_2d(smem + 0, &map0, bar, 0, 0);")
    )
    assert len(body_lines(p, "set_max_registers")) == 1


def test_main_loop_stands_once_for_two_warpgroups(plan, array):
    def body(x, o):
        wg = lax.axis_index("wg")

        @plgpu.when(wg < 2)
        def _():
            o[wg] = lax.fori_loop(0, plgpu.dim_size(x, 0), lambda i, c: c + x[i], x[wg])

    p = plan(body, array(8), out=array(2), num_threads=3, thread_name="wg")
    assert len(body_lines(p, "for (int v")) == 1 and body_lines(p, "= wg;")


# ---- grids and clusters ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("grid", "expected"),
    [((), (1, 1, 1)), ((5,), (5, 1, 1)), ((2, 5), (5, 2, 1)), ((3, 2, 5), (5, 2, 3)), ((7, 3, 2, 5), (5, 2, 21))],
)
def test_launch_grid(plan, array, compiled, grid, expected):
    """The last axis is x, the second last y, the rest share z; every axis can be asked for its index and size."""
    names = tuple("abcd"[: len(grid)])

    def body(x, o):
        for i, n in enumerate(names):
            o[i] = lax.axis_index(n) * 1000 + plgpu.num_programs(i)

    p = plan(body, array(8), out=array(8, dtype=jnp.int32), grid=grid, grid_names=names)
    assert launch_grid(p) == expected
    assert [q for q in parameters(p) if q.kind == "grid"] == [
        Parameter("grid", i) for i in range(max(0, len(grid) - 2)) if len(grid) > 3
    ]
    assert compiled(p).complaints() == []


def test_indices_of_a_large_grid(plan, array):
    """Four axes: z holds the first two, divided by the extents that are parameters."""

    def body(x, o):
        o[0] = sum(lax.axis_index(n) for n in "abcd")

    p = plan(body, array(8), out=array(8, dtype=jnp.int32), grid=(7, 3, 2, 5), grid_names=tuple("abcd"))
    source = text(p)
    assert "((int)blockIdx.z / (1 * grid_n1) % grid_n0)" in source and "((int)blockIdx.z / (1) % grid_n1)" in source
    assert "(int)blockIdx.y" in source and "(int)blockIdx.x" in source


def cluster_kernel(x, o, s, full, empty):
    c, d = lax.axis_index("c"), lax.axis_index("d")
    plgpu.copy_gmem_to_smem(x.at[plgpu.ds(plgpu.program_id(0) * 64, 64)], s, full, collective_axes="d")
    plgpu.barrier_wait(full)
    o[c, d] = s[0, 0]
    plgpu.barrier_arrive(empty)
    plgpu.barrier_wait(empty)


def test_a_warpgroup_arrives_in_a_cluster_warp_by_warp(plan, array):
    """Each warp once, a lane of it for each block along the axis."""

    def body(x, o, empty):
        o[...] = x[...] + 1.0
        plgpu.barrier_arrive(empty)
        plgpu.barrier_wait(empty)

    scratch = [plgpu.ClusterBarrier(collective_axes=("d",))]
    p = plan(
        body, array(128), out=array(128), scratch_types=scratch, grid=(1,), cluster=(2, 4), cluster_names=("c", "d")
    )
    (arrive,) = body_lines(p, "mbarrier_arrive_cluster(")
    assert arrive.startswith("if (lane < 4)") and "(rank - cluster_1 * 1) + 1 * lane" in arrive
    (barrier,) = p.barriers.values()
    assert (barrier.unit, barrier.expected) == (4, 16)


def test_clusters(plan, array, compiled):
    """Ranks by axis, multicast masks along one axis, arrivals in every block along it, a meeting at the end."""
    scratch = [plgpu.SMEM((64, 64), F), plgpu.Barrier(), plgpu.ClusterBarrier(collective_axes=("d",))]
    p = plan(
        cluster_kernel,
        array(256, 64),
        out=array(2, 4),
        scratch_types=scratch,
        grid=(4,),
        cluster=(2, 4),
        cluster_names=("c", "d"),
    )
    lines = body_lines(p)
    assert launch_grid(p) == (32, 1, 1)
    assert "const int rank = blockIdx.x % 8; (void)rank;" in lines
    assert "const int cluster_0 = rank / 4 % 2; (void)cluster_0;" in lines
    assert "const int cluster_1 = rank / 1 % 4; (void)cluster_1;" in lines
    assert len(body_lines(p, "tma_load_multicast_2d(")) == 4 and all(
        "(u16)(15u << (rank - cluster_1 * 1))" in t for t in body_lines(p, "tma_load_multicast")
    )
    assert len(body_lines(p, "mbarrier_arrive_cluster_release(")) == 4  # by the role's one thread
    assert lines.count("cluster_arrive(); cluster_wait();") == 2 and "__syncthreads();" not in lines
    assert "(int)(blockIdx.x / 8)" in text(p)
    assert compiled(p).complaints() == []


# ---- barriers --------------------------------------------------------------------------------------------------------
def test_phases(plan, array, compiled):
    """One bit for each barrier, in a register that the role's arrays share; flipped by each wait."""

    def body(x, o, first, b):
        plgpu.barrier_arrive(first)
        plgpu.barrier_wait(first)

        def step(i, c):
            plgpu.barrier_arrive(b.at[lax.rem(i, 3)])
            plgpu.barrier_wait(b.at[lax.rem(i, 3)])
            return c

        lax.fori_loop(0, plgpu.dim_size(x, 0), step, 0)
        plgpu.barrier_wait(b.at[1])
        o[...] = x[...]

    scratch = [plgpu.Barrier(), plgpu.Barrier(num_barriers=3)]
    p = plan(body, array(128), out=array(128), scratch_types=scratch)
    assert body_lines(p, "u32 phases") == ["u32 phases0 = 0;"]
    one, three, static = body_lines(p, "mbarrier_wait(")
    assert one == "mbarrier_wait(smem + 0, (phases0 >> 0) & 1); phases0 ^= 1u;"
    assert body_lines(p, "u32 slot")[0].endswith(", mine = 2u << slot;")
    assert three == "mbarrier_wait(smem + 8 + 8 * slot, (phases0 & mine) != 0); phases0 ^= mine;"
    assert static == "mbarrier_wait(smem + 16, (phases0 >> 2) & 1); phases0 ^= 4u;"
    assert compiled(p).complaints() == []


def test_more_than_32_barriers_take_a_second_register(plan, array, compiled):
    def body(x, o, first, b):
        for barrier in (first, b):
            plgpu.barrier_arrive(barrier.at[0])
            plgpu.barrier_wait(barrier.at[0])
        o[...] = x[...]

    scratch = [plgpu.Barrier(num_barriers=20), plgpu.Barrier(num_barriers=20)]
    p = plan(body, array(128), out=array(128), scratch_types=scratch)
    assert body_lines(p, "u32 phases") == ["u32 phases0 = 0;", "u32 phases1 = 0;"]
    assert body_lines(p, "mbarrier_wait(")[1] == "mbarrier_wait(smem + 160, (phases1 >> 0) & 1); phases1 ^= 1u;"
    assert compiled(p).complaints() == []


def test_a_warpgroup_arrives_warp_by_warp(plan, array):
    def body(x, o, b):
        o[...] = x[...]
        plgpu.barrier_arrive(b)

    p = plan(body, array(128), out=array(128), scratch_types=[plgpu.Barrier()])
    (arrive,) = body_lines(p, "mbarrier_arrive(")
    assert "__syncwarp();" in arrive and "lane == 0" in arrive
    assert body_lines(p, "mbarrier_init(smem") == ["mbarrier_init(smem + 0 + 8 * i, 4);"]


def test_a_branch_that_only_arrives_is_a_predicate(plan, array, compiled):
    """Of `when(...)(arrive)` no branch is left, across whose end ptxas would move little; with more in it, it stays."""

    def body(n, x, o, b, c):
        m = n[0]
        o[...] = x[...]
        plgpu.when(m > 3)(lambda: plgpu.barrier_arrive(b))

        @plgpu.when(m > 4)
        def _():
            plgpu.barrier_arrive(c)
            o[...] = x[...] + 1

    scratch = [plgpu.Barrier(), plgpu.Barrier()]
    p = plan(body, array(4, dtype=jnp.int32), array(128), out=array(128), scratch_types=scratch)
    first, second = body_lines(p, "mbarrier_arrive(")
    assert re.fullmatch(r"__syncwarp\(\); if \(lane == 0 && \w+ >= 1\) mbarrier_arrive\(smem \+ \d+\);", first)
    assert re.fullmatch(r"__syncwarp\(\); if \(lane == 0\) mbarrier_arrive\(smem \+ \d+\);", second)
    assert len(body_lines(p, "if (v", ">= 1) {")) == 1
    assert compiled(p).complaints() == []


def test_a_warp_counts_as_much_as_a_warpgroup(plan, array, compiled):
    """One barrier on which a warpgroup and a single warp arrive: the warp's arrival has the warpgroup's weight."""

    def body(x, o, b):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            o[...] = x[...]
            plgpu.barrier_arrive(b)

        @plgpu.when(wg == 1)
        def _():
            def warps(warp):
                @plgpu.when(warp == 0)
                def _():
                    plgpu.barrier_arrive(b)

                @plgpu.when(warp == 1)
                def _():
                    o[0] = jnp.full((), x[0]) + jnp.reshape(x[1], ())
                    plgpu.barrier_arrive(b)

            plgpu.warp_map(warps)
            plgpu.barrier_wait(b)

    p = plan(
        body, array(128), out=array(128), scratch_types=[plgpu.Barrier(num_arrivals=3)], num_threads=2, thread_name="wg"
    )
    (b,) = p.barriers.values()
    assert (b.unit, b.expected) == (4, 12)
    assert len(body_lines(p, "mbarrier_arrive_count(", ", 4)")) == 2, (
        "one elected lane, and a warp with data of its own"
    )
    assert len(body_lines(p, "mbarrier_arrive(")) == 1
    assert compiled(p).complaints() == []


def test_meeting_points_of_roles_have_named_barriers_of_their_own(plan, array):
    """commit_smem syncs one warpgroup: the first free id plus the warpgroup's number."""

    def body(x, s, n):
        s[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        plgpu.commit_smem()

    scratch = [plgpu.SMEM((64, 64), F), plgpu.NamedBarrier(num_warpgroups=1, num_barriers=3)]
    p = plan(body, array(64, 64), scratch_types=scratch, num_threads=2, thread_name="wg")
    assert body_lines(p, "named_barrier_sync(") == ["named_barrier_sync(4 + wg, 128);"]
    with pytest.raises(ResourceExceeded, match="14 named barriers and one for each of 2 warpgroups"):
        scratch[1] = plgpu.NamedBarrier(num_warpgroups=1, num_barriers=14)
        emit(plan(body, array(64, 64), scratch_types=scratch, num_threads=2, thread_name="wg"))


# ---- lines -----------------------------------------------------------------------------------------------------------
def test_line_directives(plan, array, line_of):
    """Each step is preceded by the user's file and line."""

    def body(x, o):
        a = plgpu.load(x, layout=plgpu.Layout.WGMMA)  # load
        o[...] = jnp.exp(a)  # exp

    lines = body_lines(plan(body, array(64, 8), out=array(64, 8)))
    assert f'#line {line_of(body, "load")} "{__file__}"' in lines
    where = next(i for i, t in enumerate(lines) if "expf(" in t)
    last = [t for t in lines[:where] if t.startswith("#line")][-1]
    assert last == f'#line {line_of(body, "exp")} "{__file__}"'


def test_every_line_of_a_step_has_its_number(plan, array, line_of):
    """However many lines of C++ a step takes: numbered as the C++ compiler counts them."""

    def body(x, o):
        a = plgpu.load(x, layout=plgpu.Layout.WGMMA)  # load
        top = jnp.max(a, axis=1)  # max
        o[...] = jnp.exp(a - top[:, None])  # exp

    numbers: dict[str, set[int]] = {"= p0 +": set(), "max_nan(": set(), "expf(": set(), "= p1 +": set()}
    number = 0
    for t in text(plan(body, array(64, 16), out=array(64, 16))).splitlines():
        number += 1
        if found := re.match(r"#line (\d+)", t):
            number = int(found[1]) - 1
        for key in numbers:
            if key in t:
                numbers[key].add(number)
    load, top, exp = (line_of(body, mark) for mark in ("load", "max", "exp"))
    assert list(numbers.values()) == [{load}, {top}, {exp}, {exp}]


def test_lines_reach_the_machine_code(plan, array, line_of):
    """nvdisasm shows the Python line of an instruction."""

    def body(x, o):
        a = plgpu.load(x, layout=plgpu.Layout.WGMMA)  # load
        b = jnp.exp2(a)  # exp2
        o[...] = jnp.sin(b)  # sin

    p = plan(body, array(64, 8), out=array(64, 8), compiler_params=plgpu.CompilerParams(approx_math=True))
    (function,) = sass.read_cubin(compile_cuda(emit(p), arch="sm_90a", name="/t.cu").cubin)

    def places(opcode):
        return {i.place for i in function.instructions if i.opcode.startswith(opcode)}

    assert places("MUFU.EX2") == {(__file__, line_of(body, "exp2"))}
    assert places("MUFU.SIN") == {(__file__, line_of(body, "sin"))}
    assert places("LDG") == {(__file__, line_of(body, "load"))}


# ---- text ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.0, "float32", "(1.0f)"),
        (0.1, "float32", "(0.1f)"),
        (1e30, "float32", "(1e+30f)"),
        (-2.5, "bfloat16", "(-2.5f)"),
        (float("inf"), "float32", "__int_as_float(0x7f800000)"),
        (float("-inf"), "float32", "__int_as_float(0xff800000)"),
        (float("nan"), "float32", "__int_as_float(0x7fc00000)"),
        (3, "int32", "3"),
        (-3, "int32", "(-3)"),
        (-(2**31), "int32", "(-2147483647 - 1)"),
        (2**32 - 1, "uint32", "4294967295u"),
        (True, "bool", "true"),
        (0.1, "float64", "(0.1)"),
    ],
)
def test_literals(value, dtype, expected):
    assert literal(Literal(value, dtype)) == expected


def test_types_without_registers_are_refused_by_name(plan, array, assert_at):
    """Scale factors can be copied and multiplied with, nothing else."""

    def body(x, o):
        o[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA).astype(F)  # load

    x = array(64, 64, dtype=jnp.float8_e8m0fnu)
    with pytest.raises(UnsupportedPrimitive, match="float8_e8m0fnu values: a kernel computes in") as e:
        emit(plan(body, x, out=array(64, 64)))
    assert_at(e.value, body, "load")


def test_emission_is_deterministic(plan, array):
    def body(x, o):
        o[...] = jnp.exp(plgpu.load(x, layout=plgpu.Layout.WGMMA))

    p = plan(body, array(64, 8), out=jax.ShapeDtypeStruct((64, 8), F))
    assert emit(p) == emit(p)


@pytest.mark.parametrize("pair", [False, True])
def test_tensor_memory_is_freed_where_the_kernel_ends(plan, compiled, pair):
    """One allocation, by one warp, which gives the permit back at once; one release, behind which every path ends."""

    def body(o, t):
        @plgpu.when(plgpu.program_id(0) > 0)
        def _():
            o[...] = plgpu.async_load_tmem(t)
            plgpu.wait_load_tmem()

    cluster = dict(cluster=(2,), cluster_names=("pair",)) if pair else {}
    scratch = [plgpu.TMEM((128, 32), jnp.float32, collective=pair)]
    out = jax.ShapeDtypeStruct((128, 32), jnp.float32)
    planned = plan(body, out=out, arch="sm_100a", scratch_types=scratch, grid=(2,), grid_names=("g",), **cluster)
    text, group = emit(planned).rpartition('#line 1 "/mosaic_gpu/kernel.cu"')[2], 2 if pair else 1
    lines = [line.strip() for line in text.splitlines()]
    calls = [i for i, line in enumerate(lines) if "tmem_" in line and "alloc" in line or "tmem_relinquish" in line]
    assert [lines[i].partition("tmem_")[2].partition("<")[0] for i in calls] == ["alloc", "relinquish", "dealloc"]
    assert calls[1] == calls[0] + 1 and lines[calls[0] - 1] == "if (threadIdx.x < 32) {"
    assert lines[calls[2]].startswith(f"if (threadIdx.x < 32) tmem_dealloc<32, {group}>(")
    assert not any(line.startswith(("return", "goto", "if (lane == 0) return")) for line in lines)
    assert compiled(planned).complaints() == []
