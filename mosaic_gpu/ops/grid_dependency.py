"""Programmatic dependent launch: a kernel that begins while the one before it on the stream still runs.

PTX ISA 9.7.13.14, griddepcontrol.  A kernel that waits is launched with the attribute that lets it begin early; everything that
it does with global memory comes after its wait, which the plan checks, so that results are those of one kernel after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import UnsupportedCall
from ..program import SHAPE_ONLY, Equation, Value, View, walk
from .registry import BOTH, WARPGROUP, op

OUTSIDE = "call it in the warpgroup's role, outside warp_map"
griddepcontrol_wait_p = op("griddepcontrol_wait", issues_only=True, instead=OUTSIDE)
griddepcontrol_launch_dependents_p = op("griddepcontrol_launch_dependents", issues_only=True, instead=OUTSIDE)


def griddepcontrol_wait() -> None:
    """Wait until the kernels before this one on the stream are done and what they wrote is visible.

    A kernel in which a role calls this may begin before they are done: set-up of barriers and registers then overlaps with
    their end.  Each role calls it before it first touches a GMEM Ref (a copy counts, `dim_size` does not), and not in a loop or
    branch; else UnsupportedCall when the plan is made.  A role that touches no GMEM Ref need not call it.
    """
    from ..frontend.primitives import bind

    bind(griddepcontrol_wait_p)


def griddepcontrol_launch_dependents() -> None:
    """Allow a kernel after this one that calls `griddepcontrol_wait` to begin, once every block has called this or ended.

    A hint, and safe anywhere: that kernel still waits for the end of this one before it touches global memory.  It takes the room
    that this kernel's blocks leave: call it when no more blocks of this kernel are to come, or at its start where there is room.
    """
    from ..frontend.primitives import bind

    bind(griddepcontrol_launch_dependents_p)


@griddepcontrol_wait_p.abstract
def _() -> Any:
    return ()


@griddepcontrol_launch_dependents_p.abstract
def _() -> Any:
    return ()


@griddepcontrol_wait_p.emit(BOTH, (WARPGROUP,))
def _(out: Any, step: Any) -> None:
    out.line("griddepcontrol_wait();")


@griddepcontrol_launch_dependents_p.emit(BOTH, (WARPGROUP,))
def _(out: Any, step: Any) -> None:
    out.line("griddepcontrol_launch_dependents();")


@griddepcontrol_wait_p.simulate
def _(sim: Any, step: Any) -> None:
    pass  # kernels are simulated one after the other; that nothing comes before the wait, the plan has checked


@griddepcontrol_launch_dependents_p.simulate
def _(sim: Any, step: Any) -> None:
    pass


def waits_for_earlier_kernels(roles: Sequence[Sequence[Equation]]) -> bool:
    """Whether a kernel of these roles waits, and so may begin early.  UnsupportedCall for a role that is too early, or may not
    wait at all."""
    if not any(e.op == "griddepcontrol_wait" for equations in roles for e in walk(tuple(equations))):
        return False
    for equations in roles:
        waited = False
        for e in _top(equations):
            if e.op == "griddepcontrol_wait":
                waited = True
                continue
            for inner in walk((e,)):
                if (
                    inner.op == "griddepcontrol_wait" and e.op != "warp_map"
                ):  # a warp has none, which its own error says
                    raise UnsupportedCall(
                        "griddepcontrol_wait must be reached on every path of its role: move it out of the loop or branch",
                        inner.line,
                    )
                if not waited and (ref := _touched(inner)) is not None:
                    raise UnsupportedCall(
                        f"{inner.op} touches {ref} before griddepcontrol_wait: a kernel that waits may begin before the one "
                        "that wrote or reads it is done; call griddepcontrol_wait first in this role, too",
                        inner.line,
                    )
    return True


def _top(equations: Sequence[Equation]) -> Iterator[Equation]:
    """In order; scopes are transparent."""
    for e in equations:
        if e.op == "run_scoped":
            yield from _top(e.regions[0].equations)
        else:
            yield e


def _touched(e: Equation) -> Value | None:
    """A GMEM Ref, or a semaphore, that it reads or writes."""
    if e.op == SHAPE_ONLY:
        return None
    refs = (o.ref if isinstance(o, View) else o for o in e.operands)
    return next(
        (r for r in refs if isinstance(r, Value) and r.space is not None and r.space.kind in ("gmem", "semaphore")),
        None,
    )
