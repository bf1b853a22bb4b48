"""The simulator: a planned kernel on NumPy, with the GPU's barriers, copies and tensor cores modelled one by one."""

from .machine import simulate
from .params import SimulatorParams, simulator_params
from .remarks import Report, UnwrittenOutput

__all__ = ["Report", "SimulatorParams", "UnwrittenOutput", "simulate", "simulator_params"]
