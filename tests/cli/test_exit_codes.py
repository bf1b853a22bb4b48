"""The exit codes that docs/cli.md promises: of every verb where it is refused, and of every class of error."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import Any

import jax
import pytest
import typer

from mosaic_gpu import errors
from mosaic_gpu.cli import app as verbs
from mosaic_gpu.cli import targets
from mosaic_gpu.errors import MosaicGpuError
from tests.cli.handover import HANDOVER

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "cli.md"
CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, MosaicGpuError)]
ARG = ("--arg", "f32[64,64]")

# A situation in which each verb is refused.
REFUSED = {
    "doctor": ("--sorted",),
    "demo": ("--shape", "b1"),
    "compile": ("own_kernels.py:unknown", *ARG),
    "simulate": ("own_kernels.py:unknown", *ARG),
    "ops": ("--arch", "sm_80"),
    "explain-call": ("--grid", "x"),
    "bench attention": ("--quick",),
    "bench matmul": (),
    "bench kernel": ("attention",),
    "bench compare": ("none.json", "none.json"),
    "bench report": ("none.json",),
    "bench compile": ("--arch", "sm_90a", "--head-dim", "65"),
    "tune run": ("attention",),
    "tune resume": (),
    "tune compile": ("conv", "--out", "out"),
    "tune time": ("nowhere",),
    "tune show": ("attention", "--device", "none"),
    "tune diff": ("none.json", "none.json"),
    "tune merge": ("none.json", "--into", "other.json"),
    "tune prune": ("--keep",),
    "tune validate": ("none.json",),
    "tune export": ("--what",),
    "tune savings": ("none.json", "none.json"),
    "check": ("nowhere.py:kernel",),
    "verify-device": ("none.zip",),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    more = """
    clean, wrong = handover(True), handover(False)

    @plgpu.kernel(out_type=OUT)
    def unknown(x, o):
        o[...] = jax.lax.betainc(x[...], x[...], x[...])
    """
    calls = "\nimport jax.numpy as jnp\n{}(jnp.ones((64, 64), jnp.float32))\n"
    (tmp_path / "own_kernels.py").write_text(HANDOVER + textwrap.dedent(more))
    (tmp_path / "calls.py").write_text(HANDOVER + textwrap.dedent(more) + calls.format("clean"))
    (tmp_path / "calls_wrong.py").write_text(HANDOVER + textwrap.dedent(more) + calls.format("wrong"))
    (tmp_path / "jits_wrong.py").write_text(HANDOVER + textwrap.dedent(more) + calls.format("jax.jit(wrong)"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def every_verb() -> set[str]:
    found = set()
    root: Any = typer.main.get_command(verbs.app)
    for name, command in root.commands.items():
        found |= {f"{name} {sub}" for sub in command.commands} if hasattr(command, "commands") else {name}
    return found


def test_every_verb_is_here() -> None:
    assert set(REFUSED) == every_verb()


def test_every_verb_has_json() -> None:
    root: Any = typer.main.get_command(verbs.app)
    for name in REFUSED:
        command = root
        for part in name.split():
            command = command.commands[part]
        assert any("--json" in p.opts for p in command.params), name


@pytest.mark.parametrize("name", REFUSED)
def test_refused_is_2(verb, folder, name: str) -> None:
    result = verb(*name.split(), *REFUSED[name])
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert result.stdout == "" and "Traceback" not in result.stderr


def documented(code: int) -> set[str]:
    """The classes that the page names for a code."""
    (row,) = re.findall(rf"^\| {code} \| (it .*) \|$", PAGE.read_text(), re.M)
    return set(re.findall(r"`(\w+)`", row))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("debug", [(), ("--debug",)], ids=["", "debug"])
def test_every_class_has_the_code_of_the_page(verb, monkeypatch, tmp_path, cls, debug) -> None:
    def raises(*_: Any) -> Any:
        raise cls("made up", errors.Line("file.py", 7))

    monkeypatch.setattr(targets, "find_call", raises)
    result = verb("compile", *debug, "matmul", "--out", tmp_path / "out")
    # The base class itself is a launch that the driver refuses.
    expected = 1 if cls.__name__ in documented(1) or cls is MosaicGpuError else 2
    assert result.exit_code == expected and "made up" in result.stderr
    assert ("Traceback" in result.stderr) == bool(debug)


def test_a_bug_and_what_jax_wraps(verb, monkeypatch, tmp_path) -> None:
    def raises(error: Exception) -> Any:
        monkeypatch.setattr(targets, "find_call", lambda *_: (_ for _ in ()).throw(error))
        return verb("compile", "matmul", "--out", tmp_path / "out")

    assert raises(KeyError("lost")).exit_code == 1
    assert raises(jax.errors.JaxRuntimeError("INTERNAL: something of XLA's")).exit_code == 1
    assert raises(jax.errors.JaxRuntimeError("INTERNAL: [DeviceMismatch] not here")).exit_code == 2


@pytest.mark.parametrize(("kernel", "code"), [("clean", 0), ("wrong", 1), ("unknown", 2), ("nosuch", 2)])
def test_simulate(verb, folder, kernel: str, code: int) -> None:
    result = verb("simulate", f"own_kernels.py:{kernel}", *ARG, "--schedules", 0, "--no-compile")
    assert result.exit_code == code, result.output


# ---- files that call their kernel when they are imported --------------------------------------------------------------------
@pytest.mark.parametrize("name", ["simulate", "compile"])
@pytest.mark.parametrize("file", ["calls_wrong.py", "jits_wrong.py"])
def test_a_file_that_fails_when_imported_is_told_about_the_guard(verb, folder, name: str, file: str) -> None:
    result = verb(name, f"{file}:clean", *ARG)
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr
    last = len((folder / file).read_text().splitlines())
    assert f"{file} was imported for clean\n  at {folder / file}:{last} in <module>\nRace: " in result.stderr
    assert 'if __name__ == "__main__":' in result.stderr


def test_a_file_whose_kernel_is_refused_as_it_is_made_called_none(verb, folder) -> None:
    made = "\n@plgpu.kernel(out_type=OUT, cluster=(32,), cluster_names=('c',))\ndef large(x, o):\n    pass\n"
    (folder / "large.py").write_text(HANDOVER + made)
    result = verb("simulate", "large.py:large", *ARG)
    assert result.exit_code == 2 and "UnsupportedCall: cluster=(32,)" in result.stderr
    assert "large.py was imported for large\n  at " in result.stderr and "__main__" not in result.stderr


@pytest.mark.parametrize(("name", "options"), [("simulate", ("--schedules", 0, "--no-compile")), ("compile", ())])
def test_a_file_that_runs_its_kernel_is_told_so(verb, folder, name: str, options: tuple[Any, ...]) -> None:
    result = verb(name, "calls.py:clean", *ARG, *options)
    assert result.exit_code == 0, result.output
    assert "calls.py was imported for clean, and called" in result.stderr
    assert 'if __name__ == "__main__":' in result.stderr
    assert "__main__" not in verb(name, "kernels.py:clean", *ARG, *options).stderr


def test_a_platform_that_jax_does_not_find() -> None:
    """A login node with JAX_PLATFORMS=cuda: what to do, not a bug of ours."""
    call = "import sys; sys.argv = ['mosaic-gpu', 'demo']; from mosaic_gpu.cli import main; main()"
    environment = {**os.environ, "JAX_PLATFORMS": "rocm"}
    found = subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True, text=True)
    assert found.returncode == 2 and "JAX_PLATFORMS=rocm,cpu" in found.stderr and "Traceback" not in found.stderr


def test_an_interrupt_is_no_bug(verb, monkeypatch, tmp_path) -> None:
    """Ctrl-C, while NVRTC compiles for example: the shell's code for it, no traceback, and nothing half written."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("mosaic_gpu.codegen.nvrtc.Nvrtc.compile", interrupted)
    monkeypatch.setenv("MOSAIC_GPU_CACHE_DIR", str(tmp_path / "cache"))
    result = verb("compile", "matmul", "--arch", "sm_90a", "--out", tmp_path / "out")
    assert result.exit_code == 130 and "Traceback" not in result.stderr and result.stdout == ""
    left = [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix not in (".cu", ".lock")]
    assert not left, left
