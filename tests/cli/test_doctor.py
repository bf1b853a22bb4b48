"""`doctor` names what is missing and how to get it, and survives whatever is broken."""

from __future__ import annotations

import importlib.util
import json

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
