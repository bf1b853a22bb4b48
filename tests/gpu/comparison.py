"""How far a GPU's results may be from the simulator's: both round at the same places, and add in another order.

The simulator computes an operation in the type that the GPU computes it in, so that most results are the same to the bit.  What
may differ: `ex2.approx`, `lg2.approx`, `rcp.approx` and the like (docs/ops.md has their errors), and sums on the tensor core,
which adds in an order and with an internal precision of its own.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

# Of the norm of the difference, relative to that of the result.
# float32: products are of operands rounded to tf32 on both sides; what is left are sums, which lose some bits of 24 when terms
# cancel, and the approximate units, each amplified by what follows it.
ALLOWED = {"float32": 2e-5}
# All others: a result that lies near the middle between two neighbours goes to either, once for each rounding on its way.
ALLOWED_EPS = 4.0
# Of one element, relative to the largest: a norm over many does not show one that is wrong.
ALLOWED_MOST = {"float32": 2e-4}
# Of products of float8: Hopper's tensor core adds their terms with about 14 bits, which the simulator does not model.
ALLOWED_FLOAT8, ALLOWED_MOST_FLOAT8 = 2.0**-12, 2.0**-10


@dataclasses.dataclass(frozen=True)
class Difference:
    """same: to the bit; norm: of the difference, relative; most: its largest element, in eps of the type times the largest value
    expected; message: what is wrong, if anything is."""

    dtype: str
    same: bool
    norm: float = 0.0
    most: float = 0.0
    message: str = ""

    @property
    def wrong(self) -> bool:
        return bool(self.message)


def compare(found: np.ndarray, expected: np.ndarray, float8: bool = False) -> Difference:
    """One output against what is expected of it: integers equal, NaNs and infinities in the same places, the rest near.

    float8: the kernel multiplies numbers of 8 bits.
    """
    dtype = str(expected.dtype)
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return Difference(dtype, False, message=f"{found.dtype}{list(found.shape)}, not {dtype}{list(expected.shape)}")
    if found.tobytes() == expected.tobytes():
        return Difference(dtype, True)
    try:
        eps = float(ml_dtypes.finfo(expected.dtype).eps)
    except ValueError:
        count = int((found != expected).sum())
        return Difference(dtype, False, message=f"{count} of {found.size} elements differ{_first(found, expected)}")
    a, b = found.astype(np.float64), expected.astype(np.float64)
    odd = np.where(np.isfinite(b) & np.isfinite(a), False, ~((a == b) | (np.isnan(a) & np.isnan(b))))
    if odd.any():
        text = (
            f"{int(odd.sum())} of {a.size} elements are NaN or infinite on one side only{_first(found, expected, odd)}"
        )
        return Difference(dtype, False, np.inf, np.inf, text)
    finite = np.isfinite(b)
    off, size = np.abs(a[finite] - b[finite]), np.abs(b[finite])
    norm = _ratio(float(np.linalg.norm(off)), float(np.linalg.norm(size)))
    most = _ratio(float(off.max(initial=0)), float(size.max(initial=0)))
    allowed = ALLOWED.get(dtype, ALLOWED_EPS * eps), ALLOWED_MOST.get(dtype, ALLOWED_EPS * eps)
    if float8:
        allowed = max(allowed[0], ALLOWED_FLOAT8), max(allowed[1], ALLOWED_MOST_FLOAT8)
    message = ""
    if norm > allowed[0] or most > allowed[1]:
        text = f"relative norm {norm:.2e} (allowed {allowed[0]:.2e}), largest {most:.2e} (allowed {allowed[1]:.2e})"
        worst = np.zeros(a.shape, bool)
        worst[finite] = off == off.max()
        message = text + _first(found, expected, worst)
    return Difference(dtype, False, norm, most / eps, message)


def _ratio(a: float, b: float) -> float:
    return a / b if b else (np.inf if a else 0.0)


def _first(found: np.ndarray, expected: np.ndarray, where: np.ndarray | None = None) -> str:
    """One of the elements, for a message."""
    places = np.argwhere(found != expected if where is None else where)
    at = tuple(int(i) for i in places[0]) if len(places) else ()
    return f", e.g. at {at}: {found[at]}, not {expected[at]}" if len(places) else ""
