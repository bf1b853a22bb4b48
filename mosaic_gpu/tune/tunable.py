"""What the tuner, the lookup and the benchmarks need to know of a kernel: one class a kernel.

Ours are declared in `tune/attention.py`, `tune/attention_backward.py` and `tune/matmul.py`; docs/tuning.md shows one of a
user's.  A kernel is named on the command line, in jobs for other processes and in cache files by its *reference*: `attention`,
or `FILE.py:NAME`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from ..errors import UnsupportedCall
from .chip import Chip
from .schema import canonical
from .space import Space, enumerate_space, points
from .workload import dtype_name, parse_fields

Key = dict[str, Any]
OURS = {
    "attention": "AttentionTunable",
    "attention_backward": "AttentionBackwardTunable",
    "matmul": "MatmulTunable",
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The workload of a user's kernel: sizes by their letters, `w["m"]`, and a dtype."""

    sizes: tuple[tuple[str, int], ...]
    dtype: str
    flops: float | None = None
    bytes: float | None = None

    def __getitem__(self, letter: str) -> int:
        return dict(self.sizes)[letter]

    def __str__(self) -> str:
        return " ".join(f"{letter}{number}" for letter, number in self.sizes)

    def to_json(self) -> Key:
        """Plain data."""
        return {**dict(self.sizes), "dtype": self.dtype}


def rolled(x: Any, n: int) -> Any:
    """An array turned by some elements: other data of the same kind."""
    import jax.numpy as jnp

    return jnp.roll(jnp.asarray(x).ravel(), n * 977).reshape(x.shape)


class Tunable:
    """A kernel that can be tuned.  Subclass it; what has no default here is needed, and named by the error.

    name: of the cache file, and the `kernel` of its config class.  config: the class of its configs, a frozen dataclass that
    derives from `mosaic_gpu.kernels.config.Config` and refuses in its constructor what cannot be (ValueError).
    space: a grid {field: values}, or a list of grids.  Values may be a function of the fields before it (conditional).
    letters: what a shape is written with, {"m": "rows"} for `m4096`.
    tolerance: the relative error (of norms) that a result may have.
    """

    name: ClassVar[str]
    config: Any
    space: Space
    letters: ClassVar[Mapping[str, str]] = {}
    example: ClassVar[str] = ""
    tolerance: ClassVar[float] = 1e-2
    nearest_within: ClassVar[float] = 3.0  # distance up to which another key's config is taken
    slack: float = 1.5  # by how much the cost estimate may be off: what is estimated slower is not timed

    # ---- workloads ----
    def parse(self, text: str, *, dtype: str = "bfloat16", **options: Any) -> Any:
        """The workload of a shape in text, such as 'm4096n1024'.  ValueError says how to write it."""
        given = parse_fields(
            text, {letter: letter for letter in self.letters}, self.example or "".join(f"{x}128" for x in self.letters)
        )
        if missing := set(self.letters) - set(given):
            raise ValueError(f"shape {text!r} lacks {', '.join(f'{x} ({self.letters[x]})' for x in sorted(missing))}")
        return self.workload({**given, "dtype": dtype_name(dtype)})

    def workload(self, data: Mapping[str, Any]) -> Any:
        """The workload that `to_json` gave."""
        sizes = tuple((letter, int(data[letter])) for letter in self.letters)
        plain = Sizes(sizes, str(data["dtype"]))
        return dataclasses.replace(plain, flops=self.flops(plain), bytes=self.bytes(plain))

    def flops(self, w: Any) -> float | None:
        """Operations of a call; None where TFLOP/s mean nothing."""
        return None

    def bytes(self, w: Any) -> float | None:
        """Bytes of global memory that a call must move at least; None if unknown."""
        return None

    def workload_of(self, *args: Any, **kwargs: Any) -> Any:
        """The workload of a call of the kernel's function, for `explain_config`."""
        raise NotImplementedError(f"{type(self).__name__}.workload_of is not defined")

    # ---- keys ----
    def key(self, w: Any) -> Key:
        """What of a workload the best config depends on."""
        return dict(w.to_json())

    def distance(self, a: Key, b: Key) -> float:
        """How far two keys are from each other; infinite where the one's config is of no use for the other.

        By default: doublings of the numbers; all else must be equal.
        """
        if a.keys() != b.keys():
            return math.inf
        total = 0.0
        for name, x in a.items():
            y = b[name]
            if isinstance(x, bool) or not isinstance(x, (int, float)) or not isinstance(y, (int, float)):
                total += 0.0 if x == y else math.inf
            else:
                total += abs(math.log2(max(x, 1)) - math.log2(max(y, 1)))
        return total

    # ---- configs ----
    @property
    def generation(self) -> str:
        """'sm90' or 'sm100': the configs' tag."""
        return str(self.config.generation)

    def default(self, w: Any) -> Any:
        """The config that is used where nothing was tuned."""
        return self.config()

    def fits(self, w: Any, config: Any) -> None:
        """Raise ValueError or UnsupportedCall if the config cannot do this workload, beyond what its constructor refuses."""

    def cost(self, w: Any, config: Any, chip: Chip) -> float:
        """An estimate of the seconds of a call, to try the likely ones first.  By default all cost the same."""
        return 0.0

    def from_json(self, data: Mapping[str, Any]) -> Any:
        """A config from a cache file or the command line; tags may be left out.  ValueError for what does not fit."""
        return self.config.from_json({"generation": self.generation, "kernel": self.name, **data})

    def candidates(self, w: Any, chip: Chip) -> list[Any]:
        """Every valid config of the space and the default, by rising cost estimate; the default first among equals."""
        start = self.default(w)
        found = [start, *(c for c in self.valid()[0] if c != start and self._fits(w, c))]
        return sorted(found, key=lambda c: self.cost(w, c, chip))

    def _fits(self, w: Any, config: Any) -> bool:
        try:
            self.fits(w, config)
        except (ValueError, UnsupportedCall):
            return False
        return True

    @functools.cached_property
    def _valid(self) -> tuple[list[Any], int]:
        return enumerate_space(self.config, self.space)

    def valid(self) -> tuple[list[Any], int]:
        """(the configs of the space that their constructor takes, how many it refused)."""
        return self._valid

    @functools.cached_property
    def space_hash(self) -> str:
        """Of the valid configs: it changes when a value is added."""
        text = "\n".join(sorted(canonical(c.to_json()) for c in self.valid()[0]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # ---- running ----
    def arguments(self, w: Any) -> Sequence[Any]:
        """Shapes and dtypes of a call's arrays: `jax.ShapeDtypeStruct`s, or anything with `shape` and `dtype`."""
        raise NotImplementedError(f"{type(self).__name__}.arguments is not defined")

    def call(self, w: Any, config: Any) -> Callable[..., Any]:
        """The function of arrays to time; it is traced, and calls kernels only."""
        raise NotImplementedError(f"{type(self).__name__}.call is not defined")

    def inputs(self, w: Any, seed: int) -> tuple[Any, ...]:
        """Random arrays for a call, normal ones of the types of `arguments`."""
        from .measure import normal_arrays

        return normal_arrays(self.arguments(w), seed)

    def rolled(self, w: Any, arrays: Sequence[Any], n: int) -> tuple[Any, ...]:
        """Other inputs of the same kind, for timings to rotate through: by default each array turned by some elements."""
        return tuple(rolled(x, n) for x in arrays)

    def reference(self, w: Any, *arrays: Any) -> Any:
        """The right result, in float32 or better, of the arrays of `inputs`."""
        raise NotImplementedError(f"{type(self).__name__}.reference is not defined")

    def judge(self, w: Any, arrays: Sequence[Any]) -> Any:
        """What judges results for these inputs: with `error(result)`, `accepts(error)`, `allowed`, and `same(first, again)`,
        whether two results for the same inputs are as alike as they must be."""
        import jax.numpy as jnp

        from .accuracy import Judge

        return Judge(jnp.asarray(self.reference(w, *arrays)), self.tolerance)

    def peers(self, w: Any) -> dict[str, Callable[..., Any]]:
        """Other functions of the same arrays in JAX, by name, for benchmarks to compare with."""
        return {}

    # ---- where it comes from ----
    def sources(self) -> Sequence[Path]:
        """The files whose change may change the kernel's speed; by default the one that defines the configs."""
        return [Path(inspect.getfile(self.config))]

    @functools.cached_property
    def source_hash(self) -> str:
        """Of the sources, without comment lines and blank ones."""
        digest = hashlib.sha256()
        for path in self.sources():
            for line in path.read_text().splitlines():
                if line.strip() and not line.strip().startswith("#"):
                    digest.update(line.rstrip().encode() + b"\n")
        return digest.hexdigest()[:16]

    @property
    def reference_text(self) -> str:
        """How other processes, and `mosaic-gpu tune run`, find it."""
        if self.name in OURS:
            return self.name
        file = getattr(sys.modules.get(type(self).__module__), "__file__", None) or "FILE.py"  # none in a notebook
        return getattr(self, "_reference", f"{file}:{type(self).__name__}")

    def found_at(self, reference: str) -> Self:
        """Itself, with the reference that it was found by."""
        self._reference = reference
        return self


def find_tunable(reference: str, generation: str = "sm90") -> Tunable:
    """A kernel by its reference: ours by name, for a generation, or FILE.py:NAME.

    UnsupportedCall for a kernel of ours that the generation does not have; ValueError for what is neither.
    """
    if reference in OURS:
        return _ours(reference, generation)
    path, colon, name = reference.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ValueError(f"a kernel to tune is {', '.join(OURS)} or FILE.py:NAME, not {reference!r}")
    return _from_file(str(Path(path).resolve()), name)


@functools.cache
def _ours(name: str, generation: str) -> Tunable:
    made = getattr(importlib.import_module(f"{__package__}.{name}"), OURS[name])
    found: Tunable = made(generation)
    return found


@functools.cache
def _from_file(path: str, name: str) -> Tunable:
    module = _module_of(path)
    found = getattr(module, name, None)
    found = found() if isinstance(found, type) and issubclass(found, Tunable) else found
    if not isinstance(found, Tunable):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Tunable)]
        has = [n for n in classes if n != Tunable.__name__]
        raise ValueError(f"{path} has no Tunable {name!r}; it has {', '.join(has) or 'none'}")
    if wrong := what_is_missing(found):
        raise ValueError(f"{path}:{name}: {wrong}")
    return found.found_at(f"{path}:{name}")


def what_is_missing(t: Tunable) -> str | None:
    """In a user's Tunable, before anything is asked of it."""
    if taken := name_is_taken(t):
        return taken
    needed = {"name": "of the cache file", "config": "the class of its configs", "space": "{field: values}"}
    for attribute, what in needed.items():
        if not hasattr(t, attribute):
            return f"{type(t).__name__} lacks `{attribute}` ({what})"
    if not t.letters:
        return f'{type(t).__name__} lacks `letters`, what a shape is written with, such as {{"m": "rows"}}'
    made: Any = t.config
    if not (isinstance(made, type) and dataclasses.is_dataclass(made)):
        return f"config={made!r} is no dataclass"
    fields = [f.name for f in dataclasses.fields(made)]
    grids: Any = [t.space] if isinstance(t.space, Mapping) else t.space
    for grid in grids:
        for field, values in grid.items():
            if field not in fields:
                return f"space: {made.__name__} has no field {field!r}; it has {', '.join(fields)}"
            if not callable(values) and not isinstance(values, Sequence):
                return f"space[{field!r}] is {values!r}: a sequence of values, or a function of the fields before it"
    try:
        next(points(t.space), None)
    except ValueError as error:
        return str(error)
    return None


def name_is_taken(t: Tunable) -> str | None:
    """What to say of a user's Tunable that is called what a kernel of ours is: their caches are files of that name."""
    if getattr(t, "name", None) in OURS and not type(t).__module__.startswith(f"{__package__}."):
        return (
            f"{type(t).__name__}.name = {t.name!r} is the name of a kernel that comes with mosaic_gpu, whose caches this one "
            "would read and write: give it another name"
        )
    return None


def find_object(reference: str) -> Any:
    """FILE.py:NAME, from the same module that the file's Tunables come from."""
    path, _, name = reference.rpartition(":")
    return getattr(_module_of(str(Path(path).resolve())), name)


def _module_of(path: str) -> Any:
    """A user's file as a module: executed once, since a second copy of its config class would be another type."""
    import importlib.util

    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    name = f"_mosaic_gpu_tuned_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look it up
    sys.path.insert(0, str(Path(path).parent))  # its neighbours are importable, as when Python runs it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.pop(0)
    return module
