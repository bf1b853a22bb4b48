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
from .jax_calls import host_call, program_of_sets
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
        """A call for each set."""
        attend = self.attend(cell)
        return self.batch(attend, self.arrays(problem.sets), lambda out: self.torch.from_dlpack(out).clone())

    def attend(self, cell: Cell) -> Attend:
        """The library's function.  Raises Unsupported."""
        try:
            import jax

            if jax.default_backend() != "gpu":
                raise Unsupported("JAX sees no GPU")
            return self.make(cell.data)
        except ImportError as error:
            raise Unsupported(f"{self.package} cannot be imported: {first_line(error)}") from error

    def arrays(self, sets: Any) -> list[list[Any]]:
        """PyTorch's tensors as JAX's arrays of the dtype that the library takes."""
        import jax

        self.torch.cuda.synchronize()  # they are written before another stream reads them
        found = [[jax.dlpack.from_dlpack(x).astype(self.dtype) for x in inputs] for inputs in sets]
        return jax.block_until_ready(found)  # type: ignore[no-any-return]

    def batch(self, function: Callable[..., Any], sets: Any, finish: Callable[[Any], Any]) -> HostCall:
        """One program with a call for each set; a library's results are not compared with each other."""
        call = host_call(program_of_sets(function, sets), sets, lambda a, b: True, overhead_seconds())
        return HostCall(call.run, call.calls, lambda: finish(call.first()), call.overhead)


class JaxGradient(JaxPeer):
    """A library's derivative.  Its residuals are what `jax.vjp` keeps, made before anything is timed, unless the forward pass is
    timed, too (`problem.shape.forward`)."""

    def prepare(self, cell: Cell, problem: Any) -> HostCall:
        """A call for each set."""
        import jax

        attend, inputs = self.attend(cell), self.arrays(problem.inputs)

        def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
            return jax.vjp(attend, q, k, v)[1](d_out)

        def finish(gradients: Any) -> Any:
            return [self.torch.from_dlpack(x).clone() for x in gradients]

        if problem.shape.forward:
            return self.batch(both, inputs, finish)
        pull = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)[1])
        sets = jax.block_until_ready([(pull(*some[:3]), some[3]) for some in inputs])
        return self.batch(lambda pull, d_out: pull(d_out), sets, finish)


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


PEERS: list[tuple[str, str, Callable[[Any], Attend]]] = [
    ("jax.nn cudnn", "jax", _cudnn),
    ("fa3 jax", "flash-attn3-jax", _flash_attention_3),
    ("tokamax", "tokamax", _tokamax),
]


def attention_peers(torch: Any) -> list[Provider]:
    """All of them, installed or not."""
    peers = [JaxPeer(torch, *peer) for peer in PEERS]
    return [*peers, JaxPeer(torch, "jax attention_mgpu fp16", "jax", _attention_mgpu, "float16")]


def gradient_peers(torch: Any) -> list[Provider]:
    """Those that have a derivative."""
    return [JaxGradient(torch, *peer) for peer in PEERS]
