"""Which configs are worth a try: a grid for each type of config, of which its own checks keep the valid ones."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UnsupportedCall

Grid = Mapping[str, Sequence[Any]]

# By generation and kernel.  A field that is not named keeps its default.  Register budgets are pairs, since the pool is
# shared: what one kind of warpgroup gives up is of no use unless the other takes it.  Not in the grid is what lost wherever
# it was measured: no turns, and rescaling always.
GRIDS: dict[tuple[str, str], Sequence[Grid]] = {
    ("sm90", "attention"): [
        {
            "block_kv": (64, 80, 96, 112, 128, 144, 160, 176),
            "num_stages": (2, 3),
            "compute_warpgroups": (warpgroups,),
            "compute_registers": (compute,),
            "memory_registers": (memory,),
            "persistent": (False, True),
            "q_in_registers": (False, True),
        }
        for warpgroups, compute, memory in ((2, 240, 24), (3, 160, 32))
    ],
    ("sm100", "attention"): [
        {
            "tile_k": (64, 96, 128),
            "kv_slots": (1, 2, 3, 4),
            "rescale_threshold": (0.0, 8.0),
            "persistent": (True, False),
            "emulated_columns": (0, 32),
        }
    ],
}


def generation_of(arch: str) -> str:
    """'sm90' for sm_90a, 'sm100' for sm_100a and sm_103a."""
    return "sm90" if arch.startswith("sm_90") else "sm100"


def config_class(kernel: str, generation: str) -> Any:
    """The type of a kernel's config on a generation; UnsupportedCall where there is none."""
    try:
        module = importlib.import_module(f"mosaic_gpu.kernels.{generation}.{kernel}")
        return getattr(module, f"{kernel.capitalize()}Config")
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnsupportedCall(f"{kernel} has no kernel for {generation}") from error


def config_from(kernel: str, generation: str, data: Mapping[str, Any]) -> Any:
    """A config from JSON; the two tags may be left out.  ValueError for what does not fit."""
    return config_class(kernel, generation).from_json({"generation": generation, "kernel": kernel, **data})


def default_config(kernel: str, generation: str, head_dim: int) -> Any:
    """What runs where nothing was tuned."""
    made = config_class(kernel, generation)
    module = importlib.import_module(made.__module__)
    return module.default_config(head_dim) if hasattr(module, "default_config") else made()


def candidates(kernel: str, generation: str, head_dim: int) -> list[Any]:
    """Every valid config of the grid, the default first and then by how many fields differ from it.

    So a search that runs out of time has tried the most likely ones.
    """
    made = config_class(kernel, generation)
    if (generation, kernel) not in GRIDS:
        raise UnsupportedCall(f"there is no tuning grid for {kernel} on {generation}")
    start = default_config(kernel, generation, head_dim)
    found = {start: None}
    for grid in GRIDS[generation, kernel]:
        for values in itertools.product(*grid.values()):
            try:
                config = made(**dict(zip(grid, values, strict=True)))
                if hasattr(config, "check"):
                    config.check(head_dim)
            except ValueError:  # ResourceExceeded is one
                continue
            found[config] = None

    def distance(config: Any) -> int:
        return sum(getattr(config, f.name) != getattr(start, f.name) for f in dataclasses.fields(config))

    return sorted(found, key=distance)
