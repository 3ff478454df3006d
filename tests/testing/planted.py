"""Classic faults of parallel training, planted into layouts of several ranks; one process stays right."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import numpy as np

import mpizero as mz
from mpizero.comm.model_group import CommunicatorGroup
from mpizero.layout.flat import flat_names
from mpizero.sharding import grad_reduce
from mpizero.sharding.engine import Engine
from mpizero.sharding.forward_backward import CheckedMicroBatch
from mpizero.sharding.grad_reduce import AllReduceBuffer
from mpizero.sharding.params import ParameterStore
from mpizero.sharding.update import Updater
from mpizero.testing import compare_layouts


def gpt(comm=None, **changes):
    settings = {"dim": 12, "layers": 1, "heads": 2, "sequence": 8, "vocabulary": 23, "tied": True}
    return mz.nn.GPT(**{**settings, **changes})


def texts(count, samples=8):
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 23, (samples, 8)), rng.integers(0, 23, (samples, 8))) for _ in range(count)]


def compared(layout, comm=None, model=gpt, **settings):
    """Three steps of a small model on one layout."""
    settings = {"micro_batch": 1, "make_optimizer": lambda: mz.AdamW(lr=1e-2), **settings}
    return compare_layouts(model, settings.pop("batches", texts(3)), [layout], comm=comm, **settings)


def finding(*args, **settings):
    """What is found in it."""
    (found,) = compared(*args, **settings).findings
    return found


#: What a diagnosis may say, by a word that only it has.
CAUSES = (
    "another order",
    "clip",
    "depends on the rank",
    "keyed by the rank",
    "left out",
    "no function of",
    "race",
    "skipped reduction",
    "stale data",
    "stale parameters",
    "tied gradient",
    "wrong count",
)


def causes(found):
    """The causes that a finding names."""
    return {word for word in CAUSES if word in (found.diagnosis or "")}


def fault(owner, name, *, sums_overlap=True):
    """Make a fault of a function that stands in the place of a method of ``owner`` and is given the right one, too.

    It is planted with its settings by name; without ``sums_overlap`` nothing of a sum is made before it is asked for.
    """

    def decorate(wrong):
        def plant(patch, **settings):
            right = getattr(owner, name)
            patch.setattr(owner, name, lambda self, *args, **named: wrong(right, self, *args, **named, **settings))
            if not sums_overlap:
                patch.setattr(grad_reduce, "overlaps_reduction", lambda *_: False)

        return plant

    return decorate


@fault(Engine, "_divisors")
def divide_by(right, self, totals, *, factor):
    """Divide sums of gradients by a factor more, a function of the number of ranks."""
    found = right(self, totals)
    return found._replace(gradients=found.gradients * factor(self.grid.world.size))


def wrong_divisor(patch):
    """Means of means: the sum is divided by the number of ranks once more."""
    divide_by(patch, factor=lambda ranks: ranks)


@fault(Updater, "scale")
def missed_clip(right, self, reduced, factor, *, first, ranks=lambda rank: True):
    """From step ``first`` on, some ranks use their gradient unclipped."""
    world = self.grid.world
    if world.size == 1 or self.step_count + 1 < first or not ranks(world.rank):
        right(self, reduced, factor)


@fault(Updater, "add_uses")
def tie_counted_twice(right, self, reduced):
    """The gradient of the output head is added to the token table's twice."""
    for _ in range(1 if self.grid.world.size == 1 else 2):
        right(self, reduced)


@fault(CommunicatorGroup, "shift")
def stale_halo(right, self, arrays, by, tag=""):
    """What arrives from a neighbour is what it sent in the evaluation before: one hop of one layer and micro-batch."""
    request = right(self, arrays, by, tag)
    if tag == "ring gradients":
        return request
    history = self.__dict__.setdefault("history", [])
    fresh = tuple(a.copy() for a in request.wait())
    history.append(fresh)
    request._received = history[-2] if len(history) > 1 else fresh
    return request


@fault(ParameterStore, "all_gather")
def stale_parameters(right, self, *, first, rank, exchange=True, later=False):
    """From step ``first`` on, one rank keeps its old copies of what others own."""
    old = self.values.copy()
    right(self, exchange=exchange)
    if self.grid.world.size > 1 and self.grid.world.rank == rank and self.version > first:
        kept = np.ones(self.layout.size, bool)
        for span in self.shard.spans:
            kept[span.start : span.stop] = False
        self.values[kept] = old[kept]


@fault(AllReduceBuffer, "sum", sums_overlap=False)
def skipped_reduction(right, self, divisors):
    """Every rank divides the gradient of its own samples."""
    if self.grid.world.size == 1:
        return right(self, divisors)
    row = self.row(0)
    row[: self.layout.gradient_size] = self.local_sum() / divisors.gradients
    return row


@fault(AllReduceBuffer, "sum", sums_overlap=False)
def another_order(right, self, divisors):
    """Gradients are divided before they are summed: the same number but for rounding."""
    if self.grid.world.size == 1:
        return right(self, divisors)
    found = right(self, divisors._replace(gradients=divisors.gradients * 3))
    found *= found.dtype.type(3)
    return found


@fault(Engine, "_context")
def rank_keyed_dropout(right, self, first_sample, count):
    """Dropout masks differ with the rank that draws them."""
    found = right(self, first_sample, count)
    return replace(found, seed=found.seed + self.grid.world.rank)


@fault(Updater, "update")
def halved_slots(right, self, reduced, threads, loss):
    """Optimizer arrays are half of what they must be after a step."""
    right(self, reduced, threads, loss)
    for values in self.state.values() if self.grid.world.size > 1 else ():
        values *= 0.5


def written(checked, unit, blocks):
    """The names and arrays of the gradients that ``blocks`` have written."""
    return flat_names({block: checked._written[unit.index][block] for block in blocks})


@fault(CheckedMicroBatch, "_accumulate")
def gradients_changed(right, self, unit, blocks, parts, *, change):
    """The gradients of every micro-batch that rank 1 computes are what ``change`` makes of them."""
    if self.scalars.grid.world.rank == 1:
        for _, view in written(self, unit, blocks):
            view[...] = change(view)
    right(self, unit, blocks, parts)


def unseeded_noise(patch, size):
    """The gradients of rank 1 have noise that is another in every evaluation."""
    rng = np.random.default_rng()
    gradients_changed(patch, change=lambda view: view + size * rng.choice([-1.0, 1.0], view.shape))


def rank_factor(patch, factor):
    """The gradients of rank 1 are a little too large."""
    gradients_changed(patch, change=lambda view: view * view.dtype.type(factor))


def rank_offset(patch, offset):
    """All elements of the gradients of rank 1 are too large by the same."""
    gradients_changed(patch, change=lambda view: view + view.dtype.type(offset))


@fault(CheckedMicroBatch, "_accumulate")
def rank_keyed_noise(right, self, unit, blocks, parts, *, size):
    """The gradients of every rank have noise with the rank for a seed, but for rank 0."""
    world = self.scalars.grid.world
    for name, view in written(self, unit, blocks) if world.rank else ():
        noise = np.random.default_rng([world.rank, crc32(name.encode())]).standard_normal(view.shape)
        view += (size * noise).astype(view.dtype)
    right(self, unit, blocks, parts)


@fault(Engine, "_reduced")
def added_to_sums(right, self, *args, offset):
    found = right(self, *args)
    if self.grid.world.size > 1:
        for piece in self.pieces():
            found[piece.gradient : piece.gradient + piece.size] += found.dtype.type(offset)
    return found


def sum_offset(patch, offset):
    """The averaged gradient is too large by the same everywhere; what ranks give to it is right."""
    added_to_sums(patch, offset=offset)
    patch.setattr(Engine, "_needs_norm", True)  # then the sum is seen before the update
