"""`mosaic-gpu ops`, and that docs/ops.md is what the registry says."""

from __future__ import annotations

import json
import pathlib

from typer.testing import CliRunner

from mosaic_gpu.cli.app import app
from mosaic_gpu.ops import coverage
from mosaic_gpu.ops.registry import OPS

ROOT = pathlib.Path(__file__).parents[2]


def test_docs_are_up_to_date():
    """Otherwise: python -m mosaic_gpu.ops.coverage."""
    page = (ROOT / "docs" / "ops.md").read_text()
    assert coverage.updated(page) == page


def test_json():
    found = CliRunner().invoke(app, ["ops", "--json", "--arch", "sm_100a", "--against", "triton,mosaic"])
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    rows = {(r["table"], r["primitive"]): r for r in data["operations"]}
    assert {t for t, _ in rows} == {"sm100/warpgroup", "sm100/warp"}
    assert rows["sm100/warpgroup", "sort"]["dtypes"][:3] == ["float32", "float16", "bfloat16"]
    assert ("sm100/warp", "sort") not in rows and ("sm100/warpgroup", "wgmma") not in rows
    for backend in ("triton", "mosaic"):
        against = data["against"][backend]
        assert {"add", "exp", "reduce_sum", "select_n"} <= set(against["both"])
        assert {"sort", "cumprod"} <= set(against["only here"])
        assert not set(against["both"]) & set(against["only there"])
    assert "argmax" in data["against"]["triton"]["both"]


def test_table_and_refusals():
    runner = CliRunner()
    shown = runner.invoke(app, ["ops"])
    assert shown.exit_code == 0 and "sm90/warpgroup" in shown.output and "cumlogsumexp" in shown.output
    for arguments in (["--arch", "sm_80"], ["--against", "xla"]):
        assert runner.invoke(app, ["ops", *arguments]).exit_code == 2


def test_every_op_has_all_its_rules():
    """What a table can emit, the simulator can run; what a front-end name is said to be inlined has no rule of its own."""
    for o in OPS.values():
        assert o.simulate_rule is not None, o.name
        assert o.emit_rules, o.name
    assert not set(coverage.INLINED) & set(OPS)
