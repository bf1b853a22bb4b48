"""All operations.  Importing this fills the tables of `registry`."""

from . import (
    barriers,
    control_flow,
    copies,
    elementwise,
    fragments,
    grid,
    reductions,
    refs,
    registers,
    shapes,
    tcgen05,
    warp_branch,
    wgmma,
)

__all__ = [
    "barriers",
    "control_flow",
    "copies",
    "elementwise",
    "fragments",
    "grid",
    "reductions",
    "refs",
    "registers",
    "shapes",
    "tcgen05",
    "warp_branch",
    "wgmma",
]
