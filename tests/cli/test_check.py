"""`check`: every line with its operations, layouts and costs; every failure at once; bodies written for JAX's Pallas."""

from __future__ import annotations

import json
import textwrap

import jax
import jax.numpy as jnp
import pytest

from mosaic_gpu.cli.targets import load_object, programs_of
from mosaic_gpu.collecting import collecting
from mosaic_gpu.errors import IllegalInstruction
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.check import check_program

SOURCE = """
import jax, jax.numpy as jnp
import mosaic_gpu as plgpu
from jax.experimental import pallas as pl

F = jax.ShapeDtypeStruct((128, 64), jnp.float32)

@plgpu.kernel(out_type=F, scratch_types=[plgpu.SMEM((128, 64), jnp.float32)])
def good(x, o, s):
    s[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA)  # store
    plgpu.commit_smem()
    y = jax.nn.softmax(s[...])  # softmax
    o[...] = y.T.reshape(128, 64)  # transpose

@plgpu.kernel(out_type=F)
def bad(x, o):
    a = plgpu.load(x, layout=plgpu.Layout.WGMMA)
    b = jnp.fft.fft(a).real  # fft
    c = plgpu.load(x, layout=plgpu.Layout.TCGEN05_TMEM_NATIVE)
    d = jax.scipy.special.betainc(a, a, a)  # bessel
    e = jax.random.split(jax.random.key(3), 65)  # split
    o[...] = a + c  # conflict
    plgpu.set_max_registers(17, action="decrease")  # budget

@plgpu.kernel(out_type=F)
def late(x, o):
    o[...] = plgpu.from_fragments(plgpu.to_fragments(jnp.ones((128, 64))), (128, 64))  # only the emitter refuses

TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
B = jnp.bfloat16
TILES = [plgpu.SMEM((64, 64), B, transforms=TILE)] * 2

@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32), num_threads=2, thread_name="wg",
    scratch_types=[*TILES, plgpu.Barrier(num_arrivals=2)])
def four(x, o, a, b, full):
    wg = jax.lax.axis_index("wg")

    @plgpu.when(wg == 1)
    def _():
        plgpu.set_max_registers(256, action="decrease")  # the wrong way
        plgpu.copy_gmem_to_smem(x.at[:, plgpu.ds(0, 32)], a, full)  # copy
        plgpu.copy_gmem_to_smem(x, b, full)

    @plgpu.when(wg == 0)
    def _():
        def compute(acc):
            plgpu.wgmma(acc, a, b)  # product
            return acc[...]
        y = plgpu.run_scoped(compute, plgpu.ACC((64, 128)))
        o[...] = jax.scipy.special.betainc(y, y, y)[:, :64]  # no rule

@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32), num_threads=2, thread_name="wg",
    scratch_types=[*TILES, plgpu.Barrier(num_arrivals=2)])
def tracing(x, o, a, b, full):
    wg = jax.lax.axis_index("wg")

    @plgpu.when(wg == 1)
    def _():
        def step(i, _):
            plgpu.copy_gmem_to_smem(a, x, full)  # swapped
            plgpu.wgmma(a, a, b)  # no accumulator
        jax.lax.fori_loop(0, 4, step, None)
        c = plgpu.load(x.at[:], layout="WGMMA")  # a name
        plgpu.barrier_wait(a)  # no barrier
        o[...] = jax.scipy.special.betainc(*[c.astype(jnp.float32)] * 3)  # what it gives goes on
        o[...] = c  # ends the branch
        plgpu.set_max_registers(17, action="decrease")  # not seen

    plgpu.set_max_registers(25, action="decrease")  # behind the branch
    plgpu.get_global(3)  # ends the kernel
    plgpu.barrier_wait(b)  # not seen either

@plgpu.kernel(out_type=F, scratch_types=[plgpu.SMEM((1024, 64), jnp.float32), plgpu.Barrier()])
def large(x, o, tile, full):  # no room
    plgpu.copy_gmem_to_smem(x, tile, full)  # too little
    y = plgpu.load(tile, layout=plgpu.Layout.WGMMA)  # no registers
    o[...] = jax.scipy.special.betainc(y[:128], y[:128], y[:128])  # neither a rule

def twice(x):
    return good(good(x))

def scale(x_ref, o_ref):
    o_ref[...] = jnp.sort(x_ref[...], axis=1) * 2 + pl.program_id(0)  # stock

def faulty(x_ref, o_ref):
    y = jnp.fft.fft(x_ref[...]).real  # no such operation
    o_ref[...] = y.T  # of another shape

def ours(x):
    spec = plgpu.BlockSpec((32, 64), lambda i: (i, 0))
    return plgpu.pallas_call(faulty, F, grid=(4,), in_specs=[spec], out_specs=spec)(x)

direct = plgpu.pallas_call(lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...]), F)

def stock(x):
    spec = pl.BlockSpec((32, 64), lambda i: (i, 0))
    return pl.pallas_call(scale, F, grid=(4,), in_specs=[spec], out_specs=spec)(x)
"""
ARGUMENT = ("--arg", "f32[128,64]")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


def line_of(mark: str) -> int:
    return next(i for i, text in enumerate(SOURCE.splitlines(), 1) if text.endswith(f"# {mark}"))


def checked(verb, source, name, *options):
    result = verb("check", f"{source}:{name}", *ARGUMENT, "--json", *options)
    data = json.loads(result.stdout)
    assert result.exit_code == (0 if data["ok"] else 1)
    return data, {x["line"]: x for x in data["lines"] if x["file"] == str(source)}


def test_a_kernel_that_compiles(verb, source):
    data, lines = checked(verb, source, "good")
    assert data["ok"] and not data["failures"] and data["arch"] == "sm_90a"
    softmax = lines[line_of("softmax")]
    assert softmax["source"].startswith("y = jax.nn.softmax")
    operations = {o["operation"]: o for o in softmax["operations"]}
    assert {"get", "reduce_max", "exp", "reduce_sum", "div"} <= set(operations)
    assert all(o["rule"] and o["table"] == "sm90/warpgroup" for o in softmax["operations"])
    assert operations["exp"]["layouts"] == ["float32[128, 64] WG_SPREAD x64"]
    store = lines[line_of("store")]["operations"]
    assert store[0]["layouts"] == ["float32[128, 64] WGMMA x64"]
    assert store[1]["costs"] == ["bank conflicts: 1024 wavefronts for 256"]
    moved = {o["operation"]: o["costs"] for o in lines[line_of("transpose")]["operations"]}
    assert moved["transpose"] == ["32768 bytes through shared memory"]
    shown = verb("check", f"{source}:good", *ARGUMENT)
    assert shown.exit_code == 0 and "every line has its rules" in shown.stdout and "reduce_max" in shown.stdout


def test_every_failure_at_once(verb, source):
    data, lines = checked(verb, source, "bad")
    found = {
        n: [(f["class"], f["message"].split()[0]) for f in x["failures"]] for n, x in lines.items() if x["failures"]
    }
    assert found == {
        line_of("fft"): [
            ("UnsupportedPrimitive", "'fft'"),
            ("UnsupportedPrimitive", "'real'"),
        ],
        line_of("bessel"): [("UnsupportedPrimitive", "'regularized_incomplete_beta'")],
        line_of("split"): [("UnsupportedCall", "jax.random.split")],
        line_of("conflict"): [("LayoutConflict", "add")],
        line_of("budget"): [("RegisterBudgetError", "set_max_registers(17):")],
    }
    assert [o["rule"] for o in lines[line_of("bessel")]["operations"]] == [False]
    shown = verb("check", f"{source}:bad", *ARGUMENT)
    assert shown.exit_code == 1 and "6 failures" in shown.stdout and "not in sm90/warpgroup" in shown.stdout


def failures_of(lines):
    return {n: [(f["class"], f["message"]) for f in x["failures"]] for n, x in lines.items() if x["failures"]}


def test_four_mistakes_on_four_lines(verb, source):
    data = json.loads(verb("check", f"{source}:four", "--arg", "bf16[64,64]", "--json").stdout)
    found = failures_of({x["line"]: x for x in data["lines"]})
    assert {n: c for n, ((c, _),) in found.items()} == {
        line_of("the wrong way"): "RegisterBudgetError",
        line_of("copy"): "IllegalInstruction",
        line_of("product"): "IllegalInstruction",
        line_of("no rule"): "UnsupportedPrimitive",
    }
    assert "(64, 64) of a @ b (64, 64) of b: shapes do not fit" in found[line_of("product")][0][1]
    assert data["skipped"] == ["what shows only when the whole kernel is planned and emitted"] and not data["ok"]
    shown = verb("check", f"{source}:four", "--arg", "bf16[64,64]").stdout
    for mark in ("the wrong way", "copy", "product", "no rule"):
        assert f"mine.py:{line_of(mark)}: " in shown
    assert "4 failures" in shown and "not looked at: what shows only" in shown


def test_what_there_is_too_little_of(verb, source):
    """Limits of resources hide nothing of what else is wrong."""
    data, lines = checked(verb, source, "large")
    assert {n: [c for c, _ in x] for n, x in failures_of(lines).items()} == {
        line_of("no room") - 1: ["ResourceExceeded"],  # the kernel's
        line_of("too little"): ["IllegalInstruction"],
        line_of("no registers"): ["ResourceExceeded"],
        line_of("neither a rule"): ["UnsupportedPrimitive"],
    }
    assert data["skipped"] == ["what shows only when the whole kernel is planned and emitted"]


def test_errors_of_tracing_are_collected(verb, source):
    """Calls that are refused are left out, or stand for what they would give; anything else ends its body only."""
    data = json.loads(verb("check", f"{source}:tracing", "--arg", "bf16[64,64]", "--json").stdout)
    lines = {x["line"]: x for x in data["lines"]}
    found = failures_of(lines)
    assert {n: [c for c, _ in x] for n, x in found.items()} == {
        line_of("swapped"): ["TypeError"],
        line_of("no accumulator"): ["TypeError"],
        line_of("a name"): ["TypeError"],
        line_of("no barrier"): ["TypeError"],
        line_of("what it gives goes on"): ["UnsupportedPrimitive"],
        line_of("ends the branch"): ["IllegalInstruction"],
        line_of("behind the branch"): ["RegisterBudgetError"],
        line_of("ends the kernel"): ["TypeError"],
    }
    assert "acc must be an ACC Ref" in found[line_of("no accumulator")][0][1]
    assert data["skipped"] == [
        f"_ behind line {line_of('ends the branch')}",
        f"tracing behind line {line_of('ends the kernel')}",
        "the register budgets, not all of which are known",
        "what shows only when the whole kernel is planned and emitted",
    ]
    assert lines[line_of("what it gives goes on")]["operations"], "what was traced before an end is shown"


def test_a_body_of_pallas_call(verb, source):
    data, lines = checked(verb, source, "ours")
    found = failures_of(lines)
    assert {n: {c for c, _ in x} for n, x in found.items()} == {
        line_of("no such operation"): {"UnsupportedPrimitive"},
        line_of("of another shape"): {"IllegalInstruction"},
    }
    assert data["skipped"][0] == f"faulty behind line {line_of('of another shape')}"


def test_a_pallas_call_by_its_name(verb, source):
    """What is called has other parameters than its body."""
    data, _ = checked(verb, source, "direct")
    assert data["ok"]


def test_nothing_is_collected_elsewhere(source):
    """Outside of `check` the first error is raised as ever."""
    kernel = load_object(source, "tracing")
    with pytest.raises(TypeError, match="copy_gmem_to_smem"):
        kernel.program(jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))


def test_what_is_collected_is_not_kept(source):
    """A kernel that was traced for `check`, with parts left out, is traced again for a call."""
    x = jnp.zeros((64, 64), jnp.bfloat16)
    for name, error in (("tracing", TypeError), ("ours", IllegalInstruction)):
        function = load_object(source, name)
        argument = x if name == "tracing" else jnp.zeros((128, 64), jnp.float32)
        with collecting() as failures:
            programs_of(function, [jax.ShapeDtypeStruct(argument.shape, argument.dtype)])
        assert failures
        with pytest.raises(error):
            function(argument)


def test_what_only_the_emitter_refuses(verb, source):
    """A check that passes is a kernel that compiles: the emitter has run."""
    data, lines = checked(verb, source, "late")
    (failure,) = lines[line_of("only the emitter refuses")]["failures"]
    assert failure["class"] == "LayoutConflict" and "of one repeated value" in failure["message"]


def test_other_tables(verb, source):
    data, lines = checked(verb, source, "good", "--arch", "sm_100a")
    assert {o["table"] for x in lines.values() for o in x["operations"]} == {"sm100/warpgroup"}


def test_against_pallas(verb, source):
    """A stock `pallas_call`: which lines JAX's backends would take, too."""
    data, lines = checked(verb, source, "stock", "--backends")
    assert data["ok"]
    found = {o["operation"]: o["backends"] for o in lines[line_of("stock")]["operations"]}
    assert found["mul"] == ["mosaic", "triton"] and found["sort"] == [] and found["swap"] == ["mosaic", "triton"]


def test_kernels_of_ours(verb):
    for name, arch in (("attention", "sm_90a"), ("matmul", "sm_100a"), ("attention", "sm_103a")):
        data = json.loads(verb("check", name, "--arch", arch, "--json").stdout)
        assert data["ok"], data["failures"]
        assert any(o["operation"] in ("wgmma", "tcgen05_mma") for x in data["lines"] for o in x["operations"])


def test_several_kernels(verb, source):
    data, lines = checked(verb, source, "twice")
    assert data["ok"] and data["kernel"] == "good"
    assert {o["count"] for o in lines[line_of("store")]["operations"]} == {2}


def test_refusals(verb, source):
    assert verb("check", f"{source}:good", *ARGUMENT, "--arch", "sm_80").exit_code == 2
    assert verb("check", f"{source}:none", *ARGUMENT).exit_code == 2
    ignored = verb("check", f"{source}:good", *ARGUMENT, "--shape", "s1", "--config", "{}")
    assert ignored.exit_code == 2 and "does not go with --shape, --config" in ignored.stderr
    assert verb("check", "matmul", "--causal").exit_code == 2


def test_a_check_that_passes_plans_as_well(program, array):
    def body(x, o):
        o[...] = x[...] * 2

    p = program(body, array(64, 64), out=array(64, 64))
    assert not check_program(p, "sm_90a").errors
    build_plan(p, "sm_90a")
