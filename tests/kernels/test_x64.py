"""With 64-bit types enabled the kernels' index arithmetic stays 32 bits wide."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import jax, jax.numpy as jnp
from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.kernels.sm90 import attention as attention90
from mosaic_gpu.kernels.sm90 import matmul as matmul90
from mosaic_gpu.kernels.sm100 import attention as attention100
from mosaic_gpu.kernels.sm100 import matmul as matmul100
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import format_program

assert jnp.arange(3).dtype == jnp.int64, "64-bit types are not enabled"
t = jnp.dtype(jnp.bfloat16)
x = jax.ShapeDtypeStruct((512, 512), t)
y = jax.ShapeDtypeStruct((1, 512, 2, 64), t)
table = jax.ShapeDtypeStruct((3, 2, 3), jnp.int32)
bias = jax.ShapeDtypeStruct((1, 2, 512, 512), t)
c90 = attention90.default_config(64, bias=True)
attentions = [
    (attention100._kernel(1, 512, 2, 64, 64, 2, t, attention100.AttentionConfig(**c), True, 1.0, True, "sm_100a", has), has)
    for c, has in (({}, False), (dict(dynamic=True, pair=True), False), ({}, True))
]
for program, arch in (
    (matmul90._kernel(512, 512, t, matmul90.MatmulConfig()).program(x, x), "sm_90a"),
    (matmul100._kernel(512, 512, 4, (t, t, t), matmul100.MatmulConfig(), None, "sm_100a").program(x, x), "sm_100a"),
    *((attention.program(table, y, y, y, *([bias] * has)), "sm_100a") for attention, has in attentions),
    (
        attention90._kernel(1, 512, 2, 64, 64, 2, t, c90, True, True, 1.0, True, True, True).program(table, y, y, y, bias),
        "sm_90a",
    ),
):
    body = body_of(emit(build_plan(program, arch)))
    print("int64" in format_program(program), "long long" in body, "wgmma" in body or "tcgen05_mma" in body)
"""


def test_no_64_bit_arithmetic() -> None:
    env = os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *["False", "False", "True"] * 2,
        *["False", "True", "True"] * 4,  # addresses of tables
    ]
