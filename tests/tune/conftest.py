"""A tuning cache in a folder of the test's own."""

from __future__ import annotations

import pytest

from mosaic_gpu.tune import cache


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The caches are here; returns the folder."""
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path)
    cache.load.cache_clear()
    yield tmp_path
    cache.load.cache_clear()
