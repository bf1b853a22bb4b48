"""Source of a kernel in which one warpgroup hands a tile to another: clean if the reader waits, a race if not."""

HANDOVER = """
import jax
import jax.numpy as jnp
import mosaic_gpu as plgpu

OUT = jax.ShapeDtypeStruct((64, 64), jnp.float32)

def handover(wait, out_type=OUT):
    @plgpu.kernel(out_type=out_type, num_threads=2, thread_name="wg",
                  scratch_types=dict(s=plgpu.SMEM((64, 64), jnp.float32), ready=plgpu.Barrier()))
    def kernel(x, o, *, s, ready):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def produce():
            s[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA)
            plgpu.barrier_arrive(ready)

        @plgpu.when(wg == 1)
        def consume():
            if wait:
                plgpu.barrier_wait(ready)
            o[...] = plgpu.load(s, layout=plgpu.Layout.WGMMA)  # read
    return kernel
"""
