"""To and from JAX's own Pallas: its calls compiled by us, our calls handed to its Triton backend.

The only file that imports `jax.experimental.pallas` (public names), and only when it is called.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from ..errors import Line, UnsupportedCall
from ..frontend.memory import ACC, SMEM
from ..frontend.tracebacks import located
from ..program import CompilerParams
from . import lowering
from .call import Call
from .interpret import Place
from .irregular import checked, is_irregular
from .mapping import BlockMapping, GridMapping, dynamic
from .room import on_inputs, with_room
from .specs import BlockDim, Blocked, BoundedSlice, Buffered, Element, Squeezed
from .told import cost_of, metadata_of


def _stock() -> Any:
    import jax.experimental.pallas as pl

    return pl


# ---- a stock call, compiled by us -----------------------------------------------------------------------------------------
@functools.cache
def register() -> bool:
    """Let stock `pallas_call(..., compiler_params=mosaic_gpu.CompilerParams())` compile with us on CUDA; whether JAX can."""
    try:
        from jax.extend.pallas import register_lowering_rule
    except ImportError:  # an older JAX
        return False
    register_lowering_rule(CompilerParams, lower_stock_call, platform="gpu")
    return True


def lower_stock_call(ctx: Any, *operands: Any, **params: Any) -> Any:
    """The lowering rule that stock Pallas asks for our `CompilerParams`."""
    call = call_of(params)

    def run(*arrays: Any) -> Sequence[Any]:
        return lowering.run(call, *arrays)

    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def call_of(params: dict[str, Any]) -> Call:
    """A stock call's parameters as a `Call`."""
    jaxpr = params.get("jaxpr")
    line = _line_of(getattr(jaxpr, "jaxpr", jaxpr))
    with located(line):
        return _call_of(params, line)


def _call_of(params: dict[str, Any], line: Line | None) -> Call:
    m = params["grid_mapping"]
    name = str(params.get("name") or "kernel")
    if params.get("mesh") is not None or m.grid_names:
        raise UnsupportedCall(f"{name}: a pallas_call over a mesh or named axes: use plgpu.kernel(grid_names=...)")
    jaxpr = params["jaxpr"]
    closed = jex.ClosedJaxpr(jaxpr, ()) if not hasattr(jaxpr, "consts") else jaxpr
    count = m.num_index_operands
    prefetch = [v.aval for v in closed.jaxpr.invars[:count]]
    scratch = tuple(_scratch_of(a, name) for a in m.scratch_avals)
    aliases = params.get("input_output_aliases") or ()
    pairs = tuple(aliases.items() if isinstance(aliases, dict) else aliases)
    blocks = on_inputs([_block_of(b, name) for b in m.block_mappings], m.num_outputs, {int(k) for _, k in pairs})
    mapping = GridMapping(
        tuple(n if isinstance(n, int) else dynamic for n in m.grid),
        tuple(m.vmapped_dims),
        tuple(jax.core.ShapedArray(a.shape, a.dtype) for a in prefetch),
        with_room(name, blocks, m.num_outputs, scratch, None),
        m.num_outputs,
    )
    return Call(
        name,
        closed,
        mapping,
        scratch,
        tuple((int(i) - mapping.num_dynamic, int(o)) for i, o in pairs),
        params["compiler_params"],
        False,
        bool(params.get("debug")),
        cost_of(params.get("cost_estimate")),
        metadata_of(params.get("metadata")),
        line,
    )


def _line_of(jaxpr: Any) -> Line | None:
    """Where the body was written, which JAX keeps as text: 'name at file:line'."""
    source = str(getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or "")
    name, _, place = source.rpartition(" at ")
    file, _, number = place.rpartition(":")
    return Line(file, int(number), name) if number.isdigit() else None


def _block_of(b: Any, name: str) -> BlockMapping:
    array = b.array_aval
    space = str(getattr(b.transformed_block_aval, "memory_space", None)).rsplit(".", 1)[-1].lower()
    in_gmem = space in ("any", "gmem", "hbm")
    dims = tuple(_dim_of(d, name) for d in b.block_shape)
    if in_gmem and any(map(is_irregular, dims)):
        raise UnsupportedCall(
            f"{name}: {b.origin}: a BoundedSlice block is copied to shared memory; leave memory_space={space} out"
        )
    whole = in_gmem and dims == tuple(Blocked(n) for n in array.shape)
    mode = b.pipeline_mode
    return BlockMapping(
        str(b.origin),
        tuple(array.shape),
        np.dtype(array.dtype),
        () if whole else dims,
        _index_of(b, dims),
        in_gmem,
        None if mode is None else Buffered(mode.buffer_count).buffer_count,
        free=space in ("none", "default")
        and mode is None
        and not any(is_irregular(d) or isinstance(d, Element) and d.padding[0] for d in dims),
    )


def _index_of(b: Any, dims: Sequence[BlockDim]) -> Any:
    """The index map as `BlockMapping` has it: JAX keeps what of a slice is known in the tree of its results."""
    closed = b.index_map_jaxpr
    if not any(isinstance(d, BoundedSlice) for d in dims):
        return closed

    def index(*given: Any) -> list[Any]:
        found = jax.tree.unflatten(b.index_map_out_tree, jex.jaxpr_as_fun(closed)(*given))
        return jax.tree.leaves(
            [checked(str(b.origin), i, d, x) for i, (d, x) in enumerate(zip(dims, found, strict=True))]
        )

    return jax.make_jaxpr(index)(*(v.aval for v in closed.jaxpr.invars))


def _dim_of(d: Any, name: str) -> BlockDim:
    pl = _stock()
    if d is None or isinstance(d, pl.Squeezed):
        return Squeezed()
    if isinstance(d, (int, pl.Blocked)):
        return Blocked(int(getattr(d, "block_size", d)))
    if isinstance(d, pl.Element):
        return Element(d.block_size, tuple(d.padding))
    if isinstance(d, pl.BoundedSlice):
        return BoundedSlice(d.block_size)
    raise UnsupportedCall(f"{name}: a block dimension {d} of a call of JAX's; call plgpu.pallas_call")


def _scratch_of(aval: Any, name: str) -> Any:
    inner = getattr(aval, "inner_aval", aval)
    space = str(getattr(aval, "memory_space", None)).rsplit(".", 1)[-1].lower()
    if jnp.issubdtype(inner.dtype, jax.dtypes.extended):  # of barriers and the like
        raise UnsupportedCall(f"{name}: scratch of {inner.dtype} in a call of JAX's; plgpu.pallas_call takes barriers")
    if space in ("smem", "default", "none"):
        return SMEM(tuple(inner.shape), np.dtype(inner.dtype))
    if space in ("regs", "acc"):
        return ACC(tuple(inner.shape), np.dtype(inner.dtype))
    raise UnsupportedCall(f"{name}: scratch in {space}: plgpu.pallas_call takes SMEM, ACC and Barrier")


# ---- our call, handed to Triton -------------------------------------------------------------------------------------------
def run_on_triton(call: Call, params: Any, *operands: Any) -> list[Any]:
    """The call through stock Pallas with Triton's parameters."""
    pl, m = _stock(), call.mapping
    if m.num_dynamic:
        raise UnsupportedCall(
            f"{call.name}: dynamic grid bounds not supported in the Triton backend; use plgpu.CompilerParams()",
            call.line,
        )
    if m.prefetch:
        raise UnsupportedCall(f"{call.name}: Triton has no scalar prefetch; use plgpu.CompilerParams()", call.line)
    if call.scratch:
        raise UnsupportedCall(f"{call.name}: Triton has no scratch buffers; use plgpu.CompilerParams()", call.line)
    rank = len(m.grid)

    def body(*refs: Any) -> None:
        ids, sizes = [pl.program_id(i) for i in range(rank)], [pl.num_programs(i) for i in range(rank)]
        Place(m.seen(ids), m.seen(sizes), call.line, {}).run(call.jaxpr, refs, call.line)

    def spec(b: BlockMapping) -> Any:
        dims = b.dims or tuple(Blocked(n) for n in b.shape)
        return pl.BlockSpec(tuple(_stock_dim(d) for d in dims), lambda *ids: tuple(b.starts(ids, ())))

    cost = call.cost and pl.CostEstimate(**dataclasses.asdict(call.cost))
    return list(
        pl.pallas_call(
            body,
            [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in m.outputs],
            grid=m.grid,
            in_specs=[spec(b) for b in m.inputs],
            out_specs=[spec(b) for b in m.outputs],
            input_output_aliases=dict(call.aliases),
            compiler_params=params,
            cost_estimate=cost,
            name=call.name,
            debug=call.debug,
        )(*operands)
    )


def _stock_dim(d: BlockDim) -> Any:
    pl = _stock()
    if isinstance(d, Squeezed):
        return None
    if is_irregular(d):
        raise UnsupportedCall(f"{d}: Triton has no such block dimensions; use plgpu.CompilerParams()")
    return pl.Element(d.block_size, d.padding) if isinstance(d, Element) else pl.Blocked(d.block_size)
