"""The C expressions of the elementwise table, compiled for the host and run: they compute what the NumPy column does."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess

import numpy as np
import pytest

from mosaic_gpu.codegen.prelude import piece
from mosaic_gpu.ops.elementwise import ROWS, Row

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HEADER = """
#include <cmath>
#include <cstring>
#include <cstdint>
static float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
static float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
static int __float_as_int(float x) { int i; memcpy(&i, &x, 4); return i; }
static unsigned __float_as_uint(float x) { return (unsigned)__float_as_int(x); }
static double __longlong_as_double(long long x) { double f; memcpy(&f, &x, 8); return f; }
static long long __double_as_longlong(double x) { long long i; memcpy(&i, &x, 8); return i; }
template <class T> T max_nan(T a, T b) { return a != a ? a : b != b ? b : a > b || (a == b && !std::signbit(a)) ? a : b; }
template <class T> T min_nan(T a, T b) { return a != a ? a : b != b ? b : a < b || (a == b && std::signbit(a)) ? a : b; }
static float fmaxf_of_ptx(float a, float b) { return a != a ? b : b != b ? a : max_nan(a, b); }
static float fminf_of_ptx(float a, float b) { return a != a ? b : b != b ? a : min_nan(a, b); }
#define fmaxf fmaxf_of_ptx
#define fminf fminf_of_ptx
static float exp2_approx(float x) { return exp2f(x); }
static float log2_approx(float x) { return log2f(x); }
static float tanh_approx(float x) { return tanhf(x); }
static float rsqrtf(float x) { return 1.f / sqrtf(x); }
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
static int __popcll(u64 x) { return __builtin_popcountll(x); }
static int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
// For the host only: Newton's method on erf (CUDA has the function).
static double erfinv(double y) {
  if (!(y > -1 && y < 1)) return y == 1 || y == -1 ? y * HUGE_VAL : NAN;
  if (y == 0) return y;
  double x = copysign(sqrt(-log((1 - y) * (1 + y))), y);
  for (int i = 0; i < 60; ++i) x -= (erf(x) - y) * 0.886226925452758 * exp(x * x);
  return x;
}
static float erfinvf(float y) { return (float)erfinv(y); }
#define __fdividef(a, b) ((a) / (b))
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define DI static inline
"""
TYPES = {"float32": "float", "float64": "double", "int32": "int", "bool": "bool"}
BOOL_RESULTS = {"eq", "ne", "lt", "le", "gt", "ge", "lt_to", "le_to", "is_finite"}
INTEGERS = np.array([0, 1, -1, 2, 5, -7, 30, -128, 1000, 2**31 - 1, 3, -3], np.int32)
FLOATS = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -3.75, 17.0, 1e-3, 80.0, math.inf, -math.inf, math.nan], np.float64)


def arity(row: Row) -> int:
    text = " ".join(filter(None, (row.float_, row.int_, row.bool_)))
    return 3 if "{2}" in text else 2 if "{1}" in text else 1


def cases() -> list[tuple[Row, str, bool]]:
    found = [(r, t, False) for r in ROWS for t in TYPES if r.expression(t, False) is not None]
    return found + [(r, "float32", True) for r in ROWS if r.approx]


def name(row: Row, dtype: str, approx: bool) -> str:
    return f"{row.name}_{dtype}" + ("_approx" if approx else "")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Every case as a function over arrays."""
    folder = tmp_path_factory.mktemp("expressions")
    text = [HEADER, piece("numbers")]
    for row, dtype, approx in cases():
        c, result = TYPES[dtype], "bool" if row.name in BOOL_RESULTS else TYPES[dtype]
        types = ["bool" if row.name == "select_n" and i == 0 else c for i in range(arity(row))]
        parameters = ", ".join(f"const {t}* a{i}" for i, t in enumerate(types))
        expression = str(row.expression(dtype, approx)).format(*(f"a{i}[k]" for i in range(len(types))))
        text.append(
            f'extern "C" void {name(row, dtype, approx)}({parameters}, {result}* out, int n) '
            f"{{ for (int k = 0; k < n; ++k) out[k] = ({expression}); }}"
        )
    source, target = folder / "expressions.cpp", folder / "expressions.so"
    source.write_text("\n".join(text))
    subprocess.run(
        [str(COMPILER), "-O1", "-shared", "-fPIC", "-w", "-ffp-contract=off", "-o", str(target), str(source)],
        check=True,
    )
    return ctypes.CDLL(str(target))


def operands(row: Row, dtype: str) -> list[np.ndarray]:
    """Every combination of the values of a type that the operation is meant for."""
    values: np.ndarray = (
        np.array([False, True]) if dtype == "bool" else FLOATS.astype(dtype) if dtype.startswith("float") else INTEGERS
    )
    grids = [values] * arity(row)
    if row.name == "select_n":
        grids[0] = np.array([False, True])
    if row.name in ("div", "rem") and dtype == "int32":
        grids[1] = values[values != 0]
    if row.name.startswith("shift"):
        grids[1] = np.array([0, 1, 7, 31], np.int32)
    if row.name == "clamp":
        crossed = [math.nan, 3, -0.0] if dtype.startswith("float") else [3]
        grids[0], grids[2] = np.array([-1, 0, *crossed], dtype), np.array([2, 5, *crossed], dtype)
    if row.name == "square" or (row.name == "mul" and dtype == "int32"):
        grids = [g[np.abs(g.astype(np.float64)) < 30000] if dtype == "int32" else g for g in grids]
    return [np.ascontiguousarray(x.reshape(-1)) for x in np.meshgrid(*grids, indexing="ij")]


@pytest.mark.parametrize(("row", "dtype", "approx"), cases(), ids=lambda v: v.name if isinstance(v, Row) else str(v))
def test_expression(library, row, dtype, approx):
    args = operands(row, dtype)
    with np.errstate(all="ignore"):
        expected = np.asarray(row.numpy(*args))
    found = np.zeros(len(args[0]), bool if row.name in BOOL_RESULTS else dtype)
    getattr(library, name(row, dtype, approx))(*(a.ctypes.data_as(ctypes.c_void_p) for a in (*args, found)), len(found))
    if (
        approx
    ):  # the instructions that stand behind these are not the host's; only NaN and huge arguments differ in kind
        keep = np.logical_and.reduce([np.isfinite(a) for a in args]) & np.isfinite(expected)
        found, expected = found[keep], expected[keep]
    if row.name in ("max", "min", "clamp") and dtype.startswith("float"):
        np.testing.assert_array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))
    if dtype == "float32" and found.dtype != bool:
        np.testing.assert_allclose(found, expected.astype(np.float32), rtol=1e-5, atol=1e-6)
    elif dtype == "float64" and found.dtype != bool:
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-300)
    else:
        np.testing.assert_array_equal(found, expected)
