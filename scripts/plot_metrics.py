"""Draw the losses of one or several runs of `mpizero train` from their ``metrics.jsonl`` (needs matplotlib)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def read(run: Path) -> list[dict[str, Any]]:
    """Return "step", "loss" and "validation_loss" (or None) of each line in the metrics of a run.

    ``run`` is the run's folder, or its file ``metrics.jsonl``.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    if path.exists() and not path.is_file():
        sys.exit(f"{path}: not a regular file; give the folder of a run of `mpizero train`")
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        keys = ("step", "loss")
        return [{key: line[key] for key in keys} | {"validation_loss": line.get("validation_loss")} for line in found]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        sys.exit(f"{path}: {error!r:.200}; give the folder of a run of `mpizero train`")


def main() -> None:
    """Draw the losses of all runs on the command line into one picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or metrics files")
    parser.add_argument("--output", type=Path, default=Path("loss.png"))
    options = parser.parse_args()
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("matplotlib is missing: pip install 'mpizero[plot]'")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in options.runs:
        lines = read(run)
        axes.plot([m["step"] for m in lines], [m["loss"] for m in lines], linewidth=1, label=f"{run}: training")
        checked = [m for m in lines if m.get("validation_loss") is not None]
        axes.plot(
            [m["step"] for m in checked], [m["validation_loss"] for m in checked], "o--", label=f"{run}: validation"
        )
    axes.set(xlabel="step", ylabel="loss (mean over the global batch)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(options.output, dpi=150)
    print(options.output)


if __name__ == "__main__":
    main()
