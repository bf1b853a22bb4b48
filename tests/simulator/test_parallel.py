"""Clusters in several processes: the same bits, the same reports and the same errors as one after the other."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import errors
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import Report, SimulatorParams, parallel, simulate

TILES = 7


def tiles_kernel(wrong: str = "") -> Any:
    """Each block doubles a tile of x through shared memory; `wrong` says what goes wrong in block 5."""

    def body(x: Any, y: Any, tile: Any, out_tile: Any, full: Any) -> None:
        i = lax.axis_index("i")
        bad = i == 5
        plgpu.copy_gmem_to_smem(x.at[i], tile, full)
        if wrong == "Race":
            plgpu.when(bad)(lambda: plgpu.copy_gmem_to_smem(x.at[0], tile, full))
        if wrong == "UninitializedRead":
            y[0] = plgpu.load(out_tile, layout=plgpu.Layout.WGMMA)
        plgpu.barrier_wait(full)
        if wrong == "Deadlock":
            plgpu.when(bad)(lambda: plgpu.barrier_wait(full))
        out_tile[...] = plgpu.load(tile, layout=plgpu.Layout.WGMMA) * 2.0
        plgpu.commit_smem()
        where = i
        if wrong == "write/write":
            where = lax.select(bad, 1, i)
        if wrong in ("OutOfBounds", "read/write"):

            @plgpu.when(bad)
            def _() -> None:
                other = plgpu.load(y.at[i + 2 if wrong == "OutOfBounds" else i - 3], layout=plgpu.Layout.WGMMA)
                tile[...] = other

        plgpu.copy_smem_to_gmem(out_tile, y.at[where])
        if wrong == "Leak":
            plgpu.when(i < 4)(lambda: plgpu.wait_smem_to_gmem(0))
        else:
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((TILES, 64, 16), jnp.float32),
        scratch_types=[plgpu.SMEM((64, 16), jnp.float32), plgpu.SMEM((64, 16), jnp.float32), plgpu.Barrier()],
        grid=(TILES,),
        grid_names=("i",),
    )


X = np.arange(TILES * 64 * 16, dtype=np.float32).reshape(TILES, 64, 16)


def plan_for(wrong: str = "") -> Any:
    return build_plan(tiles_kernel(wrong).program(jax.ShapeDtypeStruct(X.shape, X.dtype)), "sm_90a")


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call ran in workers."""
    calls: list[bool] = []
    honest = parallel._spread
    monkeypatch.setattr(parallel, "_spread", lambda *args: [calls.append(True), honest(*args)][1])
    return calls


def outcome(plan: Any, **params: Any) -> tuple[Any, ...]:
    """All that can be seen of a simulation, its results or its error."""
    report = Report()
    try:
        with np.errstate(all="ignore"):
            outputs = simulate(plan, [X], SimulatorParams(report=report, **params))
    except errors.MosaicGpuError as error:
        return type(error), str(error), vars(error)
    return [o.tobytes() for o in outputs], report.to_json()


@pytest.mark.parametrize("way", [dict(), dict(timing="early"), dict(seed=3), dict(uninitialized="zero")], ids=str)
def test_same_bits_and_report(spread: list[bool], way: dict[str, Any]) -> None:
    plan = plan_for()
    alone = outcome(plan, processes=1, **way)
    assert not spread and alone[0] == [(2 * X).tobytes()]
    assert outcome(plan, processes=2, **way) == outcome(plan, processes=3, **way) == alone
    assert len(spread) == 2


WRONG = ("Race", "UninitializedRead", "Deadlock", "OutOfBounds", "Leak", "write/write", "read/write")


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("way", [dict(), dict(seed=3)], ids=str)
def test_same_findings(spread: list[bool], wrong: str, way: dict[str, Any]) -> None:
    plan = plan_for(wrong)
    alone = outcome(plan, processes=1, **way)
    if "/" in wrong:
        assert alone[0] is errors.Race and alone[2]["between"] == "grid" and alone[2]["kind"] == wrong
    else:
        assert alone[0] in (getattr(errors, wrong), errors.BarrierMisuse)
    assert outcome(plan, processes=2, **way) == alone
    assert spread


def test_errors_keep_what_they_have() -> None:
    line = errors.Line("a.py", 3, "f")
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.MosaicGpuError)]
    assert len(classes) > 10
    for cls in classes:
        error = cls("what", line)
        error.add_note("under the schedule 'late'")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (cls, str(error), vars(error))
    race = errors.Race("m", line, "write/write", between="grid", other_line=line, who="a", other="b", remedy="r")
    assert vars(pickle.loads(pickle.dumps(race))) == vars(race)


def test_workers_stay_and_know_no_jax() -> None:
    plan = plan_for()
    simulate(plan, [X], processes=2)
    pids = [w.process.pid for w in parallel._pool.workers]
    simulate(plan, [X], processes=2)
    assert [w.process.pid for w in parallel._pool.workers] == pids and len(pids) >= 2
    for pid in pids:
        with open(f"/proc/{pid}/maps") as maps:
            text = maps.read()
        assert "numpy" in text and "jaxlib" not in text


def test_a_worker_that_was_killed_is_replaced() -> None:
    plan = plan_for()
    simulate(plan, [X], processes=2)
    parallel._pool.workers[0].process.kill()
    (y,) = simulate(plan, [X], processes=2)  # here
    assert (y == 2 * X).all() and not parallel._pool.workers
    (y,) = simulate(plan, [X], processes=2)
    assert (y == 2 * X).all() and len(parallel._pool.workers) == 2


def test_while_the_workers_are_busy_it_runs_here() -> None:
    with parallel._pool.lock:
        (y,) = simulate(plan_for(), [X], processes=2)
    assert (y == 2 * X).all()


def test_only_where_it_pays(spread: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for()
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    monkeypatch.setattr(parallel, "WARM", parallel.COLD)  # a busy machine may take longer than a tenth of a second
    simulate(plan, [X])
    assert not spread  # some milliseconds
    monkeypatch.setattr(parallel, "COLD", 0.0)
    monkeypatch.setattr(parallel, "WARM", 0.0)
    monkeypatch.setattr(parallel, "PROBE", 1e-9)
    (y,) = simulate(plan, [X])
    assert spread and (y == 2 * X).all()
    spread.clear()
    simulate(plan, [X], processes=2, checks=False)  # nobody could tell who met whom
    monkeypatch.setattr(parallel, "_cores", lambda: 1)
    simulate(plan, [X])
    assert not spread


def test_workers_are_started_for_the_next_simulation(spread: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """What would pay if they were there, but not to wait for them, runs in one process and starts them."""
    plan, pool = plan_for(), parallel.Pool()
    monkeypatch.setattr(parallel, "_pool", pool)
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    monkeypatch.setattr(parallel, "PROBE", 1e-9)
    monkeypatch.setattr(parallel, "COLD", 1e9)
    try:
        monkeypatch.setattr(parallel, "WARM", 1e9)
        simulate(plan, [X])
        assert not spread and not pool.workers
        monkeypatch.setattr(parallel, "WARM", 0.0)
        simulate(plan, [X])
        assert not spread and len(pool.workers) == 2
        (y,) = simulate(plan, [X])
        assert spread and (y == 2 * X).all()
    finally:
        pool.close()


SCRIPT = """
import os
import jax, jax.numpy as jnp, numpy as np
import mosaic_gpu as plgpu
from mosaic_gpu.simulator import parallel

@plgpu.kernel(out_type=jax.ShapeDtypeStruct((4, 64, 16), jnp.float32), grid=(4,), grid_names=("i",),
              interpret=plgpu.SimulatorParams(processes=2))
def kernel(x, y):
    i = jax.lax.axis_index("i")
    y[i] = plgpu.load(x.at[i], layout=plgpu.Layout.WGMMA)

print("main of", os.getpid(), float(kernel(np.ones((4, 64, 16), np.float32)).sum()))
print(*(w.process.pid for w in parallel._pool.workers))
"""


def test_a_script_without_a_guard_runs_once_and_leaves_nobody(tmp_path: Any) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    first, pids = done.stdout.splitlines()
    assert first.startswith("main of ") and first.endswith(" 4096.0")
    assert len(pids.split()) == 2
    deadline = time.time() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids.split()):
        assert time.time() < deadline, "a worker has outlived its parent"
        time.sleep(0.05)


ENDLESS = """
import jax, numpy as np
import mosaic_gpu as plgpu
from mosaic_gpu.simulator import parallel

@plgpu.kernel(out_type=jax.ShapeDtypeStruct((2,), np.int32), grid=(2,), grid_names=("i",),
              interpret=plgpu.SimulatorParams(processes=2))
def kernel(n, y):
    y[jax.lax.axis_index("i")] = jax.lax.fori_loop(0, n[0], lambda i, x: x + i, 0)

kernel(np.ones(1, np.int32))
print(*(w.process.pid for w in parallel._pool.workers), flush=True)
kernel(np.full(1, 2**31 - 1, np.int32))
"""


def test_workers_end_with_a_parent_that_was_killed_while_they_work() -> None:
    """Found by a user whose endless simulations, ended by `timeout`, went on taking processors."""
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    ) as parent:
        assert parent.stdout is not None
        pids = parent.stdout.readline().split()
        assert len(pids) == 2
        deadline = time.time() + 60
        used = -1.0
        while used < 0.5:  # seconds of their processors: they are at work on the second call
            used = min(sum(map(int, open(f"/proc/{pid}/stat").read().split()[13:15])) for pid in pids) / 100 - 1.5
            assert parent.poll() is None and time.time() < deadline
            time.sleep(0.1)
        parent.kill()
    deadline = time.time() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.time() < deadline, "a worker has outlived its parent"
        time.sleep(0.05)
