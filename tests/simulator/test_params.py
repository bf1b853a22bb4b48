"""SimulatorParams: where they can be given, and what they change."""

from __future__ import annotations

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import Race
from mosaic_gpu.simulator import SimulatorParams, simulate, simulator_params
from mosaic_gpu.simulator.params import current


def reuse(interpret=None):
    """A store's buffer is written again: a race; without checks the value depends on the timing."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((2, 64, 64), jnp.float32),
        scratch_types=[plgpu.SMEM((64, 64), jnp.float32)],
        interpret=interpret,
    )
    def kernel(x, y, s):
        for i in range(2):
            s[...] = plgpu.load(x.at[i], layout=plgpu.Layout.WGMMA)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s, y.at[i])
        plgpu.wait_smem_to_gmem(0)

    return kernel


X = np.arange(2 * 64 * 64, dtype=np.float32).reshape(2, 64, 64)


def test_names():
    assert plgpu.SimulatorParams is SimulatorParams and plgpu.simulator_params is simulator_params
    assert SimulatorParams() == SimulatorParams(
        timing="late", seed=None, shadow="regions", checks=True, uninitialized="nan"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        dict(timing="soon"),
        dict(shadow="bits"),
        dict(uninitialized="random"),
        dict(seed=-1),
        dict(seed=True),
        dict(max_steps=0),
        dict(max_steps=None),
        dict(processes=0),
        dict(processes=True),
        dict(checks="off"),
        dict(checks=1),
        dict(report="yes"),
    ],
)
def test_wrong_values(wrong):
    with pytest.raises((TypeError, ValueError), match=rf"SimulatorParams\({next(iter(wrong))}="):
        SimulatorParams(**wrong)


@pytest.mark.parametrize("wrong", [3, "late", {}, SimulatorParams])
def test_context_of_something_else(wrong):
    with pytest.raises(TypeError, match=r"simulator_params\(.*\): a SimulatorParams"), simulator_params(wrong):
        pass


def test_interpret():
    with pytest.raises(Race):
        reuse()(X)
    early = reuse(SimulatorParams(timing="early", checks=False))(X)
    late = reuse(SimulatorParams(timing="late", checks=False))(X)
    np.testing.assert_array_equal(early, X)
    np.testing.assert_array_equal(late, np.stack([X[1], X[1]]))


def test_interpret_under_jit():
    f = jax.jit(reuse(SimulatorParams(timing="early", checks=False)))
    np.testing.assert_array_equal(f(X), X)


@pytest.mark.parametrize("jit", [False, True])
def test_context(jit):
    f = jax.jit(reuse()) if jit else reuse()
    with simulator_params(timing="early", checks=False) as params:
        assert params == current()
        np.testing.assert_array_equal(f(X), X)
        with simulator_params(timing="late"):
            assert current().checks is False
            np.testing.assert_array_equal(f(X), np.stack([X[1], X[1]]))
    assert current() == SimulatorParams()
    kept = reuse(SimulatorParams(timing="early", checks=False))
    with simulator_params(SimulatorParams(timing="late")):
        np.testing.assert_array_equal(kept(X), X)


def test_seeds_repeat(plan_of):
    """A seed is one order: the same report every time; the fixed order is that of seed 0."""
    plan = plan_of(reuse(), X)

    def report(**params):
        with pytest.raises(Race) as e:
            simulate(plan, [X], SimulatorParams(**params))
        return str(e.value)

    assert report(seed=3) == report(seed=3)
    assert report() == report(seed=0)


def test_a_race_travels(plan_of):
    with pytest.raises(Race) as e:
        simulate(plan_of(reuse(), X), [X])
    copy = pickle.loads(pickle.dumps(e.value))
    assert vars(copy) == vars(e.value) and str(copy) == str(e.value)
    assert copy.kind == "buffer in flight" and copy.other_line is not None and copy.remedy


def test_params_are_plain_data():
    params = SimulatorParams(seed=7)
    assert pickle.loads(pickle.dumps(params)) == params and hash(params) == hash(dataclasses.replace(params))
