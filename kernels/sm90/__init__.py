"""Kernels for Hopper (sm_90a): wgmma, TMA, warp specialisation by warpgroup."""
