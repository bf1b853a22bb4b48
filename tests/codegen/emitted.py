"""The emitted C++ of a plan, as its tests look at it."""

import re

from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import emit


def text(plan) -> str:
    return body_of(emit(plan))


def body_lines(plan, *words: str) -> list[str]:
    """Lines of C++ that hold all words; bare `#line`s, which only repeat a number, are left out."""
    found = [t.strip() for t in text(plan).splitlines()]
    return [t for t in found if all(w in t for w in words) and not re.fullmatch(r"#line \d+", t)]
