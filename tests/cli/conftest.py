"""Running verbs in this process, as on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from mosaic_gpu.cli.app import app
from mosaic_gpu.runtime import device


@pytest.fixture
def verb(monkeypatch, tmp_path) -> Callable[..., Any]:
    """verb("compile", "attention", ...): the result, with exit_code, stdout and stderr.  No GPU, its own kernel cache."""
    monkeypatch.setattr(device, "gpu_devices", lambda: [])
    monkeypatch.setenv("MOSAIC_GPU_CACHE_DIR", str(tmp_path / "cache"))
    return lambda *args: CliRunner().invoke(app, [str(a) for a in args])
