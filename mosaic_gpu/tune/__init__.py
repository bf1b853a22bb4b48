"""Tuning: spaces of configs, trials on a GPU, and the per-device caches that the dispatchers read (docs/tuning.md).

`Tunable` describes a kernel; `explain_config` says which config a call takes and why; `override_config` chooses one for a while;
`config_for` is what a kernel's own function asks.
"""

from __future__ import annotations

from typing import Any

from .lookup import Explanation, explain_config, override_config
from .tunable import Tunable

__all__ = ["Explanation", "Tunable", "config_for", "explain_config", "override_config"]


def config_for(kernel: str | Tunable, *args: Any, config: Any = None, **kwargs: Any) -> Any:
    """The config that a call takes on this machine: `explain_config(...)` without the reasons."""
    return explain_config(kernel, *args, config=config, **kwargs).config
