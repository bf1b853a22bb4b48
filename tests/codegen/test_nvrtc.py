from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from mosaic_gpu.codegen import nvrtc
from mosaic_gpu.errors import ToolchainError

KERNEL = 'extern "C" __global__ void k(int* out) { out[threadIdx.x] = 3; }'


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_compiles_to_a_cubin(arch: str) -> None:
    compiled = nvrtc.compile_cuda(KERNEL, arch=arch, name="/k.cu")
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.arch == arch
    assert compiled.toolchain.startswith("NVRTC 1") and compiled.toolchain.count(".") >= 1
    assert compiled.ptx is not None and ".entry k" in compiled.ptx
    assert "registers" in compiled.log and not compiled.log.endswith("\0")
    assert "ELF" not in repr(compiled)


def test_errors_of_the_language_are_quoted() -> None:
    with pytest.raises(ToolchainError) as caught:
        nvrtc.compile_cuda(f'#line 7 "/user.py"\nint x = missing;\n{KERNEL}', arch="sm_90a", name="/k.cu")
    assert '/user.py(7): error: identifier "missing" is undefined' in str(caught.value)
    assert "int x = missing;" in str(caught.value)


def test_errors_of_the_assembler_are_traced_to_the_source() -> None:
    source = """
__device__ __forceinline__ void inner() { asm volatile("nonsense.op;"); }
__device__ __forceinline__ void outer() { inner(); }
#line 40 "/user.py"
extern "C" __global__ void k() {
  outer();
}"""
    with pytest.raises(ToolchainError) as caught:
        nvrtc.compile_cuda(source, arch="sm_90a", name="/k.cu")
    assert "/user.py(41): error from ptxas" in str(caught.value)
    assert "nonsense.op;" in str(caught.value)


def test_only_the_first_errors_are_shown() -> None:
    source = "\n".join(f"__device__ int x{i} = missing{i};" for i in range(20))
    with pytest.raises(ToolchainError, match="… and 15 more"):
        nvrtc.compile_cuda(source, arch="sm_90a", name="/k.cu")


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ToolchainError, match="sm_90"):
        nvrtc.compile_cuda(KERNEL, arch="sm_17a", name="/k.cu")


def test_threads_compile_in_parallel_without_mixing_results() -> None:
    def compile_one(number: int) -> bool:
        source = f'extern "C" __global__ void k{number}(int* out) {{ out[0] = {number}; }}'
        compiled = nvrtc.compile_cuda(source, arch="sm_90a", name="/k.cu")
        return f"k{number}".encode() in compiled.cubin

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(compile_one, range(12)))


def library(major: int, minor: int) -> Any:
    return SimpleNamespace(version=(major, minor))


@pytest.mark.parametrize(
    ("driver", "expected"), [(None, (13, 5)), ((13, 0), (13, 5)), ((12, 4), (12, 9)), ((14, 1), (13, 5))]
)
def test_the_newest_library_that_the_driver_takes(driver: tuple[int, int] | None, expected: tuple[int, int]) -> None:
    libraries = [library(12, 8), library(13, 0), library(13, 5), library(12, 9)]
    assert nvrtc.newest(libraries, driver).version == expected


def test_no_library_says_what_to_install() -> None:
    with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvrtc"):
        nvrtc.newest([], None)


def test_a_driver_too_old_for_every_library() -> None:
    with pytest.raises(ToolchainError, match=r"CUDA 12\.4.*13\.5.*nvidia-cuda-nvrtc-cu12"):
        nvrtc.newest([library(13, 5)], (12, 4))


def test_the_variable_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    path = nvrtc.list_nvrtc()[0].path
    monkeypatch.setenv(nvrtc.ENVIRONMENT_VARIABLE, path)
    assert nvrtc.find_nvrtc().path == path
    monkeypatch.setenv(nvrtc.ENVIRONMENT_VARIABLE, "/nowhere/libnvrtc.so")
    with pytest.raises(ToolchainError, match="/nowhere/libnvrtc.so"):
        nvrtc.find_nvrtc()


def test_the_library_is_looked_for_once() -> None:
    assert nvrtc.find_nvrtc() is nvrtc.find_nvrtc()


def test_locate_follows_inlined_calls_outwards() -> None:
    ptx = """.visible .entry k()
{
\t.loc\t1 40 5
\t.loc\t2 3 1, function_name $L1, inlined_at 1 40 5
\t.loc\t2 9 2, function_name $L2, inlined_at 2 3 1
\tmov.u32 %r1, 0;
}
\t.file\t1 "/user.py"
\t.file\t2 "/prelude.cuh"
"""
    assert nvrtc.locate(ptx, 6) == ("/user.py", 40)
    assert nvrtc.locate(ptx, 3) == ("/user.py", 40)
    assert nvrtc.locate(ptx, 1) is None
    assert nvrtc.locate(ptx, 0) is None
