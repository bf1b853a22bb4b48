"""`doctor` names what is missing and how to get it, and survives whatever is broken."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re

import pytest

from mosaic_gpu.cli import checks
from mosaic_gpu.codegen import cubin_cache, nvrtc, sass
from mosaic_gpu.errors import ToolchainError
from mosaic_gpu.runtime import device, native


def report(verb):
    result = verb("doctor", "--json")
    data = json.loads(result.stdout)
    return result, {c["name"]: c for c in data["checks"]}, {a["name"]: a for a in data["works"]}


def absent(message):
    def raising(*_, **__):
        raise message if isinstance(message, BaseException) else ToolchainError(message)

    return raising


def test_here(verb):
    result, found, works = report(verb)
    assert result.exit_code == 0
    assert works["simulate"]["works"] and works["compile for sm_90a"]["works"] and works["compile for sm_100a"]["works"]
    assert found["NVRTC"]["detail"].startswith("NVRTC 1") and "libnvrtc" in found["NVRTC"]["detail"]
    table = verb("doctor").stdout
    assert "What will work" in table and "nvdisasm" in table


def test_without_a_gpu(verb, monkeypatch):
    monkeypatch.setattr(nvrtc, "driver_version", lambda: None)
    monkeypatch.setattr(checks, "driver_gpus", lambda: [])
    _, found, works = report(verb)
    assert found["GPU"]["status"] == found["NVIDIA driver"]["status"] == "missing"
    assert not works["run on the GPU"]["works"] and "needs GPU" in works["run on the GPU"]["why"]
    assert works["simulate"]["works"]


def test_a_gpu_that_jax_does_not_see(verb, monkeypatch):
    monkeypatch.setattr(checks, "driver_gpus", lambda: [("NVIDIA H200", (9, 0))])
    monkeypatch.setattr(nvrtc, "driver_version", lambda: (12, 8))
    _, found, works = report(verb)
    assert found["JAX on the GPU"]["remedy"] == "pip install 'mosaic-gpu[cuda12]'"
    assert "needs JAX on the GPU" in works["run on the GPU"]["why"]


def test_a_gpu_and_everything(verb, monkeypatch):
    monkeypatch.setattr(checks, "driver_gpus", lambda: [("NVIDIA H200", (9, 0))])
    monkeypatch.setattr(nvrtc, "driver_version", lambda: (14, 0))
    monkeypatch.setattr(device, "gpu_devices", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(native, "load", lambda: type("Library", (), {"_name": "launch.so"})())
    assert report(verb)[2]["run on the GPU"]["works"]


def test_a_gpu_of_another_generation(verb, monkeypatch):
    monkeypatch.setattr(checks, "driver_gpus", lambda: [("NVIDIA A100", (8, 0))])
    _, found, works = report(verb)
    assert found["GPU"]["status"] == "problem" and "Hopper" in found["GPU"]["remedy"]
    assert not works["run on the GPU"]["works"]


@pytest.mark.parametrize(
    "module, name, check, remedy",
    [
        (nvrtc, "find_nvrtc", "NVRTC", "nvidia-cuda-nvrtc"),
        (sass, "find_nvdisasm", "nvdisasm", "nvidia-cuda-nvdisasm"),
        (native, "load", "native launcher", "mosaic-gpu"),
        (cubin_cache, "cache_folder", "kernel cache", "MOSAIC_GPU_CACHE_DIR"),
    ],
)
@pytest.mark.parametrize("error", [ToolchainError("it is not installed"), OSError("no such thing"), KeyError("x")])
def test_missing_parts(verb, monkeypatch, module, name, check, remedy, error):
    monkeypatch.setattr(module, name, absent(error))
    result, found, works = report(verb)
    assert result.exit_code == 0
    assert found[check]["status"] == ("missing" if isinstance(error, ToolchainError) else "problem")
    assert remedy in found[check]["remedy"]
    assert works["simulate"]["works"]
    assert works["compile for sm_90a"]["works"] == (check in ("native launcher", "kernel cache"))


def test_no_jax_at_all(verb, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "jax" else find(name, *a))
    result, found, works = report(verb)
    assert result.exit_code == 1
    assert found["jax"]["status"] == "missing" and found["jax"]["remedy"].startswith("pip install 'jax")
    assert not any(a["works"] for a in works.values())


def test_an_old_nvrtc(verb, monkeypatch):
    monkeypatch.setattr(
        checks, "nvrtc", lambda: checks.Check("NVRTC", "ok", "NVRTC 12.4", data={"architectures": [80, 90]})
    )
    works = report(verb)[2]
    assert works["compile for sm_90a"]["works"] and "too old" in works["compile for sm_100a"]["why"]


def test_cache_turned_off(verb, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_CACHE_DIR", "")
    assert report(verb)[1]["kernel cache"]["status"] == "missing"


def test_environment_variables_are_named_with_what_they_chose(verb, monkeypatch, tmp_path):
    disassembler = sass.find_nvdisasm()
    monkeypatch.setenv("MOSAIC_GPU_NVDISASM", disassembler)
    _, found, _ = report(verb)
    assert found["nvdisasm"]["detail"].endswith(f"{disassembler} (chosen by MOSAIC_GPU_NVDISASM)")
    assert found["nvdisasm"]["detail"][0].isdigit()  # the version it says of itself
    assert f"MOSAIC_GPU_NVDISASM={disassembler} chooses the disassembler" in found["environment"]["detail"]
    assert "(chosen by MOSAIC_GPU_CACHE_DIR)" in found["kernel cache"]["detail"]  # by the fixture
    assert found["environment"]["status"] == "ok" and "chosen by" not in found["NVRTC"]["detail"]


@pytest.mark.parametrize(
    "variable, check",
    [("MOSAIC_GPU_NVDISASM", "nvdisasm"), ("MOSAIC_GPU_NVRTC", "NVRTC"), ("MOSAIC_GPU_NATIVE", "native launcher")],
)
def test_a_variable_that_chose_wrong_is_the_remedy(verb, monkeypatch, variable, check):
    native.load.cache_clear()
    monkeypatch.setenv(variable, "/nowhere")
    result, found, _ = report(verb)
    assert result.exit_code == 0 and not found[check]["status"] == "ok"
    assert found[check]["remedy"] == f"{variable}=/nowhere chooses it: name another, or unset it"


def test_a_misspelled_variable(verb, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_NVDISAM", "/somewhere")
    found = report(verb)[1]["environment"]
    assert found["status"] == "problem" and "MOSAIC_GPU_NVDISAM means nothing" in found["detail"]
    assert found["remedy"] == "write MOSAIC_GPU_NVDISASM"


def test_a_variable_that_is_jaxs(verb, monkeypatch):
    """JAX's own Mosaic GPU has variables of the same prefix, and sets some when it is imported."""
    monkeypatch.setenv("MOSAIC_GPU_NVSHMEM_BC_PATH", "/somewhere")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    assert report(verb)[1]["environment"]["status"] == "ok"


def test_the_whole_cache_is_looked_at(verb, tmp_path):
    cubins = tmp_path / "cache" / "cubins"
    cubins.mkdir(parents=True, mode=0o700)
    for i in range(3):
        (cubins / f"{i:064x}").write_bytes(bytes(1_000_000))
    (cubins / "00.lock").touch()
    (tmp_path / "cache").chmod(0o755)
    found = report(verb)[1]["kernel cache"]
    assert found["status"] == "ok" and "3 kernels, 3.0 MB (mode 755 cache, mode 700 cubins)" in found["detail"]
    (tmp_path / "cache").chmod(0o777)
    found = report(verb)[1]["kernel cache"]
    assert found["status"] == "problem" and "others may replace what is in" in found["detail"]
    assert found["remedy"] == f"chmod go-w {tmp_path / 'cache'}"


def test_a_cache_that_cannot_be_written(verb, monkeypatch):
    def full(dir):
        raise OSError(28, "No space left on device", str(dir))

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", full)
    found = report(verb)[1]["kernel cache"]
    assert found["status"] == "problem" and "No space left" in found["detail"]


def test_every_variable_that_is_read_is_known():
    """Names in the package's own code, but for its C++ macros."""
    package = pathlib.Path(checks.__file__).parents[1]
    text = "\n".join(p.read_text() for p in (*package.rglob("*.py"), *(package / "runtime" / "native").glob("*.cc")))
    names = set(re.findall(r"""(?:environ|getenv|VARIABLE)\W.*?["'](MOSAIC_GPU_\w+)["']""", text))
    assert names <= set(checks.VARIABLES) and {"MOSAIC_GPU_COMMIT", "MOSAIC_GPU_PALLAS_BACKEND"} <= names
    assert all(name in text.replace(f'"{name}": "', "") for name in checks.VARIABLES)


@pytest.mark.parametrize(
    "variable, value, words",
    [
        ("MOSAIC_GPU_PALLAS_BACKEND", "tritn", "there is no backend 'tritn'"),
        ("MOSAIC_GPU_PALLAS_BACKEND", "", "there is no backend ''"),
        ("MOSAIC_GPU_LIBCUDA", "/nowhere/libcuda.so", "cannot open shared object"),
    ],
)
def test_a_value_that_means_nothing(verb, monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    found = report(verb)[1]["environment"]
    assert found["status"] == "problem" and variable in found["detail"] and words in found["detail"] and found["remedy"]


def test_a_folder_of_tuned_configs_that_is_a_file(verb, monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_TUNE_DIR", str(tmp_path))
    assert report(verb)[1]["tuned configs"]["detail"] == f"{tmp_path} (chosen by MOSAIC_GPU_TUNE_DIR), 0 files"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOSAIC_GPU_TUNE_DIR", str(tmp_path / "file"))
    found = report(verb)[1]["tuned configs"]
    assert found["status"] == "problem" and found["remedy"] == "set MOSAIC_GPU_TUNE_DIR to a folder of your own"
