"""The simulator refuses what the compiler refuses: the same class, text and line, for every refusal there is.

Every `raise` of a refusal in the front end, the planner, the layouts, the ops and the emitter is found in the source; the cases
must reach each of them, and each case must end in the same error on the way to a cubin and on the way through the simulator.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import pathlib
import re
from typing import Any

import jax
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu import errors
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.codegen.wgmma_text import wgmma_product
from mosaic_gpu.errors import MosaicGpuError
from mosaic_gpu.plan.build import build_plan

from . import cases_blackwell, cases_peers, cases_products  # noqa: F401, their cases join the others
from .cases import CASES, Case
from .exempt import EXEMPT

ROOT = pathlib.Path(plgpu.__file__).parent
FOLDERS = ("frontend", "plan", "layouts", "ops", "codegen")
FOUND_LATER = {"Race", "Deadlock", "UninitializedRead", "BarrierMisuse", "Leak"}  # by the simulator, as it runs
OF_THE_MACHINE = {"MosaicGpuError", "ToolchainError", "DeviceMismatch", "CacheInvalid", "NoMulticastObject"}
CLASSES = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, MosaicGpuError)}
REFUSALS = CLASSES - FOUND_LATER - OF_THE_MACHINE
# The back half: what NVRTC, ptxas and the driver say, after a plan has been emitted.
BEHIND = {"build", "cubin_cache", "nvrtc", "ptxas_log", "resources", "sass", "artifacts"}
Site = tuple[str, int, int]


@functools.cache
def sites() -> dict[Site, str]:
    """(file, first line, last line) of each refusal -> its function and the beginning of its text."""
    found: dict[Site, str] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder == "codegen" and path.stem in BEHIND:
                continue
            name = str(path.relative_to(ROOT))
            tree = ast.parse(path.read_text())
            for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
                for node in ast.walk(function):
                    if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                        continue
                    called = getattr(node.exc.func, "id", getattr(node.exc.func, "attr", ""))
                    if called in REFUSALS or called == "_conflict":  # of layouts
                        text = re.sub(r"\s+", " ", ast.unparse(node.exc))
                        found[name, node.lineno, node.end_lineno or node.lineno] = f"{function.name}: {text[:90]}"
    return found


def site_of(error: BaseException) -> Site | None:
    """Where our code raised it."""
    found = None
    tb = error.__traceback__
    while tb is not None:
        path = pathlib.Path(tb.tb_frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            name, line = str(path.relative_to(ROOT)), tb.tb_lineno
            found = next((s for s in sites() if s[0] == name and s[1] <= line <= s[2]), found)
        tb = tb.tb_next
    return found


def types_of(c: Case) -> Any:
    """The context in which JAX has the types of its arrays."""
    if not c.x64:
        return contextlib.nullcontext()
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def kernel_of(c: Case, **more: Any) -> Any:
    """Made in one line of Python, which is that of what is refused of its options."""
    return plgpu.kernel(c.body, **c.options, **more)


def compiled(c: Case) -> Any:
    kernel = kernel_of(c)
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in c.arrays]
    with types_of(c):
        return emit(build_plan(kernel.program(*avals), c.arch))


def simulated(c: Case) -> Any:
    with types_of(c):
        return kernel_of(c, interpret=True)(*c.arrays)


@functools.cache
def outcome(c: Case) -> MosaicGpuError | None:
    """What the way to a cubin says."""
    try:
        compiled(c)
    except MosaicGpuError as error:
        return error
    return None


def by_name(c: Case) -> str:
    return c.name


@pytest.mark.parametrize("c", CASES, ids=by_name)
def test_same_refusal(c: Case) -> None:
    error = outcome(c)
    assert error is not None, "the compiler takes it"
    assert type(error).__name__ in REFUSALS
    with pytest.raises(MosaicGpuError) as e:
        simulated(c)
    assert (type(e.value), e.value.message, e.value.line) == (type(error), error.message, error.line)


def test_every_refusal_has_a_case() -> None:
    reached = {site_of(e) for c in CASES if (e := outcome(c)) is not None}
    missing = {site: what for site, what in sites().items() if site not in reached}
    unknown = [f"{s[0]}:{s[1]} {what}" for s, what in missing.items() if not exempt(s, what)]
    assert not unknown, "no case reaches\n" + "\n".join(unknown)
    needless = [key for key in EXEMPT if not any(matches(key, s, what) for s, what in missing.items())]
    assert not needless, f"reached, or gone: {needless}"


def exempt(site: Site, what: str) -> bool:
    return any(matches(key, site, what) for key in EXEMPT)


def matches(key: tuple[str, str], site: Site, what: str) -> bool:
    return site[0] == key[0] and key[1] in what


@pytest.mark.parametrize(
    ("n", "kinds", "registers", "majors", "words"),
    [
        (64, ("f64", "f64", "f32"), False, (False, False), "operands are one of"),
        (64, ("f16", "bf16", "f32"), False, (False, False), "cannot be mixed"),
        (64, ("bf16", "bf16", "f16"), False, (False, False), "the accumulator must be"),
        (12, ("bf16", "bf16", "f32"), False, (False, False), "multiple of 8 from 8 to 256"),
        (40, ("s8", "s8", "s32"), False, (False, False), "for integers n is"),
        (64, ("e4m3", "e4m3", "f32"), False, (False, True), "only 16-bit operands"),
        (64, ("bf16", "bf16", "f32"), True, (True, False), "no MN-major form"),
    ],
)
def test_what_the_template_refuses(n: int, kinds: Any, registers: bool, majors: Any, words: str) -> None:
    with pytest.raises(errors.IllegalInstruction, match=words):
        wgmma_product(n, *kinds, registers, *majors, "dynamic")


def test_names_are_unique() -> None:
    assert len({c.name for c in CASES}) == len(CASES)
    assert len(sites()) > 90
