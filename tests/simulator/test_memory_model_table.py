"""docs/memory_model.md: every rule of the model is in a table, and what the tables name exists."""

from __future__ import annotations

import pathlib
import re

import mosaic_gpu

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "memory_model.md"
# How many rules each chapter of the memory model has: proxies, mbarriers, copies, wgmma, tcgen05, barriers of threads.
CHAPTERS = {"B": 12, "C": 19, "D": 13, "E": 9, "F": 22, "G": 9}


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    text = PAGE.read_text().split(f"## {title}")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def rules(cell: str) -> set[str]:
    return set(re.findall(r"\b[B-G]\d+b?\b", cell))


def test_every_rule_has_a_row() -> None:
    kept, not_kept = rows("Rules that are kept"), rows("Rules that are not kept, and why")
    named = set().union(*(rules(row[0]) for row in (*kept, *not_kept)))
    every = {f"{chapter}{i}" for chapter, n in CHAPTERS.items() for i in range(1, n + 1)} | {"D2b"}
    assert named == every
    both = set().union(*(rules(r[0]) for r in kept)) & set().union(*(rules(r[0]) for r in not_kept))
    assert not both
    assert all(row[1] for row in not_kept)


def test_what_the_rows_name_exists() -> None:
    folder = pathlib.Path(mosaic_gpu.__file__).parent / "simulator"
    code = "\n".join(p.read_text() for p in folder.glob("*.py"))
    tests = {p.name: p.read_text() for p in pathlib.Path(__file__).parent.glob("test_*.py")}
    for name in (
        "test_scales.py",
        "test_launch_control.py",
        "test_cluster_ref.py",
        "test_atomics.py",
        "test_semaphores.py",
    ):
        tests[name] = (pathlib.Path(__file__).parents[1] / "ops" / name).read_text()
    tests_text = "\n".join(tests.values())
    for rule, symbols, proofs in rows("Rules that are kept"):
        named = re.findall(r"`([^`]+)`", symbols)
        for symbol in named:
            name = symbol.split("(")[0].split(".")[-1]
            assert re.search(rf"\b{name}\b", code), (rule, symbol)
        found = re.findall(r"`([^`]+)`", proofs)
        assert found or "good" in proofs or "tm" in proofs, rule
        for name in found:
            assert name in tests or re.search(rf"\b{re.escape(name.rstrip('*'))}", tests_text), (rule, name)
