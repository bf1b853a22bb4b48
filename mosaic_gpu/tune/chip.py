"""What a GPU can do at most: the roof of rooflines, for cost estimates and for the share that a benchmark reached.

Multiprocessors, the dense 16-bit rate, the memory's bandwidth and, by them, the clock are those of NVIDIA's data sheets; results
a clock those of the CUDA programming guide (throughput of native arithmetic instructions); shared memory has 32 banks of 4 bytes.
What was measured or estimated says so.  A chip that reaches its power limit runs slower, so 100 % is out of reach for long
kernels.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of GPU.  Rates are per clock and multiprocessor unless said otherwise."""

    name: str
    multiprocessors: int
    clock: float  # Hz
    tensor_flops: int  # 16-bit
    memory_bandwidth: float  # bytes a second, whole chip
    l2_bytes_per_clock: float = 40.0  # our matmul on an H200 (docs/performance.md) has taken 37 to 42
    shared_bytes_per_clock: float = 128.0
    fp32_results: float = 128.0
    exponentials: float = 16.0
    load_latency: float = 1000.0  # clocks from a TMA request to the arrival, L2 busy: an estimate, not measured

    @property
    def peak_flops(self) -> float:
        """Of the whole chip, a second."""
        return self.multiprocessors * self.clock * self.tensor_flops

    def bound(self, flops: float, bytes_moved: float) -> float:
        """Seconds that these operations and bytes take at least."""
        return max(flops / self.peak_flops, bytes_moved / self.memory_bandwidth)


H200 = Chip("nvidia_h200", 132, 1.83e9, 4096, 4.8e12)
H100 = Chip("nvidia_h100", 132, 1.83e9, 4096, 3.35e12)
B200 = Chip("nvidia_b200", 148, 1.84e9, 8192, 8.0e12)
B300 = Chip("nvidia_b300", 148, 1.84e9, 8192, 8.0e12, exponentials=32.0)
CHIPS = (H200, H100, B200, B300)


def chip_of(device: str | None, arch: str = "sm_90a") -> Chip:
    """By the device's name, such as nvidia_h100_80gb_hbm3; else the one that stands for its architecture."""
    named = next((c for c in CHIPS if device and device.startswith(c.name)), None)
    return named or {"sm_100a": B200, "sm_103a": B300}.get(arch, H200)
