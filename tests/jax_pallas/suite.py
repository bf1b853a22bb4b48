"""JAX's own tests of `pallas_call`, read from a checkout of JAX, run through ours.

    JAX_SOURCE=/path/to/jax python -m tests.jax_pallas [pattern ...] [--list] [--jobs N]

The checkout is that of the JAX that is installed.  Of its test files only the imports are replaced, in memory; nothing of them is
kept here.  `expected.toml` says which tests are left out, and which are expected to be refused or to fail, each with a reason.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import pathlib
import re
import signal
import sys
import time
import tomllib
import types
import unittest
from collections.abc import Iterator, Sequence

from mosaic_gpu import errors

FILES = ("pallas_test", "pallas_vmap_test", "indexing_test", "pallas_shape_poly_test")
"""Files about `pallas_call` itself; ops_test has no expectations yet (`--files ops_test`); the others are of one
backend (tpu_*, gpu_*, mgpu_*, triton_*) or of other tools."""

HERE = "tests.jax_pallas.stand_ins"
# JAX's test files import modules of JAX that are not public. Those imports are theirs and stay, or become one of the same
# package; no file of ours names such a module.
IMPORTS = (
    (r"from jax\.experimental import pallas as (\w+)", rf"from {HERE} import pl as \2"),
    (r"from jax\.experimental\.pallas import tpu as (\w+)", rf"from {HERE} import pltpu as \2"),
    (r"from jax\.\w+ import hypothesis_test_util as (\w+)", rf"from {HERE} import htu as \2"),
    (r"(from jax\.\w+ import test_util as (\w+))", rf"\2; {HERE}.on_no_device(\3)"),
    (
        r"(from jax\.\w+)\.pallas import pallas_test_util as (\w+)",
        rf"\2 import test_util as _jtu; \3 = {HERE}.test_cases(_jtu)",
    ),
)
LIMIT = 25  # seconds a test


def with_our_imports(source: str) -> str:
    """The text of a test file with its imports of Pallas replaced; no line moves."""
    for old, new in IMPORTS:
        source = re.sub(rf"^([ \t]*){old}$", rf"\1import {HERE}; {new}", source, flags=re.MULTILINE)
    return source


@dataclasses.dataclass(frozen=True)
class Outcome:
    """kind: passed, skipped (by the test itself), refused (an error of ours that names what is missing), failed."""

    test: str
    kind: str
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Expectation:
    """Of tests whose id matches one of the patterns.  kind: excluded, skipped, refused or failed."""

    kind: str
    reason: str
    tests: tuple[str, ...]

    def covers(self, test: str) -> bool:
        return any(fnmatch.fnmatchcase(test, p) for p in self.tests)


def expectations(path: pathlib.Path) -> list[Expectation]:
    entries = tomllib.loads(path.read_text())["expect"]
    found = [Expectation(e["kind"], e["reason"], tuple(e["tests"])) for e in entries]
    for e in found:
        if e.kind not in ("excluded", "refused", "failed") or not e.reason:
            raise ValueError(f"{path}: {e}")
    return found


@functools.cache
def load(path: pathlib.Path) -> types.ModuleType:
    """A test file as a module with our imports."""
    module = types.ModuleType(f"jax_pallas_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(with_our_imports(path.read_text()), str(path), "exec"), module.__dict__)
    return module


def cases(module: types.ModuleType) -> Iterator[tuple[str, unittest.TestCase]]:
    """(id, test) of a module's classes, each under the class that defines it or inherits it."""
    stem = module.__name__.removeprefix("jax_pallas_")
    for name, kind in sorted(vars(module).items()):
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == module.__name__:
            for test in unittest.TestLoader().loadTestsFromTestCase(kind):
                yield f"{stem}::{name}.{test._testMethodName}", test


def _refused(error: BaseException | None) -> bool:
    """Whether an error, or one that it comes from, is ours; under jit XLA keeps only its text."""
    while error is not None:
        if isinstance(error, errors.MosaicGpuError):
            return True
        if type(error).__name__ == "JaxRuntimeError" and re.search(r"\bUnsupported(Call|Primitive)\b", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _late(*_: object) -> None:
    raise TimeoutError(f"no end after {LIMIT} s")


def run(name: str, test: unittest.TestCase) -> Outcome:
    result = _Result()
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(LIMIT)
    try:
        test.run(result)
    finally:
        signal.alarm(0)
    if result.error is not None:
        kind = "refused" if _refused(result.error) else "failed"
        lines = str(result.error).strip().splitlines() or [""]
        return Outcome(name, kind, f"{type(result.error).__name__}: {' '.join(lines)[:300]}")
    return Outcome(name, "skipped" if result.skipped else "passed", result.skipped[0][1] if result.skipped else "")


def part_of(job: tuple[str, int, int, Sequence[str]]) -> list[tuple[Outcome, float]]:
    """Outcomes and seconds of (path, i, n, patterns): of a file's tests that match, every n-th from the i-th."""
    path, first, step, patterns = job
    chosen = [
        (n, t)
        for n, t in cases(load(pathlib.Path(path)))
        if not patterns or any(fnmatch.fnmatchcase(n, p) for p in patterns)
    ]
    found = []
    for name, test in chosen[first::step]:
        start = time.monotonic()
        found.append((run(name, test), time.monotonic() - start))
    return found


class _Result(unittest.TestResult):
    """Keeps the first error itself, not its text."""

    error: BaseException | None = None

    def addError(self, test, err):
        self.error = self.error or err[1]

    addFailure = addError

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.addError(test, err)


def verdict(outcome: Outcome, expected: Sequence[Expectation]) -> str | None:
    """What is wrong with an outcome; None: it is as expected."""
    listed = next((e for e in expected if e.covers(outcome.test)), None)
    if outcome.kind == "skipped":
        return None
    if outcome.kind == "passed":
        return None if listed is None else f"passed, expected to be {listed.kind}"
    if listed is None:
        return f"{outcome.kind}: {outcome.why}"
    return None if outcome.kind == listed.kind else f"{outcome.kind}, expected to be {listed.kind}: {outcome.why}"
