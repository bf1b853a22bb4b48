"""Whatever is typed, and whatever a user's file does, ends in a message and an exit code, never in a traceback of ours."""

from __future__ import annotations

import textwrap

import pytest

from mosaic_gpu.cli import demo

GOOD = """
    import jax
    import jax.numpy as jnp
    import mosaic_gpu as plgpu

    print("hello from the file")
    S = jax.ShapeDtypeStruct((128, 64), jnp.float32)

    @plgpu.kernel(out_type=S)
    def double(x, o):
        o[...] = x[...] * 2

    def plus(x, y):
        return double(x) + y

    def undefined(x):
        return double(x) + nowhere  # line 16

    def ends(x):
        raise SystemExit(7)

    number = 3
"""
FILES = {
    "good.py": GOOD,
    "imports.py": "import nosuchmodule\n",
    "syntax.py": "x = 1\ndef f(:\n",
    "raises.py": "def f():\n    return 1 / 0\n\nf()\n",
    "ends.py": "raise SystemExit(3)\n",
    "options.py": "import mosaic_gpu as p\nk = p.kernel(lambda x, o: None, 5)\n",
    "empty.py": "",
}
ARG = ("--arg", "f32[128,64]")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "a_file").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(result, words):
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert "Traceback" not in result.output and result.stdout == ""
    text = " ".join(result.stderr.replace("│", " ").split())
    assert words in text, text
    assert all("mosaic_gpu" not in line for line in result.stderr.splitlines() if line.startswith("  at"))


@pytest.mark.parametrize("name", ["check", "compile", "simulate"])
@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere.py:k"], "there is no file nowhere.py"),
        (["good.py:nothing"], "has no kernel 'nothing'; it has double, plus"),
        (["good.py:double"], "needs its arguments' types"),
    ],
)
def test_the_file_is_looked_at_before_the_arguments(verb, folder, name, arguments, words):
    refused(verb(name, *arguments), words)


@pytest.mark.parametrize("name", ["compile", "simulate"])
@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "Missing argument 'kernel'"),
        (["attention", "matmul"], "unexpected extra argument"),
        ([""], "FILE.py:NAME, not ''"),
        ([":"], "FILE.py:NAME, not ':'"),
        (["nowhere.py:k", *ARG], "there is no file nowhere.py"),
        (["folder.py:k", *ARG], "there is no file folder.py"),
        (["empty.py:k", *ARG], "has no kernel 'k'; it has none"),
        (["good.py:", *ARG], "has no kernel ''; it has double"),
        (["good.py:number", *ARG], "has no kernel 'number'; it has double, plus"),
        (["good.py:double"], "needs its arguments' types"),
        (["good.py:double", "--arg", ""], "write a type"),
        (["good.py:double", "--arg", "f32[-1]"], "write a type"),
        (["good.py:double", *ARG, *ARG], "double(x) does not take 2 arguments (f32[128,64], f32[128,64])"),
        (["good.py:plus", *ARG], "plus(x, y) does not take 1 arguments (f32[128,64]): give one --arg for each"),
        (
            ["good.py:double", "--arg", "f32[8]"],
            "IllegalInstruction: an array of shape (8,) is stored to a Ref of shape (128, 64)",
        ),
        (["good.py:undefined", *ARG], "NameError: name 'nowhere' is not defined at FOLDER/good.py:17 in undefined"),
        (["good.py:ends", *ARG], "good.py:ends cannot be traced: SystemExit: 7"),
        (
            ["imports.py:k", *ARG],
            "ModuleNotFoundError: No module named 'nosuchmodule' at FOLDER/imports.py:1 in <module>",
        ),
        (["syntax.py:k", *ARG], "syntax.py cannot be imported: SyntaxError: invalid syntax at FOLDER/syntax.py:2"),
        (
            ["raises.py:k", *ARG],
            "ZeroDivisionError: division by zero at FOLDER/raises.py:4 in <module> at FOLDER/raises.py:2 in f",
        ),
        (["ends.py:k", *ARG], "ends.py cannot be imported: SystemExit: 3"),
        (["options.py:k", *ARG], "TypeError: kernel: out_type must be"),
        (["attention", "--shape", "b0s4"], "batch must be from 1"),
        (["attention", "--shape", "s99999999999"], "length must be from 1 to 2**31 - 1"),
        (["attention", "--dtype", "f32"], "--dtype f32: bf16 or f16"),
        (["matmul", "--dtype", "q7"], "--dtype q7: bf16 or f16"),
        (["matmul", "--shape", "m0n1k1"], "m must be from 1"),
        (["attention", "--config", "[]"], "--config is a JSON object"),
        (["attention", "--nonsense"], "No such option: --nonsense"),
        (["attention", "--arch", "hopper"], "--arch hopper: one of sm_90a"),
    ],
)
def test_a_kernel_to_look_at(verb, folder, name, arguments, words):
    refused(verb(name, *arguments), words.replace("FOLDER", str(folder)))


@pytest.mark.parametrize(
    "out, words",
    [
        ("a_file", "a_file is a file"),
        ("a_file/inside", "a_file is a file"),
        ("/proc/x", "--out /proc/x cannot be written"),
    ],
)
def test_nowhere_to_write(verb, folder, out, words):
    refused(verb("compile", "good.py:double", *ARG, "--out", out), words)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["doctor", "extra"], "unexpected extra argument"),
        (["demo", "extra"], "unexpected extra argument"),
        (["demo", "--seed", "-1"], "Invalid value for '--seed'"),
        (["demo", "--shape", "zz"], "--shape: shape 'zz': write it like"),
        (["demo", "--shape", "s64h3kv2d64"], "--shape: 3 query heads cannot share 2 KV heads"),
        (["demo", "--config", '{"a": 1}'], "--config: AttentionConfig has no field a"),
        (["demo", "--config", '{"block_kv": 17}'], "--config: block_kv=17"),
        (["bench", "attention", "--shapes", ","], "--shapes: shape '' has no length"),
        (["bench", "attention", "--dtype", "f32"], "--dtype f32"),
        (["bench", "compile", "--arch", "sm_80"], "--arch sm_80: one of"),
        (["bench", "compile", "--head-dim", "0"], "head_dim must be"),
        (["bench", "compile", "--repeats", "0"], "Invalid value for '--repeats'"),
        (["tune", "run"], "Missing argument 'kernel'"),
        (["tune", "run", "attention", "--shape", "b4s4096d0"], "--shape: shape 'b4s4096d0'"),
        (["tune", "run", "attention", "--shape", "b1"], "--shape: shape 'b1' has no length"),
        (["tune", "run", "attention", "--dtype", "f32"], "--dtype f32"),
    ],
)
def test_other_verbs(verb, arguments, words):
    refused(verb(*arguments), words)


def test_what_a_file_prints_is_no_result(verb, folder):
    result = verb("compile", "good.py:double", *ARG, "--out", "made", "--json")
    assert result.exit_code == 0 and result.stdout.startswith("{") and "hello from the file" in result.stderr


def test_a_bug_of_ours_says_where_in_a_line(verb, monkeypatch):
    def broken(*_):
        raise KeyError("lost")

    monkeypatch.setattr(demo, "run_demo", broken)
    result = verb("demo")
    assert result.exit_code == 1 and "KeyError: 'lost'" in result.stderr and "Traceback" not in result.stderr
    assert "in broken; this is a bug of ours, --debug shows the whole traceback" in result.stderr
    debug = verb("demo", "--debug")
    assert debug.exit_code == 1 and "Traceback" in debug.stderr and "KeyError: 'lost'" in debug.stderr


def test_debug_shows_what_the_users_file_raised(verb, folder):
    result = verb("compile", "--debug", "imports.py:k", *ARG)
    assert result.exit_code == 2 and "Traceback" in result.stderr and "ModuleNotFoundError" in result.stderr
