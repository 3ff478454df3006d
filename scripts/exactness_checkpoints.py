"""Show that a checkpoint of any layout goes on with the same bits on any other.

On each of 13 layouts of up to 8 ranks, over stages, tensor groups, context groups and replicas, a model trains 3 steps
and writes a checkpoint. Each layout loads the checkpoint of each of them, and trains on. After each pair, parameters,
the state of the optimizer and the losses of all these steps must have the SHA-256 of one process with the same tiles
that was never interrupted. Layouts of fewer than 8 ranks are communicators of some of them; the others wait.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
from exactness_hybrid import IN_TILES, Way, placed
from harness.matrix import Matrix, Row, arguments, one_hash, run
from harness.models import Case

from mpizero import checkpoint
from mpizero.comm import as_communicator

BEFORE = 3
CASES = {case.name: case for case in (IN_TILES[0], IN_TILES[5])}
way = partial(Way, tiles=(4, 2))
#: Ranks of each layout, and how it uses them.
LAYOUTS = {
    "1": (1, way()),
    "dp 3": (3, way(zero=1)),
    "dp 8": (8, way(zero=3)),
    "pp 4 x dp 2": (8, way(4, zero=2, memory="private")),
    "tp 4": (4, way(1, 4, zero=0, memory="private")),
    "tp 2 x dp 2": (4, way(1, 2, zero=2, memory="nodes of 2")),
    "cp 2": (2, way(1, 1, 2, zero=0)),
    "cp 2 x dp 3": (6, way(1, 1, 2, zero=3, memory="private")),
    "tp 2 x cp 2": (4, way(1, 2, 2, zero=1)),
    "tp 4 x cp 2": (8, way(1, 4, 2, zero=3, memory="private")),
    "pp 2 x tp 2": (4, way(2, 2, 1, zero=1, schedule="interleaved")),
    "pp 2 x tp 2 x dp 2": (8, way(2, 2, 1, zero=3, schedule="zero_bubble_v", memory="nodes of 2")),
    "pp 2 x tp 2 x cp 2": (8, way(2, 2, 2, zero=0, schedule="1f1b")),
}


class Placed:
    """A model on a layout, and the ranks that it uses; None for the other ranks."""

    def __init__(self, stack: ExitStack, case: Case, name: str, comm: Any) -> None:
        size, way = LAYOUTS[name]
        self.case, self.model = case, None
        group = stack.enter_context(comm.split(int(comm.rank >= size)))
        if comm.rank < size:
            self.model = stack.enter_context(placed(case, group, way))

    def train(self, first: int, steps: int) -> list[float]:
        """Train from batch number ``first`` on; return the losses."""
        group = self.model.batch_group
        every = self.case.batches(first + steps, group.rank, group.size)
        return [self.model.train(x, y) for x, y in list(every)[first:]]

    def result(self, losses: list[float]) -> str:
        """Return the SHA-256 of parameters, optimizer state and losses."""
        found = sha256(np.array(losses).tobytes())
        with checkpoint.from_bytes(self.model.serialize()) as reader:
            for path in sorted(reader.arrays):
                found.update(path.encode() + reader.read_whole(path).tobytes())
        return found.hexdigest()


def uninterrupted(case: str, steps: int) -> tuple[str, str]:
    """Return the SHA-256 of one process at the checkpoint, and after ``steps`` more. Not collective."""
    comm = as_communicator("self")
    with ExitStack() as stack:
        alone = Placed(stack, CASES[case], "1", comm)
        alone.train(0, BEFORE)
        return alone.result([]), alone.result(alone.train(BEFORE, steps))


#: A case, and the layout that loads.
Training = tuple[str, str]
_SAVED: dict[tuple[str, str], bytes] = {}


def saved(case: str, name: str, comm: Any) -> bytes:
    """Return the checkpoint of a layout on all ranks. Collective."""
    with ExitStack() as stack:
        writer = Placed(stack, CASES[case], name, comm)
        image = None
        if writer.model is not None:
            writer.train(0, BEFORE)
            image = writer.model.serialize()
    whole: bytes = comm.broadcast_object(image)
    return whole


def load(training: Training, comm: Any, args: argparse.Namespace) -> Row:
    """Load the checkpoints of all layouts on one of them, and train on from each. Collective.

    The keys of the row are "case", "reader", and "pairs": by the writer, the SHA-256 after the load and at the end.
    """
    case, name = training
    comm = as_communicator(comm)
    pairs = {}
    for writer in LAYOUTS:
        key = (case, writer, comm.rank)
        if key not in _SAVED:
            _SAVED[key] = saved(case, writer, comm)
    with ExitStack() as stack:
        reader = Placed(stack, CASES[case], name, comm)
        if reader.model is not None:
            for writer in LAYOUTS:
                reader.model.deserialize(_SAVED[case, writer, comm.rank])
                loaded = reader.result([])
                pairs[writer] = loaded, reader.result(reader.train(BEFORE, args.steps))
    return {"case": case, "reader": name, "pairs": pairs}


def trainings(size: int) -> list[Training]:
    """Return the readers of all cases that fit the ranks."""
    return [(case, name) for case in CASES for name in LAYOUTS]


MATRIX = Matrix(__file__, trainings, lambda training: training, load)


def main() -> None:
    """Run the job, and compare all pairs with one process; exit with status 1 if some are wrong."""
    args = arguments(__doc__, "8", "", steps=10).parse_args()
    if MATRIX.is_worker(args):
        return
    rows = []
    for row in (row for found in run(MATRIX, args) for row in found):
        rows += [row | {"writer": writer, "sha256": " ".join(found)} for writer, found in row["pairs"].items()]
    for case in dict.fromkeys(row["case"] for row in rows):
        never = " ".join(uninterrupted(case, args.steps))
        rows.append(
            {"case": case, "where": "one process", "writer": "", "reader": "never interrupted", "sha256": never}
        )
    one_hash(rows, "case", ("where", "writer", "reader"))


if __name__ == "__main__":
    main()
