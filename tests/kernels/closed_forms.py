"""How many instructions the Blackwell kernels have, in all and in each of their loops, as closed forms of their configs."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.codegen.resources import ResourceReport, report_resources
from mosaic_gpu.codegen.sass import Function, read_cubin
from mosaic_gpu.kernels.sm100.attention_config import AttentionConfig
from mosaic_gpu.kernels.sm100.matmul import MatmulConfig
from mosaic_gpu.kernels.tiles import chunk, columns_of
from mosaic_gpu.plan.model import Plan

PRODUCTS = ("UTCHMMA", "UTCQMMA", "UTCOMMA")
COUNTED = (*PRODUCTS, "UTCCP", "LDTM", "STTM", "UTMALDG", "UTMASTG", "USETMAXREG")


@functools.lru_cache(maxsize=64)
def machine_code(source: str, arch: str) -> tuple[ResourceReport, Function]:
    """What a kernel is compiled to."""
    compiled = compile_cuda(source, arch=arch, name="/kernel.cu")
    (function,) = read_cubin(compiled.cubin)
    return report_resources(compiled), function


def loops_of(function: Function) -> collections.Counter[tuple[tuple[str, int], ...]]:
    """What of COUNTED each innermost loop has that waits for a barrier; products for a pair of blocks by their own name.

    (Loops without are ptxas's: around TMA operands that it takes for different in different threads, around USETMAXREG.)
    """
    bodies = [[function.instructions[i] for i in sorted(loop.body)] for loop in function.loops]
    some = [b for b in bodies if any(i.mnemonic in COUNTED for i in b) and any(i.mnemonic == "SYNCS" for i in b)]
    places = [frozenset(i.address for i in b) for b in some]
    innermost = [b for b, at in zip(some, places, strict=True) if not any(other < at for other in places)]
    return collections.Counter(
        _key(collections.Counter(_name(i) for i in b if i.mnemonic in COUNTED)) for b in innermost
    )


def _name(instruction: Any) -> str:
    pair = instruction.mnemonic in PRODUCTS and ".2CTA" in instruction.opcode
    return f"{instruction.mnemonic}.2CTA" if pair else str(instruction.mnemonic)


def _key(counts: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, n) for name, n in counts.items() if n))


def check_code(plan: Plan, whole: dict[str, int], loops: list[dict[str, int]]) -> None:
    """No spill, no complaint, every role within its budget, as many instructions as `whole` says, and in the loops as `loops`."""
    report, function = machine_code(emit(plan), plan.arch)
    assert report.complaints() == [] and report.stack == 0
    assert all(b.needed <= b.requested for b in report.budgets)
    assert {name: report.mnemonics.get(name, 0) for name in whole} == whole
    assert loops_of(function) == collections.Counter(map(_key, loops))


@dataclasses.dataclass(frozen=True)
class Attention:
    """Of the attention kernel with a config, head dims of Q and K and of V, a mask or none, a bias or none.

    Products: 16 elements of K each; scores (d of them) stand once in front of the key loop and once in it, P V (tile_k) once in
    the loop and once behind it, for each query tile.  Transfers: 32 columns of cells each; scores are loaded in the loop with a
    mask and in the one without; the output in the rescaling (by pieces) and at the end (by pieces of its chunks), for each tile.
    Probabilities are half as wide; parts, and the polynomials' share of a part, are stored apart.

    Float32 arithmetic in pairs: scores are scaled and shifted by an fma each in both loops, a polynomial is 3 sums and 3 fmas in
    the loop without a mask, the output is scaled in the rescaling and at the end.

    keys: of an array with a bias.  It is added by an fma, after which scores are shifted and then scaled, and leaves no
    polynomials; a copy for each query tile where TMA can count its keys in rows of the swizzle, else one for each such row.
    """

    config: AttentionConfig
    d: int
    dv: int
    causal: bool
    keys: int = 0

    @property
    def bias(self) -> bool:
        return self.keys > 0

    @property
    def _emulated(self) -> int:
        return 0 if self.bias else self.config.emulated_columns

    @property
    def _biases(self) -> int:
        """Copies of a block of keys."""
        row = chunk(self.config.tile_k)
        return self.bias * self.config.query_tiles * (1 if self.keys % row == 0 else self.config.tile_k // row)

    @property
    def _ends(self) -> list[int]:
        dv = columns_of(self.dv)
        return [n for _ in range(0, dv, chunk(dv)) for n in _pieces(chunk(dv), self.config.correction_columns)]

    @property
    def _rescaled(self) -> list[int]:
        return _pieces(columns_of(self.dv), self.config.correction_columns)

    def _stored(self, emulated: int) -> list[int]:
        """Keys whose probabilities are stored together."""
        size = self.config.tile_k // self.config.p_parts
        split = [min(max(emulated - start, 0), size) for start in range(0, self.config.tile_k, size)]
        return [n for x in split for n in (x, size - x) if n]

    def whole(self) -> dict[str, int]:
        """Instructions of the whole kernel."""
        c, d, dv = self.config, columns_of(self.d), columns_of(self.dv)
        tiles, both = c.query_tiles, self._stored(0) + self._stored(self._emulated)
        return {
            "FFMA2": 2 * c.tile_k // 2 + 3 * self._emulated // 2,
            "FADD2": 3 * self._emulated // 2 + self.bias * 2 * c.tile_k // 2,
            "FMUL2": 2 * tiles * dv // 2 + self.bias * 2 * c.tile_k // 2,
            "UTCHMMA": tiles * (2 * (d // 16) + 2 * (c.tile_k // 16)),
            "LDTM": 2 * _powers_of_two(c.tile_k) + tiles * sum(map(_powers_of_two, self._rescaled + self._ends)),
            "STTM": sum(_powers_of_two(n // 2) for n in both) + tiles * sum(map(_powers_of_two, self._rescaled)),
            "UTMALDG": 2 + tiles + 1 + self._biases,  # K once more, in front of its loop
            "UTMASTG": tiles * dv // chunk(dv),
            "USETMAXREG": 3,
            "UGETNEXTWORKID": int(c.dynamic),
        }

    def loops(self) -> list[dict[str, int]]:
        """Instructions of each loop over key blocks: those that load K and V, the products', the softmax's (with a mask it
        stands in a loop of its own, else in front of the other), the correction's."""
        c, d = self.config, columns_of(self.d)
        tiles, product = c.query_tiles, "UTCHMMA.2CTA" if c.pair else "UTCHMMA"
        rescaled = tiles * sum(map(_powers_of_two, self._rescaled))

        def softmax(emulated: int) -> dict[str, int]:
            stores = sum(_powers_of_two(n // 2) for n in self._stored(emulated))
            return {"LDTM": _powers_of_two(c.tile_k), "STTM": stores}

        return [
            {"UTMALDG": 1},
            {"UTMALDG": 1},
            *([{"UTMALDG": self._biases}] if self.bias else []),
            {product: tiles * (d // 16 + c.tile_k // 16)},
            *([softmax(0)] if self.causal else []),
            softmax(self._emulated),
            {"LDTM": rescaled, "STTM": rescaled},
        ]


def matmul(c: MatmulConfig, product: str, factors: int = 0) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Of the matmul, in the whole kernel, and in the loops over K that load and multiply, and over tiles that carries out.

    A product for each 32 bytes of K; 32 columns a transfer of the accumulator, 64 of the result.  factors: of a row and stage, of
    block-scaled operands; a copy brings four of 128 rows to tensor memory.
    """
    loads, copies = (4, factors // 4 * (1 + c.tile_n // 128)) if factors else (2, 0)
    products, carried = c.tile_k // 32, {"LDTM": c.tile_n // 32, "UTMASTG": c.tile_n // 64}
    whole = {product: products, "UTCCP": copies, "UTMALDG": loads, "UTCBAR": 2, "USETMAXREG": 0, "STTM": 0, **carried}
    by_pair = f"{product}.2CTA" if c.pair else product
    return whole, [{"UTMALDG": loads}, {by_pair: products, "UTCCP": copies}, carried]


def _pieces(columns: int, most: int) -> list[int]:
    return [min(most, columns - n) for n in range(0, columns, most)]


def _powers_of_two(columns: int) -> int:
    """Transfers of at most 32 columns, each a power of two, that make up so many columns."""
    return columns // 32 + (columns % 32).bit_count()
