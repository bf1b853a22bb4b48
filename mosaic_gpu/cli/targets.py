"""What `compile` and `bench compile` work on: a kernel of ours by name, or one of the user's, traced to its programs.

To add a kernel of ours: a function here that calls it, under its name in KERNELS.  It is found in
`mosaic_gpu.kernels.<generation>.<name>` for every generation that has that module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import MosaicGpuError, UnsupportedCall
from ..frontend.trace import OUR_FOLDER
from ..program import Program
from ..runtime import execute
from ..tune.space import config_class, config_from, generation_of
from ..tune.workload import DTYPES, Attention, Matmul, dtype_name
from .common import Refusal, find_ours, kernel_dtype, refuse_options, report_error


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asks for.  shape: None takes the kernel's own example; dtype: None, bfloat16.

    bottom_right: causal, with that diagonal.  bias, mask: the extents of one, such as 'bhst' or '1h1t'; None: there is none.
    """

    arch: str
    shape: str | None = None
    dtype: str | None = None
    causal: bool = False
    return_lse: bool = False
    config: dict[str, Any] | None = None
    bottom_right: bool = False
    bias: str | None = None
    mask: str | None = None

    @property
    def diagonal(self) -> Any:
        """The kernels' `causal`."""
        return "bottom_right" if self.bottom_right else self.causal

    @property
    def of_scores(self) -> dict[str, Any]:
        """The options that say what is added to scores, or hides them, as the user writes them."""
        return {"--bias": self.bias, "--mask": self.mask}


Call = tuple[Callable[..., Any], Sequence[jax.ShapeDtypeStruct]]


def _kernel_function(name: str, arch: str) -> Callable[..., Any]:
    generation = generation_of(arch)
    config_class(name, generation)  # refuses with the reason where the module is missing
    function = getattr(importlib.import_module(f"mosaic_gpu.kernels.{generation}.{name}"), name, None)
    if function is None:
        raise UnsupportedCall(f"{name} has no kernel for {generation} yet")
    return function  # type: ignore[no-any-return]


def _arguments(shapes: Sequence[tuple[int, ...]], dtype: str) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]


def attention_call(w: Attention, arch: str, config: Any = None, return_lse: bool = False) -> Call:
    """Attention of one generation on a workload; config None: its default."""
    function = _kernel_function("attention", arch)
    if config is None:
        from ..tune.tunable import find_tunable

        config = find_tunable("attention", generation_of(arch)).default(w)
    options = {"config": config, "causal": w.causal, "scale": w.head_dim**-0.5, "return_lse": return_lse}
    return functools.partial(function, **options), _arguments(w.shapes, w.dtype)


def _attention(r: Request) -> Call:
    biased = r.bias is not None or r.mask is not None
    dtype, causal = kernel_dtype(r.dtype or "bf16"), bool(r.diagonal)
    w = Attention.parse(r.shape or "b4s4096d128", dtype=dtype, causal=causal, bias=biased)
    config = None if r.config is None else config_from("attention", generation_of(r.arch), r.config)
    function, arrays = attention_call(w, r.arch, config, r.return_lse)
    function = functools.partial(function, causal=r.diagonal)
    if not biased:
        return function, arrays
    from mosaic_gpu.kernels.attention import as_bias

    given = {name: text for name, text in r.of_scores.items() if text is not None}
    arrays = [*arrays, *(_like_scores(name, text, w) for name, text in given.items())]

    def with_bias(q: Any, k: Any, v: Any, *of_scores: Any) -> Any:
        arrays = dict(zip(given, of_scores, strict=True))
        return function(q, k, v, as_bias(arrays.get("--bias"), arrays.get("--mask"), w.length, q.dtype))

    return with_bias, arrays


def _like_scores(option: str, text: str, w: Attention) -> jax.ShapeDtypeStruct:
    """The type of a bias or mask whose extents are written as 'bhst', 1 for one that all share."""
    extents = {"b": w.batch, "h": w.heads, "s": w.length, "t": w.kv_length, "1": 1}
    if not re.fullmatch("[b1][h1][s1]t", text):
        raise Refusal(
            f"{option} {text}: write its four extents as bhst (batch, heads, queries, keys), with a 1 for each but t that all "
            "share, such as 1hst"
        )
    return jax.ShapeDtypeStruct([extents[c] for c in text], jnp.bool_ if option == "--mask" else jnp.dtype(w.dtype))


def _matmul(r: Request) -> Call:
    refuse_options(
        "matmul has no mask and one output",
        {"--causal": r.causal, "--bottom-right": r.bottom_right, "--lse": r.return_lse, **r.of_scores},
    )
    w = Matmul.parse(r.shape or "m4096n4096k4096", dtype=kernel_dtype(r.dtype or "bf16"))
    function = _kernel_function("matmul", r.arch)
    config = config_from("matmul", generation_of(r.arch), r.config or {})
    return functools.partial(function, config=config), _arguments(w.shapes, w.dtype)


def _attention_backward(r: Request) -> Call:
    """Of (q, k, v, output, log-sum-exp, the output's cotangent); three kernels."""
    from ..tune.tunable import find_tunable

    refuse_options("attention_backward takes the log-sum-exp as an argument", {"--lse": r.return_lse})
    refuse_options("there are no gradients with a bias or a mask", r.of_scores)
    generation, name = generation_of(r.arch), "attention_backward"
    _kernel_function(name, r.arch)
    tunable = find_tunable(name, generation)
    w = tunable.parse(r.shape or "b4s4096d128", dtype=kernel_dtype(r.dtype or "bf16"), causal=bool(r.diagonal))
    config = tunable.default(w) if r.config is None else config_from(name, generation, r.config)
    return functools.partial(tunable.call(w, config), causal=r.diagonal), tunable.arguments(w)


KERNELS: dict[str, Callable[[Request], Call]] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "matmul": _matmul,
}


def find_call(kernel: str, request: Request, arguments: Sequence[str] = ()) -> Call:
    """The function and the types of its arguments that KERNEL on the command line stands for."""
    if kernel in KERNELS:
        if arguments:
            raise Refusal(f"--arg is for kernels of your own; {kernel} takes --shape")
        try:
            return KERNELS[kernel](request)
        except (ValueError, TypeError) as error:
            raise Refusal(str(error)) from error
    path, colon, name = kernel.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise Refusal(f"KERNEL is {', '.join(KERNELS)} or FILE.py:NAME, not {kernel!r}")
    options: dict[str, Any] = {"--shape": request.shape, "--dtype": request.dtype, "--config": request.config}
    options |= {"--causal": request.causal, "--bottom-right": request.bottom_right, "--lse": request.return_lse}
    refuse_options("a kernel of your own takes --arg", {**options, **request.of_scores})
    function = load_object(Path(path), name)
    if not arguments:
        raise Refusal("a kernel of your own needs its arguments' types: --arg 'bf16[4,4096,16,128]', one for each")
    types = [parse_argument(a) for a in arguments]
    check_number(name, function, arguments)
    for text, t in zip(arguments, types, strict=True):  # the file may have turned 64 bits on
        if (narrow := jax.eval_shape(lambda x: x, t).dtype) != t.dtype:
            raise Refusal(f"--arg {text!r}: JAX takes {t.dtype.name} as {narrow.name} unless JAX_ENABLE_X64=1 is set")

    @functools.wraps(function)
    def called(*args: Any) -> Any:
        with users_code(Path(path), f"{kernel} cannot be traced"):
            return function(*args)

    return called, types


def check_number(name: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """A refusal unless the function takes as many arguments as there are --arg."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it does not say
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise Refusal(
            f"{name}({', '.join(signature.parameters)}) does not take {len(arguments)} arguments "
            f"({', '.join(arguments)}): give one --arg for each"
        ) from error


@contextlib.contextmanager
def users_code(path: Path, what: str) -> Iterator[None]:
    """What the user's file raises becomes a refusal, with the lines of theirs that led there and none of ours.

    What it prints goes to standard error: standard output is for results.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Refusal, MosaicGpuError):
        raise
    except (Exception, SystemExit) as error:
        ours = find_ours(error) if isinstance(error, Exception) else None
        if ours is not None:  # inside jit JAX has wrapped it
            raise ours.with_traceback(error.__traceback__) from error
        lines = _lines_of(path, error)[-3:]
        if isinstance(error, SyntaxError) and error.filename:
            lines.append(f"\n  at {error.filename}:{error.lineno}")
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise Refusal(f"{what}: {type(error).__name__}: {message}{''.join(lines)}") from error


def _lines_of(path: Path, error: BaseException) -> list[str]:
    """The lines of the user's that led to an error."""
    folder = str(path.parent.resolve()) + os.sep
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_in(folder, f.filename)]
    return [f"\n  at {f.filename}:{f.lineno} in {f.name}" for f in frames]


def _is_in(folder: str, file: str) -> bool:
    """Whether a file is the user's: theirs are beside the one that was named, where a virtual environment may be, too."""
    return not file.startswith("<") and os.path.abspath(file).startswith(folder) and "site-packages" not in file


def parse_argument(text: str) -> jax.ShapeDtypeStruct:
    """A type such as 'bf16[4, 4096, 16, 128]' or 'f32[]'."""
    found = re.fullmatch(r"\s*([a-z]\w*)\s*\[\s*((?:\d+\s*(?:,\s*\d+\s*)*)?)\]\s*", text)
    if found is None:
        raise Refusal(f"--arg {text!r}: write a type as bf16[4,4096,16,128]")
    name = dtype_name(found[1])
    try:
        dtype = jnp.dtype(name)
    except TypeError as error:
        raise Refusal(f"--arg {text!r}: there is no dtype {found[1]!r}; there are {', '.join(DTYPES)}") from error
    if dtype.name != name:  # NumPy's codes count bytes (i4 is int32, f8 float64), all other names here bits
        short = next((s for s, full in DTYPES.items() if full == dtype.name), dtype.name)
        raise Refusal(f"--arg {text!r}: {found[1]} is NumPy's code for {dtype.name}; write {short}")
    return jax.ShapeDtypeStruct(tuple(int(n) for n in found[2].split(",") if n.strip()), dtype)


def load_object(path: Path, name: str) -> Callable[..., Any]:
    """A kernel, or a function that calls one, out of a user's file."""
    if not path.is_file():
        raise Refusal(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickles in it look it up
    sys.path.insert(0, str(path.parent.resolve()))  # its neighbours are importable, as when Python runs it
    before = execute.simulated.copy()
    guard = 'Calls of kernels that the file itself makes belong under `if __name__ == "__main__":`'
    try:
        with users_code(path, f"{path} cannot be imported"):
            spec.loader.exec_module(module)
    except MosaicGpuError as error:
        frames = traceback.extract_tb(error.__traceback__)
        traced = any(f.name == "__call__" and f.filename.startswith(OUR_FOLDER) for f in frames)
        called_it = traced or execute.simulated != before
        where = "".join(_lines_of(path, error)[-1:])
        raise Refusal(
            f"{path} was imported for {name}{where}\n{type(error).__name__}: {error}" + f"\n{guard}" * called_it
        ) from error
    finally:
        sys.path.pop(0)
    if called := execute.simulated - before:
        report_error("note", f"{path} was imported for {name}, and called {', '.join(sorted(called))}. {guard}")
    found = getattr(module, name, None)
    if not callable(found):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise Refusal(f"{path} has no kernel {name!r}; it has {', '.join(names) or 'none'}")
    return found  # type: ignore[no-any-return]


def programs_of(function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct]) -> list[Program]:
    """The programs of the kernels that a function calls, in order; the function is traced, nothing runs."""
    from ..frontend.kernel import call_p

    found: list[Program] = []

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive is call_p:
                found.append(equation.params["traced"].program)
                continue
            if equation.primitive.name == "pallas_call":
                found.append(_program_of_call(equation.params))
                continue
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    visit(getattr(value, "jaxpr", value))

    visit(jax.make_jaxpr(lambda *a: function(*a))(*arguments).jaxpr)
    return found


def programs_for(
    function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct], arch: str | None
) -> list[Program]:
    """The programs of the kernels that a function calls; a refusal if there is none, or one for another architecture."""
    found = programs_of(function, arguments)
    if not found:
        raise Refusal("this compiles kernels, and the function calls none")
    for program in found:
        wanted = program.params.arch
        if arch is not None and wanted is not None and wanted != arch:
            raise Refusal(f"kernel {program.name} is for {wanted} (CompilerParams.arch), not for {arch}")
    return found


def _program_of_call(params: dict[str, Any]) -> Program:
    """The program of a `pallas_call`, ours or JAX's, as we compile it."""
    from ..pallas import lowering
    from ..pallas.stock import call_of
    from ..program import CompilerParams

    call = params["call"] if "call" in params else call_of(params)
    if not isinstance(call.params, CompilerParams):
        call = call.with_(params=CompilerParams())
    m = call.mapping
    types = [jax.ShapeDtypeStruct((1,), jnp.int32)] * m.num_dynamic
    types += [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*m.prefetch, *m.inputs)]
    program: Program = lowering.kernel_of(call).program(*types)
    return program


def program_of(function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct], arch: str | None) -> Program:
    """The program of the one kernel that a function calls; a refusal if it is not one, or is for another architecture."""
    found = programs_for(function, arguments, arch)
    if len(found) != 1:
        names = ", ".join(p.name for p in found)
        raise Refusal(f"this compiles one kernel, and the function calls {len(found)}: {names}")
    return found[0]
