"""The reference is complete and of the present docstrings."""

import mosaic_gpu
from tests.reference.page import PAGE, page, text_of, topics


def test_every_public_name_has_a_topic():
    listed = {name for names in topics().values() for name in names}
    assert set(mosaic_gpu.__all__) - listed == {"pl", "plgpu"}


def test_every_public_name_is_documented():
    """With more than a word: what it takes and does."""
    names = [name for names in topics().values() for name in names]
    assert [n for n in names if len(text_of(getattr(mosaic_gpu, n))) < 30] == []


def test_page_is_current():
    assert PAGE.read_text() == page(), "python -m tests.reference.page writes it anew"
