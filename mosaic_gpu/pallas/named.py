"""Named axes of a grid: `jax.lax.axis_index(name)` in a traced body becomes `program_id(axis)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex

from ..ops.grid import program_id


def with_program_ids(jaxpr: Any, axes: Sequence[str | None]) -> Any:
    """The jaxpr, those within its equations included.  axes: the name of each axis of the grid that has one."""
    ids = {n: jax.make_jaxpr(lambda i=i: program_id(i))().jaxpr.eqns[-1] for i, n in enumerate(axes) if n is not None}

    def kept(effects: Any) -> set[Any]:
        """All but the mention of an axis that is no longer there."""
        return {f for f in effects if getattr(f, "name", None) not in ids}

    def rewritten(x: Any) -> Any:
        if isinstance(x, jex.ClosedJaxpr):
            return x.replace(jaxpr=rewritten(x.jaxpr))
        if isinstance(x, jex.Jaxpr):
            return x.replace(eqns=[_equation(e) for e in x.eqns], effects=kept(x.effects))
        if isinstance(x, (tuple, list)) and any(isinstance(y, (jex.ClosedJaxpr, jex.Jaxpr)) for y in x):
            return type(x)(rewritten(y) for y in x)
        return x

    def _equation(e: Any) -> Any:
        name = e.params.get("axis_name")
        if e.primitive.name == "axis_index" and name in ids:
            return e.replace(primitive=ids[name].primitive, params=ids[name].params, effects=kept(e.effects))
        return e.replace(params={k: rewritten(v) for k, v in e.params.items()}, effects=kept(e.effects))

    return rewritten(jaxpr)
