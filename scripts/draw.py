#!/usr/bin/env python3
"""Write the drawings of the documentation, ``docs/pictures/*.svg``."""

from __future__ import annotations

import argparse
from pathlib import Path

from drawings import bits_and_speed, pipeline, ranks

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
DRAWINGS = {
    "bits_and_speed": bits_and_speed.draw,
    "checkpoint": ranks.checkpoint,
    "grains": ranks.grains,
    "grid": ranks.grid,
    "pipeline": pipeline.draw,
    "window": ranks.window,
    "zero_stages": ranks.zero_stages,
}


def main(arguments: list[str] | None = None) -> None:
    """Write all drawings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=PICTURES, help="where to write them (docs/pictures)")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
