"""Matrix products in bf16: ours against cuBLAS through PyTorch.

`python -m benchmarks.matmul --json results.json`
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..tune.shapes import SETS
from ..tune.workload import Matmul
from .model import Accuracy, Cell, DeviceCall, Provider
from .protocols import sets_for
from .runner import Benchmark

FLOOR = 1e-3
JUDGED_ROWS = 32  # in three places


@dataclasses.dataclass(frozen=True)
class Shape:
    """(m, k) times (k, n)."""

    m: int
    n: int
    k: int

    def cell(self) -> Cell:
        """Named m x n x k."""
        moved = 2 * (self.m * self.k + self.k * self.n + self.m * self.n)
        return Cell(f"{self.m}x{self.n}x{self.k}", 2 * self.m * self.n * self.k, self, moved)


CELLS = [Shape(w.m, w.n, w.k).cell() for w in map(Matmul.parse, SETS["matmul"]["benchmark"])]


class MatmulProblem:
    """Random inputs on the GPU, and the judge of some rows by float64."""

    def __init__(self, device: Any, cell: Cell, seed: int) -> None:
        self.torch = torch = device.torch
        self.shape: Shape = cell.data
        s = self.shape
        generator = torch.Generator("cuda").manual_seed(seed)
        self.sets = [
            tuple(
                torch.randn(x, generator=generator, device="cuda", dtype=torch.bfloat16)
                for x in ((s.m, s.k), (s.k, s.n))
            )
            for _ in range(sets_for(2 * s.k * (s.m + s.n)))
        ]

    @property
    def abstract(self) -> list[Any]:
        """The arguments as JAX's tracing takes them."""
        import jax
        import jax.numpy as jnp

        s = self.shape
        return [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((s.m, s.k), (s.k, s.n))]

    any_order = 0

    def output(self) -> list[Any]:
        """Memory for the results."""
        return [self.torch.empty((self.shape.m, self.shape.n), device="cuda", dtype=self.torch.bfloat16)]

    @functools.cached_property
    def expected(self) -> tuple[Any, Any, float]:
        """(rows, their exact result, allowed error: twice that of the exact result rounded to bf16)."""
        torch, m = self.torch, self.shape.m
        starts = (0, (m // 2 - JUDGED_ROWS // 2), m - JUDGED_ROWS)
        rows = torch.cat([torch.arange(i, i + JUDGED_ROWS, device="cuda") for i in starts])
        a, b = self.sets[0]
        exact = a[rows].double() @ b.double()
        return rows, exact, max(2 * self._error(exact.bfloat16(), exact), FLOOR)

    def _error(self, x: Any, reference: Any) -> float:
        return float((x.double() - reference).norm() / reference.norm())

    def judge(self, output: Any) -> Accuracy:
        """A NaN anywhere in the output, of poison that was not overwritten too, is an error of NaN."""
        rows, exact, allowed = self.expected
        if bool(self.torch.isnan(output).any()):
            return Accuracy(float("nan"), allowed)
        return Accuracy(self._error(output[rows], exact), allowed)


class CuBlas(Provider):
    """cuBLAS through PyTorch.  transposed: b as (n, k), for which cuBLAS may have a faster kernel."""

    def __init__(self, torch: Any, transposed: bool) -> None:
        self.torch, self.transposed = torch, transposed
        self.name = "cublas nt" if transposed else "cublas"

    def version(self) -> str:
        """PyTorch's, with CUDA's."""
        return f"torch {self.torch.__version__}, cuda {self.torch.version.cuda}"

    def prepare(self, cell: Cell, problem: MatmulProblem) -> DeviceCall:
        """torch.matmul into a given output."""
        sets = problem.sets
        if self.transposed:
            sets = [(a, b.T.contiguous().T) for a, b in sets]
        (out,) = problem.output()

        def enqueue(i: int) -> None:
            a, b = sets[i % len(sets)]
            self.torch.matmul(a, b, out=out)

        def first() -> Any:
            out.fill_(float("nan"))
            enqueue(0)
            return out

        return DeviceCall(enqueue, first)


def our_function(cell: Cell, config: Any) -> Callable[..., Any]:
    """What a user calls."""
    from mosaic_gpu.kernels.matmul import matmul

    return functools.partial(matmul, config=config)


def providers(device: Any, configs: str | None) -> list[Provider]:
    """Ours with the configs of a file, then cuBLAS."""
    from .ours import read_configs

    return providers_of(device.torch, read_configs(configs, "matmul"))


def providers_of(torch: Any, configs: Sequence[Any]) -> list[Provider]:
    """Ours with these configs (`NamedConfig`), then cuBLAS."""
    from .ours import Ours

    return [*(Ours(torch, c, "matmul", our_function) for c in configs), CuBlas(torch, False), CuBlas(torch, True)]


BENCHMARK = Benchmark("matmul", CELLS, MatmulProblem, providers)
