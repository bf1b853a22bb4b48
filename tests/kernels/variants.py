"""Options of the sm90 kernels in combinations that fit: compiled by every NVRTC, run on a GPU."""

from typing import Any

THREE: dict[str, Any] = {"compute_warpgroups": 3, "compute_registers": 160, "memory_registers": 32}
FOUR: dict[str, Any] = {"compute_warpgroups": 4, "compute_registers": 112, "memory_registers": 32}
ATTENTION: list[tuple[int, dict[str, Any]]] = [
    *(
        (d, {"persistent": persistent, "rescale_threshold": t})
        for d in (64, 128)
        for persistent, t in ((True, 8.0), (False, 0.0))
    ),
    (64, {"block_kv": 128, "persistent": True, "rescale_threshold": 8.0, **THREE}),
    (64, {"block_kv": 112, "persistent": True, "rescale_threshold": 8.0, **THREE}),
    (64, {"block_kv": 80, "num_stages": 3, "q_in_registers": True, **THREE}),
    (64, {"block_kv": 128, "sum_by_product": True, **THREE}),
    (64, {"block_kv": 64, "num_stages": 4, "sum_by_product": True, **FOUR}),
    (64, {"block_kv": 96, "sum_by_product": True, "q_in_registers": True, **THREE}),
    (128, {"sum_by_product": True, "q_in_registers": True}),
    (128, {"persistent": True, "rescale_threshold": 8.0, "q_in_registers": True}),
    (128, {"block_kv": 96, "persistent": True, "q_in_registers": True, "take_turns": False}),
    (128, {"block_kv": 176, "persistent": True, "rescale_threshold": 8.0, "output_tile": False}),
    (256, {"block_kv": 64, "persistent": True, "rescale_threshold": 8.0}),
    (256, {"block_kv": 80, "persistent": True, "rescale_threshold": 8.0, "output_tile": False}),
]

# With a bias; {}: the default.
BIASED: list[tuple[int, dict[str, Any]]] = [
    *((d, {}) for d in (64, 96, 128, 256)),
    (64, {"persistent": False, "rescale_threshold": 0.0}),
    (64, {"block_kv": 112, **THREE}),
    (64, {"block_kv": 96, "sum_by_product": True, **THREE}),
    (64, {"block_kv": 48, "num_stages": 4, **FOUR}),
    (128, {"q_in_registers": True}),  # one block of the bias in flight, as in the next
    (128, {"persistent": False}),
    (128, {"block_kv": 80, "num_stages": 3, "output_tile": False, "sum_by_product": True}),
    (128, {"block_kv": 160, "num_stages": 1}),
    (128, {"block_kv": 96, "q_in_registers": True, "take_turns": False}),
    (256, {"block_kv": 48}),
    (256, {"block_kv": 80, "num_stages": 1}),
]

MATMUL: list[dict[str, Any]] = [
    {"num_stages": 3},
    {"persistent": True},
    {"cluster_m": 2},
    {"cluster_m": 2, "persistent": True},
    {"cluster_m": 4, "persistent": True, "group_m": 1},
    {"block_n": 128, "block_k": 128, "num_stages": 2, "cluster_m": 2},
    {"block_n": 192},
]
