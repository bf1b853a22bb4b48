"""`python -m benchmarks.matmul --json results.json`: the benchmark of mosaic_gpu.bench.matmul, all its options.

`mosaic-gpu bench matmul` is the same with the usual ones.
"""

import sys

from mosaic_gpu.bench.matmul import BENCHMARK
from mosaic_gpu.bench.runner import main

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
