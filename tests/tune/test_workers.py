"""Workers, one for each GPU, with fake timers: everything is searched, crashes and hangs cost one config, Ctrl-C ends all."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from mosaic_gpu.runtime import device
from mosaic_gpu.tune import cache, header, schema
from mosaic_gpu.tune.measure import protocol
from mosaic_gpu.tune.search import Settings
from mosaic_gpu.tune.tunable import find_tunable
from mosaic_gpu.tune.workers import Job, Machine, machine_here, run_all

FAKES = pathlib.Path(__file__).parent / "fakes.py"
# Timers that misbehave on one config (a=8, b=4), and one that says which GPU it is on.
BAD = """
    import importlib.util, os, sys, time
    from mosaic_gpu.tune.tunable import _module_of
    fakes = _module_of({fakes!r})
    Fake = fakes.Fake

    class Bad(fakes.Timer):
        def samples(self, config, repeats, stop_above):
            if (config.a, config.b) == (8, 4):
                {what}
            return super().samples(config, repeats, stop_above)

    def make_timer(tunable, workload, arch, seed):
        return Bad()

    def slow(tunable, workload, arch, seed):
        return fakes.Timer(pause=0.25)

    class Where(fakes.Timer):
        def samples(self, config, repeats, stop_above):
            with open({log!r}, "a") as f:
                f.write(os.environ["CUDA_VISIBLE_DEVICES"] + " " + str(workload_of[self]) + "\\n")
            time.sleep(0.005)
            return super().samples(config, repeats, stop_above)

    workload_of = {{}}

    def where(tunable, workload, arch, seed):
        timer = Where()
        workload_of[timer] = workload
        return timer
"""


@pytest.fixture
def host(fakes, folder, tmp_path):
    """host(gpus, what): (jobs of shapes, machine) with a timer that does `what` on one config."""

    def make(*shapes, gpus=("0",), what="pass", timer="make_timer"):
        path = tmp_path / "timers.py"
        log = str(tmp_path / "log")
        path.write_text(textwrap.dedent(BAD.format(fakes=str(FAKES), what=what, log=log)))
        tunable = find_tunable(f"{FAKES}:Fake")
        settings = Settings(slack=2.0)
        jobs = [Job(f"{FAKES}:Fake", tunable.parse(s).to_json(), str(folder), settings) for s in shapes]
        return jobs, Machine("sm_90a", fakes.DEVICE, fakes.TOOLCHAIN, tuple(gpus), f"{path}:{timer}")

    return make


def trials(folder):
    data = cache.read(folder / "nvidia_h200" / "fake.json")
    assert schema.problems(data) == []
    return {e["workload"]["m"]: e["trials"] for e in data["entries"]}


def test_all_gpus_are_used_and_all_workloads_searched(host, folder, tmp_path):
    jobs, machine = host("m64n64", "m128n64", "m256n64", gpus=("0", "GPU-b"), timer="where")
    events = []
    found = dict(run_all(jobs, machine, budget=60.0, on_event=lambda n, e: events.append((n, e.what))))
    assert set(found) == {0, 1, 2} and all(o.best["config"]["a"] == 8 for o in found.values())
    assert {m: len(t) for m, t in trials(folder).items()} == {64: 17, 128: 17, 256: 17}
    lines = [line.split(" ", 1) for line in (tmp_path / "log").read_text().splitlines()]
    assert {gpu for gpu, _ in lines} == {"0", "GPU-b"}
    assert all(len({gpu for gpu, w in lines if w == shape}) == 1 for shape in {w for _, w in lines})
    assert {n for n, what in events if what == "timing"} == {0, 1, 2}


def test_who_ran_out_of_time_gets_what_the_others_left(host, folder):
    """Of 9 s the first of three workloads may take 3 and needs more; the others, known already, take none."""
    jobs, machine = host("m128n64", "m256n64", what="pass")
    assert all(o.left == 0 for _, o in run_all(jobs, machine, budget=math.inf))
    jobs, machine = host("m64n64", "m128n64", "m256n64", timer="slow")
    found = list(run_all(jobs, machine, budget=9.0))
    assert [n for n, _ in found] == [0, 1, 2, 0]
    first, last = found[0][1], found[-1][1]
    assert first.left > 0 == last.left
    assert last.measured == 17 and last.known == 0 and last.best["config"]["a"] == 8


def test_a_guided_search_leaves_out_what_it_likes(host):
    """That is not for want of time, and no reason to go on."""
    jobs, machine = host("m64n64")
    jobs = [dataclasses.replace(j, settings=Settings(slack=2.0, guided=4)) for j in jobs]
    assert [n for n, _ in run_all(jobs, machine, budget=60.0)] == [0]


@pytest.mark.parametrize(
    ("what", "words"),
    [("os._exit(11)", "took its process with it (exit code 11)"), ("time.sleep(600)", "did not end")],
    ids=["crash", "hang"],
)
def test_a_config_that_takes_the_gpu_with_it_costs_itself(host, folder, what, words):
    jobs, machine = host("m64n64", what=what)
    found = dict(run_all(jobs, machine, budget=60.0, hang_seconds=2.0))
    (crashed,) = [t for t in trials(folder)[64] if t["status"] == "crashed"]
    assert (crashed["config"]["a"], crashed["config"]["b"]) == (8, 4) and words in crashed["message"]
    assert len(trials(folder)[64]) == 17 and found[0].best["config"] != crashed["config"]


def test_a_host_that_always_fails_is_given_up(host, folder):
    jobs, machine = host("m64n64", what="pass", timer="make_timer")
    path, _, _ = machine.timer.rpartition(":")
    pathlib.Path(path).write_text("import os\nos._exit(3)\n")
    ((number, error),) = run_all(jobs, machine, budget=60.0)
    assert number == 0 and "ended 1 times, the last with exit code 3" in str(error)


def test_an_error_of_ours_is_the_outcome(host, folder):
    jobs, machine = host("m64n64")
    folder.mkdir()
    (folder / "nvidia_h200").mkdir()
    (folder / "nvidia_h200" / "fake.json").write_text("{")
    ((_, error),) = run_all(jobs, machine, budget=60.0)
    assert "is no JSON" in str(error)


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_ending_the_parent_ends_the_workers_and_loses_nothing(host, folder, name, tmp_path):
    jobs, machine = host("m64n64", "m128n64", gpus=("0", "1"), timer="where")
    script = f"""
        import pathlib
        from mosaic_gpu.tune.search import Settings
        from mosaic_gpu.tune.workers import Job, Machine, run_all
        from mosaic_gpu.tune.tunable import find_tunable

        if __name__ == "__main__":
            find_tunable({str(FAKES) + ":Fake"!r})
            jobs = {jobs!r}
            machine = {machine!r}
            for n, e in run_all(jobs, machine, budget=60.0, on_event=lambda n, e: print(e.what, flush=True)):
                pass
    """
    path = tmp_path / "parent.py"
    path.write_text(textwrap.dedent(script))
    parent = subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    seen = 0
    for line in parent.stdout:
        seen += line.strip() == "trial"
        if seen == 8:
            break
    os.killpg(parent.pid, signal.SIGINT) if name == "SIGINT" else os.kill(parent.pid, signal.SIGKILL)
    parent.wait(20)
    until = time.monotonic() + 20
    while time.monotonic() < until and _group(parent.pid):
        time.sleep(0.1)
    assert not _group(parent.pid), "workers are left"
    assert sum(map(len, trials(folder).values())) >= 8
    again = dict(run_all(jobs, machine, budget=60.0))
    assert all(o.known + o.measured >= 17 for o in again.values()) and sum(o.known for o in again.values()) >= 8


def _group(pgid):
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == pgid and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


def test_the_host_as_jax_shows_it(monkeypatch):
    """Every GPU like the first takes part, under the number that CUDA_VISIBLE_DEVICES gives it; the header is of the schema."""

    class Gpu:
        device_kind, compute_capability, core_count = "NVIDIA H200", "9.0", 132

    class Other(Gpu):
        device_kind = "NVIDIA T4"

    monkeypatch.setattr(device, "gpu_devices", lambda: [Gpu(), Other(), Gpu()])
    monkeypatch.setattr(header, "smi", lambda: (143 << 30, 700.0, "580.159"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    here = machine_here()
    assert (here.arch, here.gpus, here.device["name"]) == ("sm_90a", ("0", "2"), "nvidia_h200")
    assert here.toolchain["driver"] == "580.159" and here.toolchain["nvrtc"].startswith("NVRTC ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,GPU-7")
    assert machine_here().gpus == ("5", "GPU-7")
    attention = find_tunable("attention")
    data = header.empty_cache(attention, here.device)
    data["header"]["provenances"]["x"] = header.provenance(attention, here.toolchain, protocol(0))
    assert schema.problems(data) == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("143771, 700.00, 580.159\n143771, 700.00, 580.159\n", (143771 << 20, 700.0, "580.159")),
        ("143771, [N/A], 580.159\n", (143771 << 20, None, "580.159")),
        ("nonsense\n", (None, None, None)),
        ("", (None, None, None)),
    ],
)
def test_what_nvidia_smi_says(monkeypatch, text, wanted):
    monkeypatch.setattr(header.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    done = subprocess.CompletedProcess([], 0, text)
    monkeypatch.setattr(header.subprocess, "run", lambda *a, **k: done)
    assert header.smi() == wanted
