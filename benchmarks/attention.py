"""`python -m benchmarks.attention --json results.json`: the benchmark of mosaic_gpu.bench.attention, all its options.

`mosaic-gpu bench attention` is the same with the usual ones.
"""

import sys

from mosaic_gpu.bench.attention import BENCHMARK
from mosaic_gpu.bench.runner import main

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
