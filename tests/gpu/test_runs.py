"""Copies of and additions to rows on a GPU, whole ones and those that stick out; tests/ops/test_runs.py simulates them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.ops.test_runs import CASES, arguments, expected, row_kernel

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("length", "dtype", "add"), CASES)
def test_rows(length, dtype, add):
    """Past the end nothing is written and zeros are read; 30 runs, each into other memory."""
    x, before = arguments(length, dtype)
    kernel = jax.jit(row_kernel(length, dtype, add))
    for _ in range(30):
        np.testing.assert_array_equal(np.asarray(kernel(x, before)), expected(x, before, add))
