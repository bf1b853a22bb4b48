"""What measurements allow to be said: ratios with bootstrap intervals, verdicts, geometric means.  NumPy only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

Verdict = Literal["won", "tied", "lost"]
RESAMPLES = 10_000
TIE = 0.99  # an interval around 1 is a tie only from this ratio on


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Our rate over the best peer's, and the ends of its 95 % interval."""

    peer: str
    value: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """Won: the whole interval is at 1 or above.  Tied: it contains 1 and the ratio is 0.99 or more.  Else lost."""
        if self.low >= 1.0:
            return "won"
        return "tied" if self.high >= 1.0 and self.value >= TIE else "lost"


def compare(
    ours: Sequence[float], peers: Mapping[str, Sequence[float]], *, paired: bool, resamples: int = RESAMPLES
) -> Ratio:
    """The ratio of medians of rates, ours over the fastest peer's.

    paired: the i-th samples of all were taken in the same round, so rounds are drawn, not single samples: what slows
    a whole round down cancels out.  The fastest peer is chosen anew in every resample: that a peer was best by luck
    must not widen our lead.  Raises ValueError without peers, without samples, or for unequal numbers of paired ones.
    """
    if not peers or not ours or not all(peers.values()):
        raise ValueError("a comparison needs samples of ours and of at least one peer")
    if paired and any(len(p) != len(ours) for p in peers.values()):
        raise ValueError(f"paired samples: {len(ours)} of ours, {[len(p) for p in peers.values()]} of the peers")
    rng = np.random.default_rng(0)  # the same samples give the same interval

    def medians(samples: Sequence[float], index: np.ndarray) -> np.ndarray:
        return np.asarray(np.median(np.asarray(samples, np.float64)[index], axis=1))

    def draw(n: int) -> np.ndarray:
        return rng.integers(0, n, (resamples, n))

    index = draw(len(ours))
    top = medians(ours, index)
    others = [medians(p, index if paired else draw(len(p))) for p in peers.values()]
    low, high = np.quantile(top / np.max(others, axis=0), (0.025, 0.975))
    middle = {name: float(np.median(p)) for name, p in peers.items()}
    best = max(middle, key=middle.__getitem__)
    return Ratio(best, float(np.median(ours)) / middle[best], float(low), float(high))


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict of several protocols: the worst."""
    order: list[Verdict] = ["lost", "tied", "won"]
    return min(verdicts, key=order.index)


def geometric_mean(values: Sequence[float]) -> float:
    """NaN of no values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
