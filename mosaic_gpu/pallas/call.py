"""`pallas_call`: the call, its checks at the first use with arrays, and the primitive that it binds."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jax.ref import AbstractRef

from .. import arguments
from ..collecting import remembered, to_its_end
from ..errors import Line, MosaicGpuError, UnsupportedCall
from ..frontend import shard_map
from ..frontend.foreign import in_our_words, translated
from ..frontend.memory import RefType
from ..frontend.options import check_number_of_refs, inputs_of
from ..frontend.primitives import is_ref
from ..frontend.random import refuse_key_array
from ..frontend.trace import function_line, raised_at
from ..frontend.tracebacks import located, located_at_its_call, shortened
from ..memory import GMEM_SPACE
from ..program import CompilerParams
from ..simulator.params import SimulatorParams
from . import backends, batching, derivative
from .mapping import WHERE, BlockMapping, GridMapping, block_mapping, grid_of, no_symbols, specs_of
from .named import with_program_ids
from .pieces import in_pieces, in_place
from .room import on_inputs, with_room
from .specs import CostEstimate, GridSpec, no_block_spec
from .told import cost_of, metadata_of


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A traced call; compared by identity, so that JAX's caches key on it cheaply.

    jaxpr: the body, closed, over (prefetch, input, output, scratch) Refs; aliases: (operand, output), operands counted with the
    prefetch operands; params: what chose the backend; primal: of a call on values and tangents, that on the values alone.
    """

    name: str
    jaxpr: Any
    mapping: GridMapping
    scratch: Any
    aliases: tuple[tuple[int, int], ...]
    params: Any
    interpret: bool | SimulatorParams
    debug: bool
    cost: CostEstimate | None
    metadata: str | None
    line: Line | None
    primal: Call | None = None

    @property
    def out_avals(self) -> tuple[jax.core.ShapedArray, ...]:
        return tuple(jax.core.ShapedArray(b.shape, b.dtype) for b in self.mapping.outputs)

    @property
    def axis_env(self) -> list[tuple[str, int]]:
        """Of the warpgroups that run the body, where there are several: their axis and its size."""
        return warpgroups(self.params)

    def with_(self, **changes: Any) -> Call:
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        return f"{self.name} grid={self.mapping.grid} vmapped={self.mapping.vmapped}"


@located_at_its_call
def pallas_call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    grid_spec: Any = None,
    grid: Any = (),
    in_specs: Any = no_block_spec,
    out_specs: Any = no_block_spec,
    scratch_shapes: Any = (),
    input_output_aliases: Mapping[int, int] | None = None,
    debug: bool = False,
    interpret: bool | SimulatorParams | None = False,
    name: str | None = None,
    compiler_params: Any = None,
    cost_estimate: Any = None,
    metadata: Any = None,
) -> Callable[..., Any]:
    """Run `kernel` at each point of a grid, on the blocks of the arrays that belong there.

    kernel(*scalar-prefetch Refs, *input Refs, *output Refs, *scratch Refs) returns None and captures no arrays.
    out_shape: `jax.ShapeDtypeStruct` or a tree of them; a tuple or list gives the kernel one argument for each entry, and
    the call a tuple of results.
    grid: sizes, ints or int32 scalars (known at run time only); `program_id(i)` says where one is.
    in_specs, out_specs: a `BlockSpec` for each array, in trees like theirs.  Omitted: every array comes whole, in shared memory.
    `no_block_spec` in one slot: that array stays whole in global memory.
    grid_spec: grid, in_specs, out_specs and scratch_shapes in one, and the number of scalar-prefetch operands.
    scratch_shapes: `SMEM(...)`, `ACC(...)`, `Barrier(...)`, a sequence or (for keywords) a mapping; they live as long as a block.
    input_output_aliases: input -> output, flat, counted with the prefetch operands: one buffer for both.
    interpret: True: as XLA operations, on any platform; `SimulatorParams(...)`: in the simulator.  Both after the call has been
    held against the target's rules.  False: compiled on a GPU, simulated where there is none.
    compiler_params: its type chooses the backend; None: `mosaic_gpu.CompilerParams()`.
    cost_estimate, metadata: attributes of the call's instruction in XLA's HLO.  debug: print the mapping and the traced program.

    Nothing but the arguments' kinds is checked before the first call with arrays, where errors name them by path
    (`args[0]['w']`).  Raises ValueError, TypeError, and the classes of `mosaic_gpu.errors`.
    """
    if grid_spec is not None:
        for what, given, default in (
            ("grid", grid, ()),
            ("in_specs", in_specs, no_block_spec),
            ("out_specs", out_specs, no_block_spec),
            ("scratch_shapes", scratch_shapes, ()),
        ):
            if given is not default and not (default == () and isinstance(given, (tuple, list)) and not given):
                raise ValueError(
                    f"If `grid_spec` is specified, then `{what}` must be `{default}`. It is {arguments.shown(given)}"
                )
        if not all(hasattr(grid_spec, part) for part in ("grid", "in_specs", "out_specs", "scratch_shapes")):
            arguments.refuse(WHERE, "grid_spec", grid_spec, "GridSpec(...) or PrefetchScalarGridSpec(...)")
        spec = GridSpec(
            grid_spec.grid,
            grid_spec.in_specs,
            grid_spec.out_specs,
            grid_spec.scratch_shapes,
            getattr(grid_spec, "num_scalar_prefetch", 0),
        )
    else:
        spec = GridSpec(grid, in_specs, out_specs, scratch_shapes)
    arguments.function(WHERE, "kernel", kernel)
    if spec.in_specs is not no_block_spec and not isinstance(spec.in_specs, (tuple, list)):
        raise ValueError(f"`in_specs` must be a tuple or a list. Found: {arguments.shown(spec.in_specs)}")
    interpret = bool(interpret) if interpret is None else interpret
    if not isinstance(interpret, (bool, SimulatorParams)):
        arguments.refuse(WHERE, "interpret", interpret, "True, False or plgpu.SimulatorParams(...)")
    if name is not None and not isinstance(name, str):
        arguments.refuse(WHERE, "name", name, "a name or None")
    try:
        aliases = dict(input_output_aliases or {})
    except (TypeError, ValueError):
        arguments.refuse(WHERE, "input_output_aliases", input_output_aliases, "a mapping {input: output}")
    options = dict(
        aliases=aliases,
        debug=arguments.flag(WHERE, "debug", debug),
        interpret=interpret,
        name=name or getattr(kernel, "__name__", None) or getattr(getattr(kernel, "func", None), "__name__", "kernel"),
        params=backends.default_params() if compiler_params is None else compiler_params,
        cost=cost_estimate,
        metadata=metadata,
    )
    return _PallasCall(kernel, out_shape, spec, options)


class _PallasCall:
    """The wrapper: traced once for each signature.  `.lower` and `.trace` are those of its `jax.jit`."""

    def __init__(self, body: Callable[..., None], out_shape: Any, spec: GridSpec, options: dict[str, Any]) -> None:
        self.body, self.out_shape, self.spec, self.options = body, out_shape, spec, options
        self.calls: dict[Any, tuple[Call, Any]] = {}
        functools.update_wrapper(self, body, updated=())

    def __call__(self, *args: Any) -> Any:
        try:
            with located():
                call, out_tree, operands = self.traced(*args)
                results = pallas_call_p.bind(*shard_map.alike(operands), call=call)
        except MosaicGpuError as error:
            raise shortened(error)  # noqa: B904  (it is the same error)
        return jax.tree.unflatten(out_tree, results)

    def traced(self, *args: Any) -> tuple[Call, Any, list[Any]]:
        """The call for arguments, the tree of its results and the operands of the primitive."""
        sizes, axes, bounds = grid_of(self.spec.grid)
        paths, tree = jax.tree_util.tree_flatten_with_path(args)
        names = ["args" + jax.tree_util.keystr(path) for path, _ in paths]
        leaves = [_array(n, x) for n, (_, x) in zip(names, paths, strict=True)]
        avals = tuple(jax.core.ShapedArray(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves)
        key = (sizes, axes, tree, tuple((a.shape, a.dtype) for a in avals))
        call, out_tree = remembered(self.calls, key, lambda: _trace(self, sizes, axes, tree, names, avals))
        return call, out_tree, [*bounds, *leaves]

    @property
    def __signature__(self) -> inspect.Signature:
        return inputs_of(self.body, len(_listed(self.out_shape)), self.spec.scratch_shapes or ())

    @property
    def lower(self) -> Any:
        return jax.jit(self.__call__).lower

    @property
    def trace(self) -> Any:
        return jax.jit(self.__call__).trace


def _listed(out_shape: Any) -> tuple[Any, ...]:
    """One entry for each argument that the kernel gets for its outputs."""
    return tuple(out_shape) if isinstance(out_shape, (tuple, list)) else (out_shape,)


def _array(name: str, x: Any) -> Any:
    if is_ref(x):
        raise TypeError(f"{WHERE}: a kernel takes arrays, not Refs; {name} is one")
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        refuse_key_array(WHERE, name, x)
        return x
    if not isinstance(x, (bool, int, float, complex)):
        arguments.refuse(WHERE, name, x, "an array or a number")
    return jnp.asarray(x)


def _trace(
    p: _PallasCall, grid: Any, axes: Sequence[str | None], tree: Any, names: Sequence[str], avals: Sequence[Any]
) -> tuple[Call, Any]:
    o, spec = p.options, p.spec
    args = jax.tree.unflatten(tree, range(len(avals)))
    count = arguments.whole(WHERE, "num_scalar_prefetch", spec.num_scalar_prefetch, 0, len(args))
    fetched, fetched_tree = jax.tree.flatten(tuple(args[:count]))
    prefetch = tuple(avals[i] for i in fetched)
    out_shape = tuple(p.out_shape) if isinstance(p.out_shape, list) else p.out_shape
    outs, out_tree = jax.tree.flatten(out_shape, is_leaf=lambda x: x is None)
    for x in outs:
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            arguments.refuse(WHERE, "out_shape", x, "jax.ShapeDtypeStruct(shape, dtype) or a tree of them")
    out_names = [
        "outputs" + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(out_shape)[0]
    ]
    for name, x in zip(out_names, outs, strict=True):
        refuse_key_array(WHERE, name, x)
        if (narrow := jax.dtypes.canonicalize_dtype(x.dtype)) != x.dtype:
            raise ValueError(
                f"{WHERE}: {name} is to be {x.dtype}, which JAX has only with jax_enable_x64 (all else is computed in {narrow})"
            )
    for name, a in zip(names, prefetch, strict=False):
        no_symbols(f"{name} of shape {a.shape}", a.shape)
    index_of = (prefetch, fetched_tree)
    blocks: list[BlockMapping] = []
    inputs = jax.tree.structure(tuple(args[count:]))
    for s, n, a in zip(
        specs_of(spec.in_specs, inputs, "in_specs", "inputs"), names[len(fetched) :], avals[len(fetched) :], strict=True
    ):
        with located(getattr(s, "line", None)):
            blocks.append(block_mapping(s, n, a.shape, a.dtype, len(grid), index_of))
    listed = jax.tree.structure(out_shape)
    for s, n, x in zip(specs_of(spec.out_specs, listed, "out_specs", "out_shape"), out_names, outs, strict=True):
        with located(getattr(s, "line", None)):
            blocks.append(block_mapping(s, n, tuple(x.shape), x.dtype, len(grid), index_of))
    scratch = _scratch(spec.scratch_shapes)
    own = jax.tree.leaves(scratch, is_leaf=_is_type)
    called = (WHERE, "out_shape", "scratch_shapes")
    check_number_of_refs(o["name"], p.body, len(args), len(_listed(out_shape)), scratch, called)
    aliases = _aliases(o["aliases"], [*prefetch, *avals[len(fetched) :]], outs)
    if isinstance(o["params"], CompilerParams):
        blocks = [*on_inputs(blocks, len(outs), {k for _, k in aliases})]
        blocks = [*with_room(o["name"], blocks, len(outs), own, function_line(p.body))]
    mapping = GridMapping(grid, (), prefetch, tuple(blocks), len(outs))
    several = isinstance(out_shape, tuple)

    def call_body(*flat: Any) -> tuple[()]:  # a fresh function each time: JAX caches traces by function
        given = jax.tree.unflatten(tree, flat[: len(avals)])
        results = jax.tree.unflatten(out_tree, flat[len(avals) : len(avals) + len(outs)])
        given_scratch = jax.tree.unflatten(
            jax.tree.structure(scratch, is_leaf=_is_type), flat[len(avals) + len(outs) :]
        )
        positional, named = ((), given_scratch) if isinstance(given_scratch, dict) else (given_scratch, {})

        def run() -> None:
            result = p.body(*given, *(results if several else (results,)), *positional, **named)
            if result is not None:
                raise ValueError(
                    f"The kernel function of the pallas_call, {o['name']} at {function_line(p.body)}, should return None. It "
                    f"returns a PyTree: {jax.tree.structure(result)}. Results are stored to output Refs: o_ref[...] = x"
                )

        to_its_end(run, in_our_words)
        return ()

    refs = [AbstractRef(a, memory_space=GMEM_SPACE) for a in prefetch]
    refs += [*(b.ref() for b in mapping.blocks), *(s.aval() for s in own)]
    try:
        env = [(a, n) for a, n in zip(axes, grid, strict=True) if a is not None]
        roles = warpgroups(o["params"])
        if clash := {a for a, _ in env} & {a for a, _ in roles}:
            raise ValueError(
                f"{o['name']}: {clash.pop()!r} is an axis of the grid; give CompilerParams another wg_axis"
            )
        closed = shard_map.traced_outside(lambda: jax.make_jaxpr(call_body, axis_env=[*env, *roles])(*refs))
        closed = closed.replace(jaxpr=with_program_ids(closed.jaxpr, axes)) if env else closed
    except (AssertionError, AttributeError, IndexError, TypeError, ValueError) as error:
        from .lowering import memory_notes

        ours = translated(error, raised_at(error, function_line(p.body)))
        for note in memory_notes(mapping):
            (ours or error).add_note(note)
        if ours is None:
            raise
        raise ours.with_traceback(error.__traceback__) from ours.__cause__  # the frames of the body
    captured = [c for c in closed.consts if np.ndim(c) or hasattr(c, "aval")]
    if captured:
        raise ValueError(
            f"The kernel function {o['name']} at {function_line(p.body)} in the pallas_call captures constants "
            f"[{', '.join(str(jax.typeof(c)) for c in captured)}]. You should pass them as inputs. (Python and NumPy scalars "
            "may be captured.)"
        )
    if isinstance(o["params"], CompilerParams) and not roles:
        apart = in_place(blocks)
        refs = [*refs[: len(prefetch)], *(b.ref() for b in apart), *refs[len(prefetch) + len(blocks) :]]
        if (found := in_pieces(closed, refs, {len(avals) + k: i for i, k in aliases})) is not None:
            closed, mapping = found, dataclasses.replace(mapping, blocks=apart)
    call = Call(
        o["name"],
        closed,
        mapping,
        scratch,
        aliases,
        o["params"],
        o["interpret"],
        o["debug"],
        cost_of(o["cost"]),
        metadata_of(o["metadata"]),
        function_line(p.body),
    )
    if call.debug:
        print(f"{call!r}\n" + "\n".join(f"  {b.name}: {b.dtype}{list(b.shape)} in blocks {b.dims}" for b in blocks))
    return call, out_tree


def warpgroups(params: Any) -> list[tuple[str, int]]:
    """The axis of the warpgroups that run a body, and its size; nothing where one does everything."""
    if not isinstance(params, CompilerParams) or params.num_compute_wgs is None:
        return []
    return [(params.wg_axis, params.num_compute_wgs)]


def _is_type(x: Any) -> bool:
    return isinstance(x, RefType)


def _scratch(given: Any) -> Any:
    """Scratch as a tuple or dict of RefTypes."""
    given = () if given is None else given
    if isinstance(given, str) or not isinstance(given, (Sequence, Mapping)):
        arguments.refuse(
            WHERE, "scratch_shapes", given, "a sequence or a mapping of memory spaces such as [SMEM((128, 64), dtype)]"
        )
    found = dict(given) if isinstance(given, Mapping) else tuple(given)
    for x in found.values() if isinstance(found, dict) else found:
        if not _is_type(x):
            arguments.refuse(WHERE, "scratch_shapes", x, "a memory space such as SMEM((128, 64), dtype)")
        if x.space.kind == "gmem":
            raise UnsupportedCall(f"{WHERE}: scratch in GMEM: pass an output for it, a kernel owns no global memory")
    return found


def _aliases(given: dict[Any, Any], inputs: Sequence[Any], outs: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    for i, k in given.items():
        text = f"input_output_aliases contains the mapping '{i}:{k}'"
        if not isinstance(i, int) or not 0 <= i < len(inputs):
            raise ValueError(f"{text} with input index {i} outside the range [0, {len(inputs)})")
        if not isinstance(k, int) or not 0 <= k < len(outs):
            raise ValueError(f"{text} with output index {k} outside the range [0, {len(outs)})")
        a, b = inputs[i], outs[k]
        if tuple(a.shape) != tuple(b.shape) or np.dtype(a.dtype) != np.dtype(b.dtype):
            raise ValueError(
                f"{text} referring to input[{i}] with abstract value {_shown(a)} and to output[{k}] with a "
                f"different abstract value {_shown(b)}"
            )
    if len(set(given.values())) != len(given):
        raise ValueError(f"input_output_aliases={given}: one output cannot be the buffer of two inputs")
    return tuple(sorted(given.items()))


def _shown(x: Any) -> str:
    return f"{np.dtype(x.dtype)}[{','.join(map(str, x.shape))}]"


pallas_call_p = jex.Primitive("pallas_call")
pallas_call_p.multiple_results = True
pallas_call_p.def_abstract_eval(lambda *avals, call: shard_map.result_types(call.out_avals, avals))


def _impl(*operands: Any, call: Call) -> list[Any]:
    """Outside jit, so that the class of an error comes out as it is."""
    platforms = {d.platform for x in operands if isinstance(x, jax.Array) for d in x.devices()}
    platform = next(iter(platforms), jax.default_backend())
    return backends.run(call, backends.canonical(platform), operands, eager=True)


pallas_call_p.def_impl(_impl)

batching.register(pallas_call_p)
derivative.register(pallas_call_p)
for _platform in ("cpu", "cuda", "rocm"):
    mlir.register_lowering(
        pallas_call_p,
        mlir.lower_fun(
            functools.partial(
                lambda *a, call, platform: backends.run(call, platform, a, eager=False), platform=_platform
            ),
            multiple_results=True,
        ),
        platform=_platform,
    )
