"""debug_print, debug_check, print_layout: what the simulator prints and raises, what is compiled, what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import DebugCheckFailed, UnsupportedCall
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

F = jax.ShapeDtypeStruct((64, 8), jnp.float32)


def plan_of(f: Any, *arrays: np.ndarray, arch: str = "sm_90a", **options: Any) -> Any:
    """A kernel that does `f` of its loaded inputs and copies the first."""

    def body(*refs: Any) -> None:
        values = [r[...] for r in refs[:-1]]
        f(*values)
        refs[-1][...] = values[0]

    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    return build_plan(plgpu.kernel(body, abstract[0], **options).program(*abstract), arch)


X = np.arange(512, dtype=np.float32).reshape(64, 8) / 4
SCALARS = {
    "float": (lambda x: plgpu.debug_print("sum {}", jnp.sum(x)), "sum 32704\n"),
    "several": (
        lambda x: plgpu.debug_print("100% {} and {:.2f} and {:5d}|", jnp.max(x), x[0, 1], jnp.int32(7)),
        "100% 127.75 and 0.25 and     7|\n",
    ),
    "bool": (lambda x: plgpu.debug_print("{} {}", x[0, 0] > 1, jnp.any(x > 1)), "False True\n"),
    "hexadecimal": (lambda x: plgpu.debug_print("{:x} {:08X}", jnp.uint32(255), jnp.int32(48879)), "ff 0000BEEF\n"),
    "unsigned": (lambda x: plgpu.debug_print("{}", jnp.uint32(2**32 - 1)), "4294967295\n"),
    "nothing": (lambda x: plgpu.debug_print("here"), "here\n"),
    "jax": (
        lambda x: jax.debug.print("{b:.1f} {} {{{}}} 5%", jnp.int32(3), jnp.int32(4), b=jnp.max(x)),
        "127.8 3 {4} 5%\n",
    ),
}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", SCALARS)
def test_scalars(name, arch, capsys, compiled):
    f, expected = SCALARS[name]
    plan = plan_of(f, X, arch=arch)
    (found,) = simulate(plan, [X])
    assert capsys.readouterr().out == expected
    np.testing.assert_array_equal(found, X)
    assert emit(plan).count("printf(") == 2  # the declaration and the call
    result = compiled(plan)  # printf takes its values from the stack, which is no spill
    assert (result.spill_stores, result.spill_loads, result.messages) == (0, 0, ())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_arrays(dtype, capsys, compiled):
    x = (X[:16, :4] > 3) if dtype == "bool" else X[:16, :4].astype(jnp.dtype(dtype))
    plan = plan_of(lambda v: plgpu.debug_print("x{}", v), x)
    simulate(plan, [x])
    number = (lambda v: str(bool(v))) if dtype == "bool" else (lambda v: f"{float(v):.9g}")
    expected = "".join(f"x[{i}, {j}]: {number(x[i, j])}\n" for i in range(16) for j in range(4))
    assert capsys.readouterr().out == expected
    compiled(plan)


def test_in_roles_and_loops(capsys):
    """By the threads that come along, as often as they do."""

    def body(x: Any, o: Any) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 1)
        def _() -> None:
            lax.fori_loop(0, 3, lambda i, _: plgpu.debug_print("step {}", i), None)

        @plgpu.when(wg == 0)
        def _() -> None:
            plgpu.debug_print("warpgroup {}", wg)
            o[...] = x[...]

    plan = build_plan(plgpu.kernel(body, F, num_threads=2, thread_name="wg").program(F), "sm_90a")
    simulate(plan, [X])
    assert sorted(capsys.readouterr().out.splitlines()) == ["step 0", "step 1", "step 2", "warpgroup 0"]


@pytest.mark.parametrize(
    ("fmt", "args", "words"),
    [
        ("{} {}", 1, "with 1 values"),
        ("none", 1, "of 1 values"),
        ("{a}", 1, "in order"),
        ("{!r}", 1, "in order"),
        ("{:>8}", 1, "in order"),
        ("{:d}", 1, "{:d} of float32"),
        ("{} {}", 2, "a single array"),
    ],
)
def test_refused_formats(fmt, args, words):
    with pytest.raises(UnsupportedCall, match=words) as info:
        plan_of(lambda x: plgpu.debug_print(fmt, *([x[0, 0]] if args == 1 else [x, x])), X)
    assert info.value.line.file == __file__


def test_refs_are_no_values():
    def body(x: Any, o: Any) -> None:
        plgpu.debug_print("{}", x)

    with pytest.raises(TypeError, match="load it first"):
        plgpu.kernel(body, F).program(F)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_checks(arch, compiled):
    plan = plan_of(lambda x: plgpu.debug_check(x >= 0, "not negative"), X, arch=arch)
    simulate(plan, [X])
    bad = X.copy()
    bad[3, 5] = bad[40, 0] = -1
    with pytest.raises(DebugCheckFailed, match=r"2 of 512 elements, the first at \[3, 5\]: not negative") as info:
        simulate(plan, [bad])
    assert info.value.line.file == __file__
    text = emit(plan)
    assert "__assertfail" in text and f'"{__file__}", {info.value.line.number}' in text
    compiled(plan)
    scalar = plan_of(lambda x: plgpu.debug_check(jnp.sum(x) > 0), X, arch=arch)
    simulate(scalar, [X])
    compiled(scalar)
    with pytest.raises(DebugCheckFailed):
        simulate(scalar, [-X])


def test_a_condition_is_a_bool():
    with pytest.raises(TypeError, match="array of bools, not float32"):
        plan_of(lambda x: plgpu.debug_check(x), X)


def test_layouts(capsys):
    tile = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(x: Any, o: Any, s: Any) -> None:
        a = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        plgpu.print_layout("a: {}", a)
        plgpu.print_layout("sums: {}", jnp.sum(a, axis=1))
        plgpu.print_layout("ones: {}", jnp.ones((64, 8)))
        plgpu.print_layout("total: {}", jnp.sum(a))
        plgpu.print_layout("s: {}", s)
        plgpu.print_layout("x: {}", x)
        o[...] = a

    kernel = plgpu.kernel(body, F, scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tile)])
    plan = build_plan(kernel.program(F), "sm_90a")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "a: float32[64, 8] in WGMMA (registers: 2 of dim 1 by 1, 2 of dim 0 by 8; lanes: 4 of dim 1 by 2, 8 of dim 0 by 1; "
        "warps: 4 of dim 0 by 16)",
        "sums: float32[64] in WGMMA.reduce(1,) (registers: 2 of dim 0 by 8; lanes: 4 replicas, 8 of dim 0 by 1; "
        "warps: 4 of dim 0 by 16)",
        "ones: float32[64, 8]: one value for all elements",
        "total: float32[]: a scalar",
        "s: bfloat16[64, 64] in SMEM, tiles of (8, 64), swizzle of 128 bytes",
        "x: float32[64, 8] in GMEM, row-major",
    ]
    np.testing.assert_array_equal(simulate(plan, [X])[0], X)
    assert capsys.readouterr().out == ""
