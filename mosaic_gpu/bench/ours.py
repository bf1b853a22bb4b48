"""Our kernels outside JAX: traced and compiled from the function that users call, launched on PyTorch's memory and stream."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from mosaic_gpu.errors import MosaicGpuError, UnsupportedCall
from mosaic_gpu.program import Program
from mosaic_gpu.runtime import execute, native
from mosaic_gpu.tune.space import config_from

from .model import Cell, DeviceCall, Provider, Unsupported, first_line

SAME_MEMORY = ("reshape", "copy", "copy_p", "name")  # equations that hand an argument on


@dataclasses.dataclass(frozen=True)
class NamedConfig:
    """One configuration of our kernel.  cells: which cells it is for, a regular expression; fields None: the tuned one."""

    name: str
    fields: dict[str, Any] | None = None
    cells: str = ""

    def config(self, kernel: str) -> Any:
        """The kernel's config object, None for the tuned one.  ValueError for fields that it does not have."""
        return None if self.fields is None else config_from(kernel, "sm90", self.fields)


def read_configs(path: str | None, kernel: str) -> list[NamedConfig]:
    """From a file: {"name": {fields}, ...} or [{"name": ..., "cells": regex, "config": {fields} or null}, ...].

    Without a file: the tuned one alone.  Raises ValueError for what is neither, or for fields that do not fit.
    """
    if path is None:
        return [NamedConfig("ours")]
    data = json.loads(pathlib.Path(path).read_text())
    if isinstance(data, dict):
        data = [{"name": name, "config": fields} for name, fields in data.items()]
    try:
        found = [NamedConfig(f"ours {e['name']}", e.get("config"), e.get("cells", "")) for e in data]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path}: an object of configs by name, or a list of objects with name and config") from error
    names = [c.name for c in found]
    if len(set(names)) != len(names):
        raise ValueError(f"{path}: two configs have the same name")
    for c in found:
        re.compile(c.cells)
        c.config(kernel)
    return found


@dataclasses.dataclass(frozen=True)
class Made:
    """The `output`-th result of the `step`-th kernel of a function."""

    step: int
    output: int


Value = int | np.ndarray | Made  # an argument of the function by its index, a constant, a result of one of its kernels


def kernel_calls(
    function: Callable[..., Any], *arguments: Any
) -> tuple[list[tuple[Program, list[Value]]], list[Value]]:
    """The kernels that `function` calls for abstract arguments, in order, each with its inputs; and what it returns.

    The constants are tables that the function makes on the host, such as attention's lists of tiles.
    """
    found: list[tuple[Program, list[Value]]] = []

    def visit(closed: Any, inputs: Sequence[Value | None]) -> list[Value | None]:
        jaxpr = closed.jaxpr
        known: dict[Any, Value | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {v: np.asarray(c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}

        def value(x: Any) -> Value | None:
            return np.asarray(x.val) if isinstance(x, jex.Literal) else known.get(x)

        for e in jaxpr.eqns:
            inner = e.params.get("call_jaxpr", e.params.get("jaxpr"))
            if e.primitive.name == "mosaic_gpu_kernel":
                taken = [value(x) for x in e.invars]
                if any(x is None for x in taken):
                    raise ValueError(
                        f"{function} computes what its kernel takes; only arguments, constants and what other kernels made can "
                        "be given here"
                    )
                known |= {x: Made(len(found), i) for i, x in enumerate(e.outvars)}
                found.append((e.params["traced"].program, [x for x in taken if x is not None]))
            elif e.primitive.name in SAME_MEMORY and known.get(e.invars[0]) is not None:
                known[e.outvars[0]] = known[e.invars[0]]
            elif hasattr(inner, "consts"):  # under a jit, or a rule for derivatives
                known |= dict(zip(e.outvars, visit(inner, [value(x) for x in e.invars]), strict=True))
        return [value(x) for x in jaxpr.outvars]

    closed = jax.make_jaxpr(function)(*arguments)
    results = visit(closed, range(len(closed.jaxpr.invars)))
    if not found:
        raise ValueError(f"{function} calls no kernel")
    if any(x is None for x in results):
        raise ValueError(f"{function} returns what no kernel made")
    return found, [x for x in results if x is not None]


def explained(kernel: Any, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
    """The config of a call and where it comes from; None for a call that the kernel does not take."""
    from mosaic_gpu.tune.lookup import explain_config

    try:
        e = explain_config(kernel, *args, **kwargs)
    except (ValueError, TypeError, NotImplementedError):
        return None
    return {"source": e.source, "match": e.match, "stale": e.stale, **e.config.to_json()}


class TorchLaunch:
    """Compiled kernels on tensors, one after the other.  sets: the arguments of each set; out: where the results go, set after
    set.  What goes from kernel to kernel has memory of its own.  written: all of it, results too."""

    def __init__(self, torch: Any, function: Callable[..., Any], abstract: Sequence[Any], sets: Any, out: Any) -> None:
        steps, results = kernel_calls(function, *abstract)
        plans = [execute.plan_of(program, execute.target_arch(program, (9, 0))) for program, _ in steps]
        self.launchers = [native.Launcher(execute.launch_spec(plan)) for plan in plans]
        self.stream = lambda: torch.cuda.current_stream().cuda_stream
        memory: dict[Made, Any] = {r: x for r, x in zip(results, out, strict=True) if isinstance(r, Made)}
        constants: dict[int, Any] = {}

        def tensor(x: Value, arguments: Sequence[Any]) -> Any:
            if isinstance(x, np.ndarray):
                if id(x) not in constants:
                    constants[id(x)] = torch.from_numpy(np.array(x)).cuda()  # a copy: tables are read-only
                return constants[id(x)]
            return memory[x] if isinstance(x, Made) else arguments[x]

        made = [program.inputs[len(program.inputs) - program.num_outputs :] for program, _ in steps]
        for n, (program, inputs) in enumerate(steps):
            aliases = {o: i for i, o in program.aliases}
            for o, variable in enumerate(made[n]):
                if o in aliases and Made(n, o) in memory:
                    raise ValueError(f"{function} returns what {program.name} has changed in place")
                if o in aliases:
                    memory[Made(n, o)] = tensor(inputs[aliases[o]], ())
                elif Made(n, o) not in memory:
                    dtype = getattr(torch, str(np.dtype(variable.dtype)))
                    memory[Made(n, o)] = torch.empty(variable.shape, device="cuda", dtype=dtype)
        self.written = list({x.data_ptr(): x for x in memory.values()}.values())
        self.calls = []
        for arguments in sets:
            launches = []
            for n, (_, inputs) in enumerate(steps):
                tensors = [tensor(x, arguments) for x in inputs]
                tensors += [memory[Made(n, o)] for o in range(len(made[n]))]
                if not all(t.is_contiguous() for t in tensors):
                    raise ValueError("our kernels take row-major arrays")
                launches.append(([t.data_ptr() for t in tensors], [t.nbytes for t in tensors], tensors))
            self.calls.append(launches)

    def __call__(self, i: int) -> None:
        """Enqueue a call on the i-th set."""
        stream = self.stream()  # type: ignore[no-untyped-call]
        for launcher, (addresses, sizes, _) in zip(self.launchers, self.calls[i % len(self.calls)], strict=True):
            launcher.launch(addresses, sizes, stream)


class Ours(Provider):
    """Our kernel with one config.  function(cell, config): the user's function on arrays, its arguments abstract.

    repeats_all: every result is the same bits in every run, whatever the problem's `any_order` says of the operation.
    """

    ours = True

    def __init__(
        self,
        torch: Any,
        named: NamedConfig,
        kernel: str,
        function: Callable[[Cell, Any], Any],
        repeats_all: bool = False,
    ) -> None:
        self.torch, self.named, self.kernel, self.function = torch, named, kernel, function
        self.repeats_all = repeats_all
        self._explained: dict[str, Any] | None = None
        self.name = named.name

    def version(self) -> str:
        """The config as given; of the tuned ones, which state of the caches."""
        if self.named.fields is not None:
            return json.dumps(self.named.fields, sort_keys=True)
        from mosaic_gpu.runtime.device import device_key
        from mosaic_gpu.tune.lookup import stamp

        return f"tuned or default {stamp(self.kernel, device_key())}".strip()

    def config(self, cell: Cell) -> dict[str, Any] | None:
        """As given, or what the lookup says of the tuned one."""
        if self.named.fields is not None:
            return {"source": "explicit", **self.named.fields}
        return self._explained

    def prepare(self, cell: Cell, problem: Any) -> DeviceCall:
        """problem: has sets (tensors), abstract (arguments), output() (empty tensors, one for each result) and any_order (how
        many results, from the first, are not the same bits in every run)."""
        if not re.search(self.named.cells, cell.name):
            raise Unsupported("this config is for other cells")
        try:
            config = self.named.config(self.kernel)
            function = self.function(cell, config)
            self._explained = explained(self.kernel, *problem.abstract, **getattr(function, "keywords", {}))
            out = problem.output()
            launch = TorchLaunch(self.torch, function, problem.abstract, problem.sets, out)
        except UnsupportedCall as error:
            raise Unsupported(first_line(error)) from error
        except MosaicGpuError as error:
            raise RuntimeError(f"{type(error).__name__}: {first_line(error)}") from error
        kept: list[Any] = []

        def poisoned() -> Any:
            for x in launch.written:
                x.fill_(float("nan"))
            launch(0)
            return out

        def first() -> Any:
            kept[:] = [x.clone() for x in poisoned()]
            return kept[0] if len(kept) == 1 else kept

        def repeatable() -> bool:
            pairs = list(zip(poisoned(), kept, strict=True))[0 if self.repeats_all else problem.any_order :]
            return all(bool(self.torch.equal(x, y)) for x, y in pairs)

        return DeviceCall(launch, first, repeatable)
