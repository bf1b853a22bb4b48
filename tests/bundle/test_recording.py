"""Simulations recorded, compiled and replayed without a GPU: what is taken, what is left out, and how results are judged."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import traceback
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.bundle import files
from mosaic_gpu.errors import Deadlock, Race, UnsupportedCall
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import SimulatorParams, UnwrittenOutput, machine, simulate
from tests.bundle import replay_work as launches
from tests.gpu import recording, replay
from tests.gpu.comparison import compare
from tests.support import out, randoms

BF16 = ml_dtypes.bfloat16
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def importable():
    """The processes that compile and replay import `tests`; pytest itself does without the path."""
    sys.path.insert(0, str(ROOT))
    yield
    sys.path.remove(str(ROOT))


def twice(x, o):
    i = lax.axis_index("b")
    o[i] = plgpu.load(x.at[i], layout=plgpu.Layout.WG_STRIDED) * 2


def summed(x, start, parts, o, done):
    """Every block writes a part, the first one adds them up; `parts` starts with an input's values."""
    b = lax.axis_index("b")
    parts[b] = plgpu.load(x.at[b], layout=plgpu.Layout.WG_STRIDED)
    plgpu.semaphore_signal(done, memory_scope="gpu")

    @plgpu.when(b == 0)
    def _():
        plgpu.semaphore_wait(done, 4, memory_scope="gpu")
        o[...] = sum(plgpu.load(parts.at[i], layout=plgpu.Layout.WG_STRIDED) for i in range(4))


def early(x, o):
    plgpu.when(lax.axis_index("b") == 0)(lambda: twice(x, o))


def racy(x, o):
    o[0] = plgpu.load(x.at[lax.axis_index("b")], layout=plgpu.Layout.WG_STRIDED)


def tickets(o, done):
    o[lax.axis_index("b")] = plgpu.semaphore_fetch_add(done)


def prints(x, o):
    plgpu.debug_print("{}", lax.axis_index("b"))
    twice(x, o)


GRID = dict(grid=(4,), grid_names=("b",))
SEMAPHORE = dict(GRID, scratch_types=[plgpu.SemaphoreType.REGULAR(())])


def run(body, *arrays, out=None, arch="sm_90a", params=None, **options):
    kernel = plgpu.kernel(body, out or [jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)], **(options or GRID))
    program = kernel.program(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    return simulate(build_plan(program, arch), arrays, params)


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """Records this process's simulations from here on, like the plugin does, whether it is itself at work or not."""
    monkeypatch.setattr(machine, "run_grid", machine.run_grid)
    config = types.SimpleNamespace(getoption=lambda name: tmp_path if name == "--record" else None)
    recording.pytest_configure(config)
    yield config.recorder
    recording.pytest_unconfigure(config)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with three records of `twice`, of as many rows, and one of `summed`, and their bundle."""
    folder = tmp_path_factory.mktemp("recorded")
    recorder = recording.Recorder(folder)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(machine, "run_grid", recorder.run_grid)
        for rows in (1, 2, 3, 3):
            run(twice, randoms(rows, 128, dtype=BF16), **dict(GRID, grid=(rows,)))
        x = randoms(4, 128)
        run(summed, x, x, out=[out(4, 128), out(128)], input_output_aliases={1: 0}, **SEMAPHORE)
        assert recorder.skipped == {"recorded already": 1}
        recorder.close()
    recording.compile_folder(folder, folder / "rec.zip")
    return folder


def test_recorded_and_compiled(recorded):
    """Constants of types that NumPy has no name for come back as they were; semaphores get zeros, in whose place they are."""
    entries = files.load(recorded / "rec.zip").entries
    assert sorted(e.name for e in entries) == ["summed", "twice", "twice", "twice"]
    assert files.describe(entries) == {"entries": 4, "cubins": 2}
    for e in entries:
        assert e.spec.cubin[:4] == b"\x7fELF" and e.spec.arch == (90, "a")
        assert "test_recording.py::" in e.case["test"]
        if e.name == "twice":
            ((x,), (y,)) = e.operands, e.expected
            assert x.dtype == y.dtype == BF16 and e.outputs == ((x.shape, "bfloat16"),)
            np.testing.assert_array_equal(y, x * BF16(2))
        else:
            x, start, zeros = e.operands
            assert e.aliases == ((1, 0), (2, 2)) and (zeros.dtype, zeros.tolist()) == (np.int32, 0)
            np.testing.assert_array_equal(e.expected[0], x)
            np.testing.assert_allclose(e.expected[1], x.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "options", "reason"),
    [
        (twice, dict(params=SimulatorParams(checks=False)), "not all was checked"),
        (twice, dict(params=SimulatorParams(uninitialized="zero")), "not all was checked"),
        (prints, {}, "it prints"),
        (tickets, dict(out=[out(4, dtype=np.int32)], **SEMAPHORE), "the result depends on the order of events"),
    ],
    ids=["unchecked", "zeros", "prints", "order"],
)
def test_left_out(recorder, body, options, reason):
    run(body, *([] if body is tickets else [randoms(4, 128)]), **options)
    assert recorder.skipped == {reason: 1} and not list((recorder.folder / "records").iterdir())


def test_left_out_for_what_it_does_not_write_or_its_size_or_chip(recorder, monkeypatch):
    with pytest.warns(UnwrittenOutput):
        run(early, randoms(4, 128))
    monkeypatch.setattr(recording, "MOST_BYTES", 4096)
    run(twice, randoms(5, 128), **dict(GRID, grid=(5,)))
    run(twice, randoms(4, 128), arch="sm_100a")
    assert recorder.skipped == {"outputs not wholly written": 1, "arrays of more than 4096 bytes": 1}
    assert not list((recorder.folder / "records").iterdir())


def test_a_dangerous_kernel_is_left_out_whatever_else_is_said_of_it(recorder, tmp_path):
    x = randoms(2, 128)
    run(racy, x, out=[out(1, 128)], **dict(GRID, grid=(1,)))
    assert len(list((tmp_path / "records").iterdir())) == 1
    with pytest.raises(Race):
        run(racy, x, out=[out(1, 128)], **dict(GRID, grid=(2,)))  # the grid is no part of the source
    assert recording.compile_folder(tmp_path, tmp_path / "rec.zip").entries == ()


def test_enough_of_a_kernel(recorder):
    for seed in range(5):
        run(twice, randoms(4, 128, seed=seed))
    assert len(list((recorder.folder / "records").iterdir())) == recording.MOST_OF_SOURCE
    assert recorder.skipped == {"enough of this kernel or test": 2}


def test_what_does_not_fit_is_dropped(recorded):
    sources = [p.name for p in (recorded / "plans").iterdir()]
    sizes = {p: p.stat().st_size for p in (recorded / "records").iterdir()}
    taken = recording.chosen(recorded, sources, sum(sizes.values()) - 1)
    assert len(taken) == 3 and len({p.name.partition("-")[0] for p in taken}) == 2, "one of each kernel first"
    assert recording.chosen(recorded, sources, 10) == []


def test_calls_for_cuda(recorded):
    """One function calls all kernels of a group; outputs that start with no input's values are written over what is donated."""
    entries = files.load(recorded / "rec.zip").entries
    program, arrays, poison = replay.program_of(entries)
    assert sorted(x.shape for x in poison) == [(1, 128), (2, 128), (3, 128), (128,)]
    assert all(np.isnan(x.astype(np.float32)).all() for x in poison)
    text = program.trace(arrays, poison).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_launch") == 4
    assert text.count("tf.aliasing_output") == 4


def replayed(recorded, tmp_path, launch, **options):
    fake = dict(launch=launch, arch="sm_90a", workers=1) | options
    found = replay.replay(recorded / "rec.zip", tmp_path / "lines.jsonl", **fake)
    return replay.report(files.load(recorded / "rec.zip"), found)


def test_all_is_right(recorded, tmp_path):
    report = replayed(recorded, tmp_path, launches.right, workers=2, size=3)
    assert report["summary"] == {"ok": 4} and report["same to the bit"] == 4 and not report["not right"]
    assert report["folders"] == {"tests/bundle": {"ok": 4}}
    again = replayed(recorded, tmp_path, launches.accidents, arch="sm_100a")
    assert again == report, "what has a line is not run again"


def test_accidents(recorded, tmp_path):
    """Each costs its own record: what ran with it in a group is run again."""
    report = replayed(recorded, tmp_path, launches.accidents, limit=3.0)
    assert report["summary"] == {"failed": 1, "crashed": 1, "hung": 1, "ok": 1}
    assert [x["message"] for x in sorted(report["not right"], key=lambda x: x["status"])] == [
        "its process died",
        "RuntimeError: an illegal memory access",
        "no result after 3 s",
    ]


def test_wrong_and_refused(recorded):
    entries = sorted(files.load(recorded / "rec.zip").entries, key=lambda e: e.name)
    lines = replay.run_group(entries, launches.wrong)
    assert [x["status"] for x in lines] == ["wrong", "ok", "ok", "ok"] and "e.g. at (0, 3): " in lines[0]["message"]
    (line,) = replay.run_group(entries[:1], launches.refuses)
    assert (line["status"], line["message"]) == ("refused", "the launcher says no")
    with pytest.raises(UnsupportedCall):
        replay.run_group(entries, launches.refuses)
    found = dict(enumerate([*lines[:2], line]))
    report = replay.report(files.load(recorded / "rec.zip"), found)
    assert report["summary"] == {"wrong": 1, "ok": 1, "refused": 1, "not run": 1}
    assert [x["status"] for x in report["not right"]] == ["wrong", "refused", "not run"]
    json.dumps(report)


def test_another_gpu(recorded, tmp_path):
    with pytest.raises(SystemExit, match="is for sm_90a; here is sm_100a"):
        replayed(recorded, tmp_path, launches.right, arch="sm_100a")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, ml_dtypes.float8_e4m3fn])
def test_comparison_of_floats(dtype):
    want = randoms(64, 64).astype(dtype)
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert compare(want.copy(), want).same
    near = (want.astype(np.float32) * np.float32(1 + eps)).astype(dtype)
    found = compare(near, want)
    assert not found.same and not found.wrong and 0 < found.norm <= 2 * eps
    for value in (np.nan, 400.0, 0.0):
        other = want.copy()
        other[np.unravel_index(np.abs(want.astype(np.float32)).argmax(), want.shape)] = value
        assert compare(other, want).wrong, value
    assert "3 of 4096 elements are NaN or infinite on one side only" in compare(_with_nans(want), want).message
    assert compare(_with_nans(near), _with_nans(want)).wrong is False
    assert compare(np.zeros_like(want), want).norm == 1.0


def _with_nans(x):
    x = x.copy()
    x[3, :3] = np.nan
    return x


def test_comparison_of_others():
    x = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert compare(x, x.copy()).same
    assert compare(x + (x == 6), x).message == "1 of 12 elements differ, e.g. at (1, 2): 7, not 6"
    assert compare(x > 3, x > 4).wrong and compare(x[0], x).wrong and compare(x.astype(np.int64), x).wrong
    inf = np.array([np.inf, 1], np.float32)
    assert compare(-inf, inf).wrong and not compare(inf, inf).wrong
    assert compare(np.array([-0.0], np.float32), np.array([0.0], np.float32)) == compare(
        np.array([0.0], np.float32), np.array([-0.0], np.float32)
    )
    assert jnp.isfinite(compare(inf * np.float32(1 + 1e-7), inf).norm)


def stuck(x, o, barrier):
    plgpu.when(x[0, 0] >= -1e9)(lambda: plgpu.barrier_wait(barrier))
    plgpu.when(x[0, 0] < -1e9)(lambda: plgpu.barrier_arrive(barrier))  # else it is refused before it runs
    o[0] = x[0]


def test_a_finding_has_no_frame_of_the_recorder(recorder):
    """What tests say of tracebacks holds while they are recorded."""
    kernel = plgpu.kernel(stuck, out(1, 128), scratch_types=[plgpu.Barrier()])
    with pytest.raises(Deadlock) as e:
        kernel(randoms(1, 128))
    shown = [f.name for f in traceback.extract_tb(e.value.__traceback__)]
    assert shown == ["test_a_finding_has_no_frame_of_the_recorder", "__call__"]
    assert len(list((recorder.folder / "found").iterdir())) == 1


@pytest.mark.parametrize("failing", ["pytest", "recording", None])
def test_a_failed_test_does_not_lose_the_recording(tmp_path, failing):
    """`make recording` compiles what was recorded all the same, and fails; it also fails where that does."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("mosaic_gpu", "kernels", "bin"):
        (tmp_path / folder).mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho $2 >> ran\ncase $2 in *{failing}) exit 1;; esac\n")
    python.chmod(0o755)
    command = ["make", "recording", "VENV=.", "--assume-old", "./.installed"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / "ran").read_text().split() == ["pytest", "tests.gpu.recording"], made.stderr
    assert (made.returncode != 0) == (failing is not None), made.stderr
