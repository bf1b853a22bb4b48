"""What no kernel has is refused by the primitive's name and the user's line, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UnsupportedCall, UnsupportedPrimitive
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

KEY = 3
CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "inverse": (lambda x: jnp.linalg.inv(x), "'lu' .*outside of the kernel .jnp.linalg"),
    "cholesky": (lambda x: jnp.linalg.cholesky(x), "'cholesky' .*outside of the kernel .jnp.linalg"),
    "qr": (lambda x: jnp.linalg.qr(x)[0], "'qr' .*outside of the kernel .jnp.linalg"),
    "svd": (lambda x: jnp.linalg.svd(x)[1], "'svd' .*outside of the kernel .jnp.linalg"),
    "triangular": (lambda x: jax.scipy.linalg.solve_triangular(x, x), "'triangular_solve' .*outside of the kernel"),
    "rfft": (lambda x: jnp.fft.rfft(x).real, "^'fft' is no operation of a kernel: .*outside of the kernel .jnp.fft"),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), "^'fft' is no operation of a kernel: .*outside of the kernel .jnp.fft"),
    "fft2": (lambda x: jnp.fft.fft2(x).real, "^'fft' is no operation of a kernel"),
    "irfft": (lambda x: jnp.fft.irfft(x), "^'fft' is no operation of a kernel"),
    "dct": (lambda x: jax.scipy.fft.dct(x), "^'fft' is no operation of a kernel"),
    "fft in a loop": (
        lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.fft.fft(y).real, x),
        "^'fft' is no operation of a kernel",
    ),
    "complex, not for fft": (lambda x: (x * 1j).real, "^convert_element_type makes complex64 values: .*hand over real"),
    "incomplete beta": (
        lambda x: jax.scipy.special.betainc(x, x, x),
        "'regularized_incomplete_beta' .*jax.scipy.special",
    ),
    "gamma draws": (lambda x: jax.random.gamma(jax.random.key(KEY), x), "random_gamma of a PRNG key"),
    "raw bits": (lambda x: lax.rng_uniform(0.0, 1.0, (4,)), "'rng_uniform' .*draw by jax.random"),
    "ragged product": (
        lambda x: lax.ragged_dot(x, jnp.ones((2, 16, 4)), jnp.array([3, 5])),
        "'ragged_dot_general' .*one jnp.dot each",
    ),
    "gradient of max pool": (
        lambda x: jax.grad(lambda z: lax.reduce_window(z, -np.inf, lax.max, (2, 2), (2, 2), "VALID").sum())(x),
        "'select_and_scatter_add' .*jax.custom_vjp",
    ),
    "callback": (lambda x: jax.pure_callback(lambda v: v, x, x), "'pure_callback' .*debug_print"),
    "kernel in a kernel": (
        lambda x: plgpu.kernel(lambda a, o: o.__setitem__(..., a[...]), jax.ShapeDtypeStruct((16, 16), x.dtype))(x),
        "'mosaic_gpu_kernel' .*one after the other",
    ),
    "bools as an index": (lambda x: x[x > 0], "jnp.nonzero.mask, size=n"),
    "nonzero": (lambda x: jnp.nonzero(x)[0], "give its size="),
    "complex": (lambda x: lax.complex(x, x).real, "complex makes complex64 values: .*hand over real and imaginary"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    f, words = CASES[name]

    def body(x: Any, o: Any) -> None:
        o[...] = jnp.sum(f(x[...])) + jnp.zeros(o.shape, o.dtype)

    x = jax.ShapeDtypeStruct((16, 16), np.float32)
    with pytest.raises((UnsupportedCall, UnsupportedPrimitive), match=words) as e:
        build_plan(plgpu.kernel(body, x).program(x), "sm_90a")
    assert e.value.line is not None and e.value.line.file == __file__


def test_what_stays_where_it_is() -> None:
    """`device_put` without a device, as solvers of JAX's have it, does nothing."""

    def body(x: Any, o: Any) -> None:
        a = x[...]
        o[...] = jax.device_put(a) + jax.scipy.sparse.linalg.cg(lambda v: 2 * v, a[0], maxiter=2)[0]

    x = np.ones((16, 16), np.float32)
    t = jax.ShapeDtypeStruct(x.shape, x.dtype)
    np.testing.assert_allclose(simulate(build_plan(plgpu.kernel(body, t).program(t), "sm_90a"), [x])[0], 1.5)
