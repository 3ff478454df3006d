"""Call a loss twice on its first samples, and on parts of them, and name what differs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

import torch

from mpizero._util.checks import named
from mpizero._util.pytree import leaves_of, map_leaves
from mpizero.adapters.hidden_state import differing, hidden_state, line_that_changes, part_of, shared_generators
from mpizero.adapters.torch.arrays import gradient_leaves
from mpizero.adapters.torch.backward import Gradients, gradients_of
from mpizero.adapters.torch.first.copies import seeded
from mpizero.adapters.torch.first.first_pass import MOST_SHAPES
from mpizero.adapters.torch.first.originals import Originals
from mpizero.adapters.torch.first.parts import InParts, aligned, apart, in_double
from mpizero.adapters.torch.process import drawn_since, random_state
from mpizero.errors import LayoutError

#: How far the losses of parts may be from that of the whole, relative to their size: in double and in own precision.
_WIDE, _OWN = 1e-5, 1e-3
#: How many grains are cut: losses of one may add up by chance, as where all its masks are full, or be no numbers.
MOST_ADDED = 4
_SEE = (
    "; samples that are meant to see each other, as in a contrastive loss, do so in the module, which returns a loss "
    "for each sample (compare_forward=False)"
)


class _Found(NamedTuple):
    """Hold a loss, its weight, and its gradient by the prediction."""

    loss: float
    weight: float
    gradient: list[torch.Tensor]


@dataclass(eq=False)
class FirstLoss:
    """Look at a loss on its first samples of each shape.

    Parameters
    ----------
    function : callable
        The user's loss.
    value : callable
        Calls it, and returns the sum of losses as a tensor, and the weight.
    originals : Originals
        The tensors of the module that was given, which the loss must not read.
    added : bool
        Whether losses of parts have added up to that of the whole.
    checked : int
        How often they have been computed.
    by_rows : bool
        Whether the prediction has its samples on the first axis, so that it can be cut where no block has followed.
    seen : set
        The kinds of samples that have been looked at.
    """

    function: Callable[..., Any]
    value: Callable[[Any, Any], tuple[torch.Tensor, float]]
    originals: Originals
    added: bool = False
    checked: int = 0
    by_rows: bool = False
    seen: set[Any] = field(default_factory=set)

    @property
    def shown(self) -> str:
        """The loss's name and place, for messages."""
        return named(self.function, "loss")

    def new_kind(self, trees: Any) -> Any:
        """Return what :attr:`seen` is to have when samples like these have been looked at; None if they need not be."""
        kind = tuple((leaf.shape, leaf.dtype) for leaf in leaves_of(trees))
        return None if kind in self.seen or len(self.seen) >= MOST_SHAPES else kind

    def is_wanted(self, *, new: bool) -> bool:
        """Tell whether losses of parts of the samples, which may be of a ``new`` kind, are to be added up."""
        return (new and not self.added) or (self.by_rows and self.checked < MOST_ADDED)

    def check(self, prediction: Any, target: Any) -> None:
        """Raise :class:`LayoutError` where a second call does something else than the first. Not collective."""

        def state() -> dict[str, bytes]:
            return hidden_state(loss=self.function)

        with seeded(), self.originals.reads() as reads:
            one, kept = self._found(prediction, target), state()
            generators, drawn = shared_generators(), random_state()
            other, left = self._found(prediction, target), state()
            drawing = differing(generators, shared_generators())
            if drawn_since(drawn):
                drawing = "PyTorch's generator"
        if reads.found:
            raise LayoutError(
                f"{self.shown} reads {reads.found!r} of the module that was given, not of the copy that is trained: it "
                "would compute with the start values for ever, without a gradient; let it have a parameter module, "
                "loss(prediction, target, module), which is given the module that is trained"
            )

        def traced(look: Callable[[], Any]) -> str:
            with seeded():
                line = line_that_changes(look, lambda: self._found(prediction, target))
            return "" if line is None else f" ({line})"

        if drawing is not None:
            raise self.draws(
                drawing, traced(lambda: (shared_generators(), [state.tolist() for state in random_state()]))
            )
        if (path := differing(kept, left)) is not None:
            line = traced(lambda: part_of(state(), path))
            raise LayoutError(
                f"{self.shown} changes {path!r} in each call{line}: what it keeps depends on the rank that calls it, "
                "and is not saved; compute from prediction and target"
            )
        if one.loss != other.loss and one.loss == one.loss or not _equal(one, other):
            raise LayoutError(
                f"{self.shown} returns something else when it is called again with the same samples ({one.loss:.6g}, "
                f"then {other.loss:.6g}): it keeps something from call to call, or draws random numbers"
            )

    def draws(self, generator: str, line: str) -> LayoutError:
        """Return the error of a loss that draws random numbers."""
        return LayoutError(
            f"{self.shown} draws random numbers of {generator}{line}, which would depend on the rank that computes it: "
            "draw them in the module with PyTorch's own generator, where mpizero seeds them"
        )

    def adds_up(self, prediction: InParts, target: InParts, count: int) -> bool:
        """Raise :class:`LayoutError` if the losses of the parts do not add up; tell whether it could be computed."""
        self.checked += 1
        self.by_rows = all(axis == 0 for _, axis, _ in aligned(prediction))
        found, within = self._in_parts(prediction, target)
        if not found:
            return False
        whole, *parts = found
        for what in ("loss", "weight"):
            total, sums = getattr(whole, what), [getattr(part, what) for part in parts]
            if abs(total - sum(sums)) > within * (abs(total) + sum(map(abs, sums))):
                raise LayoutError(self._no_sum(what, total, sums, count, prediction, target))
        for number, axis, _ in aligned(InParts(*(one.gradient for one in found))):
            a, *rest = (one.gradient[number] for one in found)
            if (by := apart(a, torch.cat(rest, axis))) is not None:
                raise LayoutError(
                    f"{self.shown} is no sum over samples: its gradient for {max(count, 2)} samples differs from that "
                    f"for two parts of them by {by:.2g} of its size: a term is added once a call, such as a penalty, "
                    f"or samples see each other; add a term for each sample, or return the sum and a weight{_SEE}"
                )
        return True

    def _in_parts(self, prediction: InParts, target: InParts) -> tuple[list[_Found], float]:
        """Return what the loss is for all samples and for the parts, and how far it may be from a sum.

        It is computed in double precision if the loss takes that. Nothing is found where it raises an error, or is not
        finite, for samples of which it need not be.
        """
        narrow = any(leaf.dtype in (torch.float32, torch.complex64) for leaf in gradient_leaves(prediction.whole))
        for way, within in ((_wide, _WIDE),) * narrow + ((_same, _OWN),):
            with suppress(Exception):
                found = [self._found(way(p), way(t)) for p, t in zip(prediction, target, strict=True)]
                if all(isfinite(one.loss) and isfinite(one.weight) for one in found):
                    return found, within
        return [], _OWN

    def _no_sum(self, what: str, total: float, sums: Any, count: int, prediction: InParts, target: InParts) -> str:
        shapes = [[tuple(leaf.shape) for leaf in leaves_of(tree.whole)] for tree in (prediction, target)]
        told = [str(each[0]) if len(each) == 1 else ", ".join(map(str, each)) for each in shapes]
        hint = "; do the shapes fit, or are they broadcast?" if _become_larger(*shapes) else ""
        called = "is no sum over samples: it" if what == "loss" else "returns a weight that is no sum over samples: it"
        halves = "halves" if count > 1 else "parts"
        return (
            f"{self.shown} {called} is {total:.6g} for {max(count, 2)} samples, {sums[0]:.6g} and {sums[1]:.6g} for "
            f"their {halves} (prediction {told[0]}, target {told[1]}{hint}); use reduction='sum', or return the "
            f"sum and a weight{_SEE}"
        )

    def _found(self, prediction: Any, target: Any) -> _Found:
        """Call the loss, and differentiate it."""
        given = map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, prediction)
        leaves = gradient_leaves(given)
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.enable_grad():
            loss, weight = self.value(given, target)
            found: Gradients = [None] * len(leaves)
            if loss.requires_grad:
                found = gradients_of([loss], leaves, [torch.ones_like(loss)])
        gradient = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]
        return _Found(float(loss.detach()), weight, gradient)


def _equal(one: _Found, other: _Found) -> bool:
    pairs = zip(one.gradient, other.gradient, strict=True)
    return all(bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs)


def _become_larger(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> bool:
    """Tell whether broadcasting the shapes of a prediction and a target would give another shape than both have."""
    with suppress(RuntimeError):
        return len(one) == len(other) == 1 and tuple(torch.broadcast_shapes(*one, *other)) not in (*one, *other)
    return False


def _same(tree: Any) -> Any:
    return tree


def _wide(tree: Any) -> Any:
    return map_leaves(lambda leaf: in_double(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)
