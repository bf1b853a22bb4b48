"""Register layouts against the closed forms of the PTX ISA, and what reductions make of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_gpu.layouts.registers import Digit, Layout, RegisterLayout, strided, tcgen05_native, wgmma
from mosaic_gpu.layouts.shared import row_major


def counts(layout: RegisterLayout) -> np.ndarray:
    """How many (warp, lane, register) hold each element."""
    found = np.zeros(layout.shape, int)
    np.add.at(found, tuple(np.moveaxis(layout.coordinates().reshape(-1, len(layout.shape)), 1, 0)), 1)
    return found


@pytest.mark.parametrize(("m", "n"), [(64, 8), (64, 256), (128, 64), (192, 24)])
def test_wgmma_closed_form(m, n):
    """D of wgmma (PTX ISA 9.7.15.5): row 16w + g + 8 ((i / 2) % 2), column 8 (i / 4) + 2q + i % 2; 64 rows after 64 rows."""
    c = wgmma((m, n)).coordinates()
    assert c.shape == (4, 32, m * n // 128, 2)
    for w, lane, i in itertools.product(range(4), range(32), range(m * n // 128)):
        g, q = lane // 4, lane % 4
        block, j = divmod(i, n // 2)
        assert tuple(c[w, lane, i]) == (64 * block + 16 * w + g + 8 * (j // 2 % 2), 8 * (j // 4) + 2 * q + j % 2)


@pytest.mark.parametrize("k", [16, 64])
def test_wgmma_is_the_a_fragment(k):
    """A of m64k16 in registers: row 16w + g + 8 ((i / 2) % 2), k 2q + i % 2 + 8 (i / 4), i < 8, 16 columns after 16."""
    c = wgmma((64, k)).coordinates()
    for w, lane, i in itertools.product(range(4), range(32), range(k // 2)):
        g, q = lane // 4, lane % 4
        step, j = divmod(i, 8)
        assert tuple(c[w, lane, i]) == (16 * w + g + 8 * (j // 2 % 2), 16 * step + 2 * q + j % 2 + 8 * (j // 4))


@pytest.mark.parametrize("n", [8, 64])
def test_row_layout(n):
    """WGMMA.reduce(1): two rows a thread, each held by the four lanes of its quad."""
    row = Layout.WGMMA.reduce(1).of((64,))
    assert row.same_map(wgmma((64, n)).reduce(1)) and row.registers == 2
    c = row.coordinates()
    for w, lane, i in itertools.product(range(4), range(32), range(2)):
        assert c[w, lane, i, 0] == 16 * w + lane // 4 + 8 * i
    assert (counts(row) == 4).all()


def test_column_layout():
    """WGMMA.reduce(0): the columns of a row, held by all 32 row positions; 8 columns are 2 registers."""
    column = Layout.WGMMA.reduce(0).of((16,))
    assert column.registers == 4
    c = column.coordinates()
    for w, lane, i in itertools.product(range(4), range(32), range(4)):
        assert c[w, lane, i, 0] == 8 * (i // 2) + 2 * (lane % 4) + i % 2
    assert (counts(column) == 32).all()


@pytest.mark.parametrize(("m", "n"), [(128, 1), (128, 72), (256, 16)])
def test_tcgen05_native_closed_form(m, n):
    """tcgen05.ld.32x32b (PTX ISA 9.7.16.8): TMEM lane 32w + t, column r; a thread has whole rows."""
    c = tcgen05_native((m, n)).coordinates()
    for w, lane, r in itertools.product(range(4), range(32), range(m * n // 128)):
        block, column = divmod(r, n)
        assert tuple(c[w, lane, r]) == (128 * block + 32 * w + lane, column)


@pytest.mark.parametrize(
    ("shape", "vector"),
    [((128,), 1), ((1024,), 4), ((64, 64), 2), ((16, 8), 1), ((4, 32, 16), 4), ((2, 64), 1), ((512, 8), 2)],
)
def test_strided_closed_form(shape, vector):
    """Row-major round robin of 128 threads in vectors."""
    layout = strided(shape, vector)
    c = layout.coordinates()
    assert layout.registers == math.prod(shape) // 128
    for w, lane, i in itertools.product(range(4), range(32), range(layout.registers)):
        flat = ((i // vector * 4 + w) * 32 + lane) * vector + i % vector
        assert tuple(c[w, lane, i]) == np.unravel_index(flat, shape)


@settings(deadline=None)
@given(m=st.integers(1, 3), n=st.sampled_from([1, 2, 3, 5, 8, 16]))
def test_every_element_once(m, n):
    """Property: full layouts hold every element exactly once; reduced ones as often as the reduced extent has lanes and warps."""
    for layout in (wgmma((64 * m, 8 * n)), tcgen05_native((128 * m, n)), strided((128 * m, 2 ** n.bit_length()))):
        assert (counts(layout) == 1).all()
    assert (counts(wgmma((64 * m, 8 * n)).reduce(1)) == 4).all()
    assert (counts(wgmma((64 * m, 8 * n)).reduce(0)) == 32).all()
    assert (counts(tcgen05_native((128 * m, n)).reduce(1)) == 1).all()
    assert (counts(tcgen05_native((128 * m, n)).reduce(0)) == 128).all()


@settings(deadline=None, max_examples=30)
@given(m=st.integers(1, 2), n=st.integers(1, 8), axis=st.integers(0, 1))
def test_a_reduction_keeps_every_thread_where_it_was(m, n, axis):
    """Property: the thread that holds (i, j) also holds the result's element of the axis that is left."""
    wide = wgmma((64 * m, 8 * n))
    narrow = wide.reduce(axis)
    all_wide, all_narrow = wide.coordinates(), narrow.coordinates()
    for w, lane in ((0, 0), (1, 7), (3, 31)):
        assert set(all_wide[w, lane, :, 1 - axis]) == set(all_narrow[w, lane, :, 0])


def test_reduce_of_all_axes():
    scalar = wgmma((64, 16)).reduce((0, 1))
    assert scalar.shape == () and scalar.registers == 1


def test_register_part():
    """What the register adds to the coordinates is the same for every thread."""
    layout = wgmma((128, 16))
    c = layout.coordinates()
    for i in range(layout.registers):
        assert (c[:, :, i] - c[:, :, 0] == np.array(layout.register_part(i))).all()


def test_unit_dimensions():
    row = wgmma((64, 16)).reduce(1).with_unit_dims((64, 1), (0,))
    assert row.shape == (64, 1) and (row.coordinates()[..., 1] == 0).all()
    assert (row.coordinates()[..., 0] == wgmma((64, 8)).reduce(1).coordinates()[..., 0]).all()
    column = wgmma((64, 16)).reduce(0).with_unit_dims((1, 16), (1,))
    assert (column.coordinates()[..., 0] == 0).all()


def test_same_map_looks_through_digits_and_names():
    a = RegisterLayout("a", (128,), (), (Digit(32, 0, 1),), (Digit(4, 0, 32),))
    b = RegisterLayout(
        "b", (128,), (Digit(1, 0, 5),), (Digit(4, 0, 1), Digit(8, 0, 4)), (Digit(2, 0, 32), Digit(2, 0, 64))
    )
    c = RegisterLayout("c", (128,), (), (Digit(8, 0, 4), Digit(4, 0, 1)), (Digit(4, 0, 32),))
    assert a.same_map(b) and (a.coordinates() == b.coordinates()).all() and not a.same_map(c)
    assert strided((128,)).same_map(a)
    assert tcgen05_native((128, 64)).reduce(1).same_map(a), "rows of a TMEM load are one a thread, in order"
    assert not wgmma((64, 64)).same_map(strided((64, 64)))


@pytest.mark.parametrize(
    ("layout", "shape", "words"),
    [
        (Layout.WGMMA, (63, 8), "multiple of 64 and n of 8"),
        (Layout.WGMMA, (64, 12), "multiple of 64 and n of 8"),
        (Layout.WGMMA, (64,), "multiple of 64"),
        (Layout.WGMMA.reduce(1), (32,), "multiple of 64"),
        (Layout.TCGEN05_TMEM_NATIVE, (64, 8), "multiple of 128"),
        (Layout.WG_STRIDED, (64,), "do not divide over 128 threads"),
        (Layout.WG_STRIDED, (3, 5, 128 // 8), "do not divide"),
        (Layout.WG_STRIDED, (128, 3, 3), "cannot be split over threads evenly"),
    ],
)
def test_shapes_that_do_not_fit(layout, shape, words):
    with pytest.raises(ValueError, match=words):
        layout.of(shape)


def test_names():
    assert str(wgmma((64, 8))) == "WGMMA[64, 8]" and "reduce(1,)" in str(wgmma((64, 8)).reduce(1))
    assert Layout.WGMMA() is Layout.WGMMA and Layout.WGMMA.reduce(1) == Layout.WGMMA.reduce((1,))


RESHAPES = [
    (wgmma((64, 32)), (64, 16, 2)),
    (wgmma((64, 64)), (64, 2, 4, 4, 2)),
    (wgmma((64, 32)), (2048,)),
    (wgmma((64, 24)), (1, 8, 8, 24, 1)),
    (tcgen05_native((128, 24)), (128, 8, 3)),
    (tcgen05_native((128, 24)), (4, 32, 24)),
    (strided((16, 64), 4), (64, 16)),
    (strided((16, 64), 2), (1024,)),
    (wgmma((64, 16)).reduce(1), (8, 8)),
]


@pytest.mark.parametrize(("layout", "shape"), RESHAPES, ids=str)
def test_reshaped(layout, shape):
    """Every thread and register has the same element, row by row; and back."""
    other = layout.reshaped(shape)
    assert other is not None and other.shape == shape
    numbers = [(x.coordinates() * row_major(x.shape)).sum(-1) for x in (layout, other)]
    np.testing.assert_array_equal(*numbers)
    back = other.reshaped(layout.shape)
    assert back is not None and back.same_map(layout)


def test_not_reshaped():
    assert wgmma((64, 24)).reshaped((64, 8, 3)) is None


def test_parts_of_elements():
    """They are with the thread that has the whole."""
    whole = wgmma((64, 16))
    c = whole.with_minor((64, 16, 2)).coordinates()
    np.testing.assert_array_equal(c[:, :, ::2, :2], whole.coordinates())
    np.testing.assert_array_equal(c[:, :, 1::2, :2], whole.coordinates())
    np.testing.assert_array_equal(c[..., 2], np.broadcast_to(np.arange(16) % 2, c.shape[:-1]))
