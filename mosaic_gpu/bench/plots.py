"""Result files as pictures (extra `plot`): TFLOP/s over sequence length per head dim, and the ratio to the best peer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ToolchainError
from .report import ours_of, rate


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ToolchainError("plots need matplotlib: pip install 'mosaic-gpu[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def write_plots(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write PNG files; returns their paths.  ToolchainError without matplotlib."""
    plt = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    measured = {c: r for c, r in results["cells"].items() if ours_of(r)}
    made = []
    if measured:
        made.append(_rates(plt, results, measured, folder / f"{results['benchmark']}_tflops.png"))
    if any(r.get("comparison", {}).get(ours_of(r)) for r in measured.values()):
        made.append(_ratios(plt, results, measured, folder / f"{results['benchmark']}_ratio.png"))
    return made


def _rates(plt: Any, results: Mapping[str, Any], cells: Mapping[str, Any], path: Path) -> Path:
    """A panel for each head dim and mask with a line for each provider over the length; cells without a length are bars."""
    panels: dict[str, list[tuple[Any, str]]] = {}
    for cell in cells:
        panel, x = panel_of(cell)
        panels.setdefault(panel, []).append((x, cell))
    columns = min(len(panels), 4 if len(panels) % 4 == 0 else 3)
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.5 * columns, 3.4 * rows), squeeze=False, layout="constrained")
    names = list(dict.fromkeys(n for r in cells.values() for n in r["providers"] if rate(r, n)))
    colors = {n: f"C{i % 10}" for i, n in enumerate(names)}
    for ax, (panel, points) in zip(axes.flat, sorted(panels.items(), key=_panel_order), strict=False):
        for i, name in enumerate(names):
            data = [(x, y) for x, c in sorted(points, key=lambda p: p[0]) if (y := rate(cells[c], name))]
            if not data:
                continue
            xs, ys = zip(*data, strict=True)
            if panel:
                ours = any(cells[c]["providers"].get(name, {}).get("ours") for _, c in points)
                ax.plot(xs, ys, marker="o", color=colors[name], label=name, linewidth=2.5 if ours else 1.2)
                ax.set_xscale("log", base=2)
                ax.set_xlabel("sequence length")
            else:
                order = [c for _, c in sorted(points, key=lambda p: p[0])]
                width = 0.8 / len(names)
                ax.bar(
                    [order.index(x) + (i - len(names) / 2 + 0.5) * width for x in xs],
                    ys,
                    width,
                    color=colors[name],
                    label=name,
                )
                ax.set_xticks(range(len(order)), order, rotation=30, ha="right")
        ax.set_title(panel or str(results["benchmark"]))
        ax.set_ylabel("TFLOP/s")
        ax.set_ylim(0, ax.get_ylim()[1] * 1.12)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    figure.suptitle(f"{results['benchmark']} on {results['machine']['device']}, interleaved medians")
    return _saved(plt, figure, path)


def panel_of(cell: str) -> tuple[str, Any]:
    """(head dims and what else tells lines apart, length) of a cell of attention; ("", its name) of another."""
    found = re.search(r"\bs(\d+)\b.* (d[\d/]+)(?: (.+))?$", cell)
    return (f"{found[2]} {found[3] or ''}".strip(), int(found[1])) if found else ("", cell)


def _panel_order(item: tuple[str, Any]) -> tuple[int, str]:
    number = re.search(r"\d+", item[0])
    return int(number[0]) if number else 0, item[0]


def _ratios(plt: Any, results: Mapping[str, Any], cells: Mapping[str, Any], path: Path) -> Path:
    """Ours over the best peer in both protocols, with 95 % intervals."""
    names = [c for c, r in cells.items() if r.get("comparison", {}).get(ours_of(r))]
    figure, ax = plt.subplots(figsize=(8, 1.2 + 0.4 * len(names)), layout="constrained")
    for offset, protocol, marker in ((-0.12, "interleaved", "o"), (0.12, "alone", "s")):
        found = [(i, r) for i, c in enumerate(names) if (r := cells[c]["comparison"][ours_of(cells[c])].get(protocol))]
        if not found:
            continue
        y = [i + offset for i, _ in found]
        x = [r["value"] for _, r in found]
        errors = [[max(r["value"] - r["low"], 0) for _, r in found], [max(r["high"] - r["value"], 0) for _, r in found]]
        ax.errorbar(x, y, xerr=errors, fmt=marker, capsize=3, label=protocol)
    ax.axvline(1.0, color="black", linewidth=1)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel("ours / best peer (above 1: ours is faster)")
    ax.set_title(f"{results['benchmark']} on {results['machine']['device']}")
    ax.grid(axis="x", alpha=0.3)
    ax.legend()
    return _saved(plt, figure, path)


def _saved(plt: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
