"""The rule tables.  One `Op` holds all that is known about an operation; the decorators beside its definition fill it in.

Four tables: {sm90, sm100} x {warpgroup, warp}.  An op is in a table when it has an emit rule there.  No JAX here: the front
end makes a JAX primitive out of each op that is ours (`Op.abstract` given); ops named after JAX's own primitives have none.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..errors import Line, UnsupportedPrimitive


class Generation(enum.Enum):
    """GPU generation: which instructions exist."""

    SM90 = "sm90"
    SM100 = "sm100"

    @staticmethod
    def of_arch(arch: str) -> Generation:
        return Generation.SM90 if arch.startswith("sm_90") else Generation.SM100


class Scope(enum.Enum):
    """Who executes: the 128 threads of a warpgroup together, or one warp under `warp_map`."""

    WARPGROUP = "warpgroup"
    WARP = "warp"


SM90, SM100 = Generation.SM90, Generation.SM100
WARPGROUP, WARP = Scope.WARPGROUP, Scope.WARP
BOTH = (SM90, SM100)
Table = tuple[Generation, Scope]
Rule = Callable[..., Any]


@dataclasses.dataclass(eq=False)
class Op:
    """One operation.

    abstract: (operand types, params) -> tuple of (shape, dtype) of the results; ops of ours only.
    layouts: (solver, equation) -> None; ties the register layouts of operands and results together.
    plan: (context, equation) -> data; legality and every decision that the emitter and the simulator share.
    emit: (emitter, step) -> None; writes CUDA C++.
    simulate: (thread, step) -> generator or None; the same step on NumPy.
    issues_only: where no register array is involved, one elected thread may run it (barriers, copies, MMA issue, arithmetic).
    instead: what to write where a table has no rule.
    scratch: (layouts by value id, equation) -> bytes of shared memory through which a warpgroup's threads exchange elements.
    pure: may be dropped where nobody reads the results.
    whole: its array operands must be in registers; one value that stands for all elements is not enough.
    dtypes: of its first array operand (or result); () where no register array is involved.
    """

    name: str
    issues_only: bool = False
    instead: str = ""
    abstract_rule: Rule | None = None
    layouts_rule: Rule | None = None
    simulate_rule: Rule | None = None
    plan_rules: dict[Table, Rule] = dataclasses.field(default_factory=dict)
    emit_rules: dict[Table, Rule] = dataclasses.field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    scratch_rule: Rule | None = None
    pure: bool = False
    whole: bool = False

    def abstract(self, rule: Rule) -> Rule:
        self.abstract_rule = rule
        return rule

    def layouts(self, rule: Rule) -> Rule:
        self.layouts_rule = rule
        return rule

    def scratch(self, rule: Rule) -> Rule:
        self.scratch_rule = rule
        return rule

    def simulate(self, rule: Rule) -> Rule:
        self.simulate_rule = rule
        return rule

    def plan(
        self, generations: Iterable[Generation] = BOTH, scopes: Iterable[Scope] = (WARPGROUP, WARP)
    ) -> Callable[[Rule], Rule]:
        return self._register(self.plan_rules, generations, scopes)

    def emit(
        self, generations: Iterable[Generation] = BOTH, scopes: Iterable[Scope] = (WARPGROUP,)
    ) -> Callable[[Rule], Rule]:
        return self._register(self.emit_rules, generations, scopes)

    @staticmethod
    def _register(
        table: dict[Table, Rule], generations: Iterable[Generation], scopes: Iterable[Scope]
    ) -> Callable[[Rule], Rule]:
        cells = [(g, s) for g in generations for s in scopes]

        def add(rule: Rule) -> Rule:
            table.update((c, rule) for c in cells)
            return rule

        return add

    def supports(self, table: Table) -> bool:
        return table in self.emit_rules


OPS: dict[str, Op] = {}


F = TypeVar("F", bound=Callable[..., Any])


def gives(result: Callable[..., tuple[Any, Any]]) -> Callable[[F], F]:
    """Beside an operation's Python function: (shape, dtype) of its result, from the same arguments.

    `check` goes on with it where the call itself is refused.
    """

    def add(function: F) -> F:
        function.gives = result  # type: ignore[attr-defined]
        return function

    return add


def like(x: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    """For `gives`: as the first argument."""
    return x.shape, x.dtype


def whole_number(*_: Any, **__: Any) -> tuple[Any, Any]:
    """For `gives`: an int32 scalar."""
    return (), "int32"


def op(
    name: str,
    *,
    issues_only: bool = False,
    instead: str = "",
    pure: bool = False,
    whole: bool = False,
    dtypes: tuple[str, ...] = (),
) -> Op:
    """Define an operation.  Names are unique: JAX's primitive name, or ours."""
    if name in OPS:
        raise ValueError(f"op {name!r} is defined twice")
    OPS[name] = Op(name, issues_only, instead, pure=pure, whole=whole, dtypes=dtypes)
    return OPS[name]


def lookup(name: str, table: Table, line: Line | None) -> Op:
    """The op if the table has it, else `UnsupportedPrimitive` naming primitive, table, line and the way out."""
    found = OPS.get(name)
    if found is not None and found.supports(table):
        return found
    from .ways_out import way_out

    generation, scope = table
    where = [f"{g.value}/{s.value}" for g, s in (found.emit_rules if found else {})]
    hint = (found.instead if found else "") or (
        f"it is in the table{'s' if len(where) > 1 else ''} {', '.join(where)}" if where else way_out(name)
    )
    raise UnsupportedPrimitive(f"{name!r} has no rule in the {generation.value} x {scope.value} table; {hint}", line)
