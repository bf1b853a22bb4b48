"""With 64-bit types enabled the kernels' index arithmetic stays 32 bits wide."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import jax, jax.numpy as jnp
from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.kernels.sm90 import matmul as matmul90
from mosaic_gpu.kernels.sm100 import matmul as matmul100
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import format_program

assert jnp.arange(3).dtype == jnp.int64, "64-bit types are not enabled"
for module, arch in ((matmul90, "sm_90a"), (matmul100, "sm_100a")):
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    program = module._kernel(512, 512, jnp.dtype(jnp.bfloat16), module.MatmulConfig()).program(x, x)
    body = body_of(emit(build_plan(program, arch)))
    print("int64" in format_program(program), "long long" in body, "wgmma" in body or "tcgen05_mma" in body)
"""


def test_no_64_bit_arithmetic() -> None:
    env = os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "True"] * 2
