"""`check`: every line with its operations, layouts and costs; every failure at once; bodies written for JAX's Pallas."""

from __future__ import annotations

import json
import textwrap

import pytest

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
    d = jax.scipy.special.i0e(a)  # bessel
    e = jax.random.split(jax.random.key(3))  # split
    o[...] = a + c  # conflict
    plgpu.set_max_registers(17, action="decrease")  # budget

@plgpu.kernel(out_type=F)
def late(x, o):
    o[...] = plgpu.from_fragments(plgpu.to_fragments(jnp.ones((128, 64))), (128, 64))  # only the emitter refuses

def twice(x):
    return good(good(x))

def scale(x_ref, o_ref):
    o_ref[...] = jnp.sort(x_ref[...], axis=1) * 2 + pl.program_id(0)  # stock

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
            ("UnsupportedPrimitive", "convert_element_type"),
            ("UnsupportedPrimitive", "'fft'"),
            ("UnsupportedPrimitive", "'real'"),
        ],
        line_of("bessel"): [("UnsupportedPrimitive", "'bessel_i0e'")],
        line_of("split"): [("UnsupportedPrimitive", "jax.random.split")],
        line_of("conflict"): [("LayoutConflict", "add")],
        line_of("budget"): [("RegisterBudgetError", "set_max_registers(17):")],
    }
    assert [o["rule"] for o in lines[line_of("bessel")]["operations"]] == [False]
    shown = verb("check", f"{source}:bad", *ARGUMENT)
    assert shown.exit_code == 1 and "7 failures" in shown.stdout and "not in sm90/warpgroup" in shown.stdout


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
