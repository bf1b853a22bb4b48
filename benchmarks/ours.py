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

SAME_MEMORY = ("reshape", "copy", "copy_p")  # equations that hand an argument on


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


def kernel_call(function: Callable[..., Any], *arguments: Any) -> tuple[Program, list[int | np.ndarray]]:
    """The one kernel that `function` calls for abstract arguments, and its inputs: an argument's index, or a constant.

    The constants are tables that the function makes on the host, such as attention's lists of tiles.
    """
    found: list[tuple[Program, list[int | np.ndarray]]] = []

    def visit(closed: Any, inputs: Sequence[Any]) -> None:
        known: dict[Any, Any] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        known |= {v: np.asarray(c) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)}

        def value(x: Any) -> Any:
            """None: something that is computed."""
            return np.asarray(x.val) if isinstance(x, jex.Literal) else known.get(x)

        for e in closed.jaxpr.eqns:
            values = [value(x) for x in e.invars]
            if e.primitive.name == "mosaic_gpu_kernel":
                if any(x is None for x in values):
                    raise ValueError(
                        f"{function} computes what its kernel takes; only arguments and constants can be passed on"
                    )
                found.append((e.params["traced"].program, values))
            elif e.primitive.name in SAME_MEMORY:
                known[e.outvars[0]] = values[0]
            elif "call_jaxpr" in e.params:  # a function with a derivative of its own
                visit(e.params["call_jaxpr"], values)

    closed = jax.make_jaxpr(function)(*arguments)
    visit(closed, range(len(closed.jaxpr.invars)))
    if len(found) != 1:
        raise ValueError(f"{function} calls {len(found)} kernels; one can be launched here")
    return found[0]


class TorchLaunch:
    """A compiled kernel on tensors.  sets: the arguments of each set; out: where the results go, set after set."""

    def __init__(self, torch: Any, program: Program, inputs: Sequence[int | np.ndarray], sets: Any, out: Any) -> None:
        plan = execute.plan_of(program, execute.target_arch(program, (9, 0)))
        self.launcher = native.Launcher(execute.launch_spec(plan))
        self.stream = lambda: torch.cuda.current_stream().cuda_stream
        constants = {
            i: torch.from_numpy(np.array(x)).cuda() for i, x in enumerate(inputs) if isinstance(x, np.ndarray)
        }  # a copy: tables are read-only
        self.calls = []
        for arguments in sets:
            tensors = [constants[i] if i in constants else arguments[x] for i, x in enumerate(inputs)] + [out]
            if not all(t.is_contiguous() for t in tensors):
                raise ValueError("our kernels take row-major arrays")
            self.calls.append(([t.data_ptr() for t in tensors], [t.nbytes for t in tensors], tensors))

    def __call__(self, i: int) -> None:
        """Enqueue a call on the i-th set."""
        addresses, sizes, _ = self.calls[i % len(self.calls)]
        self.launcher.launch(addresses, sizes, self.stream())


class Ours(Provider):
    """Our kernel with one config.  function(cell, config): the user's function on arrays, its arguments abstract."""

    ours = True

    def __init__(self, torch: Any, named: NamedConfig, kernel: str, function: Callable[[Cell, Any], Any]) -> None:
        self.torch, self.named, self.kernel, self.function = torch, named, kernel, function
        self.name = named.name

    def version(self) -> str:
        """The config as given."""
        return "tuned or default" if self.named.fields is None else json.dumps(self.named.fields, sort_keys=True)

    def prepare(self, cell: Cell, problem: Any) -> DeviceCall:
        """problem: has sets (tensors), shapes (abstract arguments) and output() (an empty tensor)."""
        if not re.search(self.named.cells, cell.name):
            raise Unsupported("this config is for other cells")
        try:
            config = self.named.config(self.kernel)
            program, inputs = kernel_call(self.function(cell, config), *problem.abstract)
        except UnsupportedCall as error:
            raise Unsupported(first_line(error)) from error
        except MosaicGpuError as error:
            raise RuntimeError(f"{type(error).__name__}: {first_line(error)}") from error
        out = problem.output()
        launch = TorchLaunch(self.torch, program, inputs, problem.sets, out)
        kept: list[Any] = []

        def poisoned() -> Any:
            out.fill_(float("nan"))
            launch(0)
            return out

        def first() -> Any:
            kept[:] = [poisoned().clone()]
            return kept[0]

        return DeviceCall(launch, first, lambda: bool(self.torch.equal(poisoned(), kept[0])))
