"""What is covered: rows of `mosaic-gpu ops` and docs/ops.md out of the registry, and the names of JAX's two GPU backends."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import pathlib
from typing import Any

from .registry import OPS, Generation, Scope

BACKENDS = {"mosaic": "pallas/mosaic_gpu", "triton": "pallas/triton"}
TABLES = [(g, s) for g in Generation for s in Scope]

# Primitives that the front end takes apart: nothing of them is left for the tables.
INLINED = (
    "add_any addupdate checkpoint closed_call core_call custom_jvp_call custom_vjp_call eval_jaxpr jit "
    "multiple_of optimization_barrier pjit pvary random_bits random_fold_in random_seed remat remat2 reshard scan stop_gradient"
).split()
# Names of JAX's for what is called otherwise here.
SAME = {
    "async_load_tmem": "async_load_tmem",
    "barrier_arrive": "barrier_arrive",
    "commit_smem": "commit_smem",
    "load": "load",
    "mma": "wgmma",
    "set_max_registers": "set_max_registers",
    "wait_gmem_to_smem": "barrier_wait",
    "masked_load": "get",
    "masked_swap": "swap",
    "wgmma_accumulator_deref": "get",
    "wgmma_accumulator_store": "swap",
    "run_state": "run_scoped",
    "broadcast_to": "broadcast_in_dim",  # of older versions, for which jnp.broadcast_to gives broadcast_in_dim
    "set_max_registers_p": "set_max_registers",
    "wgmma_accumulator_deref_p": "get",
    "wgmma_accumulator_store_p": "swap",
    "relayout": "layout_cast",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One primitive in one table; dtypes of its first array operand (empty where no register array is involved)."""

    table: str
    primitive: str
    emit: bool
    simulate: bool
    dtypes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "dtypes": list(self.dtypes)}


def rows(arch: str | None = None) -> list[Row]:
    """Every primitive by table; with `arch` only the tables of its generation."""
    from .. import ops

    assert ops
    wanted = [t for t in TABLES if arch is None or t[0] is Generation.of_arch(arch)]
    return [
        Row(f"{g.value}/{s.value}", o.name, o.supports((g, s)), o.simulate_rule is not None, o.dtypes)
        for g, s in wanted
        for o in sorted(OPS.values(), key=lambda o: o.name)
        if o.supports((g, s))
    ]


def covered(name: str) -> bool:
    """Whether a primitive of JAX's has a rule here, under its name or ours, or is taken apart before."""
    own = SAME.get(name, name)
    return own in OPS or name in INLINED


def compare(backend: str) -> dict[str, list[str]]:
    """Names only here, in both, and only in a backend of the installed JAX, whose sources are read, not run."""
    theirs = backend_names(backend)
    ours = {r.primitive for r in rows()} | set(INLINED)
    both = sorted(n for n in theirs if covered(n))
    return {
        "only here": sorted(ours - set(theirs)),
        "both": both,
        "only there": sorted(set(theirs) - set(both)),
    }


def backend_names(backend: str) -> list[str]:
    """Primitives that a Pallas backend of the installed JAX lowers, out of its rules' registrations.

    Raises OSError where the backend's sources are not there, ValueError where they register nothing in a known way.
    """
    spec = importlib.util.find_spec("jax")
    assert spec is not None and spec.origin is not None
    folder = pathlib.Path(spec.origin).parent / "_src" / BACKENDS[backend]
    names: set[str] = set()
    files = sorted(folder.glob("*.py"))
    if not files:
        raise OSError(f"{folder} has no sources")
    for path in files:  # what decorates functions, and what stands outside of them: calls, dictionaries, loops
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            parts = node.decorator_list if isinstance(node, ast.FunctionDef) else [node]
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef)) or _defines_primitive(node):
                continue
            names |= {n for p in parts for x in ast.walk(p) if isinstance(x, ast.expr) and (n := _primitive(x))}
    if not names:
        raise ValueError(f"{folder} registers no rule in a way that is known")
    return sorted(names)


def _defines_primitive(node: ast.stmt) -> bool:
    """`x_p = Primitive("x")`, or what is said about x_p itself: its abstract rule, its printing."""
    text = ast.unparse(node).split("\n", 1)[0]
    return "Primitive(" in text or "_p.def_" in text or "pp_eqn" in text or "discharge" in text


def _primitive(node: ast.expr) -> str:
    """`lax.add_p` -> 'add'; '' for anything else."""
    text = ast.unparse(node).rsplit(".", 1)[-1]
    return text[:-2] if text.isidentifier() and text.endswith("_p") else ""


def markdown() -> str:
    """The generated part of docs/ops.md: one line a primitive, with the tables it is in."""
    cells = {(r.primitive, r.table): r for r in rows()}
    out = ["| primitive | " + " | ".join(f"{g.value} {s.value}" for g, s in TABLES) + " | simulator | dtypes |"]
    out.append("|---" * (len(TABLES) + 3) + "|")
    for name in sorted({p for p, _ in cells}):
        found = [cells.get((name, f"{g.value}/{s.value}")) for g, s in TABLES]
        row = next(r for r in found if r)
        marks = " | ".join("yes" if r else "–" for r in found)
        out.append(
            f"| `{name}` | {marks} | {'yes' if row.simulate else '–'} | {' '.join(_short(d) for d in row.dtypes) or '–'} |"
        )
    return "\n".join(out)


def _short(dtype: str) -> str:
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s")):
        if dtype.startswith(long):
            return short + dtype[len(long) :]
    return dtype


MARKS = ("<!-- generated by `python -m mosaic_gpu.ops.coverage`; a test compares -->\n", "<!-- end -->")


def updated(text: str) -> str:
    """docs/ops.md with its generated part made anew."""
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    return f"{text[:start]}{markdown()}\n{text[end:]}"


if __name__ == "__main__":
    page = pathlib.Path(__file__).parents[2] / "docs" / "ops.md"
    page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
