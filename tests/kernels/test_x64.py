"""With 64-bit types enabled the kernels are the same: index arithmetic stays 32 bits wide."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import hashlib
import jax, jax.numpy as jnp
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.kernels.sm90 import matmul as matmul90
from mosaic_gpu.kernels.sm100 import matmul as matmul100
from mosaic_gpu.plan.build import build_plan

for module, arch in ((matmul90, "sm_90a"), (matmul100, "sm_100a")):
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    program = module._kernel(512, 512, jnp.dtype(jnp.bfloat16), module.MatmulConfig()).program(x, x)
    print(hashlib.sha256(emit(build_plan(program, arch)).encode()).hexdigest())
"""


def sources(x64: str) -> list[str]:
    env = os.environ | {"JAX_ENABLE_X64": x64, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_same_source_with_and_without_x64() -> None:
    narrow = sources("0")
    assert len(narrow) == 2 and sources("1") == narrow
