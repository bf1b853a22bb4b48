"""Attention's gradients in bf16, alone and with the forward pass: ours against cuDNN, FlashAttention 4 and JAX-side libraries.

`python -m benchmarks.attention_backward --json results.json`
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from .attention import FLOOR, REFERENCE_ROWS, CuDnn, FlashAttention4, Shape, TorchProvider, shapes_of
from .jax_peers import gradient_peers
from .model import Accuracy, Cell, DeviceCall, Provider
from .protocols import sets_for
from .runner import Benchmark


@dataclasses.dataclass(frozen=True)
class GradientShape(Shape):
    """As of the forward pass.  forward: it runs, too, and is timed."""

    forward: bool = False

    def cell(self) -> Cell:
        """Its name, and its operations by the usual count: five products backward, two forward."""
        plain = super().cell()
        one = plain.flops // (self.qk_dim + self.v_dim)
        flops = one * (3 * self.qk_dim + 2 * self.v_dim) + plain.flops * self.forward
        inputs = 2 * sum(math.prod(s) for s in self.shapes)
        outputs = 2 * self.batch * self.length * self.heads * self.v_dim
        moved = 2 * inputs + 2 * outputs + (inputs + outputs) * self.forward
        return Cell(f"{plain.name} {'fwd+bwd' if self.forward else 'bwd'}", flops, self, moved)


CELLS = [
    GradientShape(**vars(shape), forward=forward).cell()
    for forward in (False, True)
    for shape in shapes_of("attention_backward")
]


class GradientProblem:
    """Random inputs and cotangents on the GPU, the forward pass's results, and the judge of three KV heads' gradients."""

    any_order = 1  # dQ is summed up in any order

    def __init__(self, device: Any, cell: Cell, seed: int) -> None:
        self.torch = torch = device.torch
        self.shape: GradientShape = cell.data
        s = self.shape
        generator = torch.Generator("cuda").manual_seed(seed)
        self.out_shape = (s.batch, s.length, s.heads, s.v_dim)
        shapes = [*s.shapes, self.out_shape]
        self.inputs = [
            tuple(torch.randn(x, generator=generator, device="cuda", dtype=torch.bfloat16) for x in shapes)
            for _ in range(sets_for(2 * sum(math.prod(x) for x in shapes)))
        ]

    @functools.cached_property
    def sets(self) -> list[tuple[Any, ...]]:
        """The arguments of our function: q, k, v and the cotangent, after v the forward pass's results where it is not timed."""
        if self.shape.forward:
            return self.inputs
        return [(q, k, v, *self._forward(q, k, v), d_out) for q, k, v, d_out in self.inputs]

    @property
    def abstract(self) -> list[Any]:
        """The arguments as JAX's tracing takes them."""
        import jax
        import jax.numpy as jnp

        s = self.shape
        q, k, v, out = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (*s.shapes, self.out_shape))
        lse = jax.ShapeDtypeStruct((s.batch, s.heads, s.length), jnp.float32)
        return [q, k, v, out] if s.forward else [q, k, v, out, lse, out]

    def output(self) -> list[Any]:
        """Memory for dQ, dK and dV."""
        return [self.torch.empty(s, device="cuda", dtype=self.torch.bfloat16) for s in self.shape.shapes]

    def _scores(self, q: Any, k: Any, i: int) -> Any:
        """Of the queries from i on, one head's, in float32."""
        torch = self.torch
        scores = q[i : i + REFERENCE_ROWS] @ k.T * self.shape.qk_dim**-0.5
        if self.shape.causal:
            rows = torch.arange(i, i + len(scores), device="cuda")
            scores.masked_fill_(torch.arange(len(k), device="cuda")[None] > rows[:, None], float("-inf"))
        return scores

    def _forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """The output and its natural log-sum-exp, by plain PyTorch."""
        torch, s = self.torch, self.shape
        out = torch.empty(self.out_shape, device="cuda", dtype=torch.bfloat16)
        lse = torch.empty((s.batch, s.heads, s.length), device="cuda")
        for b in range(s.batch):
            for h in range(s.heads):
                one = [
                    x.float()
                    for x in (q[b, :, h], k[b, :, h * s.kv_heads // s.heads], v[b, :, h * s.kv_heads // s.heads])
                ]
                for i in range(0, s.length, REFERENCE_ROWS):
                    scores = self._scores(one[0], one[1], i)
                    rows = torch.logsumexp(scores, -1)
                    lse[b, h, i : i + REFERENCE_ROWS] = rows
                    out[b, i : i + REFERENCE_ROWS, h] = (torch.exp(scores - rows[:, None]) @ one[2]).bfloat16()
        return out, lse

    @functools.cached_property
    def expected(self) -> list[tuple[int, int, list[Any], list[float]]]:
        """(batch, KV head, gradients in float32, allowed errors) of the first, the last and one in the middle."""
        s = self.shape
        heads = dict.fromkeys([(0, 0), (s.batch // 2, s.kv_heads // 3), (s.batch - 1, s.kv_heads - 1)])
        found = []
        for b, h in heads:
            exact, rounded = self._reference(b, h, False), self._reference(b, h, True)
            # Twice the error of plain gradients that round P, dS and the output as the tensor cores need them.
            limits = [max(2 * self._error(x, y), FLOOR) for x, y in zip(rounded, exact, strict=True)]
            found.append((b, h, exact, limits))
        return found

    def _reference(self, b: int, h: int, rounded: bool) -> list[Any]:
        """dQ of the query heads that share a KV head, (length, heads, d), and its dK and dV."""
        torch, s = self.torch, self.shape
        group = s.heads // s.kv_heads

        def to_type(x: Any) -> Any:
            return x.bfloat16().float() if rounded else x

        q, k, v, d_out = self.inputs[0]
        k, v = k[b, :, h].float(), v[b, :, h].float()
        dq = torch.empty((s.length, group, s.qk_dim), device="cuda")
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for g in range(group):
            own, do = q[b, :, h * group + g].float(), d_out[b, :, h * group + g].float()
            for i in range(0, s.length, REFERENCE_ROWS):
                some = slice(i, i + REFERENCE_ROWS)
                p = torch.softmax(self._scores(own, k, i), -1)
                delta = (to_type(to_type(p) @ v) * do[some]).sum(-1, keepdim=True)
                ds = to_type(p * (do[some] @ v.T - delta))
                dq[some, g] = ds @ k * s.qk_dim**-0.5
                dk += ds.T @ own[some] * s.qk_dim**-0.5
                dv += to_type(p).T @ do[some]
        return [to_type(x) for x in (dq, dk, dv)]

    def _error(self, x: Any, reference: Any) -> float:
        return float((x.float() - reference).norm() / reference.norm())

    def judge(self, output: Any) -> Accuracy:
        """The gradient that is worst in proportion to what is allowed; a NaN anywhere, of poison that was not overwritten too,
        is an error of NaN."""
        for x, shape in zip(output, self.shape.shapes, strict=True):
            if tuple(x.shape) != shape:
                raise ValueError(f"a gradient has shape {tuple(x.shape)}, not {shape}")
        if any(bool(self.torch.isnan(x).any()) for x in output):
            return Accuracy(float("nan"), self.expected[0][3][0])
        dq, dk, dv = output
        group = self.shape.heads // self.shape.kv_heads
        found = []
        for b, h, exact, limits in self.expected:
            own = dq[b, :, h * group : (h + 1) * group], dk[b, :, h], dv[b, :, h]
            found += [Accuracy(self._error(x, y), n) for x, y, n in zip(own, exact, limits, strict=True)]
        return max(found, key=lambda a: a.error / a.allowed)


class TorchGradient(Provider):
    """A library's derivative by PyTorch's autograd."""

    def __init__(self, torch: Any, library: TorchProvider) -> None:
        self.torch, self.library, self.name = torch, library, library.name

    def version(self) -> str:
        """The library's."""
        return self.library.version()

    def prepare(self, cell: Cell, problem: GradientProblem) -> DeviceCall:
        """The gradient of a graph that is kept; or the forward pass, which makes the graph, and the gradient."""
        torch, in_order = self.torch, self.library.in_order
        attend = self.library.attend(problem.shape)
        sets = [[in_order(x) for x in inputs] for inputs in problem.inputs]
        leaves = [[x.detach().requires_grad_() for x in inputs[:3]] for inputs in sets]
        keep = not problem.shape.forward
        graphs = [attend(*x) if keep else None for x in leaves]

        def run(i: int) -> Any:
            n = i % len(sets)
            out = graphs[n] if keep else attend(*leaves[n])
            return torch.autograd.grad(out, leaves[n], sets[n][3], retain_graph=keep)

        def first() -> Any:
            poison = [x.fill_(float("nan")) for x in problem.output()]
            del poison
            return [in_order(x) for x in run(0)]

        return DeviceCall(run, first)


def our_function(cell: Cell, config: Any, deterministic: bool = False) -> Callable[..., Any]:
    """The kernels that a user's `jax.grad` runs, alone or after the forward kernel."""
    from mosaic_gpu.kernels.attention_gradient import gradients

    s: GradientShape = cell.data
    options = {"causal": s.causal, "scale": s.qk_dim**-0.5, "deterministic": deterministic, "backward_config": config}
    return functools.partial(_forward_and_backward if s.forward else gradients, **options)


def _forward_and_backward(q: Any, k: Any, v: Any, d_out: Any, **options: Any) -> Any:
    import jax

    from mosaic_gpu.kernels.attention import attention

    return jax.vjp(functools.partial(attention, **options), q, k, v)[1](d_out)


def providers(device: Any, configs: str | None) -> list[Provider]:
    """As `providers_of`, with the configs of a file."""
    from .ours import read_configs

    return providers_of(device.torch, read_configs(configs, "attention_backward"))


def providers_of(torch: Any, configs: Sequence[Any]) -> list[Provider]:
    """Ours with these configs (`NamedConfig`), each also deterministic, then the peers: those with PyTorch's clock first."""
    from .ours import Ours

    ours = [Ours(torch, c, "attention_backward", our_function) for c in configs]
    return [*ours, *(deterministic(torch, c) for c in configs), *peers(torch)]


def deterministic(torch: Any, config: Any) -> Provider:
    """Ours with `deterministic=True`: what that costs is the ratio of two rows.  dQ, too, is then the same bits in every run."""
    from .ours import Ours

    named = dataclasses.replace(config, name=config.name.replace("ours", "ours deterministic", 1))
    function = functools.partial(our_function, deterministic=True)
    return Ours(torch, named, "attention_backward", function, repeats_all=True)


def peers(torch: Any) -> list[Provider]:
    """All of them, installed or not."""
    libraries = [CuDnn(torch, False), CuDnn(torch, True), FlashAttention4(torch)]
    return [*(TorchGradient(torch, x) for x in libraries), *gradient_peers(torch)]


BENCHMARK = Benchmark("attention_backward", CELLS, GradientProblem, providers)
