"""Every rule of the memory model has a sabotage that breaks it, or a reason why none can."""

from __future__ import annotations

import pathlib
import re

from .defects import SABOTAGES
from .rules import RULES, UNWRITABLE

CHAPTERS = {"B": 11, "C": 19, "D": 13, "E": 9, "F": 22, "G": 9}
EVERY = {f"{chapter}{i}" for chapter, n in CHAPTERS.items() for i in range(1, n + 1)} | {"D2b"}


def unwritable() -> set[str]:
    out: set[str] = set()
    for key in UNWRITABLE:
        for part in key.split(", "):
            first, _, last = part.partition(" to ")
            match = re.fullmatch(r"([B-G])(\d+)", first)
            if not last or match is None:
                out.add(part)
            else:
                out |= {f"{match[1]}{i}" for i in range(int(match[2]), int(last[1:]) + 1)}
    return out


def test_the_page_has_the_reasons() -> None:
    page = pathlib.Path(__file__).parents[2] / "docs" / "sabotage.md"
    assert all(f"| {rule} | {why} |\n" in page.read_text() for rule, why in UNWRITABLE.items())


def test_every_rule_is_broken_or_cannot_be() -> None:
    broken = {s.rule for s in SABOTAGES}
    assert EVERY - broken == unwritable()
    assert broken == set(RULES)
