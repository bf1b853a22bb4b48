"""What bundles hold: which calls, how their inputs are drawn, and when a result is right.

A case is plain data, as it stands in the bundle; whoever verifies it makes inputs and judge anew from its seed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..tune.accuracy import Judge
from ..tune.space import config_from, generation_of
from ..tune.tunable import find_tunable
from ..tune.workload import Attention, Matmul

# Element type, type of the factors, elements that share one.
SCALED = {
    "mxfp8": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, 32),
    "mxfp4": (ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu, 32),
    "nvfp4": (ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, 16),
}


ATTENTION = ("attention", "biased_attention")


@dataclasses.dataclass(frozen=True)
class Case:
    """kernel: attention, biased_attention (with a bias of each head), matmul or scaled_matmul; shape, dtype: as on the command
    line (of scaled_matmul a key of SCALED);
    config: fields that differ from the default's; benchmark: it is timed, too."""

    kernel: str
    shape: str
    dtype: str = "bfloat16"
    causal: bool = False
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    benchmark: bool = False
    seed: int = 1

    def __str__(self) -> str:
        mask = (" causal" if self.causal else " full") if self.kernel in ATTENTION else ""
        config = f" {dict(self.config)}" if self.config else ""
        return f"{self.kernel} {self.shape} {self.dtype}{mask}{config}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**dataclasses.asdict(self), "config": dict(self.config)}

    @property
    def workload(self) -> Attention | Matmul:
        if self.kernel in ATTENTION:
            bias = self.kernel == "biased_attention"
            return Attention.parse(self.shape, dtype=self.dtype, causal=self.causal, bias=bias)
        return Matmul.parse(self.shape, dtype=self.dtype)


def call_of(case: Case, arch: str) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """The function of arrays that calls the kernel, and their types."""
    generation, w = generation_of(arch), case.workload
    if case.kernel == "scaled_matmul":
        from mosaic_gpu.kernels.sm100.matmul import MatmulConfig, scaled_matmul

        assert isinstance(w, Matmul)
        element, scale, block = SCALED[case.dtype]
        types = [((n, w.k), element) for n in (w.m, w.n)] + [((n, w.k // block), scale) for n in (w.m, w.n)]
        call = functools.partial(scaled_matmul, config=MatmulConfig(**case.config))
        return call, [jax.ShapeDtypeStruct(s, t) for s, t in types]
    if case.kernel == "biased_attention":  # else the bias would be copied, which is no kernel of ours
        assert isinstance(w, Attention) and w.kv_length % 8 == 0, f"{case}: keys are to be a multiple of 8"
    tunable = find_tunable("attention" if case.kernel in ATTENTION else case.kernel, generation)
    config = config_from(tunable.name, generation, {**tunable.default(w).to_json(), **case.config})
    return tunable.call(w, config), list(tunable.arguments(w))


def inputs(case: Case) -> tuple[tuple[Any, ...], Judge]:
    """Arrays for the kernel's operands that are no constants, in order, and who judges its first result."""
    w, rng = case.workload, np.random.default_rng(case.seed)
    if case.kernel == "scaled_matmul":
        return _scaled_inputs(case, rng)
    arrays = tuple(jnp.asarray(rng.standard_normal(s, np.float32), jnp.dtype(w.dtype)) for s in w.shapes)
    if case.kernel == "biased_attention":
        assert isinstance(w, Attention)
        bias = 2 * rng.standard_normal(w.bias_shape, np.float32)
        bias[..., w.kv_length // 2 :: 7] = -np.inf
        arrays = (*arrays, jnp.asarray(bias, arrays[0].dtype))
        return arrays, Judge.of(*arrays[:3], causal=w.causal, bias=arrays[3])
    if isinstance(w, Attention):
        return arrays, Judge.of(*arrays, causal=w.causal)
    out = jnp.bfloat16 if jnp.dtype(w.dtype).itemsize == 1 else jnp.dtype(w.dtype)
    return arrays, Judge.of_product(arrays[0], arrays[1], out)


def _scaled_inputs(case: Case, rng: np.random.Generator) -> tuple[tuple[Any, ...], Judge]:
    from mosaic_gpu.kernels.sm100.matmul import tiled_factors

    element, scale, block = SCALED[case.dtype]
    w = case.workload
    assert isinstance(w, Matmul)
    operands, factors, wide = [], [], []
    for rows in (w.m, w.n):
        x = rng.uniform(-4, 4, (rows, w.k)).astype(np.float32).astype(element)
        if scale is ml_dtypes.float8_e8m0fnu:
            s = rng.integers(122, 132, (rows, w.k // block)).astype(np.uint8).view(scale)
        else:
            s = rng.uniform(0.25, 8, (rows, w.k // block)).astype(np.float32).astype(scale)
        raw = x.view(np.uint8)
        operands.append(raw[:, ::2] | raw[:, 1::2] << 4 if element is ml_dtypes.float4_e2m1fn else x)
        factors.append(np.asarray(tiled_factors(s)))
        wide.append(x.astype(np.float32) * np.repeat(s.astype(np.float32), block, axis=1))
    return (*operands, *factors), Judge.of_product(wide[0], wide[1].T, jnp.bfloat16)


def sweep(
    arch: str, kernels: tuple[str, ...] = ("attention", "matmul", "scaled_matmul"), benchmark: bool = True
) -> list[Case]:
    """What a bundle for an architecture holds: correctness over shapes and ways of building, then the benchmark's shapes."""
    blackwell = generation_of(arch) == "sm100"
    cases: list[Case] = []
    if "attention" in kernels:
        cases += _attention(blackwell)
    if "matmul" in kernels:
        cases += _matmul(blackwell)
    if "scaled_matmul" in kernels and blackwell:
        cases += _scaled()
    if not benchmark:
        return cases
    for causal in (False, True):
        if "attention" in kernels:
            cases += [Case("attention", f"b4s4096d{d}", causal=causal, benchmark=True) for d in (64, 128, 256)]
            cases += [Case("attention", "b4s4096h16d192dv128", causal=causal, benchmark=True)]
            cases += [Case("biased_attention", "b4s2048h8d128", causal=causal, benchmark=True)]
            if blackwell:
                pair = {"pair": True, "kv_slots": 2, "p_parts": 2}
                cases.append(Case("attention", "b4s4096d128", causal=causal, config=pair, benchmark=True))
                for c in ({"dynamic": True}, {"dynamic": True, **pair}):
                    cases.append(Case("attention", "b4s4096d128", causal=causal, config=c, benchmark=True))
    wide = {"tile_n": 256, "num_slots": 4, "pair": True}
    if "matmul" in kernels:
        cases.append(Case("matmul", "m8192n8192k8192", benchmark=True))
        if blackwell:
            cases.append(Case("matmul", "m8192n8192k8192", config=wide, benchmark=True))
            cases.append(Case("matmul", "m8192n8192k8192", "float8_e4m3fn", config=wide, benchmark=True))
    if "scaled_matmul" in kernels and blackwell:
        cases += [Case("scaled_matmul", "m8192n8192k8192", kind, config=wide, benchmark=True) for kind in SCALED]
    return cases


def _attention(blackwell: bool) -> list[Case]:
    shapes = ["b2s1000h4kv2d64", "b1s777h4kv1d128", "b1s300t900h2d256", "b1s600h2d192dv128", "b1s200h2d80", "b1s1h1d64"]
    cases = [Case("attention", s, causal=causal) for s in shapes for causal in (False, True)]
    cases += [Case("attention", "b2s1000h4kv2d128", "float16", causal=True), Case("attention", "b1s64t5000h2d128")]
    for s in ("b2s1000h4kv2d64", "b1s777t904h2d128", "b1s300t904h2d256"):
        cases += [Case("biased_attention", s, causal=causal) for causal in (False, True)]
    if blackwell:
        changes: list[dict[str, Any]] = [
            {"p_parts": 2, "emulated_columns": 32},
            {"pair": True, "p_parts": 2},
            {"query_tiles": 1, "tile_k": 64, "kv_slots": 2},
            {"pair": True, "query_tiles": 1},
            {"persistent": False, "emulated_columns": 0},
            {"rescale_threshold": 0.0},
            {"dynamic": True},
            {"dynamic": True, "pair": True, "p_parts": 2},
        ]
        cases += [
            Case("attention", "b2s1500h4kv2d128", causal=causal, config=c) for c in changes for causal in (False, True)
        ]
        cases.append(
            Case("biased_attention", "b1s1504h4d128", causal=True, config={"pair": True, "p_parts": 2, "kv_slots": 2})
        )
    else:
        cases += [
            Case("attention", "b2s1500h4kv2d128", causal=True, config={"persistent": False, "q_in_registers": False})
        ]
    return cases


def _matmul(blackwell: bool) -> list[Case]:
    shapes = ["m128n128k64", "m1000n776k520", "m3000n2048k1024", "m1n8k8"]
    cases = [Case("matmul", s, dtype) for s in shapes for dtype in ("bfloat16", "float16")]
    if blackwell:
        pair = {"pair": True, "tile_n": 256, "num_slots": 4}
        cases += [Case("matmul", s, config=pair) for s in shapes]
        cases += [Case("matmul", "m1000n784k528", "float8_e4m3fn", config=c) for c in ({"num_slots": 4}, pair)]
    else:
        cases += [Case("matmul", "m3000n2048k1024", config={"cluster_m": 2})]
    return cases


def _scaled() -> list[Case]:
    changes: list[dict[str, Any]] = [
        {"num_slots": 4},
        {"tile_n": 256, "num_slots": 3},
        {"pair": True, "tile_n": 256, "num_slots": 4},
    ]
    return [
        Case("scaled_matmul", s, kind, config=c)
        for kind in SCALED
        for s in ("m128n128k128", "m1000n776k640")
        for c in changes
    ]
