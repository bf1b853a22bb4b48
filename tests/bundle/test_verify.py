"""Verifying: right and wrong results, races, refusals; processes that die or hang cost one entry; the report.  No GPU."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from mosaic_gpu.bundle import cases, files, make, verify
from mosaic_gpu.bundle.cases import Case
from mosaic_gpu.cli.app import app
from mosaic_gpu.errors import DeviceMismatch
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate


def simulated(arch="sm_90a"):
    """A launch by the simulator, of the entry's kernel planned anew."""

    def launch(entry, arrays):
        traced, _ = make.kernel_call(*make.call_of(Case(**entry.case), arch))
        plan = build_plan(traced.program, arch)
        operands = [arrays[o] if isinstance(o, int) else jnp.asarray(o) for o in entry.operands]
        types = [jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in entry.outputs]
        return jax.pure_callback(lambda *xs: simulate(plan, [np.asarray(x) for x in xs]), types, *operands)

    return launch


def test_right_results(made, monkeypatch):
    """The bundled launch data and the case's inputs fit together: the simulated kernels pass, and are timed where asked."""
    monkeypatch.setattr("mosaic_gpu.bench.protocols.MOST_SETS", 2)
    first = verify.check(made.entries[0], simulated())
    assert first.status == "ok" and 0 < first.error <= first.allowed and first.seconds > 0 and first.tflops > 0
    assert verify.check(made.entries[0], simulated(), benchmark=False).seconds is None
    attention = verify.check(made.entries[2], simulated())
    assert attention.status == "ok" and attention.seconds is None


@pytest.mark.parametrize("kind", cases.SCALED)
def test_block_scaled_cases(kind):
    """Factors and packed operands are made as the kernel takes them, and judged against the exact product."""
    case = Case("scaled_matmul", "m200n136k256", kind, config={"num_slots": 2})
    traced, operands = make.kernel_call(*make.call_of(case, "sm_100a"))
    outputs = tuple((tuple(a.shape), str(a.dtype)) for a in traced.out_avals)
    entry = files.Entry(str(case), case.to_json(), None, operands, outputs, (), "", 0, 0)
    assert verify.check(entry, simulated("sm_100a")).status == "ok"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("arch", "config"), [("sm_100a", {"tile_k": 64, "emulated_columns": 0}), ("sm_90a", {"block_kv": 64})]
)
def test_attention_with_a_bias(causal, arch, config):
    """Of each head, with hidden keys; a batch dimension of 1 stands for all."""
    case = Case("biased_attention", "b2s130t200h2kv1d64", causal=causal, config=config)
    traced, operands = make.kernel_call(*make.call_of(case, arch))
    outputs = tuple((tuple(a.shape), str(a.dtype)) for a in traced.out_avals)
    entry = files.Entry(str(case), case.to_json(), None, operands, outputs, (), "", 0, 0)
    assert verify.check(entry, simulated(arch)).status == "ok"


def test_wrong_results(made):
    def nothing(entry, arrays):
        return [jnp.zeros(s, d) for s, d in entry.outputs]

    found = verify.check(made.entries[0], nothing)
    assert (found.status, found.error) == ("wrong", 1.0) and "relative error 1.00e+00, allowed" in found.message

    def one_element(entry, arrays):
        (out,) = simulated()(entry, arrays)
        return [out.at[3, 5].set(jnp.nan)]

    assert verify.check(made.entries[0], one_element).status == "wrong"


def test_results_that_differ(made):
    count = iter(range(100))

    def drifts(entry, arrays):
        (out,) = simulated()(entry, arrays)
        n = jax.pure_callback(lambda: np.float32(next(count)), jax.ShapeDtypeStruct((), jnp.float32))
        return [out.at[0, 0].add((n * 0.25).astype(out.dtype))]

    found = verify.check(made.entries[1], drifts)
    assert found.status == "wrong" and "two runs on the same inputs differ" in found.message


def test_refusals_and_failures(made):
    def refuses(entry, arrays):
        raise DeviceMismatch("the cubin is for another GPU\nmore")

    found = verify.check(made.entries[0], refuses)
    assert (found.status, found.message) == ("refused", "the cubin is for another GPU")

    def fails(entry, arrays):
        raise RuntimeError("the GPU is gone")

    with pytest.raises(RuntimeError, match="the GPU is gone"):
        verify.check(made.entries[0], fails)


@pytest.fixture
def works(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)  # so that processes that are started find it
    sys.modules.pop("bundle_work", None)
    import bundle_work

    return bundle_work


@pytest.mark.parametrize(
    ("work", "timeout", "statuses"),
    [
        ("well", 60, ["ok", "ok", "ok"]),
        ("second_dies", 60, ["ok", "crashed", "ok"]),
        ("second_hangs", 3, ["ok", "hung", "ok"]),
    ],
)
def test_processes(works, made, bundle_file, work, timeout, statuses):
    held, seen = files.load(bundle_file), []
    outcome = verify.run(bundle_file, held, timeout=timeout, on_result=seen.append, work=getattr(works, work))
    assert [outcome.results[i].status for i in range(3)] == statuses and len(seen) == 3
    data = json.loads(json.dumps(verify.report(bundle_file, held, outcome, verify.now())))
    assert data["summary"] == {s: statuses.count(s) for s in sorted(set(statuses))}
    assert data["bundle"]["identity"] == held.identity and data["device"]["name"] == "made up"
    assert [r["case"]["shape"] for r in data["results"]] == [e.case["shape"] for e in made.entries]


def test_processes_that_never_start(works, bundle_file):
    """It gives up, and says of each entry that it was not run."""
    held = files.load(bundle_file)
    outcome = verify.run(bundle_file, held, work=works.dies_at_once)
    assert outcome.results == {}
    assert verify.report(bundle_file, held, outcome, "")["summary"] == {"failed": 3}


def test_another_gpu_stops_it(works, bundle_file):
    outcome = verify.run(bundle_file, files.load(bundle_file), work=works.other_gpu)
    assert outcome.arch == "sm_80" and outcome.results == {}


# ---- the verbs ---------------------------------------------------------------------------------------------------------
def run(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def test_verify_device_without_a_gpu(bundle_file, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = run("verify-device", bundle_file, "--out", tmp_path / "report.json")
    assert (
        done.exit_code == 2
        and "is for sm_90a; here is no GPU" in done.stderr
        and not (tmp_path / "report.json").exists()
    )


def test_verify_device(works, bundle_file, tmp_path, monkeypatch):
    """From the file to the report and the exit code."""
    for work, code in (("well", 0), ("second_dies", 1)):
        monkeypatch.setattr(verify.run, "__kwdefaults__", {**verify.run.__kwdefaults__, "work": getattr(works, work)})
        done = run("verify-device", bundle_file, "--out", tmp_path / "report.json")
        assert done.exit_code == code, done.stderr
        data = json.loads((tmp_path / "report.json").read_text())
        assert sum(data["summary"].values()) == 3 and data["format"] == verify.FORMAT
        assert "bundle " + data["bundle"]["identity"][:12] in done.stdout and "report: " in done.stdout


def test_a_damaged_file_is_refused(bundle_file):
    bundle_file.write_bytes(bundle_file.read_bytes()[:-100])
    done = run("verify-device", bundle_file)
    assert done.exit_code == 2 and "is no bundle" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["conv"], "--bundle takes attention, matmul, scaled_matmul or all, not 'conv'"),
        (["matmul", "--shape", "m8n8k8"], "it does not go with --shape"),
        (["scaled_matmul", "--arch", "sm_90a"], "there is no scaled_matmul for sm_90a"),
        (["all", "--arch", "sm_80"], "--arch sm_80: one of"),
    ],
)
def test_compile_refuses(args, words, tmp_path):
    done = run("compile", *args, "--bundle", tmp_path / "b.zip")
    assert done.exit_code == 2 and words in done.stderr


def test_compile_writes_a_bundle(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "sweep", lambda *a: [Case("matmul", "m64n64k64")])
    done = run(
        "compile", "matmul", "--bundle", tmp_path / "b.zip", "--arch", "sm_90a", "--json", "--multiprocessors", 7
    )
    assert done.exit_code == 0, done.stderr
    held = files.load(tmp_path / "b.zip")
    said = json.loads(done.stdout)
    assert said["identity"] == held.identity and said["entries"] == said["cubins"] == 1 and said["spills"] == []
    assert held.multiprocessors == 7 and dataclasses.asdict(Case(**held.entries[0].case))["shape"] == "m64n64k64"
