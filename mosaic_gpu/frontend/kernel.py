"""`kernel`: a Python function over Refs becomes a function on arrays, on the GPU or in the simulator."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import mlir
from jax.ref import AbstractRef

from .. import arguments
from ..collecting import remembered, to_its_end
from ..errors import Line, MosaicGpuError, UnsupportedCall
from ..garbage import uncollected
from ..layouts.tilings import with_tilings
from ..memory import GMEM_SPACE
from ..ops import multimem
from ..program import CompilerParams, Equation, Program, Value, format_program
from ..simulator.params import SimulatorParams
from . import shard_map, transforms
from .foreign import UNBOUND, translated
from .memory import RefType
from .options import check_aliases, check_number_of_refs, checked_options, inputs_of
from .primitives import is_ref
from .random import refuse_key_array
from .trace import Tracer, function_line, leaf_names, raised_at
from .tracebacks import located, located_at_its_call, shortened

UNSET: Any = object()


class Traced:
    """A traced call: its program and what its outputs are.  Compared by identity, so JAX's caches key on it cheaply."""

    def __init__(
        self, program: Program, out_avals: tuple[jax.core.ShapedArray, ...], interpret: bool | SimulatorParams | None
    ) -> None:
        self.program = program
        self.out_avals = out_avals
        self.simulate = interpret is not None and interpret is not False
        self.simulator_params = interpret if isinstance(interpret, SimulatorParams) else None
        self.batch: transforms.Batch | None = None

    def with_program(self, program: Program, out_avals: tuple[jax.core.ShapedArray, ...]) -> Traced:
        """The same call of another program."""
        changed = copy.copy(self)
        changed.program, changed.out_avals = program, out_avals
        return changed

    def __repr__(self) -> str:
        return self.program.name


@located_at_its_call
def kernel(
    body: Callable[..., None] = UNSET,
    out_type: Any = UNSET,
    *,
    scratch_types: Sequence[Any] | Mapping[str, Any] = (),
    compiler_params: CompilerParams | None = None,
    grid: Sequence[int] | int = (),
    grid_names: Sequence[str] | str = (),
    cluster: Sequence[int] | int = (),
    cluster_names: Sequence[str] | str = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    interpret: bool | SimulatorParams | None = None,
    name: str | None = None,
    out_shape: Any = UNSET,
    scratch_shapes: Any = UNSET,
    kernel_name: str | None = None,
    debug: bool = False,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Any:
    """Make a GPU kernel out of `body(*input_refs, *output_refs, *scratch_refs)`.

    Also a decorator: `@kernel(out_type=..., num_threads=3, thread_name="wg")`.

    out_type: `jax.ShapeDtypeStruct`, or a list or tuple of them, one for each output.
    scratch_types: `SMEM(...)`, `Barrier(...)`, `TMEM(...)`, ..., as a sequence (positional) or mapping (by keyword).
    grid, grid_names: blocks (clusters, if there are any) along each axis; `jax.lax.axis_index(name)` or `program_id(i)`.
    cluster, cluster_names: blocks of a cluster along each axis.  One axis may be written without a tuple, for the grid, too.
    num_threads, thread_name: warpgroups of 128 threads in a block, and the axis that tells them apart.
    interpret: True runs the simulator whatever the device, `SimulatorParams(...)` too, and says how; None: only where there
    is no GPU.
    input_output_aliases: {input: output} by number: the output starts with the input's values, and takes its place in memory
    where XLA can arrange that (where it cannot it copies).  In the body both Refs are one array.
    debug: print the traced program (`mosaic-gpu compile --stages` shows every pass).
    out_shape, scratch_shapes, kernel_name: older spellings of out_type, scratch_types and name.

    The body must return None, may capture numbers and arrays up to 1024 elements.  The result is a function on arrays that
    works under `jax.jit`.  Raises UnsupportedCall and the other classes of `mosaic_gpu.errors` with the Python line.
    """
    out_type = _older(out_type, out_shape, "out_type", "out_shape", ())
    scratch_types = _older(
        UNSET if scratch_types == () else scratch_types, scratch_shapes, "scratch_types", "scratch_shapes", ()
    )
    options = checked_options(
        out_type=out_type,
        scratch_types=scratch_types,
        compiler_params=compiler_params,
        grid=grid,
        grid_names=grid_names,
        cluster=cluster,
        cluster_names=cluster_names,
        num_threads=num_threads,
        thread_name=thread_name,
        interpret=interpret,
        name=_older(
            UNSET if name is None else name, UNSET if kernel_name is None else kernel_name, "name", "kernel_name", None
        ),
        debug=debug,
        input_output_aliases=input_output_aliases,
    )
    if body is UNSET:
        return lambda b: _Kernel(b, **options)
    return _Kernel(body, **options)


def _older(new: Any, old: Any, new_name: str, old_name: str, default: Any) -> Any:
    if old is UNSET:
        return default if new is UNSET else new
    if new is not UNSET:
        raise ValueError(f"kernel: give {new_name} or its older spelling {old_name}, not both")
    return old


class _Kernel:
    """A kernel with its options; calling it traces once per signature and binds the primitive."""

    def __init__(self, body: Callable[..., None], **options: Any) -> None:
        arguments.function("kernel", "body", body)
        self.body = body
        self.options = options
        self.traces: dict[Any, Traced] = {}
        functools.update_wrapper(self, body, updated=())
        self.name: str = options["name"] or getattr(body, "__name__", "kernel")

    def __call__(self, *args: Any, **named: Any) -> Any:
        with located():
            if named:
                raise TypeError(f"kernel {self.name}: inputs are given by position, not as {', '.join(named)}=")
            leaves, tree, avals = self._flatten(args)
        out_leaves, out_tree = jax.tree.flatten(self.options["out_type"])
        key = (tree, tuple((a.shape, a.dtype) for a in avals))
        try:
            traced = remembered(self.traces, key, lambda: self.trace(tree, avals, out_leaves))
            multimem.check_world(traced.program, shard_map.world())
            results = call_p.bind(*shard_map.alike(leaves), traced=traced)
        except MosaicGpuError as error:
            raise shortened(error)  # noqa: B904  (it is the same error)
        return jax.tree.unflatten(out_tree, results)

    def traced(self, *args: Any) -> Traced:
        """The traced call for arguments (arrays or ShapeDtypeStructs)."""
        _, tree, avals = self._flatten(args)
        return self.trace(tree, avals, jax.tree.leaves(self.options["out_type"]))

    def program(self, *args: Any) -> Program:
        """The program of `traced`."""
        return self.traced(*args).program

    def _flatten(self, args: Sequence[Any]) -> tuple[list[Any], Any, tuple[jax.core.ShapedArray, ...]]:
        """The inputs' leaves (Python numbers as JAX takes them), how they hang together, and their types."""
        leaves, tree = jax.tree.flatten(args)
        for i, x in enumerate(leaves):
            if is_ref(x):
                raise TypeError(f"kernel {self.name}: a kernel takes arrays, not Refs; input {i} is one")
            if not (hasattr(x, "shape") and hasattr(x, "dtype")):
                if not isinstance(x, (bool, int, float, complex)):
                    arguments.refuse(f"kernel {self.name}", f"input {i}", x, "an array or a number")
                leaves[i] = jax.numpy.asarray(x)
            refuse_key_array(f"kernel {self.name}", f"input {i}", leaves[i])
        return (
            leaves,
            tree,
            tuple(jax.core.ShapedArray(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves),
        )

    def trace(self, tree: Any, avals: Sequence[Any], out_types: Sequence[Any]) -> Traced:
        line = self.options.get("line") or function_line(self.body)  # pallas_call says whose body it is
        with located(line), uncollected():
            return self._trace(tree, avals, out_types, line)

    def _trace(self, tree: Any, avals: Sequence[Any], out_types: Sequence[Any], line: Line | None) -> Traced:
        o = self.options
        check_number_of_refs(
            self.name, self.body, len(jax.tree.unflatten(tree, avals)), len(out_types), o["scratch_types"]
        )
        outs = tuple(jax.core.ShapedArray(t.shape, t.dtype) for t in out_types)
        check_aliases(self.name, o["aliases"], avals, outs)
        scratch, scratch_tree = jax.tree.flatten(o["scratch_types"], is_leaf=lambda x: isinstance(x, RefType))
        refs = [AbstractRef(jax.core.ShapedArray(a.shape, a.dtype), memory_space=GMEM_SPACE) for a in (*avals, *outs)]

        def traced_body(*flat: Any) -> tuple[()]:  # a fresh function each time: JAX caches traces by function
            inputs = jax.tree.unflatten(tree, flat[: len(avals)])
            outputs = flat[len(avals) : len(avals) + len(outs)]
            given = jax.tree.unflatten(scratch_tree, flat[len(avals) + len(outs) :])
            positional, named = ((), given) if isinstance(given, Mapping) else (tuple(given), {})

            def run() -> None:
                result = self.body(*inputs, *outputs, *positional, **named)
                if result is not None:
                    raise ValueError(
                        f"the kernel {self.name} at {line} should return None; it returned {arguments.shown(result)}. Results "
                        "are stored to output Refs: o[...] = x"
                    )

            to_its_end(run, said)
            return ()

        def said(error: Exception) -> Exception:
            """What is raised for an error of the body's."""
            at = raised_at(error, line)
            if isinstance(error, NameError) and str(error).startswith(UNBOUND):  # JAX's, which then speaks of shard_map
                have = ", ".join(n for n, _ in axes) or "none"
                return UnsupportedCall(
                    f"{error.args[0].split('.')[0]}; the kernel {self.name} has {have} (grid_names, cluster_names, thread_name)",
                    at,
                )
            if isinstance(error, MosaicGpuError):
                error.line = error.line or at
            elif isinstance(error, (AssertionError, AttributeError, IndexError, TypeError, ValueError)):
                return translated(error, at) or error
            return error

        axes = [*zip(o["grid_names"], o["grid"], strict=False), *zip(o["cluster_names"], o["cluster"], strict=False)]
        if o["thread_name"] is not None:
            axes.append((o["thread_name"], o["num_threads"]))
        try:
            types = (*refs, *(s.aval() for s in scratch))
            closed = shard_map.traced_outside(lambda: jax.make_jaxpr(traced_body, axis_env=axes)(*types))
        except Exception as error:
            ours = said(error)
            if ours is error:
                raise
            raise ours.with_traceback(error.__traceback__) from ours.__cause__  # the frames of the body
        tracer = Tracer()
        inputs = tuple(
            tracer.value_of_aval(v.aval, n)
            for v, n in zip(closed.jaxpr.invars, self._names(tree, scratch_tree, len(outs)), strict=True)
        )
        equations: list[Equation] = []
        tracer.inline(closed, inputs, equations, line)
        n = len(refs)
        counters = (*filter(_is_semaphore, inputs[n:]), *tracer.semaphores)
        gmem: tuple[Value, ...] = (*inputs[:n], *counters)
        program = Program(
            name=self.name,
            inputs=gmem,
            num_outputs=len(outs) + len(counters),
            scratch=tuple(v for v in inputs[n:] if not _is_semaphore(v)),
            body=tuple(equations),
            grid=o["grid"],
            grid_names=o["grid_names"],
            cluster=o["cluster"],
            cluster_names=o["cluster_names"],
            num_threads=o["num_threads"] or 1,
            thread_name=o["thread_name"],
            params=o["compiler_params"],
            line=line,
            aliases=o["aliases"],
            semaphores=len(counters),
        )
        program = with_tilings(program)
        if o["debug"]:
            print(format_program(program))
        return Traced(program, outs, o["interpret"])

    def _names(self, tree: Any, scratch_tree: Any, outputs: int) -> list[str]:
        """What the body calls its Refs; those of a pallas_call are called what its errors call its arrays."""
        if "names" in self.options:
            return list(self.options["names"])
        inputs = jax.tree.unflatten(tree, range(tree.num_leaves))
        given = jax.tree.unflatten(scratch_tree, range(scratch_tree.num_leaves))
        positional, named = ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})
        return leaf_names(self.body, (*inputs, *range(outputs), *positional), named)

    @property
    def __signature__(self) -> inspect.Signature:
        return inputs_of(self.body, len(jax.tree.leaves(self.options["out_type"])), self.options["scratch_types"])


def _is_semaphore(v: Value) -> bool:
    return v.space is not None and v.space.kind == "semaphore"


call_p = jex.Primitive("mosaic_gpu_kernel")
call_p.multiple_results = True
call_p.def_abstract_eval(lambda *avals, traced: shard_map.result_types(traced.out_avals, avals))


transforms.register(call_p)


def _impl(*args: Any, traced: Traced) -> list[Any]:
    from ..runtime import execute

    return execute.run(traced, args)


call_p.def_impl(_impl)


def _lowering(name: str) -> Any:
    """The lowering that `execute` has under a name."""

    def lower(*args: Any, traced: Traced) -> list[Any]:
        from ..runtime import execute

        try:
            return list(getattr(execute, name)(traced, args))
        except MosaicGpuError as error:
            raise shortened(error)  # noqa: B904  (it is the same error)

    return mlir.lower_fun(lower, multiple_results=True)


mlir.register_lowering(call_p, _lowering("simulator_call"), platform="cpu")
mlir.register_lowering(call_p, _lowering("gpu_call"), platform="cuda")
