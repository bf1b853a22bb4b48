"""Attention of libraries on JAX.  JAX has streams of its own, which PyTorch's events do not see: the host's clock times
batches long enough that what a batch costs besides its kernels stays below 1 %."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from .gpu import package_version
from .model import Cell, HostCall, Provider, Unsupported, first_line

Attend = Callable[..., Any]
# tokamax imports these for its own benchmarks only.
TOKAMAX_UNUSED = ("fire", "termcolor", "xprof", "xprof.cli", "xprof.cli.tools", "xprof.cli.tools.get_kernel_stats_tool")


def _cudnn(shape: Any) -> Attend:
    import jax

    return functools.partial(jax.nn.dot_product_attention, is_causal=shape.causal, implementation="cudnn")


def _flash_attention_3(shape: Any) -> Attend:
    from flash_attn3_jax import flash_mha

    return functools.partial(flash_mha, is_causal=shape.causal)


def _tokamax(shape: Any) -> Attend:
    try:
        import tokamax
    except ImportError:
        for name in TOKAMAX_UNUSED:
            sys.modules.setdefault(name, mock.MagicMock())
        import tokamax

    return functools.partial(tokamax.dot_product_attention, is_causal=shape.causal, implementation="mosaic")


def _attention_mgpu(shape: Any) -> Attend:
    from jax.experimental.pallas.ops.gpu import attention_mgpu as module

    # The fastest of its documented sizes that fits shared memory, with its 2 steps in flight.
    config = module.TuningConfig(
        block_q=64, block_kv=64 if shape.qk_dim > 128 else 128, max_concurrent_steps=2, causal=shape.causal
    )
    return functools.partial(module.attention, config=config)


class JaxPeer(Provider):
    """dtype: what the library takes; inputs of another are converted before anything is timed."""

    host_timed = True

    def __init__(
        self, torch: Any, name: str, package: str, make: Callable[[Any], Attend], dtype: str = "bfloat16"
    ) -> None:
        self.torch, self.name, self.package, self.make, self.dtype = torch, name, package, make, dtype

    def version(self) -> str:
        """Of its package, and of JAX."""
        return f"{self.package} {package_version(self.package)}, jax {package_version('jax')}, {self.dtype}"

    def prepare(self, cell: Cell, problem: Any) -> HostCall:
        """One program with a call for each set: launches follow each other without waiting for Python."""
        try:
            import jax

            if jax.default_backend() != "gpu":
                raise Unsupported("JAX sees no GPU")
            attend = self.make(cell.data)
        except ImportError as error:
            raise Unsupported(f"{self.package} cannot be imported: {first_line(error)}") from error
        self.torch.cuda.synchronize()  # the inputs are written before another stream reads them
        sets = [[jax.dlpack.from_dlpack(x).astype(self.dtype) for x in inputs] for inputs in problem.sets]
        jax.block_until_ready(sets)
        program = jax.jit(lambda sets: [attend(*inputs) for inputs in sets]).lower(sets).compile()

        def run(loops: int) -> None:
            for _ in range(loops):
                result = program(sets)
            jax.block_until_ready(result)

        def first() -> Any:
            out = jax.block_until_ready(program(sets))[0]
            return self.torch.from_dlpack(out).clone()

        return HostCall(run, len(sets), first, overhead_seconds())


@functools.cache
def overhead_seconds() -> float:
    """What it takes to start and await a program that does next to nothing: the part of a timing that is no kernel."""
    import jax
    import jax.numpy as jnp

    tiny = jax.jit(lambda x: x + 1)
    x = jnp.zeros(8)
    samples = []
    for i in range(110):
        begun = time.perf_counter()
        jax.block_until_ready(tiny(x))
        if i >= 10:
            samples.append(time.perf_counter() - begun)
    return statistics.median(samples)


def attention_peers(torch: Any) -> list[Provider]:
    """All of them, installed or not."""
    return [
        JaxPeer(torch, "jax.nn cudnn", "jax", _cudnn),
        JaxPeer(torch, "fa3 jax", "flash-attn3-jax", _flash_attention_3),
        JaxPeer(torch, "tokamax", "tokamax", _tokamax),
        JaxPeer(torch, "jax attention_mgpu fp16", "jax", _attention_mgpu, "float16"),
    ]
