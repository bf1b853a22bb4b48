"""How many blocks fit a multiprocessor: by hand for each resource, and of kernels whose limits are known."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.codegen.resources import entry_registers
from mosaic_gpu.plan.residency import residency

F = jnp.float32


def empty(plan, *scratch, warpgroups=1, arch="sm_90a"):
    return plan(lambda *_: None, scratch_types=scratch, num_threads=warpgroups, thread_name="wg", arch=arch)


@pytest.mark.parametrize(
    ("warpgroups", "registers", "blocks"),
    [
        (1, 32, 16),  # 65,536 / (128 x 32)
        (1, 33, 12),  # 40 each: 12.8
        (1, 40, 12),
        (1, 168, 3),
        (1, 255, 2),  # 256 each
        (2, 64, 4),
        (2, 128, 2),
        (3, 168, 1),  # 504 of 512
        (3, 80, 2),  # a partition has room for 6.4 warps, so for two of each block: 65,536 / (384 x 80) is 2.13
        (4, 128, 1),
    ],
)
def test_registers(plan, warpgroups, registers, blocks):
    found = residency(empty(plan, warpgroups=warpgroups), registers)
    assert found.room["registers"] == found.blocks == blocks and "registers" in found.limited_by
    assert found.room["warps"] == 64 // (4 * warpgroups)


@pytest.mark.parametrize(
    ("size", "blocks"),
    [(1024, 114), (100 * 1024, 2), (113 * 1024, 2), (113 * 1024 + 128, 1), (113 * 1024 + 1, 1), (227 * 1024, 1)],
)
def test_shared_memory(plan, size, blocks):
    """228 KiB, of which a block takes 1 KiB more than it asks for."""
    found = residency(empty(plan), 24, size)
    assert found.room["shared memory"] == blocks
    assert (found.limited_by == ("shared memory",)) == (blocks < 16)


@pytest.mark.parametrize(("columns", "blocks"), [(32, 16), (64, 8), (128, 4), (130, 2), (256, 2), (257, 1), (512, 1)])
def test_tensor_memory(plan, columns, blocks):
    """A power of two of 512 columns: with more than 256 a block is alone."""
    found = residency(empty(plan, plgpu.TMEM((128, columns), F), arch="sm_100a"), 32)
    assert found.room["TMEM columns"] == found.blocks == blocks
    assert "TMEM columns" in found.limited_by and (found.limited_by == ("TMEM columns",)) == (blocks < 16)


def test_hopper_has_none(plan):
    assert "TMEM columns" not in residency(empty(plan), 32).room


def test_the_number_of_blocks(plan):
    """An empty block is held by its warps: 16 of 4 each; no block has fewer, so that 32 are never reached."""
    found = residency(empty(plan), 16)
    assert found.blocks == 16 and found.limited_by == ("warps",) and found.room["blocks"] == 32


def test_words(plan):
    full = empty(plan, plgpu.TMEM((128, 512), F), arch="sm_100a")
    assert str(residency(full, 128, 1000)) == (
        "1 block fits a multiprocessor, limited by TMEM columns; room for registers 4, shared memory 114, warps 16, blocks 32"
    )
    unknown = residency(full, None)
    assert str(unknown).startswith(
        "at most 1 block fits a multiprocessor (registers unknown: not compiled), limited by TMEM"
    )
    assert unknown.to_json()["text"] == str(unknown) and unknown.to_json()["room"] == unknown.room


def budgets(x, o):
    wg = lax.axis_index("wg")

    @plgpu.when(wg == 0)
    def _():
        plgpu.set_max_registers(24, action="decrease")

    @plgpu.when(wg > 0)
    def _():
        plgpu.set_max_registers(240, action="increase")
        o[wg] = x[wg]


def test_budgets_stay_in_the_block(plan, array):
    """Registers at launch count, whatever the warpgroups make of them; a small kernel fits several times."""
    p = plan(budgets, array(8), out=array(8), num_threads=3, thread_name="wg")
    at_launch = entry_registers(compile_plan(p).compiled)
    found = residency(p, at_launch)
    assert (at_launch, found.blocks, found.limited_by) == (168, 1, ("registers",))
