"""docs/tuning.md does what it says: the user's kernel, in under 30 lines, is tuned, benchmarked and explained as written."""

from __future__ import annotations

import json
import pathlib
import re
import shlex

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from mosaic_gpu.bench.jax_calls import JaxDevice
from mosaic_gpu.cli import bench
from mosaic_gpu.cli import tune as tune_module
from mosaic_gpu.cli.app import app
from mosaic_gpu.runtime import device
from mosaic_gpu.tune.lookup import explain_config
from mosaic_gpu.tune.tunable import find_tunable
from mosaic_gpu.tune.workers import Machine

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
CODE = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1]
COMMANDS = re.search(r"```sh\n(.*?)```", TEXT, re.DOTALL)[1].splitlines()


@pytest.fixture
def here(tmp_path, monkeypatch, fakes):
    """The user's folder, on a machine whose GPU is the simulator: it is judged there as on a GPU, and slowly."""
    (tmp_path / "my_kernels.py").write_text(CODE)
    (tmp_path / "timers.py").write_text(
        "import mosaic_gpu.bench.protocols as p\nimport mosaic_gpu.tune.measure as m\np.MOST_SETS = 2\nm.AT_LEAST = 1e-3\n"
        "def make(tunable, w, arch, seed): return m.GpuTimer(tunable, w, seed)\n"
    )
    monkeypatch.chdir(tmp_path)
    machine = Machine("sm_90a", fakes.DEVICE, fakes.TOOLCHAIN, ("",), f"{tmp_path / 'timers.py'}:make")
    monkeypatch.setattr(tune_module, "machine", lambda: machine)
    monkeypatch.setattr(bench, "device_for", lambda kernel: JaxDevice(0.0))
    monkeypatch.setattr(device, "device_key", lambda: "nvidia_h200")
    monkeypatch.setattr("mosaic_gpu.bench.protocols.MOST_SETS", 2)
    monkeypatch.setattr("mosaic_gpu.bench.protocols.HOST_SECONDS", 1e-3)
    monkeypatch.setattr("mosaic_gpu.bench.jax_providers.overhead_seconds", lambda: 1e-6)
    return tmp_path


def test_a_users_kernel_in_under_30_lines(here, folder):
    lines = [line for line in CODE.splitlines() if line.strip()]
    assert len(lines) < 30, len(lines)
    outputs = []
    for command in COMMANDS:
        program, *arguments = shlex.split(command)
        result = CliRunner().invoke(app, arguments)
        assert program == "mosaic-gpu" and result.exit_code == 0, (command, result.output)
        outputs.append(result.stdout)
    assert "rows=" in outputs[0] and "m32 n512" in outputs[1] and "double.json" in outputs[2]
    entries = json.loads((folder / "nvidia_h200" / "double.json").read_text())["entries"]
    status = [(t["config"]["rows"], t["config"]["columns"], t["status"]) for t in entries[0]["trials"]]
    assert [s for s in status if s[2] not in ("ok", "slow")] == [(16, 4096, "refused")] and len(status) == 8
    tunable = find_tunable(f"{here / 'my_kernels.py'}:DOUBLE")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 512)), jnp.bfloat16)
    found = explain_config(tunable, x)
    assert (found.source, found.match, found.stale) == ("user", "exact", False)
    assert found.config.to_json() == entries[0]["best"]["config"]
    import sys

    np.testing.assert_array_equal(sys.modules[type(tunable).__module__].double(x), x * 2)


def test_every_verb_of_the_page_exists():
    """And takes the options that are named beside it."""
    for verb, options in re.findall(r"`(?:mosaic-gpu )?(tune \w+|bench \w+)([^`]*)`", TEXT):
        shown = CliRunner().invoke(app, [*verb.split(), "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, verb
        for option in re.findall(r"--[a-z]+", options):
            assert option in shown.stdout, (verb, option)
