"""A small bundle for Hopper, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mosaic_gpu.bundle import files, make
from mosaic_gpu.bundle.cases import Case

CASES = [
    Case("matmul", "m200n136k72", benchmark=True),
    Case("matmul", "m300n136k72"),
    Case("attention", "b1s100h2kv1d64", causal=True),
]


@pytest.fixture(scope="session")
def made() -> files.Bundle:
    return make.make(CASES, "sm_90a", 3)


@pytest.fixture
def bundle_file(made: files.Bundle, tmp_path: Path) -> Path:
    files.write(made, tmp_path / "bundle.zip")
    return tmp_path / "bundle.zip"
