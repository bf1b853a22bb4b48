"""The simulator's findings as they reach the user: of the right class, in few frames, under jit, too; and that it runs at all."""

from __future__ import annotations

import logging
import subprocess
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import Deadlock, OutOfBounds, Race, RegisterBudgetError
from mosaic_gpu.runtime import execute, jax_ffi

X = np.arange(128, dtype=np.float32)


def wait_for_nobody(x: Any, o: Any, barrier: Any) -> None:
    plgpu.when(x[0] >= 0)(lambda: plgpu.barrier_wait(barrier))
    plgpu.when(x[0] < -1e9)(lambda: plgpu.barrier_arrive(barrier))  # else it is refused before it runs
    o[...] = x[...]


def helper(x: Any) -> Any:
    return x.at[500][...]


def reads_outside(x: Any, o: Any) -> None:
    o[0] = helper(x)


def stuck(**options: Any) -> Any:
    shape = jax.ShapeDtypeStruct((128,), jnp.float32)
    return plgpu.kernel(wait_for_nobody, shape, scratch_types=[plgpu.Barrier()], **options)


def users_calls(f: Any) -> Any:
    return f(X)


def frames(error: BaseException) -> list[str]:
    return [f.name for f in traceback.extract_tb(error.__traceback__)]


@pytest.fixture
def whole_tracebacks():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


# ---- outside jit ----------------------------------------------------------------------------------------------------------
def test_a_finding_shows_the_users_frames_only() -> None:
    with pytest.raises(Deadlock) as e:
        users_calls(stuck())
    assert frames(e.value) == ["test_a_finding_shows_the_users_frames_only", "users_calls", "__call__"]
    assert e.value is plgpu.last_report()


def test_so_does_a_refusal_with_those_of_the_body() -> None:
    kernel = plgpu.kernel(reads_outside, jax.ShapeDtypeStruct((128,), jnp.float32))
    with pytest.raises(OutOfBounds) as e:
        users_calls(kernel)
    assert frames(e.value) == ["test_so_does_a_refusal_with_those_of_the_body", "users_calls", "__call__"]
    assert e.value.line is not None and e.value.line.function == "helper"


def test_pallas_call_too() -> None:
    def outside(x: Any, o: Any) -> None:
        o[...] = x[plgpu.ds(100, 128)]

    call = plgpu.pallas_call(outside, jax.ShapeDtypeStruct((128,), jnp.float32), interpret=plgpu.SimulatorParams())
    with pytest.raises(OutOfBounds) as e:
        users_calls(call)
    assert frames(e.value) == ["test_pallas_call_too", "users_calls", "__call__", "outside"]


def test_whole_where_jax_is_told_so(whole_tracebacks: None) -> None:
    with pytest.raises(Deadlock) as e:
        users_calls(stuck())
    assert {"run_grid", "process_primitive"} <= set(frames(e.value))


# ---- under jit -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap], ids=["jit", "jit of vmap"])
def test_under_jit_the_text_is_the_report(wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    x = X if wrap is not jax.vmap else np.stack([X, X])
    with pytest.raises(jax.errors.JaxRuntimeError) as e, caplog.at_level(logging.ERROR):
        jax.block_until_ready(jax.jit(wrap(lambda x: 2 * stuck()(x)))(x))
    report = plgpu.last_report()
    assert type(report) is Deadlock and report.line is not None and report.line.function.startswith("wait_for_nobody")
    assert str(e.value).startswith(f"ABORTED: Deadlock: {report}") and "Traceback" not in str(e.value)
    assert not caplog.records, "JAX has logged an exception of a callback"


def test_what_is_refused_when_it_is_planned_keeps_its_class_and_is_short_under_jit() -> None:
    def odd(x: Any, o: Any) -> None:
        plgpu.set_max_registers(33, action="decrease")
        o[...] = x[...]

    kernel = plgpu.kernel(odd, jax.ShapeDtypeStruct((128,), jnp.float32))
    with pytest.raises(RegisterBudgetError) as e:
        users_calls(jax.jit(kernel))
    ours = [f.filename for f in traceback.extract_tb(e.value.__traceback__) if "/mosaic_gpu/" in f.filename]
    assert len(ours) == 1 and ours[0].endswith("frontend/kernel.py")
    assert e.value.line is not None and e.value.line.function.endswith("odd")


def test_under_jit_the_next_call_runs() -> None:
    f = jax.jit(stuck())
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(f(X))
    np.testing.assert_array_equal(f(-1 - X), -1 - X)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap, jax.jit], ids=["jit", "jit of vmap", "jit of jit"])
@pytest.mark.parametrize("order", ["bad, bad", "good, bad, bad", "bad, good, bad"])
def test_under_jit_every_call_says_the_same(wrap: Any, order: str) -> None:
    """Once a call has ended well JAX takes a way through C++, on which every error is a ValueError: the text is the same."""
    f = jax.jit(wrap(lambda x: 2 * stuck()(x)))
    bad = np.stack([X, X]) if wrap is jax.vmap else X
    seen = set()
    for data in order.split(", "):
        if data == "good":
            np.testing.assert_array_equal(f(-1 - bad), 2 * (-1 - bad))
            continue
        kind = (jax.errors.JaxRuntimeError, ValueError)
        with pytest.raises(kind, match="^ABORTED: Deadlock: deadlock: none of 1 ") as e:
            jax.block_until_ready(f(bad))
        report = plgpu.last_report()
        assert type(report) is Deadlock and str(report) in str(e.value)
        seen.add(str(e.value))
    assert len(seen) == 1


def test_a_longer_report_than_fits_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_ffi, "REPORT_BYTES", 64)
    with pytest.raises(jax.errors.JaxRuntimeError) as e:
        jax.block_until_ready(jax.jit(stuck())(X))
    assert str(e.value).startswith("ABORTED: Deadlock: deadlock: none of")
    assert len(str(e.value).split("\n")[0]) < 64 + len("ABORTED: ")


def test_what_is_no_finding_is_jaxs_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("a mistake of the simulator")

    monkeypatch.setattr(execute, "simulate", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError: a mistake"):
        jax.block_until_ready(jax.jit(stuck())(-1 - X))


def test_results_of_all_types_pass_unchanged() -> None:
    """The call that ends an execution with a report hands results on in their place."""
    types = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint16, jnp.bool_)
    shapes = [jax.ShapeDtypeStruct((128,), t) for t in types]

    def convert(x: Any, *outs: Any) -> None:
        for o in outs:
            o[...] = (x[...] % 3).astype(o.dtype)

    kernel = plgpu.kernel(convert, shapes)
    found = jax.jit(kernel)(X)
    for y, eager, t in zip(found, kernel(X), types, strict=True):
        assert y.dtype == eager.dtype == t
        np.testing.assert_array_equal(np.asarray(y), np.asarray(eager))
        np.testing.assert_array_equal(np.asarray(y).astype(np.float32), (X % 3).astype(t).astype(np.float32))


def test_without_the_library_the_exception_carries_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_ffi, "can_report", lambda: False)
    with pytest.raises(jax.errors.JaxRuntimeError) as e:
        jax.block_until_ready(jax.jit(stuck())(X))
    assert f"Deadlock: {plgpu.last_report()}" in str(e.value)


# ---- that it runs ----------------------------------------------------------------------------------------------------------
SAYS = """
import jax, jax.numpy as jnp
import mosaic_gpu as plgpu

def copy(x, o):
    o[...] = x[...]

def kernel(**options):
    return plgpu.kernel(copy, jax.ShapeDtypeStruct((128,), jnp.float32), **options)

x = jnp.ones(128)
{calls}
"""


@pytest.mark.parametrize(
    ("calls", "times"),
    [
        ("kernel()(x); kernel()(x); kernel()(-x)", 1),
        ("kernel()(x); jax.jit(kernel())(x)", 1),
        ("jax.jit(kernel())(x); jax.vmap(kernel())(x[None])", 1),
        ("kernel(interpret=True)(x); jax.jit(kernel(interpret=plgpu.SimulatorParams()))(x)", 0),
    ],
)
def test_it_says_once_that_it_runs(calls: str, times: int, tmp_path: Any) -> None:
    path = tmp_path / "says.py"
    path.write_text(SAYS.format(calls=calls))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["mosaic_gpu: no GPU here, kernels run in the simulator"] * times


def test_each_report_has_the_names_of_its_own_program() -> None:
    """Two kernels that differ in nothing but what they call a buffer, one after the other."""

    def body(x: Any, o: Any, s: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(x, s, barrier)
        o[...] = s[...]
        plgpu.barrier_wait(barrier)

    scratch = [plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()]
    bodies = (lambda x, o, mine, b: body(x, o, mine, b)), (lambda x, o, yours, b: body(x, o, yours, b))
    for name, f in (("mine", bodies[0]), ("yours", bodies[1]), ("mine", bodies[0])):
        with pytest.raises(Race) as e:
            plgpu.kernel(f, jax.ShapeDtypeStruct((64, 64), jnp.float32), scratch_types=scratch)(jnp.ones((64, 64)))
        assert e.value.place.endswith(f"smem {name}"), e.value.place
