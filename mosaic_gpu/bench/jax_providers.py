"""Any Tunable as a benchmark inside JAX: its kernel with the tuned config, with the heuristic's, and its peers in plain JAX.

For GPUs without PyTorch, and for kernels of users.  All of it is timed by the host's clock, alike.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import MosaicGpuError, UnsupportedCall
from ..tune.lookup import explain, stamp
from ..tune.measure import input_sets
from ..tune.tunable import Tunable
from .jax_calls import host_call, program_of_sets
from .jax_peers import overhead_seconds
from .model import Accuracy, Cell, HostCall, Missing, Provider, Unsupported, first_line
from .runner import Benchmark

TORCH_PEERS = {
    "attention": ("cudnn", "cudnn bhsd", "fa4"),
    "attention_backward": ("cudnn", "cudnn bhsd", "fa4"),
    "matmul": ("cublas", "cublas nt"),
}


def cell_of(workload: Any) -> Cell:
    """A workload as a cell; without an operation count, of one operation, so that rates are calls."""
    name = f"{workload} {getattr(workload, 'mask', '')}".strip()
    return Cell(name, int(workload.flops or 1), workload, int(workload.bytes or 0))


class JaxProblem:
    """Inputs of a workload and their judge."""

    def __init__(self, tunable: Tunable, cell: Cell, seed: int) -> None:
        self.sets = input_sets(tunable, cell.data, seed)
        self._judge = tunable.judge(cell.data, self.sets[0])
        self.same = self._judge.same

    def judge(self, output: Any) -> Accuracy:
        """Of the first set's result."""
        return Accuracy(self._judge.error(output), self._judge.allowed)


class JaxProvider(Provider):
    """A function of arrays.  make(workload): that function; raises Unsupported, UnsupportedCall."""

    host_timed = True

    def __init__(
        self, name: str, make: Callable[[Any], Callable[..., Any]], version: str = "", ours: bool = False
    ) -> None:
        self.name, self.make, self._version, self.ours = name, make, version, ours

    def version(self) -> str:
        """As given."""
        return self._version

    def prepare(self, cell: Cell, problem: JaxProblem) -> HostCall:
        """One program with a call for each set."""
        try:
            program = program_of_sets(self.make(cell.data), problem.sets)
        except UnsupportedCall as error:
            raise Unsupported(first_line(error)) from error
        except MosaicGpuError as error:
            raise RuntimeError(f"{type(error).__name__}: {first_line(error)}") from error
        return host_call(program, problem.sets, problem.same, overhead_seconds())


class JaxOurs(JaxProvider):
    """Our kernel, or a user's, with one config, or (None) the tuned one."""

    def __init__(self, tunable: Tunable, name: str, config: Any, device: str | None, heuristic: bool = False) -> None:
        tuned = f"tuned or default {stamp(tunable.name, device)}".strip()
        version = "heuristic" if heuristic else tuned if config is None else str(config.to_json())
        super().__init__(name, self._function, version, ours=True)
        self.tunable, self.given, self.device, self.heuristic = tunable, config, device, heuristic

    def _chosen(self, workload: Any) -> Any:
        given = self.tunable.default(workload) if self.heuristic else self.given
        return explain(self.tunable, workload, device=self.device, config=given)

    def _function(self, workload: Any) -> Callable[..., Any]:
        return self.tunable.call(workload, self._chosen(workload).config)

    def config(self, cell: Cell) -> dict[str, Any] | None:
        """With where it comes from."""
        e = self._chosen(cell.data)
        source = "heuristic" if self.heuristic else e.source
        return {"source": source, "match": e.match, "stale": e.stale, **e.config.to_json()}


def benchmark_of(tunable: Tunable, workloads: Sequence[Any], *, device: str | None, config: Any = None) -> Benchmark:
    """The benchmark of a kernel inside JAX.  config: one for all; None: the tuned ones, and beside them the heuristic's."""

    def providers(_: Any, __: str | None) -> list[Provider]:
        found: list[Provider] = [JaxOurs(tunable, "ours", config, device)]
        if config is None:
            found.append(JaxOurs(tunable, "ours heuristic", None, device, heuristic=True))
        names = dict.fromkeys(name for w in workloads for name in tunable.peers(w))
        found += [JaxProvider(name, functools.partial(_peer, tunable, name)) for name in names]
        found += [
            Missing(name, "PyTorch is not installed, or sees no Hopper GPU")
            for name in TORCH_PEERS.get(tunable.name, ())
        ]
        return found

    return Benchmark(
        re.sub(r"\W+", "_", tunable.name),
        [cell_of(w) for w in workloads],
        lambda _, cell, seed: JaxProblem(tunable, cell, seed),
        providers,
    )


def _peer(tunable: Tunable, name: str, workload: Any) -> Callable[..., Any]:
    found = tunable.peers(workload).get(name)
    if found is None:
        raise Unsupported(f"{name} does not do {workload}")
    return found
