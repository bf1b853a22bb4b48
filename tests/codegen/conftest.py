"""Kernels that several test files compile. They are written as the emitter writes them: prelude, products, body."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mosaic_gpu.codegen.prelude import generated, prelude
from tests.wgmma_functions import wgmma_function

USER_FILE = "/home/someone/kernel.py"


@pytest.fixture(scope="session")
def consumer() -> Callable[..., str]:
    """A Hopper kernel of one producer warpgroup and two consumers; the caller gives the consumers' body.

    In the body: ``float d[n / 2]`` is the accumulator and is stored at the end; ``steps`` the number of slots to
    consume; ``ready(k)`` waits for slot k and returns its number, ``release(k)`` frees it; ``A(s, j)`` and ``B(s, j)``
    are descriptors of k-step j of slot s; ``SET``, ``ADD``, ``CHOOSE`` and ``ADD_RS`` are products.
    """

    def build(
        body: str, *, n: int = 128, increase: int = 232, decrease: int = 40, bounds: str = "384, 1", first_line: int = 1
    ) -> str:
        variants = {"SET": (False, True), "ADD": (False, False), "CHOOSE": (False, "dynamic"), "ADD_RS": (True, False)}
        texts = []
        for word, (in_registers, init) in variants.items():
            name, text = wgmma_function(n, "bf16", "bf16", "f32", in_registers, False, False, init)
            texts.append(text)
            body = body.replace(f"{word}(", f"{name}(")
        pieces = prelude("mbarrier", "registers", "wgmma", "math", "tma")
        return f"""{pieces}{generated("".join(texts))}
#line 1 "/kernel-frame.cu"
#define A(s, j) (0x4000004000010000ull | (shared + (s) * 16384 + w * 8192 + (j) * 32) >> 4)
#define B(s, j) (0x4000004000010000ull | (shared + 65536 + (s) * {n * 128} + (j) * 32) >> 4)
DI int slot(u32 full, int k) {{ mbarrier_wait(full + 8 * (k % 4), k / 4 & 1); return k % 4; }}
#define ready(k) slot(full, k)
#define release(k) if (threadIdx.x % 128 == 0) mbarrier_arrive(full + 32 + 8 * ((k) % 4))
extern "C" __global__ void __launch_bounds__({bounds})
kernel(const __grid_constant__ TensorMap map, u32* out, int steps) {{
  extern __shared__ __align__(1024) unsigned char memory[];
  u32 shared = shared_address(memory), full = shared + 65536 + {4 * n * 128};
  int role = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) for (int i = 0; i < 8; i++) mbarrier_init(full + 8 * i, i < 4 ? 1 : 2);
  __syncthreads();
  if (role == 0) {{
    set_max_registers_decrease<{decrease}>();
    if (threadIdx.x == 0) for (int k = 0; k < steps; k++) {{
      if (k >= 4) mbarrier_wait(full + 32 + 8 * (k % 4), k / 4 - 1 & 1);
      mbarrier_arrive_expect_tx(full + 8 * (k % 4), {16384 + n * 128});
      tma_load_2d(shared + k % 4 * 16384, &map, full + 8 * (k % 4), k * 64, 0);
      tma_load_2d(shared + 65536 + k % 4 * {n * 128}, &map, full + 8 * (k % 4), k * 64, 0);
    }}
  }} else {{
    set_max_registers_increase<{increase}>();
    int w = role - 1;
    float d[{n // 2}];
#line {first_line} "{USER_FILE}"
{body}
#line 1 "/kernel-end.cu"
#pragma unroll
    for (int i = 0; i < {n // 4}; i++)
      out[(blockIdx.x * 256 + threadIdx.x) * {n // 4} + i] = pack_bf16x2(d[2 * i], d[2 * i + 1]);
  }}
}}
"""

    return build


@pytest.fixture(scope="session")
def plain_loop() -> str:
    """The consumers' body of a matrix product that waits for each step."""
    return """
    #pragma unroll 1
    for (int k = 0; k < steps; k++) {
      int s = ready(k);
      wgmma_fence();
      CHOOSE(d, A(s, 0), B(s, 0), k > 0);
      ADD(d, A(s, 1), B(s, 1));
      ADD(d, A(s, 2), B(s, 2));
      ADD(d, A(s, 3), B(s, 3));
      wgmma_commit();
      wgmma_wait<0>();
      release(k);
    }
    """
