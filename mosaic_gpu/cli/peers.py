"""Other libraries' attention on the same inputs, for the column beside ours."""

from __future__ import annotations

from typing import Any

from ..tune.measure import AttentionBench


def cudnn_seconds(bench: AttentionBench) -> tuple[float | None, str]:
    """Seconds of a call of cuDNN's attention through PyTorch, timed as ours is; (None, why) where it cannot run."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return None, "PyTorch is not installed: pip install torch"
    try:
        # (b, h, s, d) is PyTorch's order; the memory stays in ours, which cuDNN takes and users of it have.
        sets = [[torch.from_dlpack(x).transpose(1, 2) for x in inputs] for inputs in bench.sets]

        def call(q: Any, k: Any, v: Any) -> Any:
            options = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bench.workload.causal, **options)

        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            error = bench.judge.error(_to_jax(call(*sets[0]).transpose(1, 2).contiguous()))
            if not bench.judge.accepts(error):
                return None, f"cuDNN: relative error {error:.2e}, allowed {bench.judge.allowed:.2e}"
            return _seconds(torch, lambda: [call(*s) for s in sets], len(sets)), ""
    except Exception as error:  # a peer that fails is a line in the table, whatever it raises
        return (
            None,
            f"cuDNN through PyTorch: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        )


def _to_jax(x: Any) -> Any:
    import jax

    return jax.dlpack.from_dlpack(x)


def _seconds(torch: Any, enqueue: Any, calls: int, *, loops: int = 20, repeats: int = 7) -> float:
    """The median over repeats, by the GPU's own events."""
    for _ in range(3):
        enqueue()
    samples = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(loops):
            enqueue()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / (loops * calls))
    return float(sorted(samples)[len(samples) // 2])
