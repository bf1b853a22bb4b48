"""Benchmarks of kernels against other libraries: problems, providers, two protocols of timing, verdicts, reports.

`mosaic-gpu bench` and `python -m benchmarks.*` are built of it; docs/benchmarks.md says what is measured and how.
"""

import os

# PyTorch and JAX share the GPU: JAX must not take three quarters of its memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
