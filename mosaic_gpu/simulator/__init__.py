"""The simulator: a planned kernel on NumPy, with the GPU's barriers, copies and tensor cores modelled one by one."""

from .machine import simulate

__all__ = ["simulate"]
