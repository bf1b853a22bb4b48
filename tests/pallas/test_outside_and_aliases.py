"""Blocks that lie outside their array, and outputs on an input's buffer: the same as XLA operations and in the simulator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as pl
from mosaic_gpu.errors import IllegalInstruction
from tests.support import out

X = np.arange(1, 4097, dtype=np.float32).reshape(64, 64)
BOTH = pytest.mark.parametrize("interpret", [True, False], ids=["xla", "simulator"])
ROWS = pl.BlockSpec((16, 64), lambda i: (i, 0))


def copied(indices, interpret, of_output):
    """Blocks of 16 rows, of the input or of the output at `indices`."""

    def body(s, x, o):
        o[...] = x[...]

    here, there = pl.BlockSpec((16, 64), lambda i, s: (i, 0)), pl.BlockSpec((16, 64), lambda i, s: (s[i], 0))
    spec = pl.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(4,),
        in_specs=[here if of_output else there],
        out_specs=there if of_output else here,
    )
    params = pl.CompilerParams(dimension_semantics=("parallel",))
    f = pl.pallas_call(body, out(64, 64), grid_spec=spec, interpret=interpret, compiler_params=params)
    return np.asarray(f(np.asarray(indices, np.int32), X))


@BOTH
def test_inputs_outside_are_zeros(interpret):
    found = copied([4, -1, 0, 70], interpret, of_output=False)
    np.testing.assert_array_equal(found, np.concatenate([0 * X[:32], X[:16], 0 * X[:16]]))


@BOTH
@pytest.mark.filterwarnings("ignore::mosaic_gpu.simulator.UnwrittenOutput")
def test_outputs_past_the_end_are_dropped(interpret):
    found = copied([3, 12, 0, 1], interpret, of_output=True)
    np.testing.assert_array_equal(found[[*range(32), *range(48, 64)]], np.concatenate([X[32:], X[:16]]))
    assert np.isnan(found[32:48]).all()


def test_outputs_in_front_are_refused():
    """As the GPU would end the kernel."""
    with pytest.raises(IllegalInstruction, match=r"in front of an array, from \(-16, 0\)"):
        copied([3, -1, 0, 1], False, of_output=True)


def half(x, o):
    o[:32] = x[:32] * 2


def nothing(x, o):
    pass


def one_block(x, o):
    @pl.when(pl.program_id(0) == 1)
    def _():
        o[...] = x[...] * 3


def increments(x, o):
    o[...] = o[...] + 1


@BOTH
@pytest.mark.parametrize(
    "body, options, scale, add",
    [
        (half, {}, np.repeat([2, 1], 32), 0),
        (nothing, {}, np.ones(64), 0),
        (one_block, {"grid": 4, "in_specs": [ROWS], "out_specs": ROWS}, np.repeat([1, 3, 1, 1], 16), 0),
        (increments, {"grid": 4, "in_specs": [ROWS], "out_specs": ROWS}, np.ones(64), 1),
        (
            increments,
            {"grid": 3, "in_specs": [spec := pl.BlockSpec((24, 64), lambda i: (i, 0))], "out_specs": spec},
            np.ones(64),
            1,
        ),
    ],
    ids=["half", "nothing", "one block", "increments", "blocks that stick out"],
)
def test_what_is_not_written_keeps_the_inputs_values(interpret, body, options, scale, add):
    f = pl.pallas_call(body, out(64, 64), input_output_aliases={0: 0}, interpret=interpret, **options)
    np.testing.assert_array_equal(jax.jit(f)(jnp.asarray(X)), X * scale[:, None].astype(np.float32) + add)
