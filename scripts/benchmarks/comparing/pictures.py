"""Draw bar charts of the results of compare.py as PNG files (needs ``pip install 'mpizero[plot]'``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

OURS, THEIRS, BOUND = "tab:blue", "tab:gray", "tab:red"


def draw(found: dict[str, Any], folder: Path, ours: Sequence[str], limit: str) -> list[Path]:
    """Draw ``speed.png``, and ``memory.png`` if memory was measured, into ``folder``; return the paths of the files.

    ``found`` are the results of compare.py. Contenders named in ``ours`` are mpizero's and get another color. ``limit``
    names the contender that is drawn as a line, as the upper limit of speed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = {name: row for name, row in found["results"].items() if name != limit}
    colors = [OURS if name.partition("@")[0] in ours else THEIRS for name in rows]
    shape = found["configuration"]
    title = (
        f"GPT {shape['dim']} x {shape['layers']}, {shape['batch']} x {shape['sequence']} tokens a rank, "
        f"{shape['ranks']} ranks, threads of a rank: {shape['threads']}"
    )
    speeds = [row["tokens_per_second"] for row in rows.values()]
    middle = [speed["median"] for speed in speeds]
    errors = [
        [speed["median"] - speed["least"] for speed in speeds],
        [speed["most"] - speed["median"] for speed in speeds],
    ]
    fast, axes = _empty(title)
    axes.barh(list(rows), middle, xerr=errors, color=colors, capsize=3)
    axes.set_xlabel(f"tokens/s (median of {found['rounds']} rounds, least and most)")
    if limit in found["results"]:
        bound = found["results"][limit]["tokens_per_second"]["median"]
        axes.axvline(bound, color=BOUND, linestyle="--", label=limit)
        fast.legend(loc="outside lower center")
    paths = [folder / "speed.png"]
    fast.savefig(paths[0], dpi=150)
    if not all("pss_node" in row for row in rows.values()):
        return paths
    small, axes = _empty(title)
    base = [row["pss_node_start"] / 1e6 for row in rows.values()]
    grown = [(row["pss_node"] - row["pss_node_start"]) / 1e6 for row in rows.values()]
    axes.barh(list(rows), base, color=colors, alpha=0.4, label="interpreter and libraries, after import")
    axes.barh(list(rows), grown, left=base, color=colors, label="since then, at the peak")
    axes.set_xlabel("PSS of all ranks of the node, MB")
    small.legend(loc="outside lower center", ncols=2)
    paths.append(folder / "memory.png")
    small.savefig(paths[1], dpi=150)
    return paths


def _empty(title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes
