"""Benchmarks of the kernels, the simulator and the dispatch against other libraries: docs/benchmarks.md says how to run them.

Run from the top of the repository, as `python -m benchmarks.attention`.
"""

import os
import pathlib

# PyTorch and JAX share the GPU: JAX must not take three quarters of its memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import mosaic_gpu

try:
    import mosaic_gpu.kernels  # noqa: F401
except ImportError:  # a source tree without installation: `kernels` stands beside the package
    mosaic_gpu.__path__.append(str(pathlib.Path(__file__).parents[1]))
