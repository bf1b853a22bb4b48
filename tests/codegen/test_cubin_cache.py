from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mosaic_gpu.codegen import cubin_cache
from mosaic_gpu.codegen.cubin_cache import CacheResult, cached_compile, compile_count
from mosaic_gpu.codegen.nvrtc import find_nvrtc
from mosaic_gpu.errors import RegisterBudgetError, ToolchainError

SOURCE = 'extern "C" __global__ void k(int* out) { out[threadIdx.x] = %d; }'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(cubin_cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    cubin_cache.forget()
    yield tmp_path / "cache" / "cubins"
    cubin_cache.forget()


def get(number: int = 1, *, arch: str = "sm_90a", name: str = "/k.cu", options: tuple[str, ...] = ()) -> CacheResult:
    return cached_compile(SOURCE % number, arch=arch, name=name, extra_options=options)


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if len(path.name) == 64]


def test_second_time_from_memory_third_from_disk(folder: Path) -> None:
    before = compile_count()
    first, second = get(), get()
    assert (first.hit, second.hit) == (False, True) and second.compiled is first.compiled
    cubin_cache.forget()
    third = get()
    assert third.hit and third.compiled == first.compiled
    assert third.compiled.ptx == first.compiled.ptx and third.compiled.options == first.compiled.options
    assert compile_count() == before + 1


def test_whatever_changes_the_cubin_changes_the_entry(folder: Path) -> None:
    variants = [get(), get(2), get(arch="sm_100a"), get(name="/other.cu"), get(options=("-DX=1",))]
    assert not any(result.hit for result in variants)
    assert len(entries(folder)) == len(variants)


def test_keys_do_not_run_parts_together() -> None:
    def key(options: tuple[str, ...], source: str = "s", toolchain: str = "NVRTC 1") -> str:
        return cubin_cache.cache_key(source, arch="sm_90a", name="n", options=options, toolchain=toolchain)

    keys = {
        key(("ab", "c")),
        key(("a", "bc")),
        key(("abc",)),
        key(()),
        key((), source="t"),
        key((), toolchain="NVRTC 2"),
    }
    assert len(keys) == 6


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_entry_is_compiled_again(folder: Path, damage: str) -> None:
    good = get().compiled
    (entry,) = entries(folder)
    data = entry.read_bytes()
    entry.write_bytes(
        {
            "cut": data[:-5],
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "empty": b"",
            "foreign": b"another program's file",
        }[damage]
    )
    cubin_cache.forget()
    again = get()
    assert not again.hit and again.compiled.cubin == good.cubin
    cubin_cache.forget()
    assert get().hit and entry.read_bytes() != b""


def test_files_are_private(folder: Path) -> None:
    get()
    assert folder.stat().st_mode & 0o777 == 0o700
    (entry,) = entries(folder)
    assert entry.stat().st_mode & 0o077 == 0
    assert not [path for path in folder.iterdir() if path.name.startswith("writing-")]


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_may_write_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(ToolchainError, match=f"mode {mode:o}.*chmod 700"):
        get()


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(cubin_cache.os, "geteuid", lambda: owner + 1)
    with pytest.raises(ToolchainError, match="belongs to another user"):
        get()


def test_a_folder_that_cannot_be_made_means_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="Compiled kernels are not kept"):
        assert not get().hit
    assert get().hit  # this process remembers


def test_set_to_nothing_it_is_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cubin_cache.ENVIRONMENT_VARIABLE, "")
    assert not get().hit
    cubin_cache.forget()
    assert not get().hit
    assert not folder.exists()


def test_the_usual_place_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cubin_cache.ENVIRONMENT_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert cubin_cache.cache_folder() == tmp_path / "home" / "mosaic_gpu" / "cubins"


def test_errors_are_not_kept(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(ToolchainError, match="undefined"):
            cached_compile("__device__ int x = missing;", arch="sm_90a", name="/k.cu")
    assert entries(folder) == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin_cache, "_REMEMBERED", 2)
    for number in range(4):
        get(number)
    assert len(cubin_cache._memo) == 2


def test_processes_that_want_one_kernel_compile_it_once(folder: Path) -> None:
    program = """
import sys
from mosaic_gpu.codegen.cubin_cache import cached_compile, compile_count
sys.stdin.readline()  # all start together
body = "".join(f"out[{i}] = out[{i} * 3 + threadIdx.x] * {i};" for i in range(400))
result = cached_compile('extern "C" __global__ void k(int* out) {' + body + "}", arch="sm_90a", name="/k.cu")
print(compile_count(), result.hit, len(result.compiled.cubin))
"""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate()[0].split() for process in processes]
    assert sorted(int(count) for count, _, _ in answers) == [0, 0, 1]
    assert sorted(hit for _, hit, _ in answers) == ["False", "True", "True"]
    assert len({size for _, _, size in answers}) == 1


def refuse(compiled: object) -> None:
    raise RegisterBudgetError("not kept")


def test_a_result_can_be_used_while_it_is_checked(folder: Path) -> None:
    """The caller has its cubin at once; the file appears only after the check."""
    go_on = threading.Event()
    first = cached_compile(
        SOURCE % 1, arch="sm_90a", name="/k.cu", accept=lambda _: assert_true(go_on.wait(20)), in_background=True
    )
    assert not first.hit and not entries(folder)
    go_on.set()
    cubin_cache.settle()
    assert len(entries(folder)) == 1


def assert_true(value: bool) -> None:
    assert value


def test_a_refusal_in_the_background_is_raised_at_the_next_use(folder: Path) -> None:
    cached_compile(SOURCE % 1, arch="sm_90a", name="/k.cu", accept=refuse, in_background=True)
    cubin_cache.settle()
    assert not entries(folder)
    with pytest.raises(RegisterBudgetError, match="not kept"):
        get()


def test_a_refusal_in_the_foreground_is_not_kept(folder: Path) -> None:
    with pytest.raises(RegisterBudgetError):
        cached_compile(SOURCE % 1, arch="sm_90a", name="/k.cu", accept=refuse)
    assert not entries(folder)
    assert not get().hit


def test_kernels_that_share_a_lock_file_follow_each_other(folder: Path) -> None:
    """The lock was once given back by another thread than took it, and no second kernel of its file could be compiled."""
    by_lock: dict[str, int] = {}
    toolchain = find_nvrtc().toolchain
    for number in range(1000):
        key = cubin_cache.cache_key(
            SOURCE % number, arch="sm_90a", name="/k.cu", options=cubin_cache.BASE_OPTIONS, toolchain=toolchain
        )
        if key[:2] in by_lock:
            pair = by_lock[key[:2]], number
            break
        by_lock[key[:2]] = number
    for number in pair:
        cached_compile(SOURCE % number, arch="sm_90a", name="/k.cu", accept=lambda _: None, in_background=True)
    cubin_cache.settle()
    assert len(entries(folder)) == 2
