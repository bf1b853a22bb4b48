"""All operations.  Importing this fills the tables of `registry`."""

from . import (
    assembly,
    barriers,
    control_flow,
    conversions,
    copies,
    elementwise,
    grid,
    reductions,
    refs,
    registers,
    scans,
    shapes,
    tcgen05,
    warp_branch,
    wgmma,
)

__all__ = [
    "assembly",
    "barriers",
    "control_flow",
    "conversions",
    "copies",
    "elementwise",
    "grid",
    "reductions",
    "refs",
    "scans",
    "registers",
    "shapes",
    "tcgen05",
    "warp_branch",
    "wgmma",
]
