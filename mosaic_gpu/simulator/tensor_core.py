"""Tensor cores: operands gathered from shared memory through matrix descriptors, and their products.

The descriptors are the words that the emitted kernel would hold.  They are decoded field by field, and the elements are
found by leading and stride byte offsets and the XOR on address bits, as the hardware does it (PTX ISA 9.7.15.5.1 and
9.7.16.3 to 9.7.16.5).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from ..codegen.encodings import COPIES, Descriptor
from ..errors import IllegalInstruction, OutOfBounds
from ..layouts.operands import SharedOperand, decode_descriptor, descriptor_high, descriptor_low
from ..layouts.shared import swizzled
from ..ops.elementwise import numpy_dtype
from .memory import UNSIGNED, Array, SharedMemory

if TYPE_CHECKING:
    from ..ops.tcgen05_copies import TmemCopy


# ---- from descriptors to elements -----------------------------------------------------------------------------------
def instruction_addresses(d: Descriptor, rows: int, size: int, mn_major: bool, k_bytes: int = 32) -> Array:
    """Byte address of each element [mn, k] that one MMA instruction reads: `rows` of M or N, so many bytes of K."""
    mn = np.arange(rows)[:, None]
    k = np.arange(k_bytes // size)[None, :]
    per_chunk = 16 // size
    if d.swizzle and not mn_major:
        linear = mn // 8 * d.stride + mn % 8 * d.swizzle + k * size
    elif d.swizzle:
        per_row = d.swizzle // size
        linear = mn // per_row * d.leading + mn % per_row * size + k // 8 * d.stride + k % 8 * d.swizzle
    elif not mn_major:
        linear = mn // 8 * d.stride + mn % 8 * 16 + k // per_chunk * d.leading + k % per_chunk * size
    else:  # without a swizzle the two offsets change their roles
        linear = mn // per_chunk * d.stride + mn % per_chunk * size + k // 8 * d.leading + k % 8 * 16
    return swizzled(d.address + linear, d.swizzle)


@functools.lru_cache(maxsize=512)
def operand_index(operand: SharedOperand, base: int, rows: int, mn_major: bool, tcgen05: bool) -> Array:
    """Element index (byte address / item size) of each element [mn, k] of an operand that starts at byte `base`.

    rows: of M or N in one instruction; an operand with more of them takes one instruction after the other.
    """
    high = descriptor_high(operand, tcgen05)
    parts = []
    for row in range(0, operand.rows, rows):
        columns = []
        for step in range(operand.k // operand.k_per_instruction):
            address = base + operand.row_offset(row) + operand.k_offset(step)
            d = decode_descriptor(high << 32 | descriptor_low(operand, address))
            if d.version != int(tcgen05):
                raise IllegalInstruction(f"this tensor core does not read matrix descriptors of version {d.version}")
            columns.append(instruction_addresses(d, rows, operand.itemsize, mn_major, operand.k_bytes))
        parts.append(np.concatenate(columns, axis=1))
    index: Array = np.concatenate(parts, axis=0) // operand.itemsize
    index.setflags(write=False)
    return index


def gather(
    shared: SharedMemory,
    operand: SharedOperand,
    base: int,
    rows: int,
    mn_major: bool,
    dtype: str,
    tcgen05: bool,
    name: str = "",
) -> Array:
    """The operand [mn, k] as numbers that hold its values exactly.  name: what messages call its buffer."""
    index = operand_index(operand, base, rows, mn_major, tcgen05)
    key = (id(operand), base, rows, mn_major)
    if key not in shared.known and (end := (int(index.max()) + 1) * operand.itemsize) > shared.data.size:
        raise OutOfBounds(f"an MMA operand reaches byte {end} of {shared.nbytes} bytes of shared memory")
    what = ("tcgen05_mma" if tcgen05 else "wgmma") + (f", operand {name}" if name else "")
    return exact(shared.read(index, operand.itemsize, lambda: what, key), dtype)


def exact(raw: Array, dtype: str) -> Array:
    """Raw elements as the tensor core sees them, in float32 (integers: float64): every operand type fits exactly; b1: eight."""
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float32":  # tf32: the low 13 bits are not read
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    if dtype == "b1":
        return np.unpackbits(raw.view(np.uint8), axis=-1, bitorder="little").astype(np.float64)
    if raw.dtype.itemsize == 1:
        return _byte_values(dtype)[raw]
    wide: Array = raw.view(numpy_dtype(dtype)).astype(np.float32)
    return wide


@functools.cache
def _byte_values(dtype: str) -> Array:
    kind = np.dtype(np.float64 if dtype in ("int8", "uint8") else np.float32)
    values: Array = np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)).astype(kind)
    return values


def register_operand(x: Array, dtype: str) -> Array:
    """An A operand in registers, as `exact` gives one in shared memory."""
    x = np.ascontiguousarray(x)
    return exact(x.view(UNSIGNED[x.dtype.itemsize]), dtype)


@functools.lru_cache(maxsize=512)
def copied_bytes(plan: TmemCopy, source: int) -> Array:
    """The byte [step, row, byte of the row] of shared memory that a copy into tensor memory reads from byte `source` on."""
    rows, nbytes = COPIES[plan.form]
    steps = [
        instruction_addresses(Descriptor.decode(plan.descriptor(source + offset).encode()), rows, 1, False, nbytes)
        for offset, _ in plan.steps
    ]
    result: Array = np.stack(steps)
    result.setflags(write=False)
    return result


def kept(metadata: Array, a_type: str) -> Array:
    """Which element of K each kept one of a sparse A is, from its metadata [row, byte] (PTX ISA 9.7.16.10.8)."""
    nibbles = np.stack([metadata & 15, metadata >> 4], axis=-1).reshape(metadata.shape[0], -1).astype(np.int64)
    first, second = nibbles & 3, nibbles >> 2
    group = np.arange(nibbles.shape[1])
    legal = first < second
    if a_type == "float32":  # one of two, as the halves of both
        legal &= (first % 2 == 0) & (second == first + 1)
    if not legal.all():
        row, at = (int(i[0]) for i in np.nonzero(~legal))
        raise IllegalInstruction(
            f"tcgen05_mma: a_sparse_metadata of row {row}, group {at} along K, is {int(nibbles[row, at]):#x}, which keeps "
            f"elements {first[row, at]} and {second[row, at]}: "
            + ("a float32 is 0x4 or 0xe" if a_type == "float32" else "of two different ones the first comes first")
        )
    if a_type == "float32":
        return 2 * group + first // 2
    return np.stack([4 * group + first, 4 * group + second], axis=-1).reshape(metadata.shape[0], -1)


# ---- products -------------------------------------------------------------------------------------------------------
SINGLE_THREADED = 1 << 18  # m * n * k up to which OpenBLAS uses one thread


def matmul(a: Array, b: Array) -> Array:
    """a @ b in slices of rows so small that BLAS does not wake its threads, which costs more than the product."""
    m, k = a.shape
    rows = m
    while rows % 2 == 0 and rows * k * b.shape[1] > SINGLE_THREADED:
        rows //= 2
    product: Array = np.matmul(a.reshape(m // rows, rows, k), b)
    return product.reshape(m, b.shape[1])


def multiply_add(acc: Array | None, a: Array, b: Array, k_step: int, acc_type: str) -> Array:
    """acc + a @ b.T (acc None: zero), a [m, k] and b [n, k] from `exact`, as a new array of acc_type.

    float32: one sum over all of K, as the hardware's order is not specified.  float16: rounded after each instruction.
    int32: exact, wraps.
    """
    if acc_type == "int32":
        total = matmul(a, b.T).astype(np.int64) + (0 if acc is None else acc)
        return total.astype(np.int32)
    if acc_type == "float32":
        product = matmul(a, b.T)
        return product if acc is None else np.add(acc, product, dtype=np.float32)
    for k in range(0, a.shape[1], k_step):
        product = a[:, k : k + k_step] @ b[:, k : k + k_step].T
        acc = (product if acc is None else product + acc.astype(np.float32)).astype(np.float16)
    assert acc is not None
    return acc


def sparse_multiply_add(acc: Array | None, a: Array, at: Array, b: Array, k_step: int, acc_type: str) -> Array:
    """The same of a sparse A, [m, kept], of which `at` says where along K each element is.  The elements of B beside those that
    are left out are not looked at, whatever they are."""
    rows = [
        multiply_add(None if acc is None else acc[i : i + 1], a[i : i + 1], b[:, at[i]], k_step, acc_type)
        for i in range(len(a))
    ]
    return np.concatenate(rows, axis=0)


# ---- accumulators of wgmma ------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Accumulator:
    """A wgmma accumulator in registers.  fresh: nothing has been written, so a 'dynamic' wgmma overwrites it."""

    data: Array
    fresh: bool = True
    owners: int = 0  # wgmma groups in flight that write it


def accumulator(shape: tuple[int, ...], dtype: str, poison: bool) -> Accumulator:
    """Registers that hold nothing yet: the plan zeroes them or lets the first wgmma overwrite them."""
    data: Array = np.full(shape, (-1 if dtype == "int32" else np.nan) if poison else 0, numpy_dtype(dtype))
    return Accumulator(data)
