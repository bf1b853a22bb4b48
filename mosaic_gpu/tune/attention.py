"""Attention as the tuner sees it: its key, its spaces and a cost estimate for each generation."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from .chip import Chip
from .space import Grid, config_class, default_config, kernel_files
from .tunable import Key, Tunable
from .workload import Attention

ROWS = 64  # query rows of a compute warpgroup
# Estimates, made before anything was compared with them (docs/tuning.md): clocks for the start and the end of a tile, and for the
# barriers in each step of a warpgroup.
TILE_OVERHEAD = 2500.0
STEP_OVERHEAD = 120.0
# An estimate, too: how much of the softmax does not hide under the products, by compute warpgroups: the tensor cores idle when
# all are at it.
EXPOSED = {2: 0.45, 3: 0.28, 4: 0.2}
# The same on Blackwell, by query tiles in flight: guesses.  Two tiles take turns; one has its next scores multiplied meanwhile.
EXPOSED100 = {1: 0.5, 2: 0.25}

# Register budgets are pairs, since the pool is shared: what one kind of warpgroup gives up is of no use unless the other takes
# it.  Not in the grid is what lost wherever it was measured: no turns, and rescaling always.
SM90: list[Grid] = [
    {
        "compute_warpgroups": (warpgroups,),
        "compute_registers": (compute,),
        "memory_registers": (memory,),
        "block_kv": tuple(range(32, top + 1, 16)),
        "num_stages": (2, 3, 4),
        "q_in_registers": (False, True),
        "sum_by_product": (False, True),
        "persistent": (True, False),
    }
    for warpgroups, compute, memory, top in ((2, 240, 24, 192), (3, 160, 32, 144), (4, 112, 32, 80))
]
SM100: list[Grid] = [
    {
        "query_tiles": (1, 2),
        # One tile leaves registers to its softmax; with 192 a few configs of it spill.
        "softmax_registers": lambda c: (232,) if c["query_tiles"] == 1 else (192,),
        # With 32 the memory and product warps of one tile spill in a tenth of the space (NVRTC 13.0), and there are more.
        "issue_registers": lambda c: (64,) if c["query_tiles"] == 1 else (32,),
        "pair": (False, True),
        "dynamic": (False, True),
        "p_parts": (1, 2),
        "tile_k": (64, 96, 128),
        "kv_slots": (1, 2, 3, 4),
        "rescale_threshold": (0.0, 8.0),
        "persistent": (True, False),
        "emulated_columns": (0, 32),
        "load_reduces": (False, True),
    }
]


class AttentionTunable(Tunable):
    """`mosaic_gpu.kernels.attention.attention`."""

    name: ClassVar[str] = "attention"
    letters: ClassVar[Mapping[str, str]] = Attention.LETTERS
    example: ClassVar[str] = Attention.EXAMPLE
    slack: float = 1.15  # chosen; the fastest of the trials in docs/tuning.md had estimates up to 1.03 times the lowest

    def __init__(self, generation: str) -> None:
        self.config = config_class(self.name, generation)
        self.space = SM90 if generation == "sm90" else SM100
        if generation != "sm90":
            self.slack = 2.0  # the estimate has been compared with nothing

    def parse(
        self, text: str, *, dtype: str = "bfloat16", causal: bool = False, bias: bool = False, **options: Any
    ) -> Attention:
        """As b4s4096h16d128."""
        return Attention.parse(text, dtype=dtype, causal=causal, bias=bias)

    def workload(self, data: Mapping[str, Any]) -> Attention:
        """Of plain data."""
        return Attention(**data)

    def workload_of(
        self, q: Any, k: Any, v: Any = None, *, causal: Any = False, bias: Any = None, mask: Any = None, **rest: Any
    ) -> Attention:
        """Of the arguments of `attention`; where a diagonal ends makes no difference, and a mask is a bias."""
        *batch, s, h, d = q.shape
        t, h_kv = k.shape[-3:-1]
        dv, biased = 0 if v is None else v.shape[-1], bias is not None or mask is not None
        return Attention(math.prod(batch), s, t, h, h_kv, d, str(q.dtype), bool(causal), dv, biased)

    def key(self, w: Attention) -> Key:
        """Head dims, dtype, mask, the lengths by powers of two, and a bias where there is one; not batch and heads."""
        return {
            "head_dim": w.head_dim,
            "value_dim": w.value_dim,
            "dtype": w.dtype,
            "causal": w.causal,
            "length": bucket(w.length),
            "kv_length": bucket(w.kv_length),
            **({"bias": True} if w.bias else {}),
        }

    def distance(self, a: Key, b: Key) -> float:
        """Doublings of the lengths; another mask counts two, another dtype a quarter; another head dim is of no use, nor is what
        was tuned without a bias to a call with one, or the other way round: it takes shared memory, and its tiles bandwidth."""
        if (a["head_dim"], a["value_dim"], "bias" in a) != (b["head_dim"], b["value_dim"], "bias" in b):
            return math.inf
        lengths = sum(abs(math.log2(a[x] / b[x])) for x in ("length", "kv_length"))
        return float(lengths + 2.0 * (a["causal"] != b["causal"]) + 0.25 * (a["dtype"] != b["dtype"]))

    def default(self, w: Attention) -> Any:
        """Of the head dims and, on Hopper, the length."""
        call = {"length": w.length, "causal": w.causal} if self.generation == "sm90" else {}
        return default_config("attention", self.generation, w.head_dim, w.value_dim, bias=w.bias, **call)

    def fits(self, w: Attention, config: Any) -> None:
        """Shared memory and registers at this head dim; loads that reduce are of sm_103a."""
        from ..ops.tcgen05_rules import features_of
        from ..runtime.device import blackwell_arch

        config.check(w.head_dim, w.value_dim, w.bias)
        if self.generation == "sm100" and config.load_reduces and not features_of(blackwell_arch()).load_reduction:
            raise ValueError(f"load_reduces=True: not on {blackwell_arch()}")

    def cost(self, w: Attention, config: Any, chip: Chip) -> float:
        """A roofline of one multiprocessor's steps, times its tiles; Blackwell's was never compared with a measurement."""
        return _cost_sm90(w, config, chip) if self.generation == "sm90" else _cost_sm100(w, config, chip)

    def arguments(self, w: Attention) -> Sequence[Any]:
        """q, k and v, and a bias where there is one."""
        import jax
        import jax.numpy as jnp

        shapes = [*w.shapes, *([w.bias_shape] if w.bias else [])]
        return [jax.ShapeDtypeStruct(s, jnp.dtype(w.dtype)) for s in shapes]

    def call(self, w: Attention, config: Any) -> Callable[..., Any]:
        """The kernel of this generation."""
        module = importlib.import_module(f"mosaic_gpu.kernels.{self.generation}.attention")

        def first(*arrays: Any) -> Any:
            options = {"config": config, "causal": w.causal, "scale": w.head_dim**-0.5, "return_lse": False}
            return module.attention(*arrays, **options)[0]

        return first

    def peers(self, w: Attention) -> dict[str, Callable[..., Any]]:
        """JAX's own attention, by XLA and by cuDNN."""
        import jax

        def of(implementation: str) -> Callable[..., Any]:
            # Its fourth argument is a bias, too.
            return functools.partial(jax.nn.dot_product_attention, is_causal=w.causal, implementation=implementation)

        return {"jax.nn xla": of("xla"), "jax.nn cudnn": of("cudnn")}

    def judge(self, w: Attention, arrays: Sequence[Any]) -> Any:
        """Twice the error of plain attention that rounds P."""
        from .accuracy import Judge

        bias = arrays[3] if w.bias else None
        return Judge.of(*arrays[:3], causal=w.causal, bias=bias)

    def sources(self) -> Sequence[Path]:
        """The kernel, how its tiles lie in shared memory, and their order."""
        more = ("attention_bias",) if self.generation == "sm90" else ("attention_products", "attention_tiles")
        names = [f"{self.generation}/{n}.py" for n in ("attention", "attention_config", "attention_loads", *more)]
        return kernel_files(*names, "sm90/schedule.py", "tiles.py")


def bucket(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def _cost_sm90(w: Attention, c: Any, chip: Chip) -> float:
    keys, warpgroups = c.block_kv, c.compute_warpgroups
    rows = ROWS * warpgroups

    def products(n: int, depth: int, a_in_shared: bool) -> float:
        """Clocks of the tensor cores for 64 x n x depth; B, and perhaps A, come out of shared memory."""
        read = 32 * n + (2048 if a_in_shared else 0)
        return depth / 16 * max(n / 2, read / chip.shared_bytes_per_clock)

    tensor = warpgroups * (
        products(keys, w.head_dim, not c.q_in_registers) + products(w.value_dim + 8 * c.sum_by_product, keys, False)
    )
    elements = ROWS * keys * warpgroups
    # A bias is converted and added, and the shift no longer goes with the factor in one fma.
    issued = 5 - c.sum_by_product + 3 * w.bias
    softmax = elements / chip.exponentials + issued * elements / chip.fp32_results
    loads = (2 * keys * (w.head_dim + w.value_dim) + 2 * elements * w.bias) / chip.l2_bytes_per_clock
    step = max(tensor, softmax, loads) + EXPOSED[warpgroups] * min(tensor, softmax) + STEP_OVERHEAD
    # A block that is asked for when its slot is free arrives in time only if the other slots last as long.
    slots = min(c.num_stages, c.bias_slots(w.head_dim, w.value_dim)) if w.bias else c.num_stages
    step = max(step, (chip.load_latency + loads) / slots)
    return _seconds(w, chip, rows, keys, step, c.persistent, chip.multiprocessors)


def _cost_sm100(w: Attention, c: Any, chip: Chip) -> float:
    """Never measured: there was no such GPU.  Counts of instructions are those of the compiled kernel, the rest is assumed."""
    keys, tiles = c.tile_k, c.query_tiles
    rows = 128 * tiles  # of a block, in a pair, too

    def products(n: int, depth: int, a_in_shared: bool) -> float:
        """Clocks of the tensor core for 128 x n x depth; of a pair, each block reads half of B out of its shared memory."""
        read = 32 * n / c.blocks + (4096 if a_in_shared else 0)
        return float(depth / 16 * max(128 * n * 32 / chip.tensor_flops, read / chip.shared_bytes_per_clock))

    tensor = tiles * (products(keys, w.head_dim, True) + products(w.value_dim, keys, False))
    elements = rows * keys
    polynomials = elements * c.emulated_columns / keys
    # Instructions for each element: half a packed fma, a sum, half a maximum of three, half a conversion; of a polynomial three
    # packed ones and what puts its exponent in.
    issued = 2.5 * elements + (elements - polynomials) + 5 * polynomials
    issued -= elements / 2 * c.load_reduces  # the load has found the maximum
    softmax = max((elements - polynomials) / chip.exponentials, issued / chip.fp32_results)
    rescaling = rows * w.value_dim * (2 if c.rescale_threshold == 0 else 0.1) / chip.fp32_results
    loads = (2 * keys * (w.head_dim + w.value_dim) / c.blocks + 2 * elements * w.bias) / chip.l2_bytes_per_clock
    hidden = EXPOSED100[tiles] * (0.85 if c.p_parts > 1 else 1.0)
    step = max(tensor, softmax, loads) + hidden * (min(tensor, softmax) + rescaling) + STEP_OVERHEAD
    step = max(step, (chip.load_latency + loads) / c.kv_slots)
    listed = c.persistent or c.dynamic
    return _seconds(w, chip, rows * c.blocks, keys, step, listed, chip.multiprocessors // c.blocks)


def _seconds(w: Attention, chip: Chip, rows: int, keys: int, step: float, listed: bool, units: int) -> float:
    """Of all tiles of `rows` by so many multiprocessors, or pairs of them; step: clocks of a block of keys; listed: a unit goes
    on to its next tile by itself."""
    blocks = math.ceil(w.kv_length / keys)
    tiles = math.ceil(w.length / rows)
    heads = w.batch * w.heads
    per_tile = [min(blocks, math.ceil((m + 1) * rows / keys)) if w.causal else blocks for m in range(tiles)]
    # A tile that ends in a mask or a tail computes whole blocks.
    clocks = heads * (sum(per_tile) * step + tiles * TILE_OVERHEAD * (0.6 if listed else 1.0))
    longest = max(per_tile) * step + TILE_OVERHEAD
    share = clocks / units
    # Whole waves of whole tiles; a list of tiles evens causal ones out.
    waves = math.ceil(heads * tiles / units) / (heads * tiles / units)
    return float(max(share * (waves if not w.causal else 1 + (waves - 1) / 2), longest)) / chip.clock
