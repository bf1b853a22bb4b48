"""`simulate` runs a kernel under many schedules, and says of each whether it was clean."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mosaic_gpu.cli.simulate import SMALL, random_arrays
from mosaic_gpu.cli.targets import KERNELS, Request, find_call
from mosaic_gpu.runtime import device
from mosaic_gpu.runtime.schedules import Rehearsal
from mosaic_gpu.simulator.params import SimulatorParams
from tests.cli.handover import HANDOVER
from tests.support import plain_attention

SOURCE = (
    HANDOVER
    + """
clean = handover(True)
wrong = handover(False)
@plgpu.kernel(out_type=OUT, compiler_params=plgpu.CompilerParams(arch="sm_90a"))
def hopper_only(x, o):
    o[...] = x[...]

@plgpu.kernel(out_type=OUT)
def unknown(x, o):
    o[...] = jax.lax.betainc(x[...], x[...], x[...])

@jax.jit
def around(x, y):
    return jax.jit(lambda z: clean(z) * 2)(x + y), clean(y)

def looped(x):
    return jax.lax.fori_loop(0, 3, lambda i, y: clean(y), x)

def none(x):
    return x
"""
)
TYPE = ("--arg", "f32[64,64]")
READ = 1 + next(i for i, text in enumerate(SOURCE.splitlines()) if text.endswith("# read"))


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "handed.py"
    path.write_text(SOURCE)
    return path


def test_clean(verb, user_file):
    result = verb("simulate", f"{user_file}:clean", *TYPE, "--schedules", 3)
    assert result.exit_code == 0, result.output
    lines = [line.split("│") for line in result.stdout.splitlines() if "│" in line]
    assert [(a.strip(), b.strip()) for _, a, b, *_ in lines] == [
        (name, "clean") for name in ("late", "early", "seed 1", "seed 2", "seed 3")
    ]
    assert "compiled: NVRTC" in result.stdout and "the same bits" in result.stdout
    assert re.search(
        r"^kernel: [1-8] blocks? fits? a multiprocessor, limited by \w+; room for", result.stdout, re.MULTILINE
    )
    assert "simulating: seed 3" in result.stderr and "compiling" in result.stderr


def test_missing_wait(verb, user_file):
    result = verb("simulate", f"{user_file}:wrong", *TYPE, "--schedules", 2, "--no-compile")
    assert result.exit_code == 1, result.output
    assert ("Race" in result.stdout or "UninitializedRead" in result.stdout) and f"handed.py:{READ}" in result.stdout
    assert "Traceback" not in result.output and "the same bits" not in result.stdout


def test_json(verb, user_file):
    result = verb("simulate", f"{user_file}:wrong", *TYPE, "--schedules", 2, "--json", "--no-compile", "--seed", 5)
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert (data["clean"], data["kernels"], data["seed"], data["arch"]) == (False, ["kernel"], 5, "sm_90a")
    assert data["compiled"] == "not asked for"
    (fits,) = data["residency"]
    assert fits["text"].startswith("at most ") and "registers" not in fits["room"] and fits["room"]["warps"] == 8
    assert [s["schedule"] for s in data["schedules"]] == ["late", "early", "seed 1", "seed 2"]
    found = [s["finding"] for s in data["schedules"] if not s["clean"]]
    assert found and {f["class"] for f in found} <= {"Race", "UninitializedRead", "Leak"}
    assert any(f["line"] == READ and f["file"] == str(user_file) for f in found)


def test_report(verb, user_file):
    args = ("simulate", f"{user_file}:clean", *TYPE, "--no-compile", "--schedule", "late", "--schedule", "seed 7")
    result = verb(*args)
    assert result.exit_code == 0, result.output
    assert "clean under 2 schedules" in result.stdout and "seed 7" in result.stdout
    assert "bank conflicts: each load of smem s takes 4 times" in result.stdout and f"handed.py:{READ}" in result.stdout
    data = json.loads(verb(*args, "--json").stdout)
    assert [s["schedule"] for s in data["schedules"]] == ["late", "seed 7"]
    (load,) = [t for t in data["report"]["traffic"] if (t["op"], t["memory"]) == ("load", "smem")]
    assert (load["line"], load["place"], load["actual"], load["ideal"]) == (READ, "s", 512, 128)
    assert data["report"]["outside"] == data["report"]["unwritten"] == []


@pytest.mark.parametrize("shadow", ["regions", "bytes"])
def test_shadow(verb, user_file, monkeypatch, shadow):
    from mosaic_gpu.runtime import schedules

    seen, honest = [], schedules.simulate
    monkeypatch.setattr(schedules, "simulate", lambda p, a, s: [seen.append(s.shadow), honest(p, a, s)][1])
    args = ("simulate", f"{user_file}:clean", *TYPE, "--no-compile", "--schedules", 1, "--shadow", shadow)
    assert verb(*args).exit_code == 0
    assert seen == [shadow] * 3


def test_json_of_a_clean_function_of_several_kernels(verb, user_file):
    args = ("simulate", f"{user_file}:around", *TYPE, *TYPE, "--schedules", 1, "--json", "--arch", "sm_100a")
    result = verb(*args)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["clean"] and data["arch"] == "sm_100a" and all(s["finding"] is None for s in data["schedules"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("attention", "--causal", "--lse"),
        ("attention_backward",),
        ("matmul", "--arch", "sm_100a"),
        ("matmul", "--arch", "sm_103a"),
    ],
)
def test_ours(verb, arguments):
    result = verb("simulate", *arguments, "--schedules", 1, "--no-compile")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("clean") == 4


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["nosuch"], "FILE.py:NAME"),
        (["USER:clean"], "--arg"),
        (["USER:clean", *TYPE, "--arch", "sm_80"], "one of sm_90a"),
        (["USER:hopper_only", *TYPE, "--arch", "sm_100a"], "is for sm_90a"),
        (["USER:unknown", *TYPE], "UnsupportedPrimitive"),
        (["USER:looped", *TYPE], "inside JAX's"),
        (["USER:none", *TYPE], "calls no kernel"),
        (["USER:clean", *TYPE, "--schedules", "-1"], "--schedules"),
        (["USER:clean", *TYPE, "--schedule", "seed x"], "'seed N'"),
        (["USER:clean", *TYPE, "--shadow", "bits"], "shadow='bits'"),
        (["USER:clean", *TYPE, "--causal", "--dtype", "f16"], "does not go with --dtype, --causal"),
        (["matmul", "--lse"], "does not go with --lse"),
    ],
)
def test_refusals(verb, user_file, arguments, why):
    result = verb("simulate", *[a.replace("USER", str(user_file)) for a in arguments])
    assert result.exit_code == 2, result.output
    assert why in result.stderr and "Traceback" not in result.stderr and result.stdout == ""


def test_what_ptxas_refuses(verb, user_file, monkeypatch):
    from mosaic_gpu.codegen import build, nvrtc
    from mosaic_gpu.errors import ToolchainError

    def refuse(plan):
        raise ToolchainError("ptxas: no such instruction")

    monkeypatch.setattr(build, "compile_plan", refuse)
    result = verb("simulate", f"{user_file}:clean", *TYPE, "--schedules", 0)
    assert result.exit_code == 2 and "no such instruction" in result.stderr
    assert verb("simulate", f"{user_file}:clean", *TYPE, "--schedules", 0, "--no-compile").exit_code == 0
    monkeypatch.setattr(nvrtc, "list_nvrtc", lambda: [])
    result = verb("simulate", f"{user_file}:clean", *TYPE, "--schedules", 0)
    assert result.exit_code == 0 and "compiled: no NVRTC here" in result.stdout


def test_other_bits_are_a_race_of_timing(verb, user_file, monkeypatch):
    """The simulator finds what we know of before it shows in bits: here a run is falsified."""
    from mosaic_gpu.runtime import schedules

    honest = schedules.simulate

    def falsified(plan, arrays, params):
        outputs = honest(plan, arrays, params)
        if params.seed == 2:
            outputs[0][3, 5] = -outputs[0][3, 5]
        return outputs

    monkeypatch.setattr(schedules, "simulate", falsified)
    result = verb("simulate", f"{user_file}:clean", *TYPE, "--schedules", 3, "--json", "--no-compile")
    assert result.exit_code == 1
    runs = {s["schedule"]: s for s in json.loads(result.stdout)["schedules"]}
    assert [name for name, s in runs.items() if not s["clean"]] == ["seed 2"]
    finding = runs["seed 2"]["finding"]
    assert (finding["class"], finding["kind"]) == ("Race", "timing")
    assert "1 of 4096 elements differ, the first at [3, 5]" in finding["message"]


def test_every_kernel_of_ours_has_a_small_shape():
    """Without --shape `compile` takes one of a benchmark's size, which the simulator would be at for hours."""
    assert SMALL.keys() == KERNELS.keys()


def test_inputs():
    names = ("float32", "bfloat16", "float8_e4m3fn", "int32", "uint8", "bool", "int4")
    types = [jax.ShapeDtypeStruct((1000,), jnp.dtype(name)) for name in names]
    a, b, c = random_arrays(types, 1), random_arrays(types, 1), random_arrays(types, 2)
    for t, x, y, z in zip(types, a, b, c, strict=True):
        assert x.dtype == t.dtype and x.tobytes() == y.tobytes() != z.tobytes()
    assert (a[3].min(), a[3].max()) == (0, 15) and a[4].max() > 240 and 0 < a[5].sum() < 1000
    assert (a[6].astype(np.int32).min(), a[6].astype(np.int32).max()) == (-8, 7)
    assert random_arrays([jax.ShapeDtypeStruct((), jnp.float32)], 0)[0].shape == ()


@pytest.mark.parametrize(
    "arch,options",
    [
        ("sm_90a", {"bottom_right": True}),
        ("sm_90a", {"bias": "1hst"}),
        ("sm_90a", {"mask": "b11t", "causal": True}),
        ("sm_90a", {"bottom_right": True, "bias": "b1st", "mask": "1h1t"}),
        ("sm_100a", {"bottom_right": True, "bias": "bhst", "mask": "bhst"}),
    ],
)
def test_what_attention_is_simulated_with(arch, options):
    """Its values are those of the options."""
    with device.planning_for(device.multiprocessors(), arch):
        function, types = find_call("attention", Request(arch, "b2s64t72h2d64", **options))
        arrays = random_arrays(types, 3)
        (found,) = Rehearsal(function, arrays, arch).outputs(SimulatorParams())
    given = dict(zip([k for k in ("bias", "mask") if k in options], arrays[3:], strict=True))
    assert all(x.dtype == (bool if k == "mask" else jnp.bfloat16) for k, x in given.items())
    causal = "bottom_right" if options.get("bottom_right") else options.get("causal", False)
    right = plain_attention(*arrays[:3], causal, **given).astype(np.float32)
    np.testing.assert_allclose(found.astype(np.float32), right, atol=4e-2)


def test_options_of_attention(verb):
    common = ("--shape", "b1s64h1d64", "--schedules", 0, "--no-compile")
    result = verb("simulate", "attention", *common, "--bottom-right", "--bias", "1hst", "--mask", "b11t")
    assert result.exit_code == 0 and "clean" in result.stdout, result.output
    result = verb("simulate", "attention_backward", *common, "--bottom-right")
    assert result.exit_code == 0 and "clean" in result.stdout, result.output


@pytest.mark.parametrize(
    "kernel,options,words",
    [
        ("attention", ("--bias", "hst"), "write its four extents as bhst"),
        ("attention", ("--mask", "bhs1"), "with a 1 for each but t"),
        ("attention_backward", ("--bias", "bhst"), "no gradients with a bias or a mask; it does not go with --bias"),
        ("matmul", ("--bottom-right", "--mask", "bhst"), "does not go with --bottom-right, --mask"),
        ("FILE", (*TYPE, "--bottom-right", "--bias", "bhst"), "does not go with --bottom-right, --bias"),
    ],
)
@pytest.mark.parametrize("name", ["simulate", "compile"])
def test_options_that_mean_nothing(verb, user_file, tmp_path, name, kernel, options, words):
    kernel = f"{user_file}:clean" if kernel == "FILE" else kernel
    more = ("--out", tmp_path / "out") if name == "compile" else ("--no-compile",)
    result = verb(name, kernel, *options, *more)
    assert result.exit_code == 2 and words in " ".join(result.output.split()), result.output
