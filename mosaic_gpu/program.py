"""The IR: plain, frozen, picklable data shaped like the jaxpr it came from.  No JAX here.

A `Program` is built once by `frontend/`; every later pass maps Program to Program or to a `Plan`.  Regions close over the
values of the regions around them, so an equation names only what it itself consumes.

Structured operations:

=============  ============================================  ===============================================
op             operands                                      regions
=============  ============================================  ===============================================
``for``        lower, upper, *carried initial values         body(i, *carried) -> carried
``while``      *carried initial values                       cond(*carried) -> (bool,), body(*carried) -> carried
``cond``       branch index (int32) or predicate (bool)      one region per branch, no inputs
``run_scoped``  –                                            body(*allocated refs) -> results
``warp_map``   –                                             body(warp id) -> ()
=============  ============================================  ===============================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from . import arguments
from .errors import Line
from .memory import MemorySpace

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Value:
    """An SSA value.  `space` is None for scalars and register arrays, else the value is a Ref into that memory.

    name: what the user's function calls a Ref, for people.  Programs that differ in nothing else are two, as their reports do.
    """

    id: int
    shape: Shape
    dtype: str
    space: MemorySpace | None = None
    name: str = ""

    def __str__(self) -> str:
        kind = f"{self.space} " if self.space else ""
        return f"{self.name or f'%{self.id}'}:{kind}{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Literal:
    """A scalar constant.  value: a Python bool, int or float (float also for bfloat16: the rounded value)."""

    value: bool | int | float
    dtype: str
    shape: Shape = ()

    def __str__(self) -> str:
        return f"{self.value}:{self.dtype}"


Scalar = Value | Literal


@dataclasses.dataclass(frozen=True)
class Affine:
    """const + sum of value * factor, in elements: where an index starts.  Values are int32 scalars."""

    const: int = 0
    terms: tuple[tuple[Value, int], ...] = ()

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.const + other.const, self.terms + other.terms)

    def __mul__(self, factor: int) -> Affine:
        return Affine(self.const * factor, tuple((v, f * factor) for v, f in self.terms))

    @property
    def static(self) -> bool:
        return not self.terms

    def __str__(self) -> str:
        parts = [f"%{v.id}*{f}" if f != 1 else f"%{v.id}" for v, f in self.terms]
        return " + ".join(parts + ([str(self.const)] if self.const or not parts else []))


@dataclasses.dataclass(frozen=True)
class DimIndex:
    """What a view takes of one dimension of its buffer.  size None: one element, the dimension is gone (squeezed)."""

    start: Affine
    size: int | None
    stride: int = 1

    def __str__(self) -> str:
        if self.size is None:
            return str(self.start)
        return f"{self.start}:+{self.size}" + (f":{self.stride}" if self.stride != 1 else "")


@dataclasses.dataclass(frozen=True)
class View:
    """A Ref and which part of it: one `DimIndex` for each dimension of the buffer, then a permutation of the kept ones.

    peer: for shared memory of another block of the cluster, (axis of the cluster, index along it) pairs; along axes that are
    not named it is this block's index.  as_type: the dtype as which it sees its elements (`ref.bitcast`), empty: the buffer's.
    """

    ref: Value
    dims: tuple[DimIndex, ...]
    permutation: tuple[int, ...]
    peer: tuple[tuple[str, Affine], ...] = ()
    as_type: str = ""

    @staticmethod
    def whole(ref: Value) -> View:
        return View(ref, tuple(DimIndex(Affine(0), n) for n in ref.shape), tuple(range(len(ref.shape))))

    @property
    def kept(self) -> tuple[int, ...]:
        """Dimensions of the buffer that the view keeps, in the view's order."""
        kept = [i for i, d in enumerate(self.dims) if d.size is not None]
        return tuple(kept[p] for p in self.permutation)

    @property
    def shape(self) -> Shape:
        return tuple(int(self.dims[i].size or 0) for i in self.kept)

    @property
    def dtype(self) -> str:
        return self.as_type or self.ref.dtype

    @property
    def space(self) -> MemorySpace:
        assert self.ref.space is not None
        return self.ref.space

    @property
    def name(self) -> str:
        """Its buffer's, for messages."""
        return self.ref.name or f"%{self.ref.id}"

    @property
    def is_transposed(self) -> bool:
        return self.permutation != tuple(sorted(self.permutation))

    def __str__(self) -> str:
        perm = f".transpose{self.permutation}" if self.is_transposed else ""
        peer = f".of({', '.join(f'{n}={i}' for n, i in self.peer)})" if self.peer else ""
        seen_as = f".bitcast({self.as_type})" if self.as_type else ""
        return f"{self.ref}[{', '.join(map(str, self.dims))}]{perm}{seen_as}{peer}"


Operand = Value | Literal | View


def named_shape(x: Operand) -> str:
    """For messages: the shape, and of a view whose part it is."""
    return f"{x.shape} of {x.name}" if isinstance(x, View) else str(x.shape)


@dataclasses.dataclass(frozen=True)
class Region:
    """Straight-line code with inputs and outputs."""

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Operand, ...] = ()


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation.  params: sorted (name, hashable plain value) pairs."""

    op: str
    operands: tuple[Operand, ...]
    results: tuple[Value, ...] = ()
    params: tuple[tuple[str, Any], ...] = ()
    regions: tuple[Region, ...] = ()
    line: Line | None = None

    def param(self, name: str, default: Any = None) -> Any:
        for k, v in self.params:
            if k == name:
                return v
        return default

    def with_(self, **changes: Any) -> Equation:
        return Equation(**{**self.__dict__, **changes})  # thousands of times a kernel: `replace` takes twice as long


@dataclasses.dataclass(frozen=True)
class CompilerParams:
    """Choices of the compiler, per kernel.

    approx_math: allow `.approx.ftz` instructions (error bounds per op in docs/ops.md).
    strict_math: round every product, also one that is added to something in the same branch and loop (else an fma).
    arch: 'sm_90a', 'sm_100a' or 'sm_103a'; None: the device's, else the config's generation, else sm_90a.
    strict: spills, serialised and emulated MMAs are errors instead of warnings.
    dimension_semantics, max_concurrent_steps: of a `pallas_call`.  For each axis of its grid 'parallel' (CUDA blocks) or
    'sequential' ('arbitrary': a loop in each block), None: sequential where an output's block stays the same along the axis,
    else parallel.  max_concurrent_steps: buffers for each input and output that changes along sequential axes.
    num_compute_wgs, memory_registers, wg_axis: of a `pallas_call`, too.  num_compute_wgs: so many warpgroups (1 to 7) run the
    body of a block, each for itself, while one more loads its inputs; None: one does everything.  wg_axis: the axis that tells
    them apart, for `lax.axis_index`.  memory_registers: of a thread that loads; the others share what is left.
    """

    approx_math: bool = False
    strict_math: bool = False
    arch: str | None = None
    strict: bool = False
    dimension_semantics: tuple[str, ...] | None = None
    max_concurrent_steps: int = 2
    num_compute_wgs: int | None = None
    memory_registers: int = 40
    wg_axis: str = "wg"

    def __post_init__(self) -> None:
        arguments.whole("CompilerParams", "max_concurrent_steps", self.max_concurrent_steps, 1)
        if self.num_compute_wgs is not None:
            arguments.whole("CompilerParams", "num_compute_wgs", self.num_compute_wgs, 1, 7)
        arguments.whole("CompilerParams", "memory_registers", self.memory_registers, 24, 256)
        if not isinstance(self.wg_axis, str):
            arguments.refuse("CompilerParams", "wg_axis", self.wg_axis, "the name of the warpgroups' axis")
        if self.dimension_semantics is not None:
            given = arguments.names("CompilerParams", "dimension_semantics", self.dimension_semantics)
            object.__setattr__(self, "dimension_semantics", given)
            for name in given:
                if name not in ("parallel", "sequential", "arbitrary"):
                    raise ValueError(
                        f"CompilerParams(dimension_semantics={given}): each is 'parallel', 'sequential' or 'arbitrary'"
                    )
        for name in ("approx_math", "strict_math", "strict"):
            arguments.flag("CompilerParams", name, getattr(self, name))
        if self.arch not in (None, "sm_90a", "sm_100a", "sm_103a"):
            raise ValueError(
                f"CompilerParams(arch={self.arch!r}): 'sm_90a', 'sm_100a' or 'sm_103a', or None for the device's"
            )


OF_PALLAS_CALLS = ("dimension_semantics", "max_concurrent_steps", "num_compute_wgs", "memory_registers", "wg_axis")
"""Fields of `CompilerParams` that mean nothing to a kernel."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced kernel.

    inputs: GMEM refs, the call's inputs then its outputs; scratch: refs allocated for the whole launch.
    semaphores: so many of the outputs, the last ones, are semaphores: zero when a launch begins, seen by no caller.
    grid, cluster: sizes by axis, outermost first, as the user names them; num_threads: warpgroups in a block.
    aliases: (input, output) pairs, counted from 0 each, that are one buffer: the output starts with the input's contents.
    """

    name: str
    inputs: tuple[Value, ...]
    num_outputs: int
    scratch: tuple[Value, ...]
    body: tuple[Equation, ...]
    grid: Shape = ()
    grid_names: tuple[str, ...] = ()
    cluster: Shape = ()
    cluster_names: tuple[str, ...] = ()
    num_threads: int = 1
    thread_name: str | None = None
    params: CompilerParams = CompilerParams()
    line: Line | None = None
    aliases: tuple[tuple[int, int], ...] = ()
    semaphores: int = 0


def scalars_of(operand: Operand) -> Iterator[Value]:
    """The SSA values that an operand reads, index values of views included (the Ref itself is not one)."""
    if isinstance(operand, View):
        for start in (*(d.start for d in operand.dims), *(i for _, i in operand.peer)):
            for v, _ in start.terms:
                yield v
    elif isinstance(operand, Value):
        yield operand


def walk(equations: tuple[Equation, ...]) -> Iterator[Equation]:
    """Every equation, those in regions too, in program order."""
    waiting = list(reversed(equations))  # no generator in a generator: each would hand on all that those inside yield
    while waiting:
        e = waiting.pop()
        yield e
        for r in reversed(e.regions):
            waiting += reversed(r.equations)


SHAPE_ONLY = "dim_size"  # names a Ref, and accesses nothing of it


def refs_of(equation: Equation) -> Iterator[View]:
    for o in equation.operands:
        if isinstance(o, View):
            yield o


def substitute(operand: Operand, env: dict[int, Operand]) -> Operand:
    """The operand with values replaced by what `env` (value id -> operand) says."""
    if isinstance(operand, Literal) or not env:
        return operand
    if isinstance(operand, Value):
        return env.get(operand.id, operand)
    new = env.get(operand.ref.id, operand.ref)
    assert isinstance(new, Value), "a Ref can only become another Ref"
    dims = tuple(dataclasses.replace(d, start=substitute_affine(d.start, env)) for d in operand.dims)
    peer = tuple((name, substitute_affine(i, env)) for name, i in operand.peer)
    return dataclasses.replace(operand, ref=new, dims=dims, peer=peer)


def substitute_affine(a: Affine, env: dict[int, Operand]) -> Affine:
    out = Affine(a.const)
    for v, f in a.terms:
        new = env.get(v.id, v)
        if isinstance(new, Literal):
            out = out + Affine(int(new.value) * f)
        else:
            assert isinstance(new, Value)
            out = out + Affine(0, ((new, f),))
    return out


def substitute_all(equations: tuple[Equation, ...], env: dict[int, Operand]) -> tuple[Equation, ...]:
    """Equations with operands replaced, in regions too, and what regions bind where a Value stands for it."""

    def bound(v: Value) -> Value:
        found = env.get(v.id, v)
        return found if isinstance(found, Value) else v

    return tuple(
        e.with_(
            operands=tuple(substitute(o, env) for o in e.operands),
            regions=tuple(
                Region(
                    tuple(bound(v) for v in r.inputs),
                    substitute_all(r.equations, env),
                    tuple(substitute(o, env) for o in r.outputs),
                )
                for r in e.regions
            ),
        )
        for e in equations
    )


def format_program(p: Program) -> str:
    """The program as text, for `mosaic-gpu compile --stages` and error messages."""
    head = f"kernel {p.name} grid={dict(zip(p.grid_names or map(str, range(len(p.grid))), p.grid, strict=False))}"
    out = [head + f" cluster={p.cluster} warpgroups={p.num_threads}"]
    out += [f"  in  {v}" for v in p.inputs] + [
        f"  scratch {v} {v.space.transforms if v.space else ''}" for v in p.scratch
    ]
    return "\n".join(out + format_equations(p.body, 1))


def format_equations(equations: tuple[Equation, ...], depth: int = 0) -> list[str]:
    pad, out = "  " * depth, []
    for e in equations:
        left = ", ".join(map(str, e.results)) + " = " if e.results else ""
        params = "".join(f" {k}={v}" for k, v in e.params)
        at = f"  # {e.line.file.rsplit('/', 1)[-1]}:{e.line.number}" if e.line else ""
        out.append(f"{pad}{left}{e.op}({', '.join(map(str, e.operands))}){params}{at}")
        for r in e.regions:
            out.append(f"{pad} ({', '.join(map(str, r.inputs))}) {{")
            out += format_equations(r.equations, depth + 1)
            out.append(f"{pad} }} -> ({', '.join(map(str, r.outputs))})")
    return out
