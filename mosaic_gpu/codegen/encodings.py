"""Words that the tensor cores read, bit by bit: matrix and instruction descriptors, tensor memory addresses, scale ids.

No compiler checks them: they are run-time values of the kernel, and a wrong one is a wrong result.  Every field is in one
table here, the emitter and the simulator read it from the same one, and tests/oracle compares the words with those of CuTe
DSL.  Sections are those of the PTX ISA (9.1).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Kind = Literal["f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4"]

# Element types by kind of instruction -> code in the instruction descriptor (tables 42 to 44).  int4 stands for nothing here:
# the 4-bit and 6-bit floats are named as ml_dtypes names them.
F8F6F4 = {
    "float8_e4m3fn": 0,
    "float8_e5m2": 1,
    "float6_e2m3fn": 3,
    "float6_e3m2fn": 4,
    "float4_e2m1fn": 5,
}
TYPE_CODES: dict[str, dict[str, int]] = {
    "f16": {"float16": 0, "bfloat16": 1},
    "tf32": {"float32": 2},
    "f8f6f4": F8F6F4,
    "i8": {"uint8": 0, "int8": 1},
    "mxf8f6f4": F8F6F4,
    "mxf4": {"float4_e2m1fn": 1},
    "mxf4nvf4": {"float4_e2m1fn": 1},
}
ACCUMULATOR_CODES = {"float16": 0, "float32": 1, "int32": 2}
SCALE_CODES = {"float8_e4m3fn": 0, "float8_e8m0fnu": 1}


# ---- instruction descriptors (9.7.16.4.2) ------------------------------------------------------------------------------
def _operand_bits(i: Instruction | ScaledInstruction) -> int:
    """Bits 7 to 22, which the tables have in common: types, signs and majorness of A and B, and N."""
    codes = TYPE_CODES[i.kind]
    return (
        codes[i.a_type] << 7
        | codes[i.b_type] << 10
        | int(i.a_negate) << 13
        | int(i.b_negate) << 14
        | int(i.a_mn) << 15
        | int(i.b_mn) << 16
        | i.n >> 3 << 17
    )


@dataclasses.dataclass(frozen=True)
class Instruction:
    """What the 32-bit instruction descriptor of tcgen05.mma says.  m, n: of the whole product, over both blocks of a pair.

    a_type, b_type, acc_type: element types by name; a_mn, b_mn: contiguous along M or N; a_negate, b_negate: the operand's
    sign is changed; sparse: A is 2:4 compressed, selector which half of the metadata holds; saturate: integers do not wrap.
    """

    kind: Kind
    a_type: str
    b_type: str
    acc_type: str
    m: int
    n: int
    a_mn: bool = False
    b_mn: bool = False
    a_negate: bool = False
    b_negate: bool = False
    sparse: bool = False
    selector: int = 0
    saturate: bool = False

    def encode(self) -> int:
        """Table 42: kinds f16, tf32, f8f6f4 and i8."""
        return (
            self.selector
            | int(self.sparse) << 2
            | int(self.saturate) << 3
            | ACCUMULATOR_CODES[self.acc_type] << 4
            | _operand_bits(self)
            | self.m >> 4 << 24
        )

    @staticmethod
    def decode(word: int, kind: Kind) -> Instruction:
        """The fields of a word, as an instruction of `kind` reads them; ValueError for bits that mean nothing there."""
        types = {code: name for name, code in TYPE_CODES[kind].items()}
        accumulators = {code: name for name, code in ACCUMULATOR_CODES.items()}
        a, b, d = word >> 7 & 7, word >> 10 & 7, word >> 4 & 3
        if a not in types or b not in types or d not in accumulators or word & (1 << 6 | 1 << 23 | 1 << 29):
            raise ValueError(f"{word:#010x} is no instruction descriptor of kind {kind}")
        return Instruction(
            kind,
            types[a],
            types[b],
            accumulators[d],
            (word >> 24 & 0x1F) << 4,
            (word >> 17 & 0x3F) << 3,
            a_mn=bool(word >> 15 & 1),
            b_mn=bool(word >> 16 & 1),
            a_negate=bool(word >> 13 & 1),
            b_negate=bool(word >> 14 & 1),
            sparse=bool(word >> 2 & 1),
            selector=word & 3,
            saturate=bool(word >> 3 & 1),
        )


@dataclasses.dataclass(frozen=True)
class ScaledInstruction:
    """The instruction descriptor of the block-scaled kinds.  scale_type: 'float8_e8m0fnu' or 'float8_e4m3fn'.

    a_scale_id, b_scale_id: which byte (scale vectors of one), or half-word (of two: 0 or 2) of a tensor memory cell holds this
    step's scales; wide_k: 96 elements of K instead of 64 (kinds mxf4 and mxf4nvf4 on sm_103a).
    """

    kind: Kind
    a_type: str
    b_type: str
    scale_type: str
    m: int
    n: int
    a_scale_id: int = 0
    b_scale_id: int = 0
    a_mn: bool = False
    b_mn: bool = False
    a_negate: bool = False
    b_negate: bool = False
    sparse: bool = False
    wide_k: bool = False

    def encode(self) -> int:
        """Tables 43 (mxf8f6f4) and 44 (mxf4, mxf4nvf4)."""
        return (
            int(self.sparse) << 2
            | self.b_scale_id << 4
            | _operand_bits(self)
            | SCALE_CODES[self.scale_type] << 23
            | self.m >> 7 << 27
            | self.a_scale_id << 29
            | int(self.wide_k) << 31
        )

    @staticmethod
    def decode(word: int, kind: Kind) -> ScaledInstruction:
        """The fields of a word, as an instruction of a block-scaled kind reads them; ValueError for what means nothing there."""
        codes = {code: name for name, code in TYPE_CODES[kind].items()}
        scales = {code: name for name, code in SCALE_CODES.items()}
        a, b = word >> 7 & 7, word >> 10 & 7
        narrow = kind != "mxf8f6f4"  # 4-bit kinds: K contiguous, ids of half-words
        if a not in codes or b not in codes or word & (1 << 3 | 1 << 6 | 7 << 24) or (not narrow and word >> 31):
            raise ValueError(f"{word:#010x} is no instruction descriptor of kind {kind}")
        if narrow and (word >> 15 & 3 or word & (1 << 4 | 1 << 29)):
            raise ValueError(f"{word:#010x}: kind {kind} has K contiguous, and its scale ids are 0 or 2")
        return ScaledInstruction(
            kind,
            codes[a],
            codes[b],
            scales[word >> 23 & 1],
            (word >> 27 & 3) << 7,
            (word >> 17 & 0x3F) << 3,
            word >> 29 & 3,
            word >> 4 & 3,
            a_mn=bool(word >> 15 & 1),
            b_mn=bool(word >> 16 & 1),
            a_negate=bool(word >> 13 & 1),
            b_negate=bool(word >> 14 & 1),
            sparse=bool(word >> 2 & 1),
            wide_k=bool(word >> 31),
        )


# ---- matrix descriptors (9.7.15.5.1.2 of wgmma, 9.7.16.4.1 of tcgen05) ----------------------------------------------------
SWIZZLE_CODES = {0: 0, 128: 1, 64: 2, 32: 3}  # of wgmma, at bit 62; tcgen05 reads three bits from 61: twice these
ATOM_32B = 1  # of tcgen05 at bit 61: a swizzle of 128 bytes whose atom is 32 bytes, for tf32 contiguous along M or N
TCGEN05_VERSION = 1  # at bit 46


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A matrix descriptor: start address, leading and stride byte offset (LBO, SBO), swizzle in bytes (0: none).

    version: 0 for wgmma, 1 for tcgen05; base_offset: of a swizzle pattern that does not start at a multiple of its length;
    atom_32b: see ATOM_32B.
    """

    address: int
    leading: int
    stride: int
    swizzle: int
    version: int
    base_offset: int = 0
    atom_32b: bool = False

    def encode(self) -> int:
        """The 64-bit word."""
        return descriptor_low(self.leading, self.address) | self.high() << 32

    def high(self) -> int:
        """Its upper half, in which the address is not."""
        swizzle = ATOM_32B << 29 if self.atom_32b else SWIZZLE_CODES[self.swizzle] << 30
        return self.stride >> 4 | self.version << 14 | self.base_offset << 17 | swizzle

    @staticmethod
    def decode(word: int) -> Descriptor:
        """The fields of a word; ValueError for a swizzle that does not exist."""
        code = word >> 61 & 7
        if code in (3, 5, 7):
            raise ValueError(f"{word:#018x} is no matrix descriptor: its swizzle is {code}")
        spans = {v: k for k, v in SWIZZLE_CODES.items()}
        return Descriptor(
            (word & 0x3FFF) << 4,
            (word >> 16 & 0x3FFF) << 4,
            (word >> 32 & 0x3FFF) << 4,
            128 if code == ATOM_32B else spans[code >> 1],
            word >> 46 & 7,
            word >> 49 & 7,
            code == ATOM_32B,
        )


def descriptor_low(leading: int, address: int = 0) -> int:
    """The lower half of a matrix descriptor: LBO and start address, both in bytes."""
    return (address & 0x3FFFF) >> 4 | leading >> 4 << 16


# ---- tensor memory (9.7.16.1, 9.7.16.8) -----------------------------------------------------------------------------------
LANES, COLUMNS = 128, 512


def tmem_address(lane: int, column: int) -> int:
    """Address of a 32-bit cell."""
    return lane << 16 | column


# Shape -> registers of a thread for each repeat, columns that a repeat covers, lanes (table 49).
TRANSFERS = {"32x32b": (1, 1, 32), "16x64b": (1, 2, 16), "16x128b": (2, 4, 16), "16x256b": (4, 8, 16)}

# ---- copies into tensor memory (9.7.16.9.2) -----------------------------------------------------------------------------------
CopyForm = Literal["32x128b.warpx4", "128x128b", "128x256b"]
# Rows, and bytes of each, that an instruction reads: row i goes to lane i, 32 rows to each quarter of the lanes, and 4 bytes to
# each column.  Two more forms, 4x256b and 64x128b, write lanes that no buffer has.
COPIES: dict[CopyForm, tuple[int, int]] = {"32x128b.warpx4": (32, 16), "128x128b": (128, 16), "128x256b": (128, 32)}

# ---- 2:4 sparse A (9.7.16.10.8) -----------------------------------------------------------------------------------------------
# Of 4 elements (of 2 float32) two (one) are kept, named by 4 bits: for each, in its order, the index of 16-bit halves or elements
# among four.  An instruction's metadata are 32 bits of a row, in one column of a pair that the selector names, for 16-bit and
# 32-bit elements, and 64 bits, the pair, for 8-bit ones.


def metadata_place(itemsize: int, row: Any, byte: Any) -> tuple[Any, Any]:
    """(lane, byte of the lane's 16) that holds a byte of a row's 16 bytes of metadata; numbers or arrays of them.

    8-bit elements: where one looks for it.  Wider ones: of each 4 bytes, an instruction's, the second half is in another lane,
    and rows 8 apart share one.
    """
    if itemsize == 1:
        return row, byte
    half = byte // 2 % 2
    return row // 16 * 16 + half * 8 + row % 8, byte // 4 * 4 + row // 8 % 2 * 2 + byte % 2
