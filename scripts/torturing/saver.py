"""Run one rank of a job that does nothing but save: ``saver.py FOLDER STEPS HOW KEEP [PAUSE]``, under mpiexec.

It saves STEPS steps into ``FOLDER``, from the step after the newest checkpoint there. ``HOW`` is ``direct``, ``mpio``
or ``background``. KEEP is the number of checkpoints that are kept, PAUSE the number of seconds between two saves. After
each save has returned, a line with its step is added to ``FOLDER/../acknowledged``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpizero import checkpoint
from mpizero.checkpoint import LocalArray, SnapshotBuffer
from mpizero.checkpoint.writer import RepeatedSave, make_plan
from mpizero.comm import as_communicator
from mpizero.guard.watchdog import Watchdog

#: Paths that are accessed when a save begins and ends, so that a log of system calls shows the calls of each save.
MARKS = ("/mpizero-torture-begin", "/mpizero-torture-end")
#: Seconds after which the watchdog ends a rank that hangs in one call.
STUCK = 20.0
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "parameters/blocks.0.weight": ((301, 67), "<f4"),
    "parameters/blocks.0.scale": ((), "<f8"),
    "parameters/none": ((0, 3), "<f4"),
    "optimizer/exp_avg/blocks.0.weight": ((301, 67), "<f4"),
    "optimizer/exp_avg_sq/blocks.0.weight": ((301, 67), "<f4"),
    "optimizer/steps": ((17,), "<i8"),
}


def values_of(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the whole arrays that are saved at a step, by their names in the checkpoint."""
    found = {}
    for number, (path, (shape, dtype)) in enumerate(SHAPES.items()):
        flat = (np.arange(int(np.prod(shape))) * (number + 2) + step * 1000003) % 8191
        found[path] = flat.astype(dtype).reshape(shape)
    return found


def pieces(step: int, rank: int, size: int) -> list[LocalArray]:
    """Return the parts of all arrays of a step that rank ``rank`` of ``size`` saves: two ranges of each array.

    Some of them are empty.
    """
    listed = []
    for number, (path, whole) in enumerate(values_of(step).items()):
        flat = whole.reshape(-1)
        cuts = [flat.size * part // (2 * size) for part in range(2 * size + 1)]
        own = ((rank + number) % size, 2 * size - 1 - (rank + number) % size)
        held = tuple((cuts[part], flat[cuts[part] : cuts[part + 1]].copy()) for part in own)
        listed.append(LocalArray(path, whole.shape, whole.dtype, held))
    return listed


def problem_of(path: str) -> str:
    """Return what is wrong with a checkpoint that this program has written; "" if nothing is."""
    with checkpoint.open_checkpoint(path) as reader:
        step = reader.attributes["step"]
        if step != checkpoint.step_of(path):
            return f"{path} holds step {step}"
        expected = values_of(step)
        if set(reader.arrays) != set(expected):
            return f"{path} has other arrays"
        for name, whole in expected.items():
            if reader.read_whole(name).tobytes() != whole.tobytes():
                return f"{path}: {name} differs"
    return ""


def buffer_of_a_saver(comm: Any, folder: Path) -> SnapshotBuffer:
    """Return a snapshot buffer in the state after a first save, so that already the first save is like later ones.

    Collective over ``comm``. Later saves know the sizes of all arrays and can begin earlier.
    """
    buffer = SnapshotBuffer()
    make_plan(comm, folder, pieces(0, comm.rank, comm.size), {}, again=RepeatedSave(buffer.layout, lambda *_: ""))
    return buffer


def save(comm: Any, folder: Path, step: int, how: str, buffer: SnapshotBuffer) -> None:
    """Save a step, and wait until it is committed; ``how`` is "direct", "mpio" or "background".

    With "background" the arrays are changed as soon as the save has copied them, to test that it uses its copy.
    """
    target, arrays = checkpoint.step_folder(folder, step), pieces(step, comm.rank, comm.size)
    if how != "background":
        checkpoint.write(target, arrays, {"step": step}, comm, backend=how)
        return
    pending = checkpoint.begin(target, arrays, {"step": step}, comm, buffer=buffer)
    for array in arrays:
        for _, held in array.pieces:
            held += 1
    while not pending.finished:
        time.sleep(0.0005)
    pending.commit()


def main(arguments: Sequence[str]) -> None:
    """Run as one rank: save step after step; ``arguments`` are those of the command line."""
    from mpi4py import MPI

    from mpizero.guard import guard

    guard.install_in_job()
    folder, steps, how, keep = Path(arguments[0]), int(arguments[1]), arguments[2], int(arguments[3])
    pause = float(arguments[4]) if len(arguments) > 4 else 0.0
    comm = MPI.COMM_WORLD
    newest = checkpoint.latest(folder, comm)
    first = 1 if newest is None else (checkpoint.step_of(newest) or 0) + 1
    comm.Barrier()
    # As in training, the watchdog ends ranks that wait inside HDF5 for a rank whose last write was refused.
    with as_communicator(comm) as world, Watchdog(world, STUCK):
        buffer = buffer_of_a_saver(world, folder)
        for step in range(first, first + steps):
            os.access(MARKS[0], os.F_OK)
            save(world, folder, step, how, buffer)
            if comm.rank == 0:
                with open(folder.parent / "acknowledged", "a", encoding="utf-8") as file:
                    file.write(f"{step}\n")
            checkpoint.prune(folder, keep, world)
            os.access(MARKS[1], os.F_OK)
            time.sleep(pause)


if __name__ == "__main__":
    main(sys.argv[1:])
