"""Compute with samples together and in two parts, and compare: what must not depend on how samples form grains."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from typing import Any, NamedTuple, Self

import torch

from mpizero._util.pytree import combine_leaves, leaves_of, map_leaves

#: How far results may be apart that differ by rounding alone, relative to their size, by the type of the elements.
_APART = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-3, torch.complex64: 1e-3}
#: The same, of what was computed in 16 bits.
_HALF = 3e-2


class InParts(NamedTuple):
    """Hold trees of tensors of some samples: of all of them, and of two parts."""

    whole: Any
    first: Any
    second: Any


def parts_of(tree: Any, count: int, *, changed: bool = True) -> InParts | None:
    """Return a tree of ``count`` samples and its halves; None if a tensor has not its samples on the first axis.

    One sample is taken twice; the second time with half of its numbers, unless ``changed`` is False.
    """
    leaves = leaves_of(tree)
    if not leaves or any(not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (count,) for leaf in leaves):
        return None
    if count > 1:
        halves = slice(0, count // 2), slice(count // 2, count)
        return InParts(tree, *(map_leaves(itemgetter(half), tree) for half in halves))
    other = map_leaves(other_samples, tree) if changed else tree
    return InParts(combine_leaves(torch.cat, [tree, other]), tree, other)


def other_samples(tensor: torch.Tensor) -> torch.Tensor:
    """Return other samples of the same kind: half of the numbers; whole numbers stay, which may be indices."""
    return tensor * 0.5 if tensor.is_floating_point() or tensor.is_complex() else tensor


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return floating-point numbers of 32 bits, real or complex, in double precision, and other numbers as they are."""
    kinds = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    return tensor.to(kinds.get(tensor.dtype, tensor.dtype))


def sample_axis(leaves: Sequence[torch.Tensor]) -> int | None:
    """Return the axis on which the two parts of a tensor add up to the whole; None if there is not just one."""
    whole, first, second = (tuple(leaf.shape) for leaf in leaves)
    if not len(whole) == len(first) == len(second):
        return None
    axes = [axis for axis, size in enumerate(whole) if size != first[axis]]
    if len(axes) != 1 or first[axes[0]] + second[axes[0]] != whole[axes[0]]:
        return None
    return axes[0]


def aligned(parts: InParts) -> list[tuple[int, int, list[torch.Tensor]]]:
    """Return the tensors of a tree that have an axis of samples: their number, the axis, the whole and its parts."""
    trees = [leaves_of(tree) for tree in parts]
    if len({len(leaves) for leaves in trees}) > 1:
        return []
    found = []
    for number, leaves in enumerate(zip(*trees, strict=True)):
        if all(isinstance(leaf, torch.Tensor) for leaf in leaves) and (axis := sample_axis(leaves)) is not None:
            found.append((number, axis, list(leaves)))
    return found


def of_whole(parts: InParts) -> InParts:
    """Return the same tree with parts that are cut from the whole, where floating-point numbers are samples' own.

    A module rounds samples differently when they are fewer. What follows may enlarge that, as the small difference of a
    prediction and its target does; so what follows is given the same numbers, once they have been compared.
    """
    cuts: list[dict[int, torch.Tensor]] = [{}, {}]
    for number, axis, (whole, first, _) in aligned(parts):
        if whole.is_floating_point() or whole.is_complex():
            size = first.shape[axis]
            cuts[0][number] = whole.narrow(axis, 0, size)
            cuts[1][number] = whole.narrow(axis, size, whole.shape[axis] - size)

    def replaced(tree: Any, cut: dict[int, torch.Tensor]) -> Any:
        numbers = count()
        return map_leaves(lambda leaf: cut.get(next(numbers), leaf), tree)

    return InParts(parts.whole, replaced(parts.first, cuts[0]), replaced(parts.second, cuts[1]))


def apart(
    whole: torch.Tensor, other: torch.Tensor, least: float = 0.0, *, half_precision: bool = False
) -> float | None:
    """Return by how much of their size two tensors differ; None if it is rounding, or if one is not finite.

    ``least`` is a size below which nothing counts as large; ``half_precision`` says whether 16 bits were computed with.
    """
    if not whole.numel() or not (torch.isfinite(whole).all() and torch.isfinite(other).all()):
        return None
    size = max(float(whole.abs().max()), float(other.abs().max()), least)
    found = float((whole - other).abs().max()) / size if size else 0.0
    return found if found > (_HALF if half_precision else _APART.get(whole.dtype, _HALF)) else None


@dataclass
class _Chain:
    """Hold the input of the next block for all samples and for their parts, and what the last block returned."""

    next: int = 0
    count: int = 0
    parts: InParts | None = None
    end: Any = None


@dataclass
class Trial:
    """Follow the first samples through the blocks of a model to its loss, together and in two parts.

    Each thread that is a rank follows samples of its own.
    """

    done: bool = False
    _chains: dict[int, _Chain] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a trial of its own for a copy of a model."""
        return type(self)(self.done)

    def input(self, number: int, x: Any, count: int) -> InParts | None:
        """Return the input of block ``number`` in parts; where the block before was not seen, cut from ``x``."""
        chain = self._chains.get(threading.get_ident())
        if number and chain is not None and chain.next == number:
            return chain.parts
        self._chains[threading.get_ident()] = _Chain(number, count)
        return parts_of(x, count)

    def output(self, number: int, parts: InParts | None) -> None:
        """Take the output of block ``number`` for the block after it; None if there is none."""
        chain = self._chains[threading.get_ident()]
        chain.next, chain.parts = number + 1, parts

    def returned(self, number: int, output: Any) -> None:
        """Note what block ``number`` returned for the samples: the loss is given that of the last one."""
        chain = self._chains.get(threading.get_ident())
        if chain is not None and chain.next == number + 1:
            chain.end = output

    def prediction(self, given: Any, tensors: Any, count: int) -> list[tuple[InParts, int]]:
        """Return the prediction that a loss was ``given`` in parts, and the number of samples, in one or two ways.

        First that which the blocks have computed in parts, then ``tensors``, the prediction itself, cut.
        """
        chain = self._chains.pop(threading.get_ident(), None)
        found = []
        if chain is not None and chain.end is given and chain.parts is not None:
            found.append((chain.parts, chain.count))
        if (cut := parts_of(tensors, count)) is not None:
            found.append((cut, count))
        return found
