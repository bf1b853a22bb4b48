"""Who may import what: JAX only in the front end and the runtime, and only its public parts."""

from __future__ import annotations

import ast
import pathlib
import pickle
import subprocess
import sys

import pytest

import mosaic_gpu

PACKAGE = pathlib.Path(mosaic_gpu.__file__).parent
KERNELS = (
    pathlib.Path(sys.modules["mosaic_gpu.kernels"].__file__).parent
    if "mosaic_gpu.kernels" in sys.modules
    else PACKAGE.parent / "kernels"
)
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imports(tree: ast.AST) -> list[str]:
    """Modules that are imported when the module is, not inside functions and not for type checkers only."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.extend(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.extend([node.module or "", *(f"{node.module}.{a.name}" for a in node.names)])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def test_there_are_sources():
    assert len(SOURCES) > 40 and (KERNELS / "attention.py").exists()


def test_compiler_and_simulator_import_no_jax():
    """The front end, the runtime and what stands above them (the command line, the tuner) do so at module level."""
    for path in SOURCES:
        first, *rest = path.relative_to(PACKAGE).parts
        if not rest or first in ("codegen", "layouts", "ops", "plan", "simulator"):
            names = [n for n in imports(ast.parse(path.read_text())) if n.split(".")[0] in ("jax", "jaxlib")]
            assert not names, f"{path} imports {names} at module level"


def test_nothing_imports_private_parts_of_jax():
    """Neither as an import nor by name: `jax._src` appears in comments only."""
    for path in [*SOURCES, *KERNELS.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.dump(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ""
            if isinstance(node, ast.Attribute):
                text = node.attr
            assert "_src" not in text, f"{path}:{getattr(node, 'lineno', 0)}"


@pytest.mark.parametrize(
    "module",
    ["ops", "plan.build", "plan.model", "codegen.emitter", "codegen.build", "simulator", "layouts.inference", "errors"],
)
def test_imports_without_jax(module):
    """In a process where JAX cannot be imported, each on its own."""
    code = f"import sys; sys.modules['jax'] = None; sys.modules['jaxlib'] = None; import mosaic_gpu.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


def test_a_program_is_planned_and_emitted_without_jax(program, array):
    def body(x, o):
        o[0] = x[0] * 2.0

    data = pickle.dumps(program(body, array(8), out=array(1)))
    code = """if True:
        import pickle, sys
        sys.modules["jax"] = None
        program = pickle.load(sys.stdin.buffer)
        from mosaic_gpu.plan.build import build_plan
        from mosaic_gpu.codegen.emitter import emit
        sys.stdout.write(emit(build_plan(program, "sm_90a")))
    """
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr.decode()
    assert b'extern "C" __global__' in done.stdout
