"""Types that a kernel does not have are refused by name, with a way out, however they get into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.cli.targets import programs_of
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import UnsupportedCall, UnsupportedPrimitive
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.check import check_program
from tests.support import dtype_of, out

INTEGERS = ("int1", "uint1", "int2", "uint2")
FLOATS = ("float6_e2m3fn", "float6_e3m2fn", "float8_e4m3", "float8_e3m4", "float8_e4m3fnuz", "float8_e5m2fnuz")
TYPES = (*INTEGERS, *FLOATS, "complex64")
WAY_OUT = "outside of the kernel to (int8|float8_e4m3fn|float16)|[hH]and over real and imaginary parts"
SHAPE = (64, 64)
Body = Callable[..., Any]
# name: (the body for a dtype, types of inputs and output by "f32" or "it", scratch of the type)
IN_VALUES: dict[str, Callable[[Any, Any], Any]] = {
    "astype": lambda x, d: x.astype(d),
    "zeros": lambda x, d: jnp.zeros(SHAPE, d),
    "iota": lambda x, d: lax.broadcasted_iota(d, SHAPE, 0),
    "scalar": lambda x, d: jnp.full(SHAPE, x[0, 0].astype(d)),
    "where": lambda x, d: jnp.where(x > 0, x.astype(d), jnp.ones(SHAPE, d)),
    "loop": lambda x, d: lax.fori_loop(0, 3, lambda i, c: c, x.astype(d)),
    "branch": lambda x, d: lax.cond(x[0, 0] > 0, lambda: x.astype(d), lambda: -x.astype(d)),
    "concatenate": lambda x, d: jnp.concatenate([x[:32].astype(d)] * 2),
    "sort": lambda x, d: jnp.sort(x.astype(d)),
    "compare": lambda x, d: x.astype(d) == x.astype(d),
    "product": lambda x, d: lax.dot(x.astype(d), x.astype(d), preferred_element_type=jnp.float32),
    "product's sums": lambda x, d: jnp.dot(x, x, preferred_element_type=d),
}


def program(body: Body, *ins: Any, outs: Any = None, pallas: bool = False, **options: Any) -> Any:
    outs = outs or out(*SHAPE)
    if pallas:
        (found,) = programs_of(plgpu.pallas_call(body, outs), ins)
        return found
    return plgpu.kernel(body, outs, **options).program(*ins)


def refused(make: Callable[[], Any], dtype: str, here: bool = True) -> None:
    with pytest.raises((UnsupportedPrimitive, UnsupportedCall), match=WAY_OUT) as e:
        emit(build_plan(make(), "sm_90a"))
    assert dtype in e.value.message
    assert not here or (e.value.line is not None and e.value.line.file == __file__), e.value.line


@pytest.mark.parametrize("pallas", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_values(dtype: str, pallas: bool) -> None:
    d = dtype_of(dtype)
    for f in IN_VALUES.values():

        def body(x: Any, o: Any, f: Any = f) -> None:
            o[...] = f(x[...], d).astype(jnp.float32)

        refused(lambda body=body: program(body, out(*SHAPE), pallas=pallas), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_refs(dtype: str) -> None:
    d = dtype_of(dtype)
    mine, plain = out(*SHAPE, dtype=d), out(*SHAPE)

    def read(x: Any, o: Any) -> None:
        o[...] = x[...].astype(o.dtype)

    def leave(x: Any, o: Any, *_: Any) -> None:
        o[...] = jnp.zeros(SHAPE, o.dtype)

    def scoped(space: Any) -> Body:
        def body(x: Any, o: Any) -> None:
            plgpu.run_scoped(lambda s: leave(x, o), space(SHAPE, d))

        return body

    def copied(x: Any, o: Any, s: Any, b: Any) -> None:
        plgpu.copy_gmem_to_smem(x, s, b)
        plgpu.barrier_wait(b)
        o[...] = s[...].astype(jnp.float32)

    def multiplied(o: Any, a: Any, b: Any) -> None:
        def product(acc: Any) -> Any:
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma_wait(0)
            return acc[...]

        o[...] = plgpu.run_scoped(product, plgpu.ACC(SHAPE))

    mem = plgpu.SMEM(SHAPE, d)
    for body in (read, leave):
        refused(lambda body=body: program(body, mine), dtype)
        refused(lambda body=body: program(body, mine, pallas=True), dtype, here=False)
    refused(lambda: program(read, plain, outs=mine), dtype)
    refused(lambda: program(leave, plain, scratch_types=[mem]), dtype)
    refused(lambda: program(copied, mine, scratch_types=[mem, plgpu.Barrier()]), dtype)
    refused(lambda: program(multiplied, scratch_types=[mem, mem]), dtype)
    for space in (plgpu.SMEM, plgpu.ACC):
        refused(lambda space=space: program(scoped(space), plain), dtype)


def test_check_says_them_all_at_once() -> None:
    """What could not be placed because of them is skipped, and said."""

    def body(x: Any, o: Any, s: Any) -> None:
        o[...] = x[...].astype(jnp.complex64).real
        o[...] = x[...].astype(jnp.int2).astype(jnp.float32)
        plgpu.run_scoped(lambda t: None, plgpu.SMEM(SHAPE, jnp.complex64))

    found = check_program(program(body, out(*SHAPE), scratch_types=[plgpu.SMEM(SHAPE, jnp.float32)]), "sm_90a")
    told = " ".join(str(e) for e in found.errors)
    assert "makes complex64" in told and "makes int2" in told and "no Refs of complex64" in told
    assert any("could not be placed" in text for text in found.skipped)


def test_factors_of_products_are_copied_only() -> None:
    d = dtype_of("float8_e8m0fnu")

    def body(o: Any) -> None:
        o[...] = jnp.ones(SHAPE, d).astype(jnp.float32)

    with pytest.raises(UnsupportedPrimitive, match="float8_e8m0fnu values: .*outside of the kernel to float32"):
        build_plan(program(body), "sm_90a")
