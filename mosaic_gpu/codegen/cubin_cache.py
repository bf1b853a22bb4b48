"""Compiled kernels on disk, by content: the same source, options, architecture and compiler are compiled once.

The cache lives in the user's cache directory; ``MOSAIC_GPU_CACHE_DIR`` names another, and set to nothing turns it off.
A directory that somebody else could write to is refused, since the GPU would run what lies in it. An entry carries the
hash of its content and is compiled anew when that does not fit. Several processes that want one kernel compile it once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import stat
import tempfile
import threading
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import filelock
import platformdirs

from mosaic_gpu.codegen.nvrtc import BASE_OPTIONS, Compiled, compile_cuda, find_nvrtc
from mosaic_gpu.errors import MosaicGpuError, ToolchainError

ENVIRONMENT_VARIABLE = "MOSAIC_GPU_CACHE_DIR"
_MAGIC = b"mosaic-gpu cubin 1\n"
_REMEMBERED = 256  # kernels kept in this process

_log = logging.getLogger(__name__)
_guard = threading.Lock()
_memo: OrderedDict[str, Compiled] = OrderedDict()
_key_locks: dict[str, threading.Lock] = {}
_refused: dict[str, MosaicGpuError] = {}
_checking: set[threading.Thread] = set()
_compilations = 0


class CacheResult(NamedTuple):
    compiled: Compiled
    hit: bool  # it was not compiled now


def compile_count() -> int:
    """How many times this process has run the compiler through the cache."""
    return _compilations


def forget() -> None:
    """Drops what this process remembers; the files stay."""
    settle()
    with _guard:
        _memo.clear()
        _refused.clear()


def cache_key(source: str, *, arch: str, name: str, options: Sequence[str], toolchain: str) -> str:
    """The hash of everything that the cubin depends on."""
    digest = hashlib.sha256(_MAGIC)
    for part in (source, arch, name, toolchain, *options):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))  # so that no two lists of parts run into one text
        digest.update(encoded)
    return digest.hexdigest()


def cached_compile(
    source: str,
    *,
    arch: str,
    name: str,
    extra_options: Sequence[str] = (),
    accept: Callable[[Compiled], None] | None = None,
    in_background: bool = False,
) -> CacheResult:
    """`compile_cuda`, unless the result is at hand. Errors are not remembered.

    accept: called with a fresh result before it is kept on disk; what it refuses (by raising) is not kept.
    in_background: return the fresh result at once and let a thread call `accept`, which may take longer than compiling; a
    refusal is logged when it comes and raised when the kernel is next asked for. `settle` waits for it.
    """
    options = (*BASE_OPTIONS, *extra_options)
    key = cache_key(source, arch=arch, name=name, options=options, toolchain=find_nvrtc().toolchain)
    with _guard:
        key_lock = _key_locks.setdefault(key, threading.Lock())
    with key_lock:
        with _guard:
            if key in _refused:
                raise _refused[key]
            if key in _memo:
                _memo.move_to_end(key)
                return CacheResult(_memo[key], True)
        request = _Request(key, source, arch, name, tuple(extra_options), accept, in_background)
        result = _from_disk_or_compiler(request)
        with _guard:
            _memo[key] = result.compiled
            while len(_memo) > _REMEMBERED:
                _memo.popitem(last=False)
    return result


def settle() -> None:
    """Waits until every result that was returned before its check has been checked."""
    with _guard:
        waiting = list(_checking)
    for thread in waiting:
        thread.join()


@dataclasses.dataclass(frozen=True)
class _Request:
    key: str
    source: str
    arch: str
    name: str
    extra_options: tuple[str, ...]
    accept: Callable[[Compiled], None] | None
    in_background: bool


def _from_disk_or_compiler(request: _Request) -> CacheResult:
    folder = cache_folder()
    path = folder / request.key if folder else None
    if path and (stored := _read(path)):
        return CacheResult(stored, True)
    answer: Future[CacheResult] = Future()
    if request.in_background and request.accept is not None:
        # All of it in one thread: a file lock belongs to the thread that took it.
        thread = threading.Thread(target=_compile, args=(request, path, answer), name="mosaic_gpu check")
        with _guard:
            _checking.add(thread)
        thread.start()
    else:
        _compile(request, path, answer)
    return answer.result()


def _compile(request: _Request, path: Path | None, answer: Future[CacheResult]) -> None:
    """Compile, answer, judge and keep; where a caller waits for the judgement, answer last.  Errors become the answer."""
    global _compilations
    try:
        # One lock file for each first byte of the key: few files, and unrelated kernels seldom wait for each other.
        with filelock.FileLock(path.parent / f"{request.key[:2]}.lock") if path else contextlib.nullcontext():
            if path and (stored := _read(path, complain=True)):  # another process was faster
                answer.set_result(CacheResult(stored, True))
                return
            compiled = compile_cuda(
                request.source, arch=request.arch, name=request.name, extra_options=request.extra_options
            )
            with _guard:
                _compilations += 1
            if request.in_background:
                answer.set_result(CacheResult(compiled, False))
            if request.accept is not None:
                request.accept(compiled)
            if path:
                _write(path, compiled)
            if not request.in_background:
                answer.set_result(CacheResult(compiled, False))
    except BaseException as error:
        if not answer.done():
            answer.set_exception(error)
        elif isinstance(error, MosaicGpuError):
            _log.error("%s was compiled and started, but is refused: %s", request.name, error)
            with _guard:
                _refused[request.key] = error
                _memo.pop(request.key, None)
        else:
            raise
    finally:
        with _guard:
            _checking.discard(threading.current_thread())


def cache_root() -> Path:
    """The directory that is ours, or that was named: the cache is a folder in it."""
    return Path(os.environ.get(ENVIRONMENT_VARIABLE) or platformdirs.user_cache_dir("mosaic_gpu", appauthor=False))


def cache_folder() -> Path | None:
    """The directory of the cache, made if need be; None where it is turned off or cannot be made."""
    wanted = os.environ.get(ENVIRONMENT_VARIABLE)
    if wanted == "":
        return None
    folder = cache_root() / "cubins"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        warnings.warn(f"Compiled kernels are not kept: {folder} cannot be made ({error}).", stacklevel=2)
        return None
    if status.st_uid != os.geteuid():
        raise ToolchainError(
            f"The cache of compiled kernels {folder} belongs to another user (id {status.st_uid}), who could put code "
            f"there for your GPU to run. Set {ENVIRONMENT_VARIABLE} to a directory of your own, or to nothing to do "
            "without a cache."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ToolchainError(
            f"Others may write to the cache of compiled kernels {folder} (mode {stat.S_IMODE(status.st_mode):o}), "
            f"and so put code there for your GPU to run. Run `chmod 700 {folder}`, or set {ENVIRONMENT_VARIABLE} to "
            "another directory, or to nothing to do without a cache."
        )
    return folder


def _write(path: Path, compiled: Compiled) -> None:
    header = {
        "log": compiled.log,
        "arch": compiled.arch,
        "toolchain": compiled.toolchain,
        "name": compiled.name,
        "options": compiled.options,
        "ptx": compiled.ptx,
    }
    content = zlib.compress(json.dumps(header).encode() + b"\n" + compiled.cubin, 1)
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix="writing-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(content).digest() + content)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:  # a full disk must not stop a kernel that has been compiled
        _log.warning("the cubin cache could not keep %s: %s", path, error)


def _read(path: Path, complain: bool = False) -> Compiled | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("the cubin cache could not read %s: %s", path, error)
        return None
    start = len(_MAGIC) + hashlib.sha256().digest_size
    content = data[start:]
    if data[:start] != _MAGIC + hashlib.sha256(content).digest():
        if complain:
            _log.warning("the cubin cache entry %s is damaged; it is compiled again", path)
        return None
    header, _, cubin = zlib.decompress(content).partition(b"\n")
    fields = json.loads(header)
    fields["options"] = tuple(fields["options"])
    return Compiled(cubin=cubin, **fields)
