"""What tcgen05.mma can do, as tables (PTX ISA 9.7.16.2.1, table 39, and the stricter of that and CUTLASS's headers).

ptxas sees none of it: shape, types and majors stand in a run-time word.  Whatever is not in a table is refused here.
"""

from __future__ import annotations

import dataclasses

from ..codegen.encodings import SCALE_CODES, Kind
from ..errors import IllegalInstruction, Line


@dataclasses.dataclass(frozen=True)
class Features:
    """What differs between the chips of this generation.  kinds: of MMA; load_reduction: tcgen05.ld.red; wide_k: K = 96 of the
    4-bit kinds; fast_exp2: exponentials are as fast as the tensor cores want them."""

    kinds: frozenset[Kind]
    load_reduction: bool
    wide_k: bool
    fast_exp2: bool


_EVERYWHERE: frozenset[Kind] = frozenset({"f16", "tf32", "f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4"})
FEATURES = {
    "sm_100a": Features(_EVERYWHERE | {"i8"}, False, False, False),
    "sm_103a": Features(_EVERYWHERE, True, True, True),
}


def features_of(arch: str) -> Features:
    """Those of an architecture; of one without tcgen05: none."""
    return FEATURES.get(arch, Features(frozenset(), False, False, False))


# A type -> (kind, B types, accumulator types)
F8 = ("float8_e4m3fn", "float8_e5m2")
TYPES: dict[str, tuple[Kind, tuple[str, ...], tuple[str, ...]]] = {
    "float16": ("f16", ("float16",), ("float32", "float16")),
    "bfloat16": ("f16", ("bfloat16",), ("float32",)),
    "float32": ("tf32", ("float32",), ("float32",)),
    "float8_e4m3fn": ("f8f6f4", F8, ("float32", "float16")),
    "float8_e5m2": ("f8f6f4", F8, ("float32", "float16")),
    "int8": ("i8", ("int8", "uint8"), ("int32",)),
    "uint8": ("i8", ("int8", "uint8"), ("int32",)),
}


@dataclasses.dataclass(frozen=True)
class ScaledKind:
    """A block-scaled kind.  a_type, b_type: of elements, as the instruction descriptor names them; block: elements of K that
    share a factor; per_step: factors of a row for one instruction, whose K is 32 bytes."""

    kind: Kind
    a_type: str
    b_type: str
    scale_type: str
    block: int

    @property
    def per_step(self) -> int:
        return (32 if self.kind == "mxf8f6f4" else 64) // self.block


PAIRS_OF_FLOAT4 = "uint8"  # two float4_e2m1fn in a byte, the low half first
BLOCK_SCALES = (
    "float8 x float8 with a float8_e8m0fnu for each 32 elements of K (mxfp8); uint8 x uint8, two float4_e2m1fn in each, with a "
    "float8_e8m0fnu for each 32 (mxfp4) or 16, or a float8_e4m3fn for each 16 (nvfp4)"
)


def scaled_kind_of(a: str, b: str, acc: str, scale: tuple[str, str], block: float, line: Line | None) -> ScaledKind:
    """The kind of a block-scaled MMA; IllegalInstruction says which there are.  scale: types of the factors of A and B."""
    packed = a == b == PAIRS_OF_FLOAT4
    legal: dict[float, tuple[str, ...]] = {32: ("float8_e8m0fnu",)}
    if packed:
        legal[16] = tuple(SCALE_CODES)
    if (
        not (packed or (a in F8 and b in F8))
        or acc != "float32"
        or len(set(scale)) > 1
        or scale[0] not in legal.get(block, ())
    ):
        raise IllegalInstruction(
            f"tcgen05_mma of {a} x {b} -> {acc} with factors {scale[0]} and {scale[1]} for each {block:g} elements of K; "
            f"there are {BLOCK_SCALES}, all to float32",
            line,
        )
    if packed:
        return ScaledKind("mxf4nvf4", "float4_e2m1fn", "float4_e2m1fn", scale[0], int(block))
    return ScaledKind("mxf8f6f4", a, b, scale[0], int(block))


def check_scaled_shape(s: Shape, line: Line | None) -> None:
    """Refuse an N or place of A that block-scaled kinds do not have."""
    if s.a_in_tmem:
        raise IllegalInstruction(
            "tcgen05_mma with scale factors and A in tensor memory: this version has A in shared memory only", line
        )
    check_shape(s, line)


def kind_of(a: str, b: str, acc: str, arch: str, line: Line | None) -> Kind:
    """The kind of an MMA of these types; IllegalInstruction names the row of the table that is missing."""
    row = TYPES.get(a)
    if row is None or b not in row[1] or acc not in row[2]:
        rows = "; ".join(f"{k} x {' or '.join(v[1])} -> {' or '.join(v[2])}" for k, v in TYPES.items())
        raise IllegalInstruction(f"tcgen05_mma of {a} x {b} -> {acc}; there are {rows}", line)
    kind = row[0]
    if kind not in features_of(arch).kinds:
        raise IllegalInstruction(
            f"tcgen05_mma of {a} x {b}: {arch} has no integer tensor core (kind i8 is of sm_100a only); convert to float8 or "
            "bfloat16",
            line,
        )
    return kind


@dataclasses.dataclass(frozen=True)
class Shape:
    """An MMA to be checked.  m, n: of the whole product, over both blocks of a pair; itemsize: bytes of an element of B; sparse:
    A is."""

    kind: Kind
    m: int
    n: int
    pair: bool
    a_in_tmem: bool
    b_mn: bool
    itemsize: int
    sparse: bool = False


def metadata_bits(a: str) -> int:
    """For each element that a sparse A keeps: of 4 elements of 8 or 16 bits two are kept, of 2 float32 one."""
    return 4 if a == "float32" else 2


def check_sparse(s: Shape, scaled: bool, b_swizzle: int, line: Line | None) -> None:
    """Refuse what a sparse A cannot be combined with here (PTX ISA 9.7.16.10.8; CUTLASS has it with A in shared memory only)."""
    if scaled:
        raise IllegalInstruction(
            "tcgen05_mma with a_sparse_metadata and scale factors: this version has one or the other", line
        )
    if s.a_in_tmem or s.m == (128 if s.pair else 64):
        raise IllegalInstruction(
            "tcgen05_mma with a_sparse_metadata has A in shared memory and M = 128, in a pair of blocks 256; this one has "
            + ("A in tensor memory" if s.a_in_tmem else f"M = {s.m}"),
            line,
        )
    if not s.b_mn and b_swizzle < 64:
        raise IllegalInstruction(
            f"tcgen05_mma with a_sparse_metadata reads 64 bytes of K of B at once, and B, contiguous along K, is swizzled by "
            f"{b_swizzle}: use SwizzleTransform(64) or (128)",
            line,
        )


def n_step(s: Shape) -> tuple[int, str]:
    """What N must be a multiple of, and why it is more than the least."""
    pair = 2 if s.pair else 1
    if s.sparse:
        return 16 * pair, "with a sparse A"
    if s.a_in_tmem and s.pair:
        return 32, "with A in tensor memory"
    if s.pair and s.kind in ("mxf8f6f4", "mxf4nvf4"):
        return 32, "with scale factors"
    if s.pair and s.kind in ("f8f6f4", "i8"):
        return 32, "of 8-bit operands"
    if s.b_mn and s.itemsize == 1:
        return 16 * pair, "with 8-bit operands contiguous along N"
    if s.kind == "i8" and s.n > 32:
        return 16 * pair, "of integers above 32"
    if s.a_in_tmem:
        return 16, "with A in tensor memory"
    return 8 * pair, ""


def check_shape(s: Shape, line: Line | None) -> None:
    """Refuse an M or N that the table does not have."""
    assert s.m in ((128, 256) if s.pair else (64, 128)), "tensor memory has buffers of 64 and 128 rows"
    blocks = "a pair of blocks" if s.pair else "one block"
    if s.a_in_tmem and s.m == (128 if s.pair else 64):
        raise IllegalInstruction(
            f"tcgen05_mma of M = {s.m} in {blocks} with A in tensor memory: this version has it with 128 rows a block only; pass "
            "A through shared memory",
            line,
        )
    step, why = n_step(s)
    if s.n % step or not step <= s.n <= 256:
        raise IllegalInstruction(
            f"tcgen05_mma: n = {s.n}; legal with M = {s.m} in {blocks}{' ' + why if why else ''} are "
            f"{step}, {2 * step}, ..., 256",
            line,
        )
