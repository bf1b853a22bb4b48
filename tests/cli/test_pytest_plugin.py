"""The pytest plugin, in runs of pytest of its own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

from tests.cli.handover import HANDOVER

KERNELS = (
    HANDOVER
    + """
import numpy as np, pytest
from mosaic_gpu.errors import Race, UninitializedRead

x = np.arange(4096.0).reshape(64, 64)

@pytest.fixture
def runs(monkeypatch):
    from mosaic_gpu.runtime import schedules
    seen, honest = [], schedules.simulate
    monkeypatch.setattr(schedules, "simulate", lambda p, a, s: [seen.append((s.timing, s.seed)), honest(p, a, s)][1])
    return seen
"""
)


@pytest.fixture
def run_pytest(tmp_path):
    """run_pytest(tests, *options): pytest on them with the plugin alone, installed as such or not."""

    def run(tests: str, *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(KERNELS + tests)
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "JAX_PLATFORMS": "cpu"}
        environment.pop("PYTEST_ADDOPTS", None)
        command = [sys.executable, "-m", "pytest", "-p", "mosaic_gpu.pytest_plugin", "-p", "no:cacheprovider", *options]
        return subprocess.run(
            [*command, "--rootdir", str(tmp_path), str(tmp_path)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def test_clean_and_wrong(run_pytest):
    result = run_pytest("""
def test_clean(simulate_schedules, runs):
    (out,) = simulate_schedules(handover(True, [OUT]), x, schedules=3)
    np.testing.assert_array_equal(out, x.astype(np.float32))
    assert runs == [("late", None), ("early", None), ("late", 1), ("late", 2), ("late", 3)]

def test_default(simulate_schedules, runs):
    simulate_schedules(handover(True, [OUT]), x)
    assert len(runs) == 22

def test_function(simulate_schedules):
    kernel = handover(True, [OUT])
    found = simulate_schedules(jax.jit(lambda a: {"y": jax.nn.relu(kernel(a + 1)[0] * 2)}), x, schedules=1)
    np.testing.assert_array_equal(found["y"], (x.astype(np.float32) + 1) * 2)

def test_own_interpret_does_not_fix_the_schedule(simulate_schedules, runs):
    kernel = handover(True, [OUT])
    kernel.options["interpret"] = plgpu.SimulatorParams(timing="early")
    simulate_schedules(kernel, x, schedules=1)
    assert runs == [("late", None), ("early", None), ("late", 1)]

def test_bits(simulate_schedules, monkeypatch):
    from mosaic_gpu.runtime import schedules
    honest = schedules.simulate
    monkeypatch.setattr(schedules, "simulate", lambda p, a, s: [o + (s.seed == 2) for o in honest(p, a, s)])
    with pytest.raises(Race, match="under late and under seed 2") as e:
        simulate_schedules(handover(True, [OUT]), x, schedules=2)
    assert e.value.kind == "timing"

def test_wrong(simulate_schedules):
    simulate_schedules(handover(False, [OUT]), x, schedules=2)
""")
    assert "5 passed" in result.stdout and "1 failed" in result.stdout, result.stdout + result.stderr
    line = 1 + next(i for i, text in enumerate(KERNELS.splitlines()) if text.endswith("# read"))
    assert f"test_it.py:{line}" in result.stdout and "under the schedule '" in result.stdout
    assert "shadow.py" not in result.stdout
    assert "FAILED test_it.py::test_wrong - mosaic_gpu.errors." in result.stdout


def test_option(run_pytest):
    tests = """
def test_count(simulate_schedules, runs):
    simulate_schedules(handover(True, [OUT]), x, schedules=3)
    assert len(runs) == 2 + 1
"""
    assert run_pytest(tests, "--mosaic-gpu-schedules", "1").returncode == 0
    assert run_pytest(tests, "--mosaic-gpu-schedules", "0").returncode == 1
    wrong = run_pytest(tests, "--mosaic-gpu-schedules", "-1")
    assert wrong.returncode == pytest.ExitCode.USAGE_ERROR and "--mosaic-gpu-schedules" in wrong.stderr


def test_import_needs_no_jax():
    code = "import sys, mosaic_gpu.pytest_plugin; print([m for m in ('jax', 'numpy', 'typer') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_entry_point():
    path = pathlib.Path(__file__).parents[2] / "pyproject.toml"
    declared = tomllib.loads(path.read_text())["project"]["entry-points"]
    assert declared["pytest11"] == {"mosaic_gpu": "mosaic_gpu.pytest_plugin"}
