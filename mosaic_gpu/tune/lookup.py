"""Which config a call gets, and why: explicit > override > the user's cache > the repository's > the kernel's heuristic.

In the caches an entry of exactly the call's key comes before the nearest one within the kernel's distance, the user's before
the repository's at the same distance.  What cannot be used (a file of another device, a broken entry, a config that today's
kernel refuses) is said in the log, once, and in the explanation; the search goes on without it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib
import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import CacheInvalid, UnsupportedCall
from . import cache
from .tunable import OURS, Tunable, find_tunable, name_is_taken, what_is_missing

log = logging.getLogger("mosaic_gpu")
Source = Literal["explicit", "override", "user", "repository", "heuristic"]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Where a config comes from.

    source: explicit (an argument), override (`override_config`), user, repository (caches), heuristic.
    match: of a cache, exact or nearest; found: that entry's key, distance: how far from `key`.
    stale: the entry was timed with another revision of the kernel's source, or one that was not recorded.
    notes: what was looked at and could not be used.
    reference: what `mosaic-gpu tune run` knows the kernel by.
    """

    kernel: str
    config: Any
    source: Source
    key: Mapping[str, Any]
    device: str | None
    match: Literal["exact", "nearest"] | None = None
    found: Mapping[str, Any] | None = None
    distance: float = 0.0
    path: Path | None = None
    tflops: float | None = None
    date: str = ""
    stale: bool = False
    notes: tuple[str, ...] = ()
    reference: str = ""

    def __str__(self) -> str:
        fields = ", ".join(f"{k}={v}" for k, v in self.config.to_json().items() if k not in ("generation", "kernel"))
        lines = [f"{self.kernel} {_words(self.key)} on {self.device or 'no GPU'}: {self.origin}", f"  {fields}"]
        if self.stale:
            lines.append(f"  {self.other_revision}")
        return "\n".join(lines + [f"  {note}" for note in self.notes])

    @property
    def other_revision(self) -> str:
        """What to say where it is stale."""
        run = self.reference or self.kernel
        return f"timed with another revision of the kernel; `mosaic-gpu tune run {run}` times this one"

    @property
    def origin(self) -> str:
        """In a few words."""
        if self.match is None:
            why = "nothing tuned is near" if self.device else "caches are of GPUs, and there is none"
            return {
                "explicit": "the config that was passed",
                "override": "the config of override_config",
            }.get(self.source, f"the kernel's heuristic: {why}")
        rate = f", {self.tflops:.0f} TFLOP/s there" if self.tflops else ""
        if self.match == "exact":
            near = f"exact key{rate}"
        else:
            found = self.found or {}
            in_order = {k: found[k] for k in sorted(found, key=list(self.key).index)}
            near = f"nearest key ({_words(in_order)}, distance {self.distance:.2g}{rate})"
        return f"tuned, {near}, {self.source} cache {self.path}, {self.date}"


def _words(key: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in key.items())


_overrides: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("mosaic_gpu_overrides", default=())


@contextlib.contextmanager
def override_config(*configs: Any) -> Iterator[None]:
    """While the body runs, calls of these configs' kernels that pass no config take them (of this generation's, the last).

    It counts when a call is traced: a function that `jax.jit` has compiled before keeps what it has.
    """
    for c in configs:
        if not (hasattr(c, "kernel") and hasattr(c, "generation")):
            raise TypeError(f"override_config takes configs such as AttentionConfig(...), not {type(c).__name__}")
    token = _overrides.set((*_overrides.get(), *configs))
    try:
        yield
    finally:
        _overrides.reset(token)


def explain(tunable: Tunable, workload: Any, *, device: str | None, config: Any = None) -> Explanation:
    """The config for a workload on a device (its name, None without a GPU), with its reasons.

    TypeError for a config of another kernel; ValueError for a Tunable of a user's that has the name of a kernel of ours.
    """
    if taken := name_is_taken(tunable):
        raise ValueError(taken)
    key = tunable.key(workload)
    plain = functools.partial(Explanation, tunable.name, key=key, device=device, reference=tunable.reference_text)
    if config is not None:
        if not isinstance(config, tunable.config):
            raise TypeError(
                f"config={config!r} is of another kernel: {tunable.name} takes {tunable.config.__name__}(...)"
            )
        return plain(config, "explicit")
    for c in reversed(_overrides.get()):
        if isinstance(c, tunable.config) and (c.kernel, c.generation) == (tunable.name, tunable.generation):
            return plain(c, "override")
    notes: list[str] = []
    found: list[tuple[float, int, float, cache.Loaded, Any, Any]] = []
    folders: list[tuple[Source, Path]] = [("user", cache.user_folder()), ("repository", cache.repository_folder())]
    for place, (_, folder) in enumerate(folders if device else []):
        loaded = _loaded(cache.cache_file(folder, str(device), tunable.name), tunable, notes)
        for entry in loaded.entries if loaded else ():
            distance = _distance(tunable, key, entry)
            if loaded is None or entry["best"] is None or distance > (tunable.nearest_within if distance else 0):
                continue
            # Of several entries with one key, that of the workload which is most like this one.
            finer = tunable_distance(workload.to_json(), entry["workload"])
            found.append((distance, place, finer, loaded, entry, None))
    for distance, place, _, loaded, entry, _ in sorted(found, key=lambda f: f[:3]):
        best = entry["best"]
        try:
            chosen = tunable.from_json(best["config"])
            tunable.fits(workload, chosen)
        except (TypeError, ValueError, UnsupportedCall) as error:
            notes.append(f"the config for {_words(entry['key'])} in {loaded.path} is none of today's kernel: {error}")
            continue
        stale = loaded.provenance(entry).get("source") != tunable.source_hash
        made = plain(chosen, folders[place][0], match="nearest" if distance else "exact", found=entry["key"])
        return _said(
            dataclasses.replace(
                made,
                distance=distance,
                path=loaded.path,
                tflops=best["tflops"],
                date=best["date"],
                stale=stale,
                notes=tuple(notes),
            )
        )
    return _said(plain(tunable.default(workload), "heuristic", notes=tuple(notes)))


def _loaded(path: Path, tunable: Tunable, notes: list[str]) -> cache.Loaded | None:
    try:
        loaded = cache.load(path)
    except CacheInvalid as error:
        notes.append(error.message)
        return None
    if loaded is None:
        return None
    generation = loaded.data["header"]["kernel"]["generation"]
    if generation != tunable.generation:
        notes.append(f"{path} has configs for {generation}, this device takes {tunable.generation}")
        return None
    notes += loaded.broken
    return loaded


def _distance(tunable: Tunable, key: Mapping[str, Any], entry: Mapping[str, Any]) -> float:
    if entry["key"] == key:
        return 0.0
    try:
        return max(tunable.distance(dict(key), dict(entry["key"])), 1e-9)
    except (KeyError, TypeError, ValueError):  # a key of fields that the kernel no longer has
        return math.inf


def tunable_distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Doublings of the numbers that two workloads share."""
    total = 0.0
    for name in a.keys() & b.keys():
        x, y = a[name], b[name]
        if isinstance(x, (int, float)) and isinstance(y, (int, float)):
            total += abs(math.log2(max(x, 1) / max(y, 1)))
    return total


def _said(e: Explanation) -> Explanation:
    for note in e.notes:
        _warn(note)
    if e.stale:
        _warn(f"{e.kernel}: {e.path} was {e.other_revision}")
    if e.device is not None:
        _tell(f"{e.kernel} {_words(e.key)}: {e.origin}")
    return e


@functools.lru_cache(maxsize=1024)
def _warn(text: str) -> None:
    log.warning("%s", text)


@functools.lru_cache(maxsize=1024)
def _tell(text: str) -> None:
    log.info("%s", text)


def stamp(kernel: str, device: str | None) -> str:
    """A short hash of what the caches have for a kernel on a device: '' for nothing, else another after each change."""
    files = (
        [cache.cache_file(f, device, kernel) for f in (cache.user_folder(), cache.repository_folder())]
        if device
        else []
    )
    contents = [p.read_bytes() for p in files if p.is_file()]
    return hashlib.sha256(b"".join(contents)).hexdigest()[:10] if contents else ""


def explain_config(kernel: str | Tunable, *args: Any, config: Any = None, **kwargs: Any) -> Explanation:
    """Which config a call would take on this machine's first GPU, and why; `str` of it is the report.

    kernel: 'attention', 'attention_backward', 'matmul', or a Tunable of yours (as FILE.py:NAME, too).  The rest: the arguments of
    the kernel's function (arrays, or `jax.ShapeDtypeStruct`s), as `explain_config("attention", q, k, v, causal=True)`.
    TypeError for one that it has not, and for another kernel's config; what the call of a kernel of ours refuses (for
    'attention_backward' that of its gradients) is refused here, by the same error.
    """
    from ..runtime.device import default_arch, device_key
    from .space import generation_of

    arch = default_arch()
    if isinstance(kernel, str):
        if kernel not in OURS and ":" not in kernel:
            raise ValueError(
                f"explain_config({kernel!r}): a kernel of yours is named by its Tunable, the object or FILE.py:NAME; ours are "
                + ", ".join(map(repr, OURS))
            )
        if arch is not None and not arch.startswith(("sm_90", "sm_10")):
            raise UnsupportedCall(f"{kernel} has no kernel for {arch}: a call runs XLA's, and takes no config")
        tunable = find_tunable(kernel, generation_of(arch) if arch else "sm90")
        if kernel in OURS:
            _check_call(kernel, args, kwargs if config is None else {**kwargs, _config_argument(kernel): config})
    else:
        tunable = kernel() if isinstance(kernel, type) and issubclass(kernel, Tunable) else kernel
        if not isinstance(tunable, Tunable):
            raise TypeError(f"explain_config takes {', '.join(map(repr, OURS))} or a Tunable, not {kernel!r}")
        if wrong := None if tunable.name in OURS else what_is_missing(tunable):
            raise ValueError(wrong)
    return explain(tunable, tunable.workload_of(*args, **kwargs), device=device_key(), config=config)


def _config_argument(kernel: str) -> str:
    return "backward_config" if kernel.endswith("_backward") else "config"


def _check_call(kernel: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises what the call of a kernel of ours raises: it is traced, and its gradients where those are asked about."""
    name = kernel.removesuffix("_backward")
    function = getattr(importlib.import_module(f"mosaic_gpu.kernels.{name}"), name)
    known = inspect.signature(function).parameters
    if unknown := kwargs.keys() - known.keys():
        raise TypeError(
            f"explain_config({kernel!r}): {name} has no argument {', '.join(sorted(unknown))}; it has {', '.join(known)}"
        )
    _trace(function, args, kwargs, kernel != name)
    implementation = kwargs.get("implementation")
    if implementation is None:
        return
    if "mosaic_gpu" not in ([implementation] if isinstance(implementation, str) else implementation):
        raise UnsupportedCall(f"{kernel}: implementation={implementation!r} runs XLA's, and takes no config")
    _trace(function, args, {**kwargs, "implementation": "mosaic_gpu"}, kernel != name)


def _trace(function: Any, args: Sequence[Any], kwargs: dict[str, Any], gradients: bool) -> None:
    import jax

    arrays = {name: x for name, x in kwargs.items() if hasattr(x, "shape") and hasattr(x, "dtype")}
    rest = {name: x for name, x in kwargs.items() if name not in arrays}

    def call(*args: Any, **arrays: Any) -> Any:
        return function(*args, **arrays, **rest)

    def pulled_back(*args: Any, **arrays: Any) -> Any:
        results, pull = jax.vjp(lambda *a: call(*a, **arrays), *args)
        return pull(results)

    if all(hasattr(x, "shape") and hasattr(x, "dtype") for x in args):
        jax.eval_shape(pulled_back if gradients else call, *args, **arrays)
    else:  # which the call says itself
        call(*args, **arrays)
