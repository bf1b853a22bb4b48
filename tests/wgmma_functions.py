"""A device function around a warpgroup product, for kernels that tests write by hand."""

from __future__ import annotations

from typing import Any

from mosaic_gpu.codegen.wgmma_text import wgmma_product


def wgmma_function(*variant: Any) -> tuple[str, str]:
    """Its name and text; the arguments are `wgmma_product`'s, its parameters (d, *inputs), d the accumulator's registers."""
    product = wgmma_product(*variant)
    d = [f"d[{i}]" for i in range(product.registers)]
    parameters = [f"{product.c_type}* d", *(f"{'int' if x == 'scale_d' else 'u32'} {x}" for x in product.inputs)]
    body = product.statement(product.instructions, d, product.inputs)
    return product.name, f"DI void {product.name}({', '.join(parameters)}) {{\n  {body}\n}}\n"
