"""Mechanical mutants: for every synchronising equation of a kernel, each small thing that could be wrong with it.

`stronger` mutants wait for more than they must; they are no defects, and an error about one is a false alarm.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator

from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import Line, MosaicGpuError
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import Equation, Literal, Program, Value, View, walk

from .kernels import Case, case
from .rewrite import Editor, Path
from .verdict import SEEDS, Finding, judge

DELETED = (
    "barrier_wait",
    "barrier_arrive",
    "named_barrier_arrive",
    "named_barrier_sync",
    "commit_smem",
    "wgmma_wait",
    "wait_smem_to_gmem",
    "wait_load_tmem",
    "commit_tmem",
    "tcgen05_commit_arrive",
)
WAITS = {"barrier_wait", "named_barrier_sync", "wgmma_wait", "wait_smem_to_gmem"}
SYNCHRONISES = WAITS | {
    "barrier_arrive",
    "named_barrier_arrive",
    "copy_gmem_to_smem",
    "tcgen05_mma",
    "tcgen05_commit_arrive",
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """kernel: a name in `kernels`; what: the change, unique in the kernel and free of line numbers; kind: its family;
    line: of the changed equation."""

    kernel: str
    what: str
    kind: str
    line: Line | None
    program: Program
    stronger: bool = False

    def __str__(self) -> str:
        return f"{self.kernel}: {self.what}"


class _Maker:
    def __init__(self, c: Case) -> None:
        self.case = c
        self.editor = Editor(c.program, c.names)
        self.labels: dict[Path, str] = {}
        seen: collections.Counter[str] = collections.Counter()
        for path, e in self.editor.sites():
            label = " ".join([e.op, *self.editor.refs(e)[-1:]]) if e.op in SYNCHRONISES else e.op
            if e.op in ("copy_gmem_to_smem", "wgmma", "tcgen05_mma", "copy_smem_to_gmem", "get", "swap"):
                label = " ".join([e.op, *self._tiles(e)])
            self.labels[path] = f"{label}#{seen[label]}"
            seen[label] += 1
        self.labels = {
            p: label if seen[label.rsplit("#", 1)[0]] > 1 else label.rsplit("#", 1)[0]
            for p, label in self.labels.items()
        }

    def _tiles(self, e: Equation) -> list[str]:
        """The on-chip tiles of an equation."""
        return [
            self.editor.name(o.ref)
            for o in e.operands
            if isinstance(o, View) and o.space.kind in ("smem", "tmem", "acc")
        ]

    def mutant(
        self, path: Path | None, what: str, kind: str, change: Callable[[Editor], None], stronger: bool = False
    ) -> Mutant:
        editor = Editor(self.case.program, self.case.names)
        change(editor)
        line = self.editor.at(path).line if path else self.case.program.line
        return Mutant(self.case.name, what, kind, line, editor.program, stronger)

    def all(self) -> Iterator[Mutant]:
        for path, e in self.editor.sites():
            label = self.labels[path]
            if e.op in DELETED:
                yield self.mutant(path, f"delete {label}", "delete", lambda x, p=path: x.put(p))
            yield from self.slots(path, e, label)
            yield from self.counts(path, e, label)
            yield from self.guards(path, e)
        yield from self.barriers()

    def slots(self, path: Path, e: Equation, label: str) -> Iterator[Mutant]:
        for i, o in enumerate(e.operands):
            if not isinstance(o, View) or o.space.kind not in ("barrier", "named_barrier", "smem"):
                continue
            slots = [d for d, n in enumerate(o.ref.shape) if o.dims[d].size is None and n > 1]
            for d in slots:
                name = self.editor.name(o.ref) + (f"[{d}]" if len(slots) > 1 else "")
                for by in (1, -1) if o.ref.shape[d] > 2 else (1,):
                    yield self.mutant(
                        path,
                        f"{label}: slot of {name} {by:+d}",
                        "slot",
                        lambda x, i=i, d=d, by=by: x.shift_slot(path, i, d, by),
                    )

    def counts(self, path: Path, e: Equation, label: str) -> Iterator[Mutant]:
        if e.op in ("wgmma_wait", "wait_smem_to_gmem"):
            n = e.param("n")
            for by in (1, -1):
                if n + by >= 0:
                    yield self.mutant(
                        path,
                        f"{label}: n {n} -> {n + by}",
                        "count",
                        lambda x, by=by: x.put_params(path, n=n + by),
                        stronger=by < 0,
                    )
        if e.op == "wait_smem_to_gmem":
            read_only = e.param("wait_read_only")
            yield self.mutant(
                path,
                f"{label}: wait_read_only -> {not read_only}",
                "read only",
                lambda x: x.put_params(path, wait_read_only=not read_only),
                stronger=read_only,
            )

    def guards(self, path: Path, e: Equation) -> Iterator[Mutant]:
        inside = {x.op for r in e.regions for x in walk(r.equations)}
        if e.op == "cond" and inside & SYNCHRONISES and not self._splits_roles(e):
            yield from self._comparison(path, e.operands[0], self._around("when", path))
        if e.op == "while" and inside & WAITS:
            yield from self._comparison(path, e.regions[0].outputs[0], self._around("while", path))
        if e.op == "tcgen05_mma":
            yield from self._comparison(path, e.operands[3], f"accumulate of {self.labels[path]}")
        if e.op == "for" and inside & WAITS:
            what = self._around("for", path)
            for operand, name, by in ((0, "lower", 1), (1, "upper", 1), (1, "upper", -1)):
                yield self.mutant(
                    path,
                    f"{what}: {name} bound {by:+d}",
                    "loop",
                    lambda x, o=operand, by=by: x.shift_bound(path, o, by),
                )

    def _around(self, word: str, path: Path) -> str:
        """The selector of a structured equation: by the first synchronising one in it."""
        op, sites = {"when": "cond"}.get(word, word), self.editor.sites()
        first = next(p for p, x in sites if len(p) > len(path) and self._in(p, path) and x.op in SYNCHRONISES)
        depth = sum(x.op == op and len(first) > len(p) >= len(path) and self._in(first, p) for p, x in sites)
        return f"{word}(" * depth + self.labels[first] + ")" * depth

    @staticmethod
    def _in(inner: Path, outer: Path) -> bool:
        n = len(outer) - 1
        return inner[:n] == outer[:n] and inner[n][0] == outer[n][0]

    def _splits_roles(self, e: Equation) -> bool:
        """Whether a `cond` tells warpgroups or warps apart: another predicate is another kernel, not a slip in this one."""
        path = self.editor.comparison(e.operands[0])
        if path is None:
            return False
        who = next((o for o in self.editor.at(path).operands if isinstance(o, Value)), None)
        place = self.editor.definition(who) if who is not None else None
        if place is None:
            return who is not None and any(
                x.op == "warp_map" and x.regions[0].inputs[0].id == who.id for x in walk(self.case.program.body)
            )
        definition = self.editor.at(place)
        top = len(path) == 1
        return top and definition.op == "axis_index" and definition.param("axis_name") == self.case.program.thread_name

    def _comparison(self, path: Path, predicate: object, what: str) -> Iterator[Mutant]:
        place = self.editor.comparison(predicate)
        if place is None:
            return
        for by in (1, -1):
            compared = self.editor.at(place)
            old = next(o for o in compared.operands if isinstance(o, Literal)).value
            yield self.mutant(
                path,
                f"{what}: {compared.op} {old} -> {compared.op} {old + by}",
                "guard",
                lambda x, by=by: x.shift_comparison(place, by),
            )

    def barriers(self) -> Iterator[Mutant]:
        for ref in self.case.program.scratch:
            if ref.space is None or ref.space.barrier is None:
                continue
            name, info = self.editor.name(ref), ref.space.barrier
            counted = "num_warpgroups" if ref.space.kind == "named_barrier" else "num_arrivals"
            for n in (info.num_arrivals + 1, info.num_arrivals - 1):
                if n >= 1:
                    yield self.mutant(
                        None,
                        f"{name}: {counted} {info.num_arrivals} -> {n}",
                        "arrivals",
                        lambda x, r=ref, n=n: x.put_barrier(r, num_arrivals=n),
                    )
            if info.orders_tensor_core:
                yield self.mutant(
                    None,
                    f"{name}: orders_tensor_core dropped",
                    "orders_tensor_core",
                    lambda x, r=ref: x.put_barrier(r, orders_tensor_core=False),
                )


@functools.cache
def mutants(kernel: str) -> tuple[Mutant, ...]:
    """All mutants of a kernel, in program order."""
    out = tuple(_Maker(case(kernel)).all())
    assert len({m.what for m in out}) == len(out), [
        w for w, n in collections.Counter(m.what for m in out).items() if n > 1
    ]
    return out


def run_mutant(mutant: Mutant, seeds: int = SEEDS) -> Finding | None:
    """What planner and simulator say about a mutant."""
    return judge(case(mutant.kernel), mutant.program, seeds)


@functools.cache
def _source(kernel: str) -> str:
    c = case(kernel)
    return emit(build_plan(c.program, c.arch))


def same_code(mutant: Mutant) -> bool:
    """Whether the mutant is emitted as the very text of the good kernel: nothing is left to find."""
    try:
        return emit(build_plan(mutant.program, case(mutant.kernel).arch)) == _source(mutant.kernel)
    except MosaicGpuError:
        return False
