"""Emission of wgmma and its accumulators; what comes of both generations' tensor cores together."""

from __future__ import annotations

from typing import cast

from ..layouts.operands import SharedOperand, descriptor_high, descriptor_low
from ..layouts.shared import PACKED
from ..ops.wgmma import KINDS, WgmmaPlan
from ..program import Affine, Value
from .emit_tcgen05 import Tcgen05Emitter
from .text import c_type
from .wgmma_text import AccumulatorKind, Chain, Init, OperandKind, Product, wgmma_product

COPIED = "a_bits"  # of A in registers, four 8-bit elements or one of 32 bits in each
ACC_KINDS = {"float32": "f32", "float16": "f16", "int32": "s32"}


class MmaEmitter(Tcgen05Emitter):
    """`functions`: name -> text of the macros that the kernel uses: the instructions of its warpgroup products."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[str, str] = {}
        self.chains: dict[str, dict[Chain, int]] = {}

    # ---- wgmma --------------------------------------------------------------------------------------------------------
    def accumulator(self, ref: Value) -> None:
        """Registers of an accumulator; `_live` says whether anything has been accumulated yet."""
        n = self.name(ref)
        self.line(
            f"{'u32' if ref.dtype in PACKED else c_type(ref.dtype)} {n}[{self._acc_registers(ref)}]; int {n}_live = 0;"
        )

    def zero_accumulator(self, ref: Value, dynamic: bool) -> None:
        n = self.name(ref)
        with self.block(f"if (!{n}_live)" if dynamic else ""):
            self.loop(self._acc_registers(ref), f"{n}[i] = 0;")
        self.line(f"{n}_live = 1;")

    def wgmma(self, p: WgmmaPlan) -> None:
        """fence, if it needs one; per 64 rows and per 32 bytes of K one instruction; commit."""
        acc = self.names[p.acc]
        acc_registers = p.n // 4 if p.acc_type == "float16" else p.n // 2  # of 64 rows
        in_registers = isinstance(p.a, int)
        with self.block():
            self.line(f"u32 b_low = {self.descriptor(p.b)};")
            if isinstance(p.a, SharedOperand):
                self.line(f"u32 a_low = {self.descriptor(p.a)};")
            fragments = self._fragments(p) if in_registers else ""
            if p.fence or fragments == COPIED:
                self.line("wgmma_fence();")
            for mi in range(p.m // 64):
                init: Init = {"add": False, "zero": True}.get(p.init, "dynamic")
                if in_registers:
                    count = 4 * (p.k // p.k_step)
                    inputs = [f"{fragments}[{mi * count + k}]" for k in range(count)]
                else:
                    assert isinstance(p.a, SharedOperand)
                    inputs = [f"a_low + {p.a.row_offset(64 * mi) >> 4}" if mi else "a_low"]
                inputs += ["b_low"] + [f"{acc}_live"] * (init == "dynamic")
                product, instructions = self._product(p, init)
                # Here, and not in a function of the prelude: an array that is passed on cannot become scalars (`scalars.py`).
                d = [f"{acc}[{mi * acc_registers + i}]" for i in range(acc_registers)]
                self.line(product.statement(instructions, d, inputs))
            self.line("wgmma_commit();")
        if p.init != "add":
            self.line(f"{acc}_live = 1;")

    def _fragments(self, p: WgmmaPlan) -> str:
        """The registers of an A that is an array: of 16 bits as they are, of others copies made before the fence."""
        name, size = self.names[cast(int, p.a)], p.b.itemsize
        if size == 2:
            return name
        count = p.m // 64 * (p.k // p.k_step) * 4
        self.line(f"u32 {COPIED}[{count}];")
        for i in range(count):
            four = ", ".join(f"{name}[{4 * i + j}]" for j in range(4))
            self.line(f"{COPIED}[{i}] = {f'bytes_of({four})' if size == 1 else f'as_u32({name}[{i}])'};")
        return COPIED

    def _product(self, p: WgmmaPlan, init: Init) -> tuple[Product, str]:
        """All its steps along K, and the macro for its instructions, numbered where chains of one name have other offsets."""
        shared, steps = p.a if isinstance(p.a, SharedOperand) else None, p.k // p.k_step
        chain = Chain(
            tuple(shared.k_offset(i) >> 4 for i in range(steps)) if shared else (),
            tuple(p.b.k_offset(i) >> 4 for i in range(steps)),
            descriptor_high(shared, False) if shared else 0,
            descriptor_high(p.b, False),
        )
        product = wgmma_product(
            p.n,
            cast(OperandKind, KINDS[p.a_type]),
            cast(OperandKind, KINDS[p.b_type]),
            cast(AccumulatorKind, ACC_KINDS[p.acc_type]),
            shared is None,
            shared is not None and shared.mn_major,
            p.b.mn_major,
            init,
            chain,
        )
        name = product.name
        number = self.chains.setdefault(name, {}).setdefault(chain, len(self.chains[name]))
        if number:
            name = f"{name}_{number}"
        self.functions[name] = f"#define {name} {product.instructions}\n"
        return product, name

    def descriptor(self, o: SharedOperand) -> str:
        """Lower word of an operand's descriptor: everything about it that is not a constant."""
        place = o.start + Affine(self.plan.buffers[o.buffer].offset)
        # Counted in units here: from a shift of the whole ptxas makes an instruction more for every product.
        units = Affine(place.const // 16, tuple((v, f // 16) for v, f in place.terms))
        assert units * 16 == place, f"{o}: operands are refused unless they start at whole atoms of the swizzle"
        return f"smem_units + {self.affine(units)} + {descriptor_low(o):#x}u"
