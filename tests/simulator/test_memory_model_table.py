"""docs/memory_model.md: every rule of the model is in a table, and what the tables name exists."""

from __future__ import annotations

import ast
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


def definitions(path: pathlib.Path) -> dict[str, set[str]]:
    """What a file defines: "" for its top level and its constants, else by class its methods, attributes and fields."""
    found: dict[str, set[str]] = {"": set()}

    def attributes(target: ast.expr) -> set[str]:
        return {n.attr for n in ast.walk(target) if isinstance(n, ast.Attribute)}

    def names(target: ast.expr) -> set[str]:
        return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}

    def visit(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[owner].add(node.name)
                found[node.name] = set()
                visit(node.body, node.name)
            elif isinstance(node, ast.FunctionDef):
                found[owner].add(node.name)
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Assign) and owner:
                        found[owner] |= {n for t in inner.targets for n in attributes(t)}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    found[owner] |= names(target)

    visit(ast.parse(path.read_text()).body, "")
    return found


def words(path: pathlib.Path) -> set[str]:
    """Of a file of tests: functions, parameters, keywords, strings."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            found |= {node.name, *(a.arg for a in (*node.args.args, *node.args.kwonlyargs))}
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_the_code_that_the_rows_name_exists() -> None:
    folder = pathlib.Path(mosaic_gpu.__file__).parent / "simulator"
    files = {path.stem: definitions(path) for path in folder.glob("*.py")}
    every: dict[str, set[str]] = {}
    for parts in files.values():
        for owner, names in parts.items():
            every.setdefault(owner, set()).update(names)
    every[""] |= {"UninitializedRead", *dir(mosaic_gpu)}
    for rule, symbols, _ in rows("Rules that are kept"):
        owner = ""
        named = re.findall(r"`([^`]+)`", symbols)
        assert named, rule
        for symbol in named:
            before, dot, name = symbol.split("(")[0].rpartition(".")
            if before in files:  # a module
                assert name in files[before][""], (rule, symbol)
                continue
            owner = before or owner if dot else ""
            assert name in every.get(owner, set()), (rule, symbol)


def test_the_tests_that_the_rows_name_exist() -> None:
    here = pathlib.Path(__file__).parent
    text = PAGE.read_text().split("## Rules that are kept")[1].split("| rule |")[0]
    files = {short: here / pathlib.Path(file).name for short, file in re.findall(r"(\w+) =\s+`([^`]+\.py)`", text)}
    files |= {short: here.parents[1] / file for short, file in re.findall(r"(\w+) =\s+`(tests/[^`]+)`", text)}
    assert all(path.exists() for path in files.values()) and len(files) >= 10
    everywhere = set().union(*(words(path) for path in (*here.glob("test_*.py"), *here.parent.glob("ops/test_*.py"))))
    for rule, _, proofs in rows("Rules that are kept"):
        file = ""
        tokens = re.findall(r"`([^`]+)`|(\w+)", proofs)
        assert tokens, rule
        for name, short in tokens:
            if short:
                file = short if short in files else file
            elif name.endswith(".py"):
                assert (here / name).exists() or (here.parent / "ops" / name).exists(), (rule, name)
            else:
                known = words(files[file]) if file else everywhere
                wanted = re.compile(re.escape(name).replace(r"\*", r"\w*"))
                assert any(wanted.fullmatch(word) for word in known), (rule, file, name)
