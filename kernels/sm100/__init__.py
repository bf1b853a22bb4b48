"""Kernels for Blackwell (sm_100a): tcgen05, tensor memory, warp specialisation by warp.

No Blackwell GPU has run these: they are compiled, checked in the disassembly and simulated.
"""
