"""Which keys a query of attention sees, as the kernels of both generations ask: by blocks of keys, and key by key."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

import mosaic_gpu as plgpu

# False: all keys.  True: query i sees keys 0 to i.  "bottom_right": the last query sees all keys, each before it one less.
Causal = bool | Literal["bottom_right"]


def last_key_of_query_0(causal: Causal, queries: int, keys: int) -> int | None:
    """Of so many queries and keys: 0, or below or above it where the diagonal ends bottom right; None without one."""
    return None if not causal else 0 if causal is True else keys - queries


class Mask:
    """The mask in a kernel.  queries, keys: Refs whose second dimension is the length; block: keys of a block; tail: False
    where the number of keys is known to be a multiple of that."""

    def __init__(self, causal: Causal, queries: Any, keys: Any, block: int, tail: bool = True) -> None:
        self.causal, self.queries, self.keys, self.block, self.tail = causal, queries, keys, block, tail

    def last_key(self, query: Any) -> Any:
        """The last key that a query sees by the diagonal: below 0 where it sees none."""
        if self.causal is True:
            return query
        return query + (plgpu.dim_size(self.keys, 1) - plgpu.dim_size(self.queries, 1))

    def blocks_before(self, query: Any) -> Any:
        """Key blocks that the queries before this one need; one even if they see no key."""
        every = plgpu.cdiv(plgpu.dim_size(self.keys, 1), self.block)
        if not self.causal:
            return every
        seen = plgpu.cdiv(self.last_key(query), self.block)
        return jnp.minimum(every, seen if self.causal is True else jnp.maximum(seen, 1))

    def whole_blocks(self, query: Any) -> Any:
        """Key blocks that lie in front of the diagonal for this query and all after it."""
        seen = self.last_key(query) + 1
        return plgpu.div(seen if self.causal is True else jnp.maximum(seen, 0), self.block)

    def apply(self, scores: Any, block: Any, first_query: Any, layout: Any) -> Any:
        """-inf where a key does not exist or, causal, lies behind the query.

        scores: (queries, keys of a block) in `layout`, of the queries from first_query on and the block-th key block.
        """
        if not self.causal and not self.tail:
            return scores
        rows, columns = scores.shape
        last = plgpu.dim_size(self.keys, 1) - 1 - block * self.block
        if self.causal:
            row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=layout.reduce(1))
            last = jnp.minimum(last, row + (self.last_key(first_query) - block * self.block))[:, None]
        column = plgpu.broadcasted_iota(jnp.int32, (rows, columns), 1, layout=layout)
        return jnp.where(column <= last, scores, -jnp.inf)
