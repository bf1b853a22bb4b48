"""A kernel that uses every kind of parameter, for tests with and without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from mosaic_gpu.codegen.nvrtc import Compiled, compile_cuda
from mosaic_gpu.runtime.launch_spec import BufferPointer, LaunchSpec, Scalar, TensorMap

# out[block][i] = tile[block][i] * factor for i < count, where a tile is 8 x 32 floats and comes by TMA.  It takes a
# kibibyte of dynamic shared memory, a cluster of any size, and blocks of one warp or more.
SOURCE = r"""
struct alignas(64) TensorMap { unsigned long long words[16]; };
extern "C" __global__ void scale_tiles(const __grid_constant__ TensorMap map, float* out, int count, float factor) {
  extern __shared__ __align__(128) float tile[];
  __shared__ unsigned long long barrier;
  unsigned bar = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  unsigned destination = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" :: "r"(bar) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :: "r"(destination), "l"(&map), "r"(0), "r"((int)blockIdx.x * 8), "r"(bar) : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(bar) : "memory");
  }
  for (int i = threadIdx.x; i < count; i += blockDim.x) out[blockIdx.x * 256 + i] = tile[i] * factor;
}
"""


@functools.cache
def _compile(arch: str) -> Compiled:
    return compile_cuda(SOURCE, arch=arch, name="scale_tiles.cu")


@pytest.fixture
def scale_tiles() -> Callable[..., LaunchSpec]:
    """Specs for `blocks` tiles: buffer 0 is the input of (8 * blocks, 32) floats, buffer 1 the output of the same."""

    def make(arch: str, blocks: int, factor: float, cluster: int = 1, **changes: object) -> LaunchSpec:
        compiled = _compile(arch)
        fields: dict[str, object] = {
            "cubin": compiled.cubin,
            "entry": "scale_tiles",
            "grid": (blocks, 1, 1),
            "threads": 128,
            "cluster": (cluster, 1, 1),
            "shared_bytes": 1024,
            "parameters": (
                TensorMap(buffer=0, dtype="float32", dims=(32, 8 * blocks), strides=(128,), box=(32, 8)),
                BufferPointer(1),
                Scalar(256, "int32"),
                Scalar(factor, "float32"),
            ),
            "toolchain": f"{compiled.toolchain} {compiled.arch}",
        }
        return LaunchSpec(**(fields | changes))  # type: ignore[arg-type]

    return make
