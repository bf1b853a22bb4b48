"""The matmul as the tuner sees it: its key, its spaces and a cost estimate for each generation."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from .chip import Chip
from .space import Grid, config_class, kernel_files
from .tunable import Key, Tunable
from .workload import Matmul

TILE_OVERHEAD = 3000.0  # clocks to fill the ring and to store a tile
STEP_OVERHEAD = 40.0

SM90: list[Grid] = [
    {
        "block_n": (128, 192, 256),
        "block_k": (64, 128),
        "num_stages": (3, 4, 5, 6),
        "cluster_m": lambda c: [n for n in (1, 2, 4) if c["block_n"] // 64 % n == 0],
        "group_m": (4, 8, 16),
        # Lists of tiles pay off where there are several for each block; kept as a choice, since small shapes have one.
        "persistent": (True, False),
    }
]
SM100: list[Grid] = [
    {
        "tile_n": (64, 128, 192, 256),
        "tile_k": (128, 256),
        "num_slots": (2, 3, 4, 5, 6),
        "pair": lambda c: (False, True) if c["tile_n"] % 128 == 0 else (False,),
        "group": (4, 8, 16),
        "persistent": (True, False),
    }
]


class MatmulTunable(Tunable):
    """`mosaic_gpu.kernels.<generation>.matmul.matmul`."""

    name: ClassVar[str] = "matmul"
    letters: ClassVar[Mapping[str, str]] = Matmul.LETTERS
    example: ClassVar[str] = Matmul.EXAMPLE
    nearest_within: ClassVar[float] = 2.0
    slack: float = 1.3  # clusters have not been measured: one block alone must stay in

    def __init__(self, generation: str) -> None:
        self.config = config_class("matmul", generation)
        self.space = SM90 if generation == "sm90" else SM100

    def parse(self, text: str, *, dtype: str = "bfloat16", **options: Any) -> Matmul:
        """As m4096n4096k4096."""
        return Matmul.parse(text, dtype=dtype)

    def workload(self, data: Mapping[str, Any]) -> Matmul:
        """Of plain data."""
        return Matmul(**data)

    def workload_of(self, a: Any, b: Any, **rest: Any) -> Matmul:
        """Of the arguments of `matmul`."""
        return Matmul(a.shape[0], b.shape[1], a.shape[1], str(a.dtype))

    def key(self, w: Matmul) -> Key:
        """The exact shape and dtype: how tiles fall on the multiprocessors depends on all of it."""
        return {"m": w.m, "n": w.n, "k": w.k, "dtype": w.dtype}

    def distance(self, a: Key, b: Key) -> float:
        """Doublings of m and n, a quarter of those of k; another dtype counts a quarter."""
        sides = abs(math.log2(a["m"] / b["m"])) + abs(math.log2(a["n"] / b["n"]))
        return float(sides + abs(math.log2(a["k"] / b["k"])) / 4 + 0.25 * (a["dtype"] != b["dtype"]))

    def cost(self, w: Matmul, config: Any, chip: Chip) -> float:
        """A roofline of one multiprocessor's stages, times its tiles."""
        item = 1 if "float8" in w.dtype else 2
        if self.generation == "sm90":
            rows, columns, depth, stages = 128, config.block_n, config.block_k, config.num_stages
            cluster, persistent = config.cluster_m, config.persistent
        else:
            rows, columns, depth, stages = 128, config.tile_n, config.tile_k // item, config.num_slots
            cluster, persistent = config.blocks, config.persistent
        tensor = 2 * rows * columns * depth / (chip.tensor_flops * (2 // item))  # of 8-bit types twice as many
        if columns < 256:  # each 64 rows read B again, and A once: below 256 columns less of it is hidden
            tensor *= 1 + 0.1 * (256 - columns) / 128
        loads = item * depth * (rows + columns / cluster) / chip.l2_bytes_per_clock
        step = max(tensor, loads) + STEP_OVERHEAD
        step = max(step, (chip.load_latency + loads) / (stages - 0.5))
        steps = math.ceil(w.k / depth)
        down = math.ceil(w.m / (rows * cluster)) * cluster
        tiles = down * math.ceil(w.n / columns)
        waves = math.ceil(tiles / (chip.multiprocessors // cluster * cluster))
        overhead = TILE_OVERHEAD * (0.35 if persistent and waves > 1 else 1.0)
        return float(max(waves * (steps * step + overhead) / chip.clock, chip.bound(w.flops, w.bytes)))

    def arguments(self, w: Matmul) -> Sequence[Any]:
        """a and b."""
        import jax
        import jax.numpy as jnp

        return [jax.ShapeDtypeStruct(s, jnp.dtype(w.dtype)) for s in w.shapes]

    def call(self, w: Matmul, config: Any) -> Callable[..., Any]:
        """The kernel of this generation."""
        module = importlib.import_module(self.config.__module__)
        return functools.partial(module.matmul, config=config)

    def peers(self, w: Matmul) -> dict[str, Callable[..., Any]]:
        """XLA's product."""
        import jax.numpy as jnp

        return {"xla": jnp.matmul}

    def judge(self, w: Matmul, arrays: Sequence[Any]) -> Any:
        """Twice the error of the exact product rounded to the dtype."""
        from .accuracy import Judge

        return Judge.of_product(*arrays)

    def sources(self) -> Sequence[Path]:
        """The kernel."""
        return kernel_files(f"{self.generation}/matmul.py")
