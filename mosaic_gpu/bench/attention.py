"""Attention forward in bf16: ours against cuDNN, FlashAttention 4 and the JAX-side libraries.

`python -m benchmarks.attention --json results.json`
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..tune.shapes import MASKS, SETS
from ..tune.workload import Attention
from .gpu import package_version
from .model import Accuracy, Cell, DeviceCall, Provider, Unsupported, first_line
from .protocols import sets_for
from .runner import Benchmark

FLOOR = 1e-3  # of the norm: an error below it is always allowed
REFERENCE_ROWS = 4096  # of the scores that are in memory at once


@dataclasses.dataclass(frozen=True)
class Shape:
    """q: (batch, length, heads, qk_dim); k: (batch, length, kv_heads, qk_dim); v: (batch, length, kv_heads, v_dim)."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k and v."""
        b, s = self.batch, self.length
        return (
            (b, s, self.heads, self.qk_dim),
            (b, s, self.kv_heads, self.qk_dim),
            (b, s, self.kv_heads, self.v_dim),
        )

    def cell(self) -> Cell:
        """Its name, and its operations by the usual count: half of the pairs when causal."""
        heads = f"h{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")
        dim = f"d{self.qk_dim}" + (f"/{self.v_dim}" if self.v_dim != self.qk_dim else "")
        pairs = self.batch * self.heads * self.length**2
        flops = 2 * pairs * (self.qk_dim + self.v_dim) // (2 if self.causal else 1)
        mask = "causal" if self.causal else "full"
        moved = 2 * sum(math.prod(s) for s in self.shapes) + 2 * self.batch * self.length * self.heads * self.v_dim
        return Cell(f"b{self.batch} s{self.length} {heads} {dim} {mask}", flops, self, moved)


def shapes_of(kernel: str) -> list[Shape]:
    """What the set of shapes `benchmark` says for a kernel."""
    found = []
    for text in SETS[kernel]["benchmark"]:
        shape, mask = text.split()
        w = Attention.parse(shape, causal=MASKS[mask])
        found.append(Shape(w.batch, w.length, w.heads, w.kv_heads, w.head_dim, w.value_dim, w.causal))
    return found


CELLS = [shape.cell() for shape in shapes_of("attention")] + [
    Shape(2, 8192, 16, 16, 96, 96, True).cell(),
    Shape(2, 8192, 16, 16, 192, 128, True).cell(),
]


class AttentionProblem:
    """Random inputs on the GPU, and the judge of three heads by them."""

    def __init__(self, device: Any, cell: Cell, seed: int) -> None:
        self.torch = torch = device.torch
        self.shape: Shape = cell.data
        generator = torch.Generator("cuda").manual_seed(seed)
        size = 2 * sum(math.prod(s) for s in self.shape.shapes)
        self.sets = [
            tuple(torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in self.shape.shapes)
            for _ in range(sets_for(size))
        ]

    @property
    def abstract(self) -> list[Any]:
        """The arguments as JAX's tracing takes them."""
        import jax
        import jax.numpy as jnp

        return [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in self.shape.shapes]

    any_order = 0

    def output(self) -> list[Any]:
        """Memory for the results."""
        s = self.shape
        return [self.torch.empty((s.batch, s.length, s.heads, s.v_dim), device="cuda", dtype=self.torch.bfloat16)]

    @functools.cached_property
    def expected(self) -> list[tuple[int, int, Any, float]]:
        """(batch, head, result in float32, allowed error) of the first, the last and a head in the middle."""
        s = self.shape
        heads = dict.fromkeys([(0, 0), (s.batch // 2, s.heads // 3), (s.batch - 1, s.heads - 1)])
        return [(b, h, *self._reference(b, h)) for b, h in heads]

    def _reference(self, b: int, h: int) -> tuple[Any, float]:
        torch, group = self.torch, self.shape.heads // self.shape.kv_heads
        q, k, v = self.sets[0]
        q, k, v = (x.float() for x in (q[b, :, h], k[b, :, h // group], v[b, :, h // group]))
        exact, rounded = [], []
        for i in range(0, len(q), REFERENCE_ROWS):
            scores = q[i : i + REFERENCE_ROWS] @ k.T * self.shape.qk_dim**-0.5
            if self.shape.causal:
                rows = torch.arange(i, i + len(scores), device="cuda")
                scores.masked_fill_(torch.arange(len(k), device="cuda")[None] > rows[:, None], float("-inf"))
            p = torch.softmax(scores, -1)
            exact.append(p @ v)
            rounded.append(p.bfloat16().float() @ v)
        result = torch.cat(exact)
        # Twice the error of plain attention that rounds P as the tensor cores need it.
        return result, max(2 * self._error(torch.cat(rounded), result), FLOOR)

    def _error(self, x: Any, reference: Any) -> float:
        return float((x.float() - reference).norm() / reference.norm())

    def judge(self, output: Any) -> Accuracy:
        """The head that is worst in proportion to what is allowed; a NaN anywhere in the output, those of poison
        that was not overwritten too, is an error of NaN."""
        if tuple(output.shape) != tuple(self.output()[0].shape):
            raise ValueError(f"the result has shape {tuple(output.shape)}")
        if bool(self.torch.isnan(output).any()):
            return Accuracy(float("nan"), self.expected[0][3])
        found = [Accuracy(self._error(output[b, :, h], r), allowed) for b, h, r, allowed in self.expected]
        return max(found, key=lambda a: a.error / a.allowed)


class TorchProvider(Provider):
    """A function of PyTorch tensors that allocates its result.  PyTorch gives memory that was freed last to what is
    allocated next, so the result is most likely written over the poison."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def attend(self, shape: Shape) -> Callable[..., Any]:
        """Its function of q, k and v.  Raises Unsupported."""
        raise NotImplementedError

    def in_order(self, x: Any) -> Any:
        """(b, s, h, d) as it takes it, and the other way round."""
        return x

    def prepare(self, cell: Cell, problem: AttentionProblem) -> DeviceCall:
        """The call on every set."""
        call = self.attend(problem.shape)
        sets = [tuple(self.in_order(x) for x in inputs) for inputs in problem.sets]

        def enqueue(i: int) -> Any:
            with self.torch.no_grad():
                return call(*sets[i % len(sets)])

        def first() -> Any:
            poison = [x.fill_(float("nan")) for x in problem.output()]
            del poison
            return self.in_order(enqueue(0))

        return DeviceCall(enqueue, first)


class CuDnn(TorchProvider):
    """cuDNN through PyTorch.  heads_first: on copies in its own order (b, h, s, d) instead of views of (b, s, h, d)."""

    def __init__(self, torch: Any, heads_first: bool) -> None:
        super().__init__(torch)
        self.heads_first = heads_first
        self.name = "cudnn bhsd" if heads_first else "cudnn"

    def version(self) -> str:
        """cuDNN's and PyTorch's."""
        return f"cudnn {self.torch.backends.cudnn.version()}, torch {self.torch.__version__}"

    def attend(self, shape: Shape) -> Callable[..., Any]:
        """scaled_dot_product_attention with the backend pinned."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        options: dict[str, Any] = {"is_causal": shape.causal}
        if shape.kv_heads != shape.heads:
            options["enable_gqa"] = True

        def call(*inputs: Any) -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(*inputs, **options)

        return call

    def in_order(self, x: Any) -> Any:
        """(b, s, h, d) as it takes it, and the other way round."""
        x = x.transpose(1, 2)
        return x.contiguous() if self.heads_first else x


class FlashAttention4(TorchProvider):
    """FlashAttention 4, in CuTe DSL."""

    name = "fa4"

    def version(self) -> str:
        """Of flash-attn-4 and of the DSL."""
        return f"{package_version('flash-attn-4')}, cutlass-dsl {package_version('nvidia-cutlass-dsl')}"

    def attend(self, shape: Shape) -> Callable[..., Any]:
        """flash_attn_func."""
        try:
            from flash_attn.cute import flash_attn_func
        except Exception as error:  # its dependencies raise more than ImportError
            raise Unsupported(f"flash-attn-4 cannot be imported: {first_line(error)}") from error

        def call(*inputs: Any) -> Any:
            out = flash_attn_func(*inputs, causal=shape.causal)
            return out[0] if isinstance(out, tuple) else out

        return call


def our_function(cell: Cell, config: Any) -> Callable[..., Any]:
    """What a user calls."""
    from mosaic_gpu.kernels.attention import attention

    return functools.partial(attention, causal=cell.data.causal, config=config)


def providers(device: Any, configs: str | None) -> list[Provider]:
    """As `providers_of`, with the configs of a file."""
    from .ours import read_configs

    return providers_of(device.torch, read_configs(configs, "attention"))


def providers_of(torch: Any, configs: Sequence[Any]) -> list[Provider]:
    """Ours with these configs (`NamedConfig`), then the peers: those with PyTorch's clock first."""
    from . import jax_peers
    from .ours import Ours

    ours: list[Provider] = [Ours(torch, c, "attention", our_function) for c in configs]
    peers: list[Provider] = [CuDnn(torch, False), CuDnn(torch, True), FlashAttention4(torch)]
    return ours + peers + jax_peers.attention_peers(torch)


BENCHMARK = Benchmark("attention", CELLS, AttentionProblem, providers)
