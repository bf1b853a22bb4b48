"""The guided search: Optuna (extra `guided`) proposes the next config from what was timed so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ToolchainError

AGAIN = 20  # proposals of configs that were timed already, or are not valid, before the next by rank is taken instead


def propose(
    candidates: Sequence[Any],
    first: Sequence[Any],
    count: int,
    seconds: Callable[[Any], float | None],
    time_is_up: Callable[[], bool],
) -> None:
    """Call `seconds(config)` for `count` of the candidates: `first`, then those that Optuna's TPE sampler proposes.

    Proposals are points of the product of the fields' values; one that is no candidate is answered at once as infinitely slow.
    Raises ToolchainError where Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ToolchainError("a guided search needs Optuna: pip install 'mosaic-gpu[guided]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = [f.name for f in dataclasses.fields(candidates[0])]
    values = {n: list(dict.fromkeys(getattr(c, n) for c in candidates)) for n in names}
    spread: dict[str, Any] = {
        n: optuna.distributions.CategoricalDistribution(range(len(v))) for n, v in values.items() if len(v) > 1
    }

    def point(c: Any) -> dict[str, int]:
        return {n: values[n].index(getattr(c, n)) for n in spread}

    by_point = {tuple(point(c).items()): c for c in candidates}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=min(8, count)))
    timed: dict[Any, float | None] = {}

    def tell(c: Any) -> None:
        timed[c] = seconds(c)
        if timed[c] is not None:
            study.add_trial(optuna.trial.create_trial(params=point(c), distributions=spread, value=timed[c]))

    for c in first[:count]:
        tell(c)
    repeated = 0
    while len(timed) < min(count, len(candidates)) and not time_is_up():
        trial = study.ask(spread)
        c = by_point.get(tuple((n, trial.params[n]) for n in spread))
        if c is None or c in timed:
            study.tell(trial, timed.get(c) or 1e9 if c in timed else 1e9)
            repeated += 1
            if repeated <= AGAIN:
                continue
            c = next(x for x in candidates if x not in timed)
            tell(c)
        else:
            timed[c] = seconds(c)
            study.tell(trial, timed[c] or 1e9)
        repeated = 0
