"""The simulator: a planned kernel on NumPy, with the GPU's barriers, copies and tensor cores modelled one by one."""

from .machine import simulate
from .params import SimulatorParams, simulator_params

__all__ = ["SimulatorParams", "simulate", "simulator_params"]
