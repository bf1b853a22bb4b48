"""`bench` in this process, inside JAX on a CPU: small kernels in the simulator; only the clock is not a GPU's."""

from __future__ import annotations

import json
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

from mosaic_gpu.bench.gpu import TorchDevice
from mosaic_gpu.bench.jax_calls import JaxDevice
from mosaic_gpu.bench.report import read_results
from mosaic_gpu.cli import bench
from mosaic_gpu.cli.common import Refusal
from mosaic_gpu.tune.shapes import workloads
from mosaic_gpu.tune.tunable import find_tunable

# A Tunable without a kernel of ours: what is tested is how it is benchmarked.
USERS = """
    import dataclasses
    from typing import ClassVar

    import jax
    import jax.numpy as jnp
    from mosaic_gpu.kernels.config import Config
    from mosaic_gpu.tune import Tunable

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class ScaleConfig(Config):
        generation: ClassVar[str] = "sm90"
        kernel: ClassVar[str] = "scale"
        wrong: bool = False

    class Scale(Tunable):
        name, config, letters = "scale", ScaleConfig, {"n": "numbers"}
        space = {"wrong": (False, True)}

        def arguments(self, w):
            return [jax.ShapeDtypeStruct((w["n"],), jnp.float32)]

        def call(self, w, config):
            return lambda x: x * (3 if config.wrong else 2)

        def reference(self, w, x):
            return x * 2.0

        def flops(self, w):
            return w["n"]

        def bytes(self, w):
            return 8 * w["n"]

        def peers(self, w):
            return {"twice": lambda x: x + x, "wrong twin": lambda x: x}
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    path = tmp_path / "users.py"
    path.write_text(textwrap.dedent(USERS))
    monkeypatch.setattr(bench, "device_for", lambda kernel: JaxDevice(rest_seconds=0.0))
    monkeypatch.setattr("mosaic_gpu.bench.protocols.MOST_SETS", 2)
    monkeypatch.setenv("MOSAIC_GPU_TUNE_DIR", str(tmp_path / "user"))
    return f"{path}:Scale"


@pytest.fixture
def fast(monkeypatch):
    """Protocols that take milliseconds."""
    from mosaic_gpu.bench import model, protocols, runner

    monkeypatch.setattr(protocols, "HOST_SECONDS", 1e-4)
    monkeypatch.setattr(runner, "QUICK", model.Options(rounds=3, alone_seconds=1e-4, alone_repeats=2))
    monkeypatch.setattr("mosaic_gpu.bench.jax_providers.overhead_seconds", lambda: 1e-6)


def test_a_kernel_of_ones_own(verb, users, fast, tmp_path):
    out, plots, table = tmp_path / "r.json", tmp_path / "plots", tmp_path / "t.md"
    arguments = ["bench", "kernel", users, "--shape", "n4096", "--quick", "--out", out]
    result = verb(*arguments, "--plot", plots, "--markdown", table, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)["cells"]["n4096"]
    status = {name: row["status"] for name, row in record["providers"].items()}
    assert status == {"ours": "ok", "ours heuristic": "ok", "twice": "ok", "wrong twin": "wrong"}
    assert record["providers"]["ours"]["config"]["source"] == "heuristic" and record["chosen"] in (
        "ours",
        "ours heuristic",
    )
    assert set(record["comparison"][record["chosen"]]) == {"interleaved", "alone"} and record["bytes"] == 8 * 4096
    assert list(read_results(out)["cells"]) == ["n4096"] and "n4096" in table.read_text()
    assert {p.name for p in plots.iterdir()} == {"scale_tflops.png", "scale_ratio.png"}
    again = verb(*arguments)
    assert "n4096: in " in again.stderr and "of roofline" in again.stdout and "wrong twin: error" in again.stdout
    compared = verb("bench", "compare", out, out)
    assert compared.exit_code == 0 and "same" in compared.stdout


def test_a_wrong_kernel_is_exit_code_1_and_a_regression(verb, users, fast, tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    arguments = ["bench", "kernel", users, "--shape", "n4096", "--quick", "--peers", ""]
    assert verb(*arguments, "--out", good).exit_code == 0
    result = verb(*arguments, "--config", '{"wrong": true}', "--out", bad)
    assert result.exit_code == 1 and "wrong" in result.stdout
    compared = verb("bench", "compare", good, bad, "--json")
    (change,) = json.loads(compared.stdout)
    assert compared.exit_code == 1 and change["verdict"] == "broken" and change["regression"]
    assert verb("bench", "compare", good, tmp_path / "none.json").exit_code == 2


def test_attention_inside_jax_with_named_blanks(verb, users, fast, tmp_path):
    """Without PyTorch its peers are lines of the table; ours runs in the simulator here."""
    result = verb(
        "bench", "attention", "--shape", "b1s128h1d64", "--causal", "--quick", "--peers", "xla|cudnn|fa4", "--json"
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["cells"]["b1 s128 h1 d64 causal"]["providers"]
    assert rows["ours"]["status"] == rows["jax.nn xla"]["status"] == "ok"
    assert rows["ours"]["config"]["block_kv"] > 0
    for blank in ("cudnn", "cudnn bhsd", "fa4"):
        assert rows[blank]["status"] == "unsupported" and "PyTorch is not installed" in rows[blank]["message"]


def test_report_over_several_files(verb, users, fast, tmp_path):
    out = tmp_path / "r.json"
    assert verb("bench", "kernel", users, "--shape", "n4096", "--quick", "--out", out).exit_code == 0
    text = verb("bench", "report", out).stdout
    assert "Hopper (not measured): ours" in text and "Blackwell (not measured)" in text and "| n4096 |" in text
    (row, *_) = json.loads(verb("bench", "report", out, "--json").stdout)
    assert row["cell"] in text and row["ours"] > 0 and set(row) >= {"device", "peer", "ratio", "of_roofline"}
    assert verb("bench", "report", tmp_path / "none.json").exit_code == 2


def test_the_kernel_is_that_of_the_gpu(verb, users, fast, monkeypatch):
    monkeypatch.setattr(bench, "target_arch", lambda: "sm_100a")
    result = verb("bench", "attention", "--shape", "b1s128h1d64", "--full", "--quick", "--json")
    assert result.exit_code == 0, result.output
    (record,) = json.loads(result.stdout)["cells"].values()
    assert record["providers"]["ours"]["status"] == "ok"
    assert record["providers"]["ours"]["config"]["generation"] == "sm100"
    other = verb("bench", "attention", "--backward", "--shape", "b1s128h1d64", "--full", "--quick")
    assert other.exit_code == 2 and "attention_backward has no kernel for sm100" in other.stderr


def beside_torch(kernel: str, shape: str, dtype: str = "bf16", **fields):
    """The benchmark of one shape beside PyTorch's libraries, of which there is nothing but the name."""
    device = object.__new__(TorchDevice)
    device.torch = SimpleNamespace(__version__="0")
    tunable = find_tunable(kernel)
    config = tunable.from_json(fields) if fields else None
    return bench.benchmark_for(tunable, workloads(tunable, [shape], dtype=dtype, causal=None), device, config), device


@pytest.mark.parametrize(("kernel", "shape"), [("matmul", "m256n256k256"), ("attention", "b1s128h1d64")])
def test_beside_pytorch_only_what_is_measured(kernel, shape):
    beside_torch(kernel, shape)
    with pytest.raises(Refusal, match="only bf16 is measured, not .* float16"):
        beside_torch(kernel, shape, "f16")


def test_a_config_counts_for_the_deterministic_gradients_too():
    benchmark, device = beside_torch("attention_backward", "b1s128h1d64", block_q=64)
    ours = {p.name: p for p in benchmark.providers(device, None) if p.ours}
    assert list(ours) == ["ours", "ours deterministic"]
    for name, provider in ours.items():
        assert provider.named.config("attention_backward").block_q == 64
        assert provider.function(benchmark.cells[0], None).keywords["deterministic"] == (name != "ours")


class Results:
    """In the place of `TorchLaunch`: three results, of which the first is another one in every run."""

    def __init__(self, torch, function, abstract, sets, out):
        self.written, self.runs = out, 0

    def __call__(self, i):
        self.runs += 1
        for n, x in enumerate(self.written):
            x.fill(self.runs if n == 0 else n)


class Array(np.ndarray):
    """As PyTorch's tensors are used."""

    fill_ = np.ndarray.fill
    clone = np.ndarray.copy


def test_what_is_deterministic_must_repeat_every_gradient(monkeypatch):
    monkeypatch.setattr("mosaic_gpu.bench.ours.TorchLaunch", Results)
    benchmark, device = beside_torch("attention_backward", "b1s128h1d64")
    device.torch.equal = np.array_equal
    problem = SimpleNamespace(
        abstract=[], sets=[], any_order=1, output=lambda: [np.zeros(4).view(Array) for _ in range(3)]
    )
    repeats = {}
    for provider in benchmark.providers(device, None)[:2]:
        call = provider.prepare(benchmark.cells[0], problem)
        call.first()
        repeats[provider.name] = call.repeatable()
    assert repeats == {"ours": True, "ours deterministic": False}
