#!/usr/bin/env python
"""Segment volumes by a 3-D U-Net, on ranks none of which has the memory for a whole volume.

    mpiexec -n 4 python examples/gallery/volume_segmentation.py --domain 2 2 1 --limit-mb 60

A volume is an image of thin tubes (vessels) and thick rods (cells), blurred, noisy, and lit from one side. The U-Net
says of each position whether it is background, vessel or cell. Vessels are as bright as cells, so it has to see their
shape. Each rank makes and keeps its box of a volume alone; ranks that the domain does not need make replicas. Every
sample of the training is another volume, and two that it has not seen are segmented at the end. The accuracy, and for
each class Dice's overlap of prediction and truth, are ratios of counts of positions, which are added up as integers. So
the printed numbers and the bits of the parameters depend on no number of ranks and no cut. With --limit-mb, the
operating system refuses a rank more memory than that for the training (RLIMIT_DATA: heap and private mappings).
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from drawing import BLUE, ORANGE, add_option, save

import mpizero as mz
from mpizero.train.machine import allocated, peak_growth

Array = np.ndarray[Any, Any]
Box = tuple[slice, ...]
#: The classes, and what a position of each weighs in the loss: few positions are a vessel's.
CLASSES, WEIGHTS = ("background", "vessel", "cell"), np.array([1, 3, 1], np.float32)
#: Positions of an axis, and steps of the training; without and with --small. Volumes of a step, and unseen ones.
LARGE, SMALL, BATCH, UNSEEN = (48, 120), (20, 40), 2, 2
#: Positions over which an edge is blurred, and the standard deviation of the noise.
EDGE, NOISE = 1.5, 0.25
MB = 1_000_000


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain", type=int, nargs=3, default=(1, 1, 1), metavar="N", help="parts of the three axes")
    parser.add_argument("--extent", type=int, help=f"of an axis (default: {LARGE[0]}; {SMALL[0]} with --small)")
    parser.add_argument("--steps", type=int, help=f"of the training (default: {LARGE[1]}; {SMALL[1]} with --small)")
    parser.add_argument("--small", action="store_true", help="small volumes and few steps, in seconds")
    parser.add_argument("--limit-mb", type=float, metavar="N", help="memory that a rank may take to train (no limit)")
    add_option(parser, "planes of an unseen volume, what is predicted, and what is wrong")
    options = parser.parse_args(arguments)
    extent, steps = SMALL if options.small else LARGE
    options.extent = extent if options.extent is None else options.extent
    options.steps = steps if options.steps is None else options.steps
    for name, least in (("extent", 16), ("steps", 1), ("limit_mb", 1)):
        value = getattr(options, name)
        if value is not None and not value >= least:
            parser.error(f"--{name.replace('_', '-')} {value:g}: expected at least {least}")
    if options.limit_mb is not None and sys.platform != "linux":
        parser.error("--limit-mb: only Linux limits the memory of a process in this way; leave it out")
    return options


@dataclass(frozen=True)
class Rod:
    """Describe the positions within ``radius`` of a line from ``start`` to ``end``: a cell, or a piece of a vessel."""

    kind: int
    start: Array
    end: Array
    radius: float
    brightness: float

    def paint(self, image: Array, labels: Array, here: Box) -> None:
        """Paint the rod over what is in the box ``here`` of a volume; nothing is computed far from it."""
        reach = self.radius + EDGE
        low = np.floor(np.minimum(self.start, self.end) - reach).astype(int)
        high = np.ceil(np.maximum(self.start, self.end) + reach).astype(int) + 1
        near = [(max(a, axis.start), min(b, axis.stop)) for a, b, axis in zip(low, high, here, strict=True)]
        if any(a >= b for a, b in near):
            return
        place = tuple(slice(a - axis.start, b - axis.start) for (a, b), axis in zip(near, here, strict=True))
        line = self.end - self.start
        # Sums of three terms, in their order: a product of matrices may add them in another one for another box.
        x, y, z = (axis - at for axis, at in zip(np.ogrid[*(slice(*pair) for pair in near)], self.start, strict=True))
        along = np.clip((x * line[0] + y * line[1] + z * line[2]) / (line**2).sum(), 0, 1)
        distance = np.sqrt((x - along * line[0]) ** 2 + (y - along * line[1]) ** 2 + (z - along * line[2]) ** 2)
        cover = np.clip((self.radius - distance) / EDGE + 0.5, 0, 1)
        image[place] += cover * (self.brightness - image[place])
        labels[place][distance < self.radius] = self.kind


def rods(extent: int, rng: np.random.Generator) -> Iterator[Rod]:
    """Draw cells at random places, and then vessels, which wind through the volume in pieces of 8 positions."""
    for _ in range(extent**3 // 4000):
        start = rng.uniform(0, extent, 3)
        yield Rod(2, start, start + rng.uniform(-3, 3, 3), rng.uniform(3.5, 6), rng.uniform(0.6, 1))
    for _ in range((extent // 8) ** 2):
        start, way = rng.uniform(0, extent, 3), rng.normal(size=3)
        radius, brightness = rng.uniform(1.5, 2.5), rng.uniform(0.6, 1)
        for _ in range(extent // 8):
            way = way / np.sqrt((way**2).sum()) + rng.normal(scale=0.3, size=3)
            yield Rod(1, start, start + 8 * way, radius, brightness)
            start = start + 8 * way


class Volumes(mz.data.Source):
    """Make volumes (samples, space, 1) and their classes (samples, space), each rank those of its box."""

    def __init__(self, extent: int, count: int, seed: int) -> None:
        self.space, self.count, self.seed = (extent,) * 3, count, seed

    def __len__(self) -> int:
        """Return the number of volumes."""
        return self.count

    def describe(self) -> dict[str, Any]:
        """Return what identifies the volumes."""
        return {"space": self.space, "count": self.count, "seed": self.seed}

    def read(self, indices: Array) -> tuple[Array, dict[str, Array]]:
        """Make whole volumes."""
        return self.boxes(indices, tuple(slice(0, extent) for extent in self.space))

    def read_slab(self, indices: Array, slab: Any, **_: Any) -> tuple[Array, dict[str, Array]]:
        """Make this rank's box of volumes, and nothing else of them."""
        return self.boxes(indices, slab.where(self.space))

    def boxes(self, indices: Array, here: Box) -> tuple[Array, dict[str, Array]]:
        """Return the box ``here`` of volumes, and of their classes with weights, as the loss takes them."""
        shape = len(indices), *(axis.stop - axis.start for axis in here)  # of a spare replica: without samples
        x, y = np.empty(shape, np.float32), np.empty(shape, np.int64)
        for row, index in enumerate(indices):
            x[row], y[row] = self.box(int(index), here)
        return x[..., None], {"target": y, "weight": WEIGHTS[y]}

    def box(self, index: int, here: Box) -> tuple[Array, Array]:
        """Return the box ``here`` of the volume ``index``, and the classes of its positions."""
        rng, extents = np.random.default_rng((self.seed, index)), [axis.stop - axis.start for axis in here]
        image, labels = np.full(extents, 0.1), np.zeros(extents, np.int64)
        for rod in rods(self.space[0], rng):
            rod.paint(image, labels, here)
        lit = rng.uniform(-0.5, 0.5, 3)
        x, y, z = (axis / extent - 0.5 for axis, extent in zip(np.ogrid[*here], self.space, strict=True))
        image *= 1 + lit[0] * x + lit[1] * y + lit[2] * z
        for at, plane in enumerate(image, here[0].start):  # whole planes of noise, the same whatever the box
            plane += NOISE * np.random.default_rng((self.seed, index, at)).normal(size=self.space[1:])[here[1:]]
        return image.astype(np.float32), labels


@contextmanager
def limited(megabytes: float | None) -> Iterator[None]:
    """Let this process allocate so much more memory, and no more, during a ``with`` block; None is no limit."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if megabytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (allocated() + int(megabytes * MB), before[1]))
    try:
        yield
    finally:
        if megabytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, before)


@dataclass(frozen=True)
class Found:
    """Hold what is compared: the hash of the parameters, the last loss, and shares of the positions of unseen volumes.

    ``constant`` is the accuracy of a prediction that is background everywhere.
    """

    sha256: str
    loss: float
    accuracy: float
    constant: float
    dice: tuple[float, ...]


def train(mesh: mz.Mesh, extent: int, steps: int) -> tuple[Found, Any]:
    """Train, segment unseen volumes, and return what was found, and this rank's part of a plane. Collective."""
    space, here = (extent,) * 3, mesh.slab((extent,) * 3)
    # The loss is a FieldLoss of CrossEntropy, as of every U-Net that classifies positions.
    net = mz.nn.UNet(inputs=1, outputs=3, axes=3, width=8, levels=3, groups=4, task="classification", space=space)
    adam, config = mz.Adam(lr=mz.optim.cosine(2e-2, steps)), mz.Config(micro_batch=1)
    with mz.distribute(net, adam, "zero3", mesh=mesh, config=config) as model:
        training = Volumes(extent, steps * BATCH, seed=0)  # so many that none comes again
        for batch in mz.data.batches(training, model, global_batch=BATCH, seed=0, steps=steps):
            loss = model.train(*batch)  # this rank's box of every sample
        unseen, part, middle = Volumes(extent, UNSEEN, seed=1), None, extent // 2
        counts = np.zeros((3, 3), np.int64)  # positions, by true and predicted class
        for index in range(UNSEEN):
            x, y = unseen.box(index, here)
            predicted = model.predict(x[None, ..., None])[0].argmax(axis=-1)
            np.add.at(counts, (y, predicted), 1)
            if index == 0 and here[2].start <= middle < here[2].stop:
                part = here[:2], np.stack([x, y, predicted])[..., middle - here[2].start]
        mesh.communicator.allreduce(counts)  # replicas count the same positions again, which no ratio shows
        true, named, right = counts.sum(axis=1), counts.sum(axis=0), counts.diagonal()
        accuracy, constant = (int(count) / int(counts.sum()) for count in (right.sum(), true[0]))
        dice = tuple((2 * right / np.maximum(true + named, 1)).tolist())
        return Found(model.parameters_sha256(), loss, accuracy, constant, dice), part


def draw(figure: Any, extent: int, parts: Sequence[tuple[Box, Array]]) -> None:
    """Draw a plane of an unseen volume, the true and the predicted classes, and errors; lines are where ranks meet."""
    from matplotlib.colors import ListedColormap

    plane = np.empty((3, extent, extent))
    for place, part in parts:
        plane[:, *place] = part
    x, y, predicted = plane
    classes, wrong = ListedColormap(["white", ORANGE, BLUE]), ListedColormap(["white", "black"])
    panels = [("input", x, "gray"), ("truth", y, classes), ("prediction", predicted, classes)]
    panels.append(("error", y != predicted, wrong))
    for axes, (title, values, colours) in zip(figure.subplots(1, 4), panels, strict=True):
        axes.imshow(values.T, origin="lower", cmap=colours)
        axes.set(title=title, xticks=(), yticks=())
        for axis, line in enumerate((axes.axvline, axes.axhline)):
            for at in {place[axis].start for place, _ in parts} - {0}:
                line(at - 0.5, color="gray", linewidth=0.8)


def main(arguments: Sequence[str] | None = None, comm: Any = None) -> Found:
    """Train and segment, report on rank 0, and return what was found. Collective over ``comm``."""
    options, began = parse(arguments), time.monotonic()
    with mz.Mesh(comm, domain=tuple(options.domain)) as mesh:
        train(mesh, 16, 1)  # loads libraries and kernels, whose memory is not the training's
        with limited(options.limit_mb), peak_growth() as peak:
            found, part = train(mesh, options.extent, options.steps)
        peaks, parts = zip(*mesh.communicator.allgather_object((peak[0], part)), strict=True)
        if mesh.rank == 0:
            here = mesh.slab((options.extent,) * 3)
            cut, box = (" x ".join(map(str, of)) for of in (options.domain, [axis.stop - axis.start for axis in here]))
            dice = ", ".join(f"{share:.4f} {name}" for name, share in zip(CLASSES, found.dice, strict=True))
            print(f"volumes of {options.extent}^3 cut {cut}: {box} positions on rank 0", end="; ")
            print(f"{options.steps} steps, last loss {found.loss:.4f}")
            print(
                f"unseen volumes: accuracy {found.accuracy:.4f}, of background everywhere {found.constant:.4f}",
                end="; ",
            )
            print(f"Dice {dice}")
            print(f"{time.monotonic() - began:.1f} s; at most {max(peaks) / MB:.0f} MB on a rank", end="; ")
            print(f"sha256 {found.sha256} on {mesh.communicator.size} ranks")
            if options.picture:
                save(options.picture, (9, 2.6), partial(draw, extent=options.extent, parts=[*filter(None, parts)]))
    return found


if __name__ == "__main__":
    main()
