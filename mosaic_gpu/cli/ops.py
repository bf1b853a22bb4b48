"""`mosaic-gpu ops`: which operations a kernel may use, by table; and beside JAX's own two GPU backends."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .common import ARCHS, AsJson, Refusal, output, print_json, table


def list_ops(
    arch: Annotated[str | None, typer.Option(help="Only the tables of this architecture.")] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Compare with the installed JAX's backends: triton, mosaic, or both with a comma."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List every operation with its tables, rules and dtypes."""
    from ..ops import coverage, jax_rules

    if arch is not None and arch not in ARCHS:
        raise Refusal(f"--arch {arch}: one of {', '.join(ARCHS)}")
    rows = coverage.rows(arch)
    data: dict[str, Any] = {"operations": [r.as_dict() for r in rows]}
    if against is not None:
        names = [n.strip() for n in against.split(",")]
        unknown = [n for n in names if n not in coverage.BACKENDS]
        if unknown:
            raise Refusal(f"--against {against}: {', '.join(coverage.BACKENDS)}")
        try:
            data["against"] = {n: coverage.compare(n) for n in names}
        except (OSError, ValueError) as error:
            raise Refusal(f"--against {against}: the installed JAX's rules cannot be read ({error})") from error
        data["names of JAX 0.11.2"] = jax_rules.union()
    if as_json:
        print_json(data)
        return
    lines = [(r.table, r.primitive, r.emit, r.simulate, ", ".join(r.dtypes)) for r in rows]
    output().print(table("operations", ("table", "primitive", "emit", "simulate", "dtypes"), lines, left=5))
    for name, found in data.get("against", {}).items():
        counts = [(k, len(v), " ".join(v)) for k, v in found.items()]
        output().print(table(f"against {name}", ("where", "count", "names"), counts))
    if against is not None:
        found = data["names of JAX 0.11.2"]
        works, total = jax_rules.there(found)
        output().print(
            table(
                f"{works} of {total} names of JAX 0.11.2's two backends",
                ("how", "count", "names"),
                [(k, len(v), " ".join(v)) for k, v in found.items()],
            )
        )
