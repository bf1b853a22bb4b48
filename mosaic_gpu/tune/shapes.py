"""Sets of shapes by name, and shapes from files: what `tune` and `bench` are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .tunable import Tunable

# Published dimensions of the models.  Prefill of one long sequence and of a batch; decoding has no kernel here.
_LLAMA3_8B = ["b1s8192h32kv8d128 causal", "b4s4096h32kv8d128 causal", "b16s1024h32kv8d128 causal"]
SETS: dict[str, dict[str, list[str]]] = {
    "attention": {
        "benchmark": [
            f"{b}h{h}d{d} {mask}"
            for b in ("b4s4096", "b1s16384", "b32s512")
            for h, d in ((32, 64), (16, 128), (8, 256))
            for mask in ("full", "causal")
        ]
        + ["b2s8192h32kv8d128 causal"],
        "llama3-8b": _LLAMA3_8B,
        "llama3-70b": [s.replace("h32", "h64") for s in _LLAMA3_8B],
        "gemma-7b": ["b1s8192h16d256 causal", "b4s4096h16d256 causal"],
        "bert-large": ["b32s512h16d64 full"],
    },
    "matmul": {
        "benchmark": [
            "m2048n2048k2048",
            "m4096n4096k4096",
            "m8192n8192k8192",
            "m8192n28672k4096",
            "m16384n4096k14336",
            "m512n8192k8192",
        ],
        # Of 8192 tokens: query, key and value; output; gate and up; down.
        "llama3-8b": ["m8192n6144k4096", "m8192n4096k4096", "m8192n28672k4096", "m8192n4096k14336"],
        "llama3-70b": ["m8192n10240k8192", "m8192n8192k8192", "m8192n57344k8192", "m8192n8192k28672"],
    },
}
SETS["attention_backward"] = SETS["attention"] | {
    "benchmark": [s for s in SETS["attention"]["benchmark"] if not s.startswith("b32s512")]
}
DEFAULTS = {
    **dict.fromkeys(
        ("attention", "attention_backward"), ["b4s4096d64", "b4s4096d128", "b4s4096d256"]
    ),  # total width 2048
    "matmul": ["m4096n4096k4096"],
}
MASKS = {"causal": True, "full": False}


def shapes_from_file(path: Path) -> list[str]:
    """A shape a line, words such as `causal` or `f16` after it; # begins a comment.  ValueError for a file without any."""
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not any(lines):
        raise ValueError(f"{path} has no shapes: a line each, such as b4s4096h16d128 causal")
    return [line for line in lines if line]


def named_shapes(kernel: str, text: str) -> list[str]:
    """'llama3-8b', or shapes with commas between them."""
    found: list[str] = []
    for part in (p.strip() for p in text.split(",")):
        known = SETS.get(kernel, {})
        if part and not part[:1].isdigit() and "-" in part and part not in known:
            raise ValueError(f"there is no set of shapes {part!r} for {kernel}; there are {', '.join(known) or 'none'}")
        found += known.get(part, [part])
    return found


def workloads(tunable: Tunable, texts: Sequence[str], *, dtype: str, causal: bool | None) -> list[Any]:
    """The workloads of shapes; a shape that does not say its mask is taken with `causal`, or with both masks if that is None.

    ValueError for what is no shape of the kernel, and for a mask where it has none.
    """
    found: dict[Any, None] = {}
    for text in texts:
        shape, *words = text.split() if any(w in text.split() for w in (*MASKS, "bf16", "f16", "bias")) else [text]
        masks = [MASKS[w] for w in words if w in MASKS] or ([causal] if causal is not None else [False, True])
        own_dtype = next((w for w in words if w in ("bf16", "f16")), dtype)
        if unknown := [w for w in words if w not in (*MASKS, own_dtype, "bias")]:
            raise ValueError(
                f"shape {text!r}: after the shape come causal or full, bf16 or f16, and bias, not {unknown[0]!r}"
            )
        masked = tunable.parse(shape, dtype=own_dtype, causal=True) != tunable.parse(
            shape, dtype=own_dtype, causal=False
        )
        if not masked and (causal is not None or any(w in MASKS for w in words)):
            raise ValueError(f"{tunable.name} has no mask: shape {text!r} is neither causal nor full")
        biased = {"bias": True} if "bias" in words else {}
        if biased and tunable.name != "attention":
            raise ValueError(f"{tunable.name} takes no bias: shape {text!r}")
        for mask in masks:
            found[tunable.parse(shape, dtype=own_dtype, causal=mask, **biased)] = None
    return list(found)
