"""Elements of 4 bits in registers (int4, uint4, float4_e2m1fn), all of them in every operation, against JAX; bits taken apart."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import IllegalInstruction, ResourceExceeded, UnsupportedCall, UnsupportedPrimitive
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate
from tests.support import dtype_of

INTEGERS = ("int4", "uint4")
KINDS = (*INTEGERS, "float4_e2m1fn")
NUMBERS = ("float32", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "bool")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
Function = Callable[[Any, Any], Any]


def x64() -> Any:
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


PAIRS = np.arange(256, dtype=np.uint8)  # every pair of elements: the low half of a byte comes first
ARITHMETIC: dict[str, Function] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lambda x, y: lax.bitwise_not(x),
    "neg": lambda x, y: -x,
    "sign": lambda x, y: lax.sign(x),
    "clamp": lambda x, y: lax.clamp(jnp.asarray(2, x.dtype), x, y),
    "select": lambda x, y: jnp.where(x > y, x, jnp.asarray(3, x.dtype)),
    "literals": lambda x, y: x * jnp.asarray(3, x.dtype) - jnp.asarray(7, x.dtype) * y,
    **{n: getattr(lax, n) for n in ("eq", "ne", "lt", "le", "gt", "ge")},
}


def elements(packed: Any, kind: str) -> Any:
    """(..., n) bytes -> (..., 2 n) elements."""
    parts = lax.bitcast_convert_type(packed, dtype_of(kind))
    return parts.reshape(*packed.shape[:-1], -1)


def packed(x: Any) -> Any:
    """Elements of 4 bits as bytes of two, the last dimension half as long; others as they are."""
    if jnp.dtype(x.dtype).name not in KINDS:
        return x
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint8)


def from_bytes(f: Callable[[Any], Any], kind: str) -> Callable[[Any], Any]:
    return lambda b: packed(f(elements(b, kind)))


def to_every(kind: str) -> dict[str, Callable[[Any], Any]]:
    others = (*NUMBERS, *FLOAT8, *KINDS)
    return {to: from_bytes(lambda v, to=to: v.astype(dtype_of(to)), kind) for to in others}  # type: ignore[misc]


def pairwise(kind: str) -> dict[str, Callable[[Any], Any]]:
    def of(f: Function) -> Callable[[Any], Any]:
        def call(b: Any) -> Any:
            v = lax.bitcast_convert_type(b, dtype_of(kind))
            return packed(f(v[:, 0], v[:, 1]))

        return call

    return {name: of(f) for name, f in ARITHMETIC.items()}


def moves(b: Any, kind: str) -> Any:
    """(64, 32) bytes, and as many: taken apart, put together, chosen from, repeated, turned round, looked up."""
    v = elements(b, kind)
    c = jnp.concatenate([v[:, 32:], v[:, :32]], 1)
    c = lax.rev(c.T, (0,)).T
    row = jnp.broadcast_to(v[3][None], (64, 64))
    c = jnp.where(lax.broadcasted_iota(jnp.int32, (64, 64), 0) < 8, row, c)
    c = jnp.where(lax.broadcasted_iota(jnp.int32, (64, 64), 1) == 5, jnp.asarray(1.5, c.dtype), c)
    c = lax.fori_loop(0, 3, lambda i, x: jnp.where(i == 1, x, lax.rev(x, (1,))), c)
    c = jnp.take(c, lax.iota(jnp.int32, 64) * 5 % 64, axis=0)
    c = lax.dynamic_update_slice(c, c[:8, :8], (jnp.int32(9), jnp.int32(4)))
    return packed(jnp.pad(c, ((0, 0), (2, 0)))[:, 1:65])


def compiled_plan(functions: dict[str, Callable[[Any], Any]], x: Any, arch: str = "sm_90a") -> Any:
    def body(a: Any, *outs: Any) -> None:
        for f, o in zip(functions.values(), outs, strict=True):
            o[...] = f(a[...])

    abstract = jax.ShapeDtypeStruct(x.shape, x.dtype)
    outs = [jax.eval_shape(f, abstract) for f in functions.values()]
    return build_plan(plgpu.kernel(body, outs).program(abstract), arch)


def right(functions: dict[str, Callable[[Any], Any]], x: Any, found: list[np.ndarray]) -> None:
    for (name, f), got in zip(functions.items(), found, strict=True):
        want = np.asarray(f(jnp.asarray(x)))
        assert got.dtype == want.dtype, name
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_becomes_every_type(kind, arch, compiled):
    functions = to_every(kind)
    plan = compiled_plan(functions, PAIRS, arch)
    found = dict(zip(functions, simulate(plan, [PAIRS]), strict=True))
    if kind == "float4_e2m1fn":  # of which XLA on a CPU makes 127 of 6, and negative numbers without a sign are open
        whole = np.trunc(np.asarray(elements(jnp.asarray(PAIRS), kind)).astype(np.float32)).astype(np.int32)
        for to in [n for n in functions if "int" in n]:
            want = np.maximum(whole, 0) if to.startswith("u") else whole
            want = (want[::2] & 15 | (want[1::2] & 15) << 4) if to in INTEGERS else want
            np.testing.assert_array_equal(found.pop(to), want.astype(np.uint8 if to in INTEGERS else to), err_msg=to)
            del functions[to]
    right(functions, PAIRS, list(found.values()))
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("source", [*NUMBERS, "float8_e4m3fn"])
def test_integers_from_other_types(kind, source, compiled):
    """Integers wrap around; a float outside becomes the nearest end, cut off towards zero, NaN zero: as on JAX's backends."""
    if source == "bool":
        x = np.arange(256) % 3 == 0
    elif source in ("float32", "float16", "bfloat16", "float8_e4m3fn"):
        x = np.concatenate([np.linspace(-20, 20, 250), [np.nan, 6e4, -6e4, 0.0, -0.0, 7.99]]).astype(np.float32)
        x = x.astype(dtype_of(source))
    else:
        info = np.iinfo(source)
        x = np.concatenate([np.linspace(info.min, info.max, 128).astype(source), np.arange(128).astype(source)])
    functions = {kind: lambda v: packed(v.astype(dtype_of(kind)))}
    for arch in ("sm_90a", "sm_100a"):
        plan = compiled_plan(functions, x, arch)
        (got,) = simulate(plan, [x])
        wide = x.astype(np.float32) if x.dtype.kind not in "iub" else x.astype(np.int64)
        ends = ml_dtypes.iinfo(dtype_of(kind))
        if wide.dtype == np.float32:
            wide = np.clip(np.trunc(np.nan_to_num(wide, nan=0.0)), int(ends.min), int(ends.max)).astype(np.int64)
        low, high = (wide[::2] & 15), (wide[1::2] & 15)
        np.testing.assert_array_equal(got, (low | high << 4).astype(np.uint8))
        if source not in ("float8_e4m3fn",):
            right(functions, x, [got])
        assert compiled(plan).complaints() == []


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16", "int8", "int32", *FLOAT8])
def test_rounding_to_float4(source, compiled):
    """To the nearest, ties to even, with the sign of zeros; what is too large becomes 6; NaN -0."""
    values = np.unique(np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    middle = (values[1:] + values[:-1]) / 2
    up, down = (np.nextafter(middle, np.float32(s)) for s in (np.inf, -np.inf))
    rest = np.array([5.0, 6.9, 7, 7.1, 8, 100, 1e30, np.inf, 1e-30, 1e-45, 0.0, np.nan], np.float32)
    x = np.concatenate([values, middle, up, down, rest, -rest]).astype(np.float32)
    x = np.concatenate([x, np.random.default_rng(0).uniform(-8, 8, 256 - len(x)).astype(np.float32)])
    if source.startswith("int"):
        x = np.arange(-128, 128)
    with np.errstate(over="ignore"):
        x = x.astype(dtype_of(source))
    functions = {"to": lambda v: packed(v.astype(jnp.float4_e2m1fn))}
    for arch in ("sm_90a", "sm_100a"):
        plan = compiled_plan(functions, x, arch)
        (got,) = simulate(plan, [x])
        codes = x.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
        codes[np.isnan(x.astype(np.float32))] = 8
        np.testing.assert_array_equal(got, codes[::2] | codes[1::2] << 4)
        right(functions, x, [got])
        assert compiled(plan).complaints() == []


@pytest.mark.parametrize("kind", INTEGERS)
def test_arithmetic_of_every_pair(kind, compiled):
    """It wraps around; by zero all bits are set, and the rest is the dividend."""
    functions = pairwise(kind)
    for arch in ("sm_90a", "sm_100a"):
        plan = compiled_plan(functions, PAIRS, arch)
        right(functions, PAIRS, simulate(plan, [PAIRS]))
        assert compiled(plan).complaints() == []


@pytest.mark.parametrize("kind", KINDS)
def test_moves(kind, compiled):
    x = np.random.default_rng(1).integers(0, 256, (64, 32)).astype(np.uint8)
    functions = {"moves": lambda b: moves(b, kind)}
    for arch in ("sm_90a", "sm_100a"):
        plan = compiled_plan(functions, x, arch)
        right(functions, x, simulate(plan, [x]))
        assert compiled(plan).complaints() == []


# ---- bits of one type as elements of another ---------------------------------------------------------------------------
WIDTHS = {
    "int4": 4,
    "uint4": 4,
    "float4_e2m1fn": 4,
    "int8": 8,
    "uint8": 8,
    "float8_e4m3fn": 8,
    "int16": 16,
    "bfloat16": 16,
}
WIDTHS |= {"float16": 16, "uint16": 16, "int32": 32, "uint32": 32, "float32": 32}
WIDTHS |= {"int64": 64, "float64": 64}


def bits(dtype: str, *shape: int) -> np.ndarray:
    """Random ones, no NaN among them or their parts: one need not keep its bits."""
    x = np.random.default_rng(3).integers(0, 256, (*shape, WIDTHS[dtype] // 8)).astype(np.uint8)
    x &= 0xBF
    return x.view(dtype_of(dtype)).reshape(shape)


def apart(a: str) -> dict[str, Callable[[Any], Any]]:
    """There and back, with the parts where the elements were, and spread over other threads."""

    def there(x: Any, b: str) -> Any:
        return packed(lax.bitcast_convert_type(x, dtype_of(b)))

    def turned(x: Any, b: str) -> Any:
        parts = lax.bitcast_convert_type(x, dtype_of(b))
        return packed(lax.rev(parts, (0, parts.ndim - 1)))

    def back(x: Any, b: str) -> Any:
        parts = lax.bitcast_convert_type(x, dtype_of(b))
        return lax.bitcast_convert_type(lax.rev(parts, (0,)), dtype_of(a))

    narrower = [b for b in WIDTHS if WIDTHS[b] < WIDTHS[a]]
    return {f"{f.__name__} {b}": functools.partial(f, b=b) for b in narrower for f in (there, turned, back)}


WIDER = [pytest.param(a, marks=[pytest.mark.slow] if WIDTHS[a] == 64 else []) for a in WIDTHS if WIDTHS[a] > 4]


@pytest.mark.parametrize("a", WIDER)
def test_bits_of_other_widths(a, compiled):
    with x64() if WIDTHS[a] == 64 else contextlib.nullcontext():
        for shape in ((16, 24), (3,)):
            x = bits(a, *shape)
            plan = compiled_plan(apart(a), x)
            right(apart(a), x, simulate(plan, [x]))
    assert compiled(plan).complaints() == []


def test_scalars_as_bits():
    """One element as an array of parts, and such an array as one."""

    def body(x: Any, o: Any, p: Any) -> None:
        parts = lax.bitcast_convert_type(x[2], jnp.uint4)
        o[...] = lax.bitcast_convert_type(parts.reshape(4, 2), jnp.uint8)
        p[0] = lax.bitcast_convert_type(lax.rev(parts, (0,)), jnp.int32)

    x = np.array([1, 2, 0x12345678, 4], np.int32)
    outs = [jax.ShapeDtypeStruct((4,), np.uint8), jax.ShapeDtypeStruct((1,), np.int32)]
    plan = build_plan(plgpu.kernel(body, outs).program(jax.ShapeDtypeStruct(x.shape, x.dtype)), "sm_90a")
    o, p = simulate(plan, [x])
    np.testing.assert_array_equal(o, [0x78, 0x56, 0x34, 0x12])
    assert p[0] == np.uint32(0x87654321).view(np.int32)


def test_parts_stay_with_their_thread(compiled):
    """A warpgroup's A fragment of 16 bits out of bytes of two elements: no shared memory, no barrier."""

    def body(w: Any, o: Any) -> None:
        o[...] = plgpu.layout_cast(elements(w[...], "int4").astype(jnp.bfloat16), plgpu.Layout.WGMMA)

    types = [jax.ShapeDtypeStruct((64, 32), jnp.int8), jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)]
    plan = build_plan(plgpu.kernel(body, types[1]).program(types[0]), "sm_90a")
    assert plan.roles[0].scratch_bytes == 0 and "named_barrier_sync" not in emit(plan).split("__global__")[1]
    found = compiled(plan).mnemonics
    assert not {"LDS", "STS", "BAR", "I2F"} & found.keys() and found["FADD"] == 32


def test_blocks_of_a_pallas_call():
    """Bytes come in blocks as any; a block that no warpgroup can hold is not taken apart piece by piece."""

    def body(w: Any, s: Any, o: Any) -> None:
        o[...] = elements(w[...], "int4").astype(jnp.float32) * s[...]

    def call(rows: int, w: Any, s: Any) -> Any:
        return plgpu.pallas_call(
            body,
            jax.ShapeDtypeStruct((128, 2 * w.shape[1]), np.float32),
            grid=(128 // rows,),
            in_specs=[
                plgpu.BlockSpec((rows, w.shape[1]), lambda i: (i, 0)),
                plgpu.BlockSpec((rows, 1), lambda i: (i, 0)),
            ],
            out_specs=plgpu.BlockSpec((rows, 2 * w.shape[1]), lambda i: (i, 0)),
            interpret=True,
        )(w, s)

    rng = np.random.default_rng(4)
    w, s = rng.integers(0, 256, (128, 32)).astype(np.uint8), rng.standard_normal((128, 1)).astype(np.float32)
    want = np.asarray(elements(jnp.asarray(w), "int4")).astype(np.float32) * s
    np.testing.assert_array_equal(call(32, w, s), want)
    with (
        pytest.raises(ResourceExceeded, match="split_bits|get|mul"),
        pytest.warns(UserWarning, match="stays in global memory"),
    ):
        call(128, np.tile(w, (1, 32)), s)


# ---- products -----------------------------------------------------------------------------------------------------------------
PRODUCTS = [*((a, b) for a in INTEGERS for b in INTEGERS), ("int4", "int8"), ("uint8", "int4")]
PRODUCT_OUTS = [jax.ShapeDtypeStruct((64, 64), np.int32)] * 3 + [jax.ShapeDtypeStruct((64, 32), np.uint8)]


def factors() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, 256, (64, 32)).astype(np.uint8) for _ in range(2)]


def factor(v: Any, kind: str) -> Any:
    return elements(v, "int4").astype(jnp.int8) if kind == "int8" else elements(v, "uint4").astype(dtype_of(kind))


def product_body(a: str, b: str) -> Callable[..., None]:
    def body(x: Any, y: Any, turned: Any, plain: Any, added: Any, narrow: Any) -> None:
        u, v = factor(x[...], a), factor(y[...], b)
        turned[...] = lax.dot_general(u, v, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        plain[...] = lax.dot(u, v, preferred_element_type=jnp.int32)
        both = a in INTEGERS and b in INTEGERS
        start = jnp.full((64, 64), 5, jnp.int32)
        added[...] = plgpu.mma(start, u, v) if both else start + lax.dot(u, v, preferred_element_type=jnp.int32)
        narrow[...] = packed(jnp.dot(u, u) if a in INTEGERS else jnp.dot(v, v))

    return body


def right_products(a: str, b: str, x: Any, y: Any, found: list[np.ndarray]) -> None:
    turned, plain, added, narrow = found
    u, v = (np.asarray(factor(jnp.asarray(w), k).astype(jnp.int32)) for w, k in ((x, a), (y, b)))
    np.testing.assert_array_equal(turned, u @ v.T)
    np.testing.assert_array_equal(plain, u @ v)
    np.testing.assert_array_equal(added, u @ v + 5)
    low = (u @ u if a in INTEGERS else v @ v) & 15
    np.testing.assert_array_equal(narrow, low[:, ::2] | low[:, 1::2] << 4)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("a", "b"), PRODUCTS)
def test_products(a, b, arch, compiled):
    """Exact in int32, as instructions of 8 bits; through `mma`, `lax.dot`, and with a result of 4 bits, which wraps."""
    x, y = factors()
    abstract = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, y)]
    plan = build_plan(plgpu.kernel(product_body(a, b), PRODUCT_OUTS).program(*abstract), arch)
    right_products(a, b, x, y, simulate(plan, [x, y]))
    report = compiled(plan)
    assert report.complaints() == [] and report.mnemonics["IMMA"] > 0
    assert "CALL" not in report.mnemonics  # that is how ptxas emulates mma.sync of 4 bits


# ---- what is refused ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_no_refs(kind):
    """Memory is addressed in bytes: inputs, outputs and buffers."""
    whole = jax.ShapeDtypeStruct((64, 64), dtype_of(kind))
    floats = jax.ShapeDtypeStruct((64, 64), np.float32)

    def body(x: Any, o: Any, *rest: Any) -> None:
        o[...] = x[...].astype(o.dtype)

    for into, of, scratch in ((whole, floats, []), (floats, whole, []), (floats, floats, [plgpu.SMEM((64,), kind)])):
        with pytest.raises(UnsupportedCall, match=f"no Refs of {kind}.*bitcast_convert_type") as e:
            build_plan(plgpu.kernel(body, of, scratch_types=scratch).program(into), "sm_90a")
        assert e.value.line is not None and e.value.line.file == __file__

    def scoped(x: Any, o: Any) -> None:
        plgpu.run_scoped(lambda s: None, plgpu.SMEM((64,), kind))

    with pytest.raises(UnsupportedCall, match=f"no Refs of {kind}") as e:
        build_plan(plgpu.kernel(scoped, floats).program(floats), "sm_90a")
    assert e.value.line is not None and e.value.line.file == __file__


COMPUTED: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "reduction": (lambda v: lax.reduce_max(v, (1,)), "int4", r"reduce_max of int4: .*astype.jnp.int8"),
    "shift": (lambda v: lax.shift_left(v, v), "uint4", "shift_left of uint4"),
    "sort": (lambda v: lax.sort(v), "int4", "sort of int4"),
    "sum of floats": (lambda v: v + v, "float4_e2m1fn", r"add of float4_e2m1fn: .*astype.jnp.float32"),
    "product of floats": (
        lambda v: lax.dot(v, v, preferred_element_type=jnp.float32),
        "float4_e2m1fn",
        "dot_general of float4_e2m1fn: .*Convert with astype",
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_not_computed(name):
    f, kind, words = COMPUTED[name]

    def body(x: Any, o: Any) -> None:
        o[...] = jnp.zeros(o.shape, o.dtype) + f(elements(x[...], kind)).astype(jnp.float32).reshape(-1)[0]

    with pytest.raises((UnsupportedPrimitive, UnsupportedCall), match=words) as e:
        out = jax.ShapeDtypeStruct((128,), np.float32)
        build_plan(plgpu.kernel(body, out).program(jax.ShapeDtypeStruct((64, 32), np.uint8)), "sm_90a")
    assert e.value.line is not None and e.value.line.file == __file__


def test_wgmma_names_what_it_multiplies():
    def body(x: Any, o: Any, b: Any) -> None:
        def product(acc: Any) -> Any:
            plgpu.wgmma(acc, elements(x[...], "int4"), b)
            return acc[...]

        o[...] = plgpu.run_scoped(product, plgpu.ACC((64, 64), jnp.int32))

    out = jax.ShapeDtypeStruct((64, 64), np.int32)
    kernel = plgpu.kernel(body, out, scratch_types=[plgpu.SMEM((64, 64), jnp.int8)])
    with pytest.raises(
        IllegalInstruction, match="no int4 x int8 -> int32; it multiplies float16.*convert A with astype"
    ):
        build_plan(kernel.program(jax.ShapeDtypeStruct((64, 32), np.uint8)), "sm_90a")
