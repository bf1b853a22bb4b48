"""The tables of tests/ops on the host: the emitted C++, which the simulator does not see, against the simulator.

Each function as its table has it, and in bfloat16 and float16, of which a register holds two elements, and where there are
tables of functions of any shape, in odd shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.layouts.shared import PACKED
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.program import Value, walk
from tests.host_gpu import test_register_ops as registers
from tests.host_gpu.host import NotForHost
from tests.ops import test_composed as composed
from tests.ops import test_elementwise as elementwise
from tests.ops import test_empty as empty
from tests.ops import test_indexed as indexed
from tests.ops import test_int4 as int4
from tests.ops import test_jax_rules as rules
from tests.ops import test_jnp_functions as functions
from tests.ops import test_scan_and_random as scans
from tests.ops import test_special as special
from tests.support import dtype_of

Case = tuple[Callable[..., Any], Sequence[np.ndarray]]
HALVES = ("bfloat16", "float16")
# What two libraries round differently, and what is added up in another order.
ROUNDED = set(
    "exp exp2 log log1p expm1 rsqrt sin cos tan tanh logistic erf erfc erf_inv lgamma pow asin acos atan atan2 sinh cosh asinh "
    "acosh atanh cbrt reduce_sum reduce_prod cumsum cumprod cumlogsumexp dot_general".split()
)


def together(table: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    return lambda *xs: [f(*xs) for f in table.values()]


def chunks(table: dict[str, Any], size: int = 6) -> Iterator[dict[str, Any]]:
    """g++ takes long for large functions."""
    items = list(table.items())
    return (dict(items[k : k + size]) for k in range(0, len(items), size))


def in_type(arrays: Sequence[np.ndarray], dtype: str) -> list[np.ndarray]:
    with np.errstate(over="ignore"):
        return [a.astype(dtype_of(dtype)) if a.dtype == np.float32 else a for a in arrays]


def zeros_to_one(shape: tuple[int, ...]) -> list[np.ndarray]:
    return [np.arange(np.prod(shape), dtype=np.float32).reshape(shape)]


def points(name: str) -> list[np.ndarray]:
    """Some of those at which the function's accuracy is judged, and the ends."""
    _, arrays, _, _ = special.CASES[name]
    some = slice(0, None, max(len(arrays[0]) // 97, 1))
    ends = zip(*special.ENDS[name], strict=True)
    return [
        np.resize(np.concatenate([np.array(e, np.float32), a[some]]), 128) for a, e in zip(arrays, ends, strict=True)
    ]


def drawn(draw: Any) -> Any:
    return lambda seed: draw(jax.random.key(seed[0]))


PLAIN: dict[str, Case] = {
    **{f"composed {n}": c for n, c in composed.CASES.items()},
    **{f"jnp {n}": c for n, c in functions.CASES.items()},
    **{f"empty {n}": (f, zeros_to_one(shape)) for n, (f, shape) in empty.CASES.items()},
    **{f"special {n}": (getattr(jax.lax, n), points(n)) for n in special.CASES},
    **{f"wrapped {n}": (f, [np.linspace(-2, 2, 47, dtype=np.float32)]) for n, f in scans.WRAPPED.items()},
}
OF_FLOAT32 = (
    "windows_by_any_function",
    "reduce",
    "reduce_odd",
    "reduce_pairs",
    "reduce_nothing",
)  # with a start of that type
ALL = {f"{n} {d}": (f, in_type(arrays, d)) for n, (f, arrays) in PLAIN.items() for d in ("float32", *HALVES)}
ALL = {n: c for n, c in ALL.items() if n.split()[2] == "float32" or n.split()[1] not in OF_FLOAT32}
del ALL["jnp sign_of_zeros bfloat16"]  # what is rounded to it loses the sign of a NaN
ALL |= {f"random {n}": (drawn(f), [np.array([1234], np.int32)]) for n, f in scans.DRAWS.items()}
ALL |= {
    f"scan {d} {r}": (
        lambda a, r=r: jax.lax.scan(scans.step, jnp.ones(a.shape[1:], a.dtype), a, reverse=r),
        [registers.numbers(d, 6, 5)],
    )
    for d in ("float32", "int8", *HALVES)
    for r in (False, True)
}
ALL |= {
    f"elementwise {d} {k} of {rows} x {columns}": (
        together(part),
        [x[:rows, :columns] for x in elementwise.inputs(d)],
    )
    for d, table in elementwise.TYPES.items()
    for rows, columns in ((64, 8), (33, 7))
    for k, part in enumerate(chunks(table, 12))
}
ALL |= {
    f"moves {d} {k} of {'x'.join(map(str, shape))}": (together(part), [registers.numbers(d, *shape)])
    for d in (*HALVES, "float32", "int8", "bool")
    for shape in ((12, 31), (20, 7), (64, 5), (8, 33))
    for k, part in enumerate(
        chunks({n: f for n, f in registers.TABLES[d].items() if shape[1] > 7 or n != "columns_as_rows"})
    )
}
ALL |= {
    f"bits of {a} {k} of {len(shape)} dimensions": (together(part), [int4.bits(a, *shape)])
    for a in int4.WIDTHS
    if 4 < int4.WIDTHS[a] < 64
    for shape in ((16, 24), (3,), (5, 2, 6))
    for k, part in enumerate(chunks(int4.apart(a), 9))
}
ALL |= {
    f"{kind} {k}": (
        lambda a, b, kind=kind, part=part: [
            int4.packed(f(int4.elements(a, kind), int4.elements(b, kind))) for f in part.values()
        ],
        [int4.PAIRS.reshape(32, 8), np.random.default_rng(0).integers(0, 256, (32, 8)).astype(np.uint8)],
    )
    for kind in int4.INTEGERS
    for k, part in enumerate(chunks(int4.ARITHMETIC, 11))
}
QUICK = {
    "composed apply_twice bfloat16",
    "composed dilated_windows float16",
    "jnp top_k_small_odd bfloat16",
    "jnp associative_scan_of_odd_length bfloat16",
    "empty concatenate bfloat16",
    "random permutation",
    "scan bfloat16 True",
    "moves bfloat16 1 of 20x7",
    "bits of bfloat16 0 of 3 dimensions",
}
assert set(ALL) >= QUICK


def marked(names: Any, quick: Any) -> list[Any]:
    return [pytest.param(n, marks=[] if n in quick else [pytest.mark.slow]) for n in names]


def plan_of(f: Callable[..., Any], arrays: Sequence[np.ndarray]) -> Plan:
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    outs = jax.tree.leaves(jax.eval_shape(f, *types))

    def body(*refs: Any) -> None:
        ins, results = refs[: len(arrays)], refs[len(arrays) :]
        for o, y in zip(results, jax.tree.leaves(f(*(r[...] for r in ins))), strict=True):
            o[...] = y

    return build_plan(plgpu.kernel(body, outs).program(*types), "sm_90a")


def rounding(plan: Plan) -> dict[str, Any]:
    """None where the results do not depend on it: then they are the same bit for bit."""
    floats = {
        v.dtype
        for e in walk(plan.program.body)
        if e.op in ROUNDED
        for v in (*e.operands, *e.results)
        if isinstance(v, Value) and "float" in v.dtype
    }
    if not floats:
        return dict(ulps=0)
    narrow = any(v.dtype in PACKED for e in walk(plan.program.body) for v in e.results)
    return dict(ulps=2, atol=2**-7) if narrow else dict(ulps=16, atol=2e-6)


@pytest.mark.parametrize("name", marked(ALL, QUICK))
def test_as_in_the_simulator(name: str, agree: Any) -> None:
    f, arrays = ALL[name]
    plan = plan_of(f, arrays)
    agree(plan, list(arrays), **rounding(plan))


INDEXED = [
    (n, d, m)
    for n in indexed.GETS
    for d in ("float32", "int8", "bool", *HALVES)
    for m in ("gmem", "smem", "swizzled")
    if m != "swizzled" or d == "float32"
]


@pytest.mark.parametrize(
    ("name", "dtype", "memory"),
    [pytest.param(*c, marks=[] if c == ("points", "bfloat16", "smem") else [pytest.mark.slow]) for c in INDEXED],
)
def test_refs_by_index_arrays(name: str, dtype: str, memory: str, agree: Any) -> None:
    x = indexed.table(dtype)
    expected = indexed.GETS[name](x, indexed.ROWS)
    smem = {"gmem": None, "smem": (), "swizzled": indexed.TILE}[memory]
    plan = indexed.get_plan(indexed.GETS[name], x, jax.ShapeDtypeStruct(expected.shape, x.dtype), smem)
    (found,) = agree(plan, [x, indexed.ROWS])
    np.testing.assert_array_equal(found.view(np.uint8), np.ascontiguousarray(expected).view(np.uint8))


# What kernel.h has not: TMA, tensor memory, warpgroups' products, semaphores, failed checks.
NOT_HERE = ("async_load", "barrier_arrive_and_wait", "wait_gmem_to_smem", "wgmma_ref", "check", "get_global")
NOT_HERE += ("semaphore_signal_parallel", "semaphore_signal_multicast")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(n for n in rules.RUNS if rules.RUNS[n] is not rules.WARPS)
)  # they leave memory unwritten
def test_rules_of_jax(name: str, agree: Any) -> None:
    body, options, _ = rules.RUNS[name]
    options = dict(options)
    arrays, arch = options.pop("arrays", [rules.X]), options.pop("arch", "sm_90a")
    result = options.pop("out", rules.out(*arrays[0].shape))
    plan = build_plan(plgpu.kernel(body, result, **options).program(*(rules.out(*a.shape) for a in arrays)), arch)
    if name in NOT_HERE:
        with pytest.raises(NotForHost):
            agree(plan, arrays)
        return
    agree(plan, arrays, **rounding(plan))
