"""Runs `with_fake_driver/` in processes of their own, as the launcher picks its driver once for a process."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    compiler = next(name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and shutil.which(name))
    source = str(HERE / "fake_libcuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), source, "-lpthread"], check=True)
    return library


@pytest.mark.parametrize("name", ["test_bundle.py", "test_launches.py", "test_refusals.py", "test_through_jax.py"])
def test_against_a_fake_driver(fake_driver: pathlib.Path, name: str) -> None:
    environment = os.environ | {"MOSAIC_GPU_LIBCUDA": str(fake_driver), "JAX_PLATFORMS": "cpu"}
    inner = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(HERE / "with_fake_driver" / name)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert inner.returncode == 0, inner.stdout + inner.stderr  # also when the process died, or collected nothing


def test_without_a_driver_a_launch_says_so() -> None:
    script = (
        "from mosaic_gpu import errors; from mosaic_gpu.runtime import device, native\n"
        "from mosaic_gpu.runtime.launch_spec import LaunchSpec\n"
        "assert device.driver_version() is None\n"
        "spec = LaunchSpec(b'x', 'k', (1, 1, 1), 128, (1, 1, 1), 0, (), 'NVRTC 13.0 sm_90a')\n"
        "try:\n    native.Launcher(spec).launch([], [])\n"
        "except errors.ToolchainError as error:\n    print(error)\n"
    )
    environment = os.environ | {"MOSAIC_GPU_LIBCUDA": "/nowhere/libcuda.so.1"}
    outer = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert "/nowhere/libcuda.so.1" in outer.stdout and "cannot be loaded" in outer.stdout, outer.stdout + outer.stderr
