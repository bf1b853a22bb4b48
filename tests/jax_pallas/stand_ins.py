"""What the imports of JAX's tests become: our `pallas_call` and its surroundings under the names that the tests use."""

from __future__ import annotations

import types

import hypothesis
import jax
import jax.export
from absl.testing import parameterized

import mosaic_gpu

pl = mosaic_gpu

# TPU names that the tests use for any platform.  VMEM is where a TPU computes, SMEM its memory for scalars: here blocks in shared
# memory, and what is read element by element where it is.
pltpu = types.SimpleNamespace(
    PrefetchScalarGridSpec=mosaic_gpu.PrefetchScalarGridSpec, VMEM=mosaic_gpu.SMEM, SMEM=mosaic_gpu.GMEM
)

htu = types.SimpleNamespace(hypothesis_is_thread_safe=lambda: False, max_examples=10)


def _setup_hypothesis(max_examples: int = 10) -> None:
    hypothesis.settings.register_profile(
        "jax_pallas",
        max_examples=min(max_examples, htu.max_examples),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    )
    hypothesis.settings.load_profile("jax_pallas")


htu.setup_hypothesis = _setup_hypothesis


def test_cases(jtu: types.ModuleType) -> types.SimpleNamespace:
    """The base class of the tests; jtu: JAX's own test utilities, which the tests import themselves."""

    @jtu.with_config(jax_traceback_filtering="off")
    class PallasTest(jtu.JaxTestCase, parameterized.TestCase):
        INTERPRET = False

        def pallas_call(self, *args, **kwargs):
            return mosaic_gpu.pallas_call(*args, **kwargs, interpret=self.INTERPRET)

    return types.SimpleNamespace(PallasTest=PallasTest, PallasTPUTest=PallasTest)


EXPORT = jax.export.export
OURS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu_launch", "mosaic_gpu_simulate_late")]


def _export(f, *, platforms=None, disabled_checks=(), **options):
    """JAX's, for a GPU where a test names a TPU; JAX vouches for the targets of its own custom calls only."""
    names = ["cuda" if p == "tpu" else p for p in platforms or ()] or None
    return EXPORT(f, platforms=names, disabled_checks=[*disabled_checks, *OURS], **options)


def on_no_device(jtu: types.ModuleType) -> None:
    """No device is special: neither a CPU's skips nor a TPU's and a GPU's exceptions apply."""
    jax.export.export = _export
    jtu.test_device_matches = lambda kinds: False
    jtu.is_device_tpu = lambda *a, **k: False
    jtu.skip_on_devices = lambda *a, **k: lambda f: f
    assert jax.default_backend() == "cpu"
