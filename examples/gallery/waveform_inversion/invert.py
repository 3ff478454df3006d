#!/usr/bin/env python
"""Find the velocities of waves in the ground from recorded shots: acoustic full-waveform inversion in two dimensions.

    mpiexec -n 4 python examples/gallery/waveform_inversion/invert.py --folder RUN

The shots of a survey at sea are computed above a ground of layers with a lens in it, which the inversion does not know.
From a smooth start it finds velocities that explain the shots, by L-BFGS within bounds, first at low frequencies, then
at higher ones. Each rank computes some of the shots. Iterates have the same bits on any number of ranks: compare the
sha256 in the last line. A run that was killed goes on with --resume, on other ranks too. Checkpoints and pictures (with
matplotlib) are written to the folder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from waveforms.inversion import Found, Inversion, Settings
from waveforms.pictures import draw
from waveforms.survey import Survey

import mpizero as mz
from mpizero.comm.agreement import all_ranks
from mpizero.guard import guard

#: Frequencies in Hz of the stages, iterations of each, and the survey; without and with --small.
LARGE = ((2.0, 4.0, 6.0), 15, Survey())
SMALL = ((4.0, 7.0), 5, Survey(rows=40, columns=80, steps=350, water=5, shots=4, receivers=40, border=12))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="for checkpoints and pictures; made if it is missing"
    )
    parser.add_argument(
        "--iterations", type=int, help=f"at each frequency (default: {LARGE[1]}; {SMALL[1]} with --small)"
    )
    parser.add_argument(
        "--every", type=int, default=5, help="iterations between two checkpoints (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the folder")
    parser.add_argument("--small", action="store_true", help="a small grid, in seconds")
    parser.add_argument(
        "--dynamic", action="store_true", help="ranks claim shots while they compute, for ranks of different speeds"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, comm: Any = None) -> Found:
    """Run the inversion, report it on rank 0, and return what was found. Collective over ``comm``."""
    options, began = parse(arguments), time.monotonic()
    if comm is None:
        guard.current().install(keep=True)  # so that errors of the user are one line
    peaks, iterations, survey = SMALL if options.small else LARGE
    assignment = "dynamic" if options.dynamic else "static"
    config = mz.Config(micro_batch=1, grain_assignment=assignment)
    with mz.Mesh(comm) as mesh:
        ranks = mesh.communicator
        say: Callable[[str], object] = partial(print, flush=True) if ranks.rank == 0 else lambda text: None
        chosen = iterations if options.iterations is None else options.iterations
        settings = Settings(survey=survey, peaks=peaks, iterations=chosen)
        found = Inversion(mesh, config, settings, options.folder, options.every, say).run(resume=options.resume)
        with all_ranks(ranks):
            if ranks.rank == 0:
                say(draw_or_tell(options.folder, survey, found))
        start, end = found.start, found.end
        say(
            f"misfit {start.misfit:.4e} -> {end.misfit:.4e}, {start.misfit / end.misfit:.1f} times smaller; "
            f"model error {start.error:.4f} -> {end.error:.4f} km/s; {time.monotonic() - began:.0f} s; "
            f"sha256 {found.sha256} on {ranks.size} ranks"
        )
    return found


def draw_or_tell(folder: Path, survey: Survey, found: Found) -> str:
    """Draw the pictures; return a line that names them, or says what is missing. Not collective."""
    try:
        return f"pictures: {', '.join(map(str, draw(folder, survey, found)))}"
    except ImportError as error:
        return f"no pictures: {error}: pip install 'mpizero[plot]'"


if __name__ == "__main__":
    main()
