"""Sabotage: good kernels, named defects of them, mechanical mutants, and whether the simulator finds each of them."""
