"""Launching compiled kernels: from JAX through an XLA FFI handler, from PyTorch, or on their own."""
