"""Spaces of configs: grids with conditional fields, of which the configs' constructors keep the valid ones.

Also how a config's class is found by kernel and generation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UnsupportedCall

# A field's values, or a function from the fields before it to its values.
Values = Sequence[Any] | Callable[[Mapping[str, Any]], Sequence[Any]]
Grid = Mapping[str, Values]
Space = Grid | Sequence[Grid]


def points(space: Space) -> Iterator[dict[str, Any]]:
    """Every combination of a space's values, a field that is not named left out."""

    def walk(rest: list[tuple[str, Values]], fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not rest:
            yield dict(fields)
            return
        (name, values), later = rest[0], rest[1:]
        try:
            possible = values(fields) if callable(values) else values
        except KeyError as error:
            raise ValueError(
                f"space: the values of {name!r} depend on {error}, which is no field before it: name that one first"
            ) from error
        for value in possible:
            yield from walk(later, {**fields, name: value})

    for grid in [space] if isinstance(space, Mapping) else space:
        yield from walk(list(grid.items()), {})


def enumerate_space(made: Any, space: Space) -> tuple[list[Any], int]:
    """(the different valid configs of class `made`, in the space's order; how many points its constructor refused)."""
    found: dict[Any, None] = {}
    refused = 0
    for fields in points(space):
        try:
            found[made(**fields)] = None
        except ValueError:  # ResourceExceeded is one
            refused += 1
    return list(found), refused


def generation_of(arch: str) -> str:
    """'sm90' for sm_90a, 'sm100' for sm_100a and sm_103a."""
    return "sm90" if arch.startswith("sm_90") else "sm100"


def config_class(kernel: str, generation: str) -> Any:
    """The type of a kernel's config on a generation; UnsupportedCall where there is none."""
    try:
        module = importlib.import_module(f"mosaic_gpu.kernels.{generation}.{kernel}")
        return getattr(module, "".join(word.capitalize() for word in kernel.split("_")) + "Config")
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnsupportedCall(f"{kernel} has no kernel for {generation}") from error


def config_from(kernel: str, generation: str, data: Mapping[str, Any]) -> Any:
    """A config from JSON; the two tags may be left out.  ValueError for what does not fit."""
    return config_class(kernel, generation).from_json({"generation": generation, "kernel": kernel, **data})


def kernel_files(*names: str) -> list[Path]:
    """Source files of our kernels, such as 'sm90/attention.py'.  FileNotFoundError for what is none."""
    folder = Path(str(importlib.import_module("mosaic_gpu.kernels").__file__)).parent
    if missing := [n for n in names if not (folder / n).is_file()]:
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}")
    return [folder / n for n in names]


def default_config(kernel: str, generation: str, *dims: int, **call: Any) -> Any:
    """What runs where nothing was tuned.  dims: of attention's heads, that of V last; call: what else the default looks at."""
    made = config_class(kernel, generation)
    module = importlib.import_module(made.__module__)
    return module.default_config(*dims, **call) if hasattr(module, "default_config") else made()
