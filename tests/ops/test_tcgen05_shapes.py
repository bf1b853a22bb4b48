"""Which N tcgen05_mma takes: every one up to 300 for every kind and place, against the tables written out.

PTX ISA 9.7.16.2.1, table 39 (M and N of each kind), and table 52 (8-bit elements contiguous along N).  CUTLASS's headers ask for
more in pairs of blocks and of A in tensor memory; what both allow is taken.
"""

from __future__ import annotations

import itertools

import pytest

from mosaic_gpu.errors import IllegalInstruction
from mosaic_gpu.ops.tcgen05_rules import Shape, check_shape


def steps(step: int) -> set[int]:
    return set(range(step, 257, step))


SCALED = ("mxf8f6f4", "mxf4nvf4")
TABLE_39 = {  # kind: of one block, of a pair
    "f16": (steps(8), steps(16)),
    "tf32": (steps(8), steps(16)),
    "f8f6f4": (steps(8), steps(16)),
    "i8": ({8, 16, 24, 32} | steps(16), steps(32)),
    "mxf8f6f4": (steps(8), steps(16)),
    "mxf4nvf4": (steps(8), steps(16)),
}
BYTES = {"f16": 2, "tf32": 4, "f8f6f4": 1, "i8": 1, "mxf8f6f4": 1, "mxf4nvf4": 1}


def legal(kind: str, pair: bool, a_in_tmem: bool, b_mn: bool, sparse: bool) -> set[int]:
    found = TABLE_39[kind][pair]
    if b_mn and BYTES[kind] == 1:
        found = found & (steps(32) if pair else steps(16))  # table 52
    if a_in_tmem or sparse:
        found = found & (steps(32) if pair else steps(16))  # CUTLASS
    if pair and (kind in SCALED or kind in ("f8f6f4", "i8")):
        found = found & steps(32)  # CUTLASS
    return found


@pytest.mark.parametrize("kind", TABLE_39)
def test_every_n(kind: str) -> None:
    for pair, a_in_tmem, b_mn, sparse in itertools.product((False, True), repeat=4):
        if (
            (sparse and (a_in_tmem or kind in SCALED))
            or (a_in_tmem and kind in SCALED)
            or (kind == "mxf4nvf4" and b_mn)
        ):
            continue  # refused before N is looked at
        taken = set()
        for n in range(1, 301):
            for m in (256,) if pair else (64, 128):
                if m == 64 and a_in_tmem:
                    continue
                try:
                    check_shape(Shape(kind, m, n, pair, a_in_tmem, b_mn, BYTES[kind], sparse), None)  # type: ignore[arg-type]
                    taken.add(n)
                except IllegalInstruction as error:
                    assert f"n = {n}; legal with M = {m} in " in error.message
        assert taken == legal(kind, pair, a_in_tmem, b_mn, sparse), (pair, a_in_tmem, b_mn, sparse)
