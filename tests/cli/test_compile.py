"""`compile` writes every file, shows every stage, and says what is wrong without a traceback."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

FILES = ("kernel.cu", "kernel.ptx", "kernel.cubin", "kernel.sass", "resources.json")
STAGES = ("stage1_traced.txt", "stage2_roles.txt", "stage3_in_flight.txt", "stage4_plan.txt")


def test_attention(verb, tmp_path):
    out = tmp_path / "out"
    result = verb("compile", "attention", "--arch", "sm_90a", "--out", out, "--causal", "--shape", "s512", "--stages")
    assert result.exit_code == 0, result.output
    assert {p.name for p in out.iterdir()} == {*FILES, *STAGES}
    assert "HGMMA" in (out / "kernel.sass").read_text() and "wgmma.mma_async" in (out / "kernel.ptx").read_text()
    assert (out / "kernel.cubin").read_bytes().startswith(b"\x7fELF")
    resources = json.loads((out / "resources.json").read_text())
    assert [(r["role"], r["requested"]) for r in resources["roles"]] == [("wg0,1", 240), ("wg2", 24)]
    assert all(0 < r["needed"] <= r["requested"] for r in resources["roles"])
    assert resources["spill_stores"] == 0
    compute, memory = (out / "stage2_roles.txt").read_text().split("role wg2")
    assert "wgmma(" in compute and "wgmma(" not in memory and "copy_gmem_to_smem(" in memory
    assert "role wg0,1" in (out / "stage3_in_flight.txt").read_text()
    plan = (out / "stage4_plan.txt").read_text()
    assert all(title in plan for title in ("roles", "buffers", "barriers", "named barriers", "maps"))
    assert "kernel attention_sm90" in result.stdout and "no spills" in result.stdout
    fits = resources["residency"]  # 384 threads of 168 registers, and most of the shared memory
    assert (fits["blocks"], fits["limited_by"]) == (1, ["registers", "shared memory"])
    assert "1 block fits a multiprocessor, limited by registers and shared memory; room for warps 5" in result.stdout


def test_json(verb, tmp_path):
    result = verb("compile", "matmul", "--out", tmp_path, "--shape", "m256n512k128", "--json", "--stages")
    data = json.loads(result.stdout)
    assert set(data) == {"files", "resources", "plan"} and data["resources"]["program"] == "matmul_sm90"
    assert data["plan"]["buffers"] and data["plan"]["maps"]


def test_blackwell_matmul(verb, tmp_path):
    result = verb("compile", "matmul", "--arch", "sm_100a", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "UTCHMMA" in (tmp_path / "kernel.sass").read_text()
    plan = json.loads(verb("compile", "matmul", "--arch", "sm_100a", "--out", tmp_path, "--json", "--stages").stdout)[
        "plan"
    ]
    assert [r["role"] for r in plan["roles"]] == ["wg0", "wg0 warp0", "wg0 warp1", "wg0 warp2,3", "wg1"]
    assert plan["tmem"][0]["columns"] == plan["tmem_columns"] == 256


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent("""
        import jax
        import jax.numpy as jnp
        import mosaic_gpu as plgpu

        @plgpu.kernel(out_type=jax.ShapeDtypeStruct((128, 64), jnp.float32))
        def double(x, o):
            o[...] = x[...] * 2

        @jax.jit
        def inside_jit(x):
            return double(x) + 1

        def twice(x):
            return double(double(x))

        @plgpu.kernel(out_type=jax.ShapeDtypeStruct((128, 64), jnp.float32), name="double")
        def triple(x, o):
            o[...] = x[...] * 3

        def different(x):
            return triple(double(x))

        @plgpu.kernel(out_type=jax.ShapeDtypeStruct((128, 64), jnp.float32),
                      compiler_params=plgpu.CompilerParams(arch="sm_90a"))
        def hopper_only(x, o):
            o[...] = x[...]
        """)
    )
    return path


@pytest.mark.parametrize("name, arch", [("double", "sm_100a"), ("inside_jit", "sm_90a")])
def test_a_users_kernel(verb, user_file, tmp_path, name, arch):
    result = verb(
        "compile", f"{user_file}:{name}", "--arg", "f32[128, 64]", "--arch", arch, "--out", tmp_path, "--stages"
    )
    assert result.exit_code == 0, result.output
    assert "FADD" in (tmp_path / "kernel.sass").read_text() or "FMUL" in (tmp_path / "kernel.sass").read_text()
    assert "mine.py" in (tmp_path / "stage1_traced.txt").read_text()


def test_several_kernels_have_a_folder_each(verb, user_file, tmp_path):
    """A function that calls the same kernel twice; attention's gradients."""
    result = verb("compile", f"{user_file}:twice", "--arg", "f32[128,64]", "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["files"]["cubin"] == str(tmp_path / "kernel.cubin")  # one kernel, then
    result = verb("compile", "attention_backward", "--shape", "b1s300h2d64", "--causal", "--out", str(tmp_path / "b"))
    assert result.exit_code == 0, result.output
    names = [f"attention_backward{part}_sm90" for part in ("_preprocess", "", "_postprocess")]
    for name in names:
        assert f"{name} for sm_90a" in result.stdout and (tmp_path / "b" / name / "kernel.sass").stat().st_size
    result = verb("compile", f"{user_file}:different", "--arg", "f32[128,64]", "--out", str(tmp_path / "d"), "--json")
    assert result.exit_code == 0, result.output
    folders = [Path(k["files"]["cubin"]).parent.name for k in json.loads(result.stdout)["kernels"]]
    assert folders == ["double_1", "double_2"]  # of one name


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["nosuch"], "FILE.py:NAME"),
        (["attention", "--arch", "sm_80"], "one of sm_90a"),
        (["attention", "--shape", "q4"], "write it like"),
        (["attention", "--arg", "f32[1]"], "--shape"),
        (["attention", "--config", "{"], "not JSON"),
        (["attention", "--config", '{"nonsense": 1}'], "nonsense"),
        (["attention", "--config", '{"block_kv": 17}'], "multiple of 16"),
        (["matmul", "--shape", "m4"], "m4096n4096k4096"),
        (["USER:double"], "--arg"),
        (["USER:double", "--arg", "f32[128"], "write a type"),
        (["USER:double", "--arg", "q32[128]"], "no dtype"),
        (["USER:double", "--arg", "i4[128]"], "i4 is NumPy's code for int32; write i32"),
        (["USER:double", "--arg", "f8[128]"], "f8 is NumPy's code for float64; write f64"),
        (["USER:double", "--arg", "f8_e4m3[128]"], "there are bf16, f16, f32"),
        (["USER:double", "--arg", "s64[128,64]"], "JAX takes int64 as int32 unless JAX_ENABLE_X64=1 is set"),
        (["USER:nothing", "--arg", "f32[128,64]"], "it has double"),
        (["attention_backward", "--lse"], "does not go with --lse"),
        (["attention_backward", "--arch", "sm_100a"], "no kernel for sm100"),
        (["USER:hopper_only", "--arg", "f32[128,64]", "--arch", "sm_100a"], "is for sm_90a"),
        (["missing.py:double", "--arg", "f32[128,64]"], "no file"),
        (["USER:double", "--arg", "f32[128,64]", "--shape", "s1"], "does not go with --shape"),
        (["USER:double", "--arg", "f32[128,64]", "--dtype", "bf16", "--lse"], "does not go with --dtype, --lse"),
        (["USER:double", "--arg", "f32[128,64]", "--config", "{}"], "does not go with --config"),
        (["matmul", "--causal", "--lse"], "does not go with --causal, --lse"),
        (["attention", "--multiprocessors", "132"], "does not go with --multiprocessors"),
        (["attention", "--no-benchmark"], "does not go with --no-benchmark"),
        (["all", "--bundle", "b", "--out", "out"], "does not go with --out"),
        (["all", "--bundle", "b", "--dtype", "bf16", "--config", "{}"], "does not go with --dtype, --config"),
    ],
)
def test_refusals(verb, user_file, arguments, why):
    result = verb("compile", *[a.replace("USER", str(user_file)) for a in arguments])
    assert result.exit_code == 2, result.output
    assert why in result.stderr and "Traceback" not in result.stderr and result.stdout == ""


def test_errors_have_a_line_and_no_traceback(verb, tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import jax, jax.numpy as jnp, mosaic_gpu as plgpu\n"
        "@plgpu.kernel(out_type=jax.ShapeDtypeStruct((128, 64), jnp.float32))\n"
        "def kernel(x, o):\n"
        "    o[...] = jax.lax.betainc(x[...], x[...], x[...])\n"
    )
    result = verb("compile", f"{wrong}:kernel", "--arg", "f32[128,64]", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "UnsupportedPrimitive" in result.stderr
    assert f"{wrong}:4" in result.stderr and "Traceback" not in result.stderr
    debug = verb("compile", "--debug", f"{wrong}:kernel", "--arg", "f32[128,64]", "--out", tmp_path / "out")
    assert debug.exit_code == 2 and "Traceback" in debug.stderr and "UnsupportedPrimitive" in debug.stderr
    assert not (tmp_path / "out").exists()
