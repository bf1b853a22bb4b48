"""Special functions that CUDA has not: series of JAX's operations, in float32 (16-bit floats rounded once).

Bessel functions: Chebyshev series, fitted with SciPy's values in float64.  digamma, zeta: shifted up by recurrence, then the
Euler-Maclaurin series (NIST DLMF 5.11.2, 25.11.28).  igamma: power series and Legendre's continued fraction (DLMF 8.11.4, 8.9.2).
How far off they are is in docs/ops.md; tests/ops/test_special.py measures it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import UnsupportedCall

# fmt: off
# Of exp(-x) I0(x), and of exp(-x) I1(x) / x, in x / 4 - 1 on 0 to 8; of sqrt(x) exp(-x) I(x) in 16 / x - 1 from 8 on.
I0_NEAR = (
    3.383976372e-01, -3.046826723e-01, 1.716209015e-01, -9.490109705e-02, 4.930528424e-02, -2.373741481e-02,
    1.054646039e-02, -4.324309995e-03, 1.639475617e-03, -5.763755745e-04, 1.885028851e-04, -5.754195010e-05,
    1.644844807e-05, -4.416738358e-06, 1.117387539e-06, -2.670793854e-07, 6.046995011e-08, -1.300025005e-08,
    2.659823750e-09,
)
I0_FAR = (
    4.022452055e-01, 3.369116478e-03, 6.889758347e-05, 2.891370521e-06, 2.048918590e-07, 2.266668991e-08,
    3.396232033e-09, 4.940602464e-10,
)
I1_NEAR = (
    1.262935932e-01, -1.764165184e-01, 1.026436587e-01, -5.294598121e-02, 2.472644903e-02, -1.056408489e-02,
    4.156422944e-03, -1.513572451e-03, 5.122859562e-04, -1.617608158e-04, 4.781565108e-05, -1.327316366e-05,
    3.470251308e-06, -8.568720264e-07, 2.003294753e-07, -4.445059130e-08, 9.381537313e-09, -1.887249731e-09,
    3.625590606e-10,
)
I1_FAR = (
    3.892881175e-01, -9.761097491e-03, -1.105889388e-04, -3.882564809e-06, -2.512236238e-07, -2.631468847e-08,
    -3.835380385e-09, -5.589743512e-10,
)
# fmt: on
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730)  # B2, B4, ...
SHIFT = 8  # steps up, after which the terms of those are below a rounding error
EPSILON = np.float32(2.0**-24)
MOST_TERMS = 2000


def _in_float32(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def call(*x: Any) -> Any:
        dtype = x[0].dtype
        if dtype == jnp.float64:
            name = f.__name__.lstrip("_")
            raise UnsupportedCall(f"{name} of float64: it is computed in float32 here: x.astype(jnp.float32)")
        return f(*(a.astype(jnp.float32) for a in x)).astype(dtype)

    return call


def _chebyshev(t: Any, coefficients: Sequence[float]) -> Any:
    """Clenshaw's recurrence, t from -1 to 1."""
    later = last = jnp.zeros_like(t)
    for c in reversed(coefficients[1:]):
        later, last = 2 * t * later - last + np.float32(c), later
    return t * later - last + np.float32(coefficients[0])


def _bessel(x: Any, near: Sequence[float], far: Sequence[float]) -> tuple[Any, Any]:
    a = jnp.abs(x)
    low = _chebyshev(jnp.minimum(a, 8) / 4 - 1, near)
    big = jnp.maximum(a, 8)
    high = _chebyshev(16 / big - 1, far) / jnp.sqrt(big)
    return low, high


@_in_float32
def _bessel_i0e(x: Any) -> Any:
    low, high = _bessel(x, I0_NEAR, I0_FAR)
    return jnp.where(jnp.abs(x) <= 8, low, high)


@_in_float32
def _bessel_i1e(x: Any) -> Any:
    low, high = _bessel(x, I1_NEAR, I1_FAR)
    return jnp.where(jnp.abs(x) <= 8, low * x, jnp.where(x < 0, -high, high))


@_in_float32
def _digamma(x: Any) -> Any:
    """Below 0.5 reflected: psi(1 - x) - pi / tan(pi x); NaN at -1, -2 and so on, at 0 infinite."""
    below = x < 0.5
    y = jnp.where(below, 1 - x, x)
    steps = [1 / (y + k) for k in range(SHIFT)]
    z = jnp.where(y < SHIFT, y + SHIFT, y)
    square = 1 / (z * z)
    series = jnp.zeros_like(z)
    for k in reversed(range(4)):
        series = (series + np.float32(BERNOULLI[k] / (2 * k + 2))) * square
    found = jnp.log(z) - 0.5 / z - series
    found = jnp.where(y < SHIFT, found - functools.reduce(jnp.add, reversed(steps)), found)
    near = x - jnp.round(x)  # tan has the period 1 in units of pi
    found = jnp.where(below, found - np.float32(np.pi) / jnp.tan(np.float32(np.pi) * near), found)
    return jnp.where((x < 0) & (near == 0), jnp.nan, jnp.where(x == 0, -jnp.inf, found))


@_in_float32
def _zeta(x: Any, q: Any) -> Any:
    """Hurwitz's: the sum of (q + k)^-x from k = 0 on."""
    total = jnp.zeros_like(q + x)
    for k in reversed(range(SHIFT)):
        total = total + jnp.power(q + k, -x)
    a = q + SHIFT
    power = jnp.power(a, -x)
    tail = power * a / (x - 1) + power / 2
    factor, term = x, power / a
    for k, b in enumerate(BERNOULLI):
        tail = tail + np.float32(b / float(np.prod(np.arange(1.0, 2 * k + 3)))) * factor * term
        factor = factor * (x + (2 * k + 1)) * (x + (2 * k + 2))
        term = term / (a * a)
    # Where the first term is all that counts, the rest may be infinity times nothing.
    found = jnp.where(power == 0, total, total + tail)
    whole = jnp.floor(q) == q
    found = jnp.where((q <= 0) & (jnp.floor(x) != x), jnp.nan, found)
    found = jnp.where((q <= 0) & whole, jnp.inf, found)
    return jnp.where(x == 1, jnp.inf, jnp.where(x < 1, jnp.nan, found))


@_in_float32
def _polygamma(m: Any, x: Any) -> Any:
    """The m-th derivative of digamma: (-1)^(m + 1) m! zeta(m + 1, x)."""
    sign = jnp.where(jnp.floor(m / 2) * 2 == m, -1.0, 1.0)
    found = sign * jnp.exp(lax.lgamma(m + 1)) * _zeta(m + 1, x)
    found = jnp.where(m == 0, _digamma(x), found)
    return jnp.where((m < 0) | (jnp.floor(m) != m), jnp.nan, found)


# ---- the incomplete gamma functions ---------------------------------------------------------------------------------------
def _front(a: Any, x: Any) -> Any:
    """x^a e^-x / gamma(a), zero where that is too small for a float32."""
    return jnp.exp(a * jnp.log(x) - x - lax.lgamma(a))


def _series(a: Any, x: Any, on: Any) -> Any:
    """P(a, x) for x not far above a; on: which elements are wanted."""

    def more(state: Any) -> Any:
        n, total, term = state
        return (n < MOST_TERMS) & jnp.any(on & (term > total * EPSILON))

    def add(state: Any) -> Any:
        n, total, term = state
        term = term * x / (a + (n + 1).astype(jnp.float32))
        return n + 1, total + term, term

    one = jnp.ones_like(x)
    return lax.while_loop(more, add, (jnp.int32(0), one, one))[1] * _front(a, x) / a


def _fraction(a: Any, x: Any, on: Any) -> Any:
    """Q(a, x) for x above a: Lentz's method on Legendre's fraction."""
    tiny = np.float32(1e-30)

    def away(v: Any) -> Any:
        return jnp.where(jnp.abs(v) < tiny, tiny, v)

    def more(state: Any) -> Any:
        n, _, _, _, change = state
        return (n < MOST_TERMS) & jnp.any(on & (jnp.abs(change - 1) > 2 * EPSILON))

    def step(state: Any) -> Any:
        n, found, c, d, _ = state
        i = (n + 1).astype(jnp.float32)
        over, under = -i * (i - a), x - a + 1 + 2 * i
        d = 1 / away(over * d + under)
        c = away(under + over / c)
        return n + 1, found * c * d, c, d, c * d

    start = 1 / away(x - a + 1)
    state = (jnp.int32(0), start, jnp.full_like(x, 1 / tiny), start, jnp.zeros_like(x))
    return lax.while_loop(more, step, state)[1] * _front(a, x)


def _incomplete(a: Any, x: Any, upper: bool) -> Any:
    inside = (a > 0) & (x > 0) & (x < jnp.inf) & (a < jnp.inf)
    a_in, x_in = jnp.where(inside, a, 1), jnp.where(inside, x, 1)
    low = (x_in < 1) | (x_in < a_in) if upper else (x_in <= 1) | (x_in <= a_in)  # where that is the smaller part
    p = _series(a_in, jnp.where(low, x_in, a_in), inside & low)
    q = _fraction(a_in, jnp.where(low, a_in + 2, x_in), inside & ~low)
    found = jnp.where(low, 1 - p if upper else p, q if upper else 1 - q)
    found = jnp.where((x == 0) | (a == jnp.inf), 1.0 if upper else 0.0, found)
    found = jnp.where((x == jnp.inf) | (a == 0), 0.0 if upper else 1.0, found)
    wrong = (x < 0) | (a < 0) | (x != x) | (a != a) | ((x == 0) & (a == 0)) | ((x == jnp.inf) & (a == jnp.inf))
    return jnp.where(wrong, jnp.nan, found)


@_in_float32
def _igamma(a: Any, x: Any) -> Any:
    return _incomplete(a, x, False)


@_in_float32
def _igammac(a: Any, x: Any) -> Any:
    return _incomplete(a, x, True)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "bessel_i0e": _bessel_i0e,
    "bessel_i1e": _bessel_i1e,
    "digamma": _digamma,
    "igamma": _igamma,
    "igammac": _igammac,
    "polygamma": _polygamma,
    "zeta": _zeta,
}
