"""What tests on a GPU share: fresh inputs, and outputs that are written over NaN or, where they are integers, 0x6B."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

POISON = 0x6B  # what integers are full of that have no NaN


def _random(*shape: int, dtype: Any) -> jax.Array:
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    return jnp.asarray(rng.standard_normal(shape), dtype)


def _poisoned(f: Any, *args: jax.Array) -> Any:
    types = jax.tree.leaves(jax.eval_shape(f, *args))
    n = len(args)

    def call(*everything: jax.Array) -> Any:
        return f(*everything[:n])

    donating = jax.jit(call, donate_argnums=tuple(range(n, n + len(types))), keep_unused=True)
    poison = [jnp.full(t.shape, jnp.nan if jnp.issubdtype(t.dtype, jnp.inexact) else POISON, t.dtype) for t in types]
    places = [p.unsafe_buffer_pointer() for p in jax.block_until_ready(poison)]
    out = donating(*args, *poison)
    assert [o.unsafe_buffer_pointer() for o in jax.tree.leaves(out)] == places, (
        "the outputs are not where the poison was"
    )
    return out


@pytest.fixture(scope="session")
def random() -> Callable[..., jax.Array]:
    """random(*shape, dtype=): normal numbers, others on every run."""
    return _random


@pytest.fixture(scope="session")
def poisoned() -> Callable[..., Any]:
    """poisoned(f, *args): f(*args) written into buffers full of NaN (POISON): donated, so XLA gives them to the outputs."""
    return _poisoned
