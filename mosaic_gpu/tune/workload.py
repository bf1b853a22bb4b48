"""What is measured: shapes written as text, with their operation counts."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Self

# As JAX prints them, and XLA (s32, pred).
DTYPES = {
    "bf16": "bfloat16",
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"{letter}{n}": f"int{n}" for letter in "is" for n in (8, 16, 32, 64)},
    **{f"u{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    **{f"f8_{kind}": f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e8m0fnu")},
    "pred": "bool",
}
ITEM_BYTES = {"float32": 4, "float64": 8, "int32": 4, "uint32": 4, "int8": 1, "uint8": 1}  # all else: 2


def dtype_name(text: str) -> str:
    """The NumPy name of a dtype that may be written short: bf16, f16, f32, ..."""
    return DTYPES.get(text, text)


def parse_fields(text: str, known: dict[str, str], example: str) -> dict[str, int]:
    """'b4 s4096 h16' as {'batch': 4, ...}; `known` maps letters to names."""
    compact = re.sub(r"[\s_]", "", text)
    parts = re.findall(r"([a-z]+)(\d+)", compact)
    letters = [letter for letter, _ in parts]
    if (
        "".join(a + b for a, b in parts) != compact
        or not set(letters) <= set(known)
        or len(set(letters)) != len(letters)
    ):
        meanings = ", ".join(f"{letter} {name}" for letter, name in known.items())
        raise ValueError(f"shape {text!r}: write it like {example} ({meanings})")
    if wrong := [known[letter] for letter, number in parts if not 1 <= int(number) < 2**31]:
        raise ValueError(f"shape {text!r}: {' and '.join(wrong)} must be from 1 to 2**31 - 1")
    return {known[letter]: int(number) for letter, number in parts}


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention call.  `length` queries see `kv_length` keys; `heads` share `kv_heads`.  bias: there is one, or a mask."""

    batch: int
    length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    value_dim: int = 0  # 0: that of q and k
    bias: bool = False

    LETTERS = {
        **{"b": "batch", "s": "length", "t": "kv_length", "h": "heads", "kv": "kv_heads"},
        **{"d": "head_dim", "dv": "value_dim"},
    }
    EXAMPLE = "b4s4096h16d128, b2s8192h32kv8d128, b1s128t4096h8d64 or b2s8192h16d192dv128"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads: no multiple of them")

    @classmethod
    def parse(cls, text: str, *, dtype: str = "bfloat16", causal: bool = False, bias: bool = False) -> Self:
        """From text; what is left out: b1, t = s, h = 2048 / d, kv = h, d128.  ValueError says how to write it."""
        given = parse_fields(text, cls.LETTERS, cls.EXAMPLE)
        if "length" not in given:
            raise ValueError(f"shape {text!r} has no length: write it like {cls.EXAMPLE}")
        head_dim = given.get("head_dim", 128)
        heads = given.get("heads", max(2048 // max(head_dim, 1), 1))
        return cls(
            given.get("batch", 1),
            given["length"],
            given.get("kv_length", given["length"]),
            heads,
            given.get("kv_heads", heads),
            head_dim,
            dtype_name(dtype),
            causal,
            given.get("value_dim", head_dim),
            bias,
        )

    def __str__(self) -> str:
        kv = f" t{self.kv_length}" if self.kv_length != self.length else ""
        heads = f"h{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")
        dv = f"/{self.value_dim}" if self.value_dim != self.head_dim else ""
        return f"b{self.batch} s{self.length}{kv} {heads} d{self.head_dim}{dv}{' bias' if self.bias else ''}"

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of q, k and v."""
        k, v = ((self.batch, self.kv_length, self.kv_heads, d) for d in (self.head_dim, self.value_dim))
        return (self.batch, self.length, self.heads, self.head_dim), k, v

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """Of a bias, which all of a batch share."""
        return 1, self.heads, self.length, self.kv_length

    @property
    def flops(self) -> int:
        """By the usual count: 2 b h (d + dv) for each pair of query and key, half of the pairs when causal."""
        pairs = self.length * self.kv_length
        if self.causal and self.length == self.kv_length:
            pairs //= 2
        elif self.causal:  # query i sees min(i + 1, t) keys
            inside = min(self.length, self.kv_length)
            pairs = inside * (inside + 1) // 2 + (self.length - inside) * self.kv_length
        return 2 * self.batch * self.heads * (self.head_dim + self.value_dim) * pairs

    @property
    def bytes(self) -> int:
        """Of q, k, v, a bias and the result: what must be moved at least."""
        q, k, v = (math.prod(s) for s in self.shapes)
        bias = math.prod(self.bias_shape) if self.bias else 0
        return (q + q // self.head_dim * self.value_dim + k + v + bias) * ITEM_BYTES.get(self.dtype, 2)

    def to_json(self) -> dict[str, Any]:
        """Plain data; a bias is in it only where there is one, as entries of caches are older than that field."""
        data = dataclasses.asdict(self)
        return data if self.bias else {name: x for name, x in data.items() if name != "bias"}


@dataclasses.dataclass(frozen=True)
class Matmul:
    """One product of (m, k) and (k, n)."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"

    LETTERS = {"m": "m", "n": "n", "k": "k"}
    EXAMPLE = "m4096n4096k4096"

    @classmethod
    def parse(cls, text: str, *, dtype: str = "bfloat16") -> Self:
        """From text; all of m, n and k."""
        given = parse_fields(text, cls.LETTERS, cls.EXAMPLE)
        if len(given) != 3:
            raise ValueError(f"shape {text!r}: write it like {cls.EXAMPLE}")
        return cls(**given, dtype=dtype_name(dtype))

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of a and b."""
        return (self.m, self.k), (self.k, self.n)

    def __str__(self) -> str:
        return f"m{self.m} n{self.n} k{self.k}"

    @property
    def flops(self) -> int:
        """2 m n k."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Of both operands and the result."""
        return (self.m * self.k + self.k * self.n + self.m * self.n) * ITEM_BYTES.get(self.dtype, 2)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)
