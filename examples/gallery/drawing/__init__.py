"""Write the picture of an example: its option ``--picture FILE`` (needs matplotlib)."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Okabe and Ito's colours, which people tell apart whatever their colour vision.
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"


def add_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--picture`` to a command line; ``what`` the picture shows."""
    parser.add_argument("--picture", type=_file, metavar="FILE", help=f"draw {what}: .png or .svg (needs matplotlib)")


def _file(text: str) -> Path:
    """Return the path of a picture; what is wrong with it is told before anything is computed."""
    path = Path(text)
    if path.suffix not in {".png", ".svg"} or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: expected a .png or .svg file in a folder that exists")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is missing: pip install 'mpizero[plot]'")
    return path


def save(path: Path, size: tuple[float, float], fill: Callable[[Any], None]) -> None:
    """Write the figure that ``fill`` draws; ``size`` in inches. Not collective."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10, "axes.titlesize": 10, "svg.hashsalt": "mpizero"}):
        figure = Figure(figsize=size, layout="constrained")
        fill(figure)
        whole = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            figure.savefig(whole, dpi=160)
            whole.replace(path)
        finally:
            whole.unlink(missing_ok=True)
