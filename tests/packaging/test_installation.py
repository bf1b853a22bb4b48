"""How the project lies on the disk once it is installed."""

from __future__ import annotations

import importlib.resources
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]


def run_python(script: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)


def test_kernels_are_part_of_the_package(tmp_path):
    assert run_python("import mosaic_gpu.kernels", tmp_path).returncode == 0
    assert "No module named 'kernels'" in run_python("import kernels", tmp_path).stderr


def test_kernels_cannot_be_imported_twice():
    # The current folder is on the path of `python -c`.
    assert "import this package as mosaic_gpu.kernels" in run_python("import kernels", REPOSITORY).stderr
    assert "kernels" not in sys.modules


def test_installation_adds_no_folder_to_the_path(tmp_path):
    script = "import sys; print(*sys.path, sep='\\n')"
    paths = [pathlib.Path(line) for line in run_python(script, tmp_path).stdout.splitlines() if line]
    assert paths and REPOSITORY not in paths and REPOSITORY.parent not in paths


def test_tuning_caches_are_found(tmp_path):
    assert importlib.resources.files("mosaic_gpu.autotune_cache").is_dir()


@pytest.mark.slow
def test_contents_of_the_wheel(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(REPOSITORY)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"mosaic_gpu"}
    assert "mosaic_gpu/runtime/native/libmosaic_gpu_launch.so" in names
    assert "mosaic_gpu/kernels/__init__.py" in names
    assert not [name for name in names if name.endswith((".cc", ".h"))]

    def packaged(folder: str, target: str, suffixes: tuple[str, ...]) -> set[str]:
        files = (path for path in (REPOSITORY / folder).rglob("*") if path.suffix in suffixes)
        return {f"{target}/{path.relative_to(REPOSITORY / folder).as_posix()}" for path in files}

    assert packaged("mosaic_gpu", "mosaic_gpu", (".py", ".cuh")) <= set(names)
    assert packaged("kernels", "mosaic_gpu/kernels", (".py",)) <= set(names)
    assert packaged("autotune_cache", "mosaic_gpu/autotune_cache", (".json",)) <= set(names)

    # It works without the repository, beside JAX as installed here.
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    script = "from mosaic_gpu.runtime import jax_ffi, native; jax_ffi.register(); print(native.load()._name)"
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1"}
    boot = f"import sys; sys.meta_path = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]; {script}"
    done = subprocess.run(
        [sys.executable, "-c", boot], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip().startswith(str(site)), done.stdout + done.stderr
