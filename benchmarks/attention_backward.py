"""`python -m benchmarks.attention_backward --json results.json`: the benchmark of mosaic_gpu.bench.attention_backward, all its
options.

`mosaic-gpu bench attention --backward` is the same with the usual ones.
"""

import sys

from mosaic_gpu.bench.attention_backward import BENCHMARK
from mosaic_gpu.bench.runner import main

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
