"""Compute a language model's last block and loss over a tensor group; no rank has the full logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero.nn.layer import namespace, vector
from mpizero.nn.layers.language_head import LanguageHead, LanguageHeadBase
from mpizero.nn.layers.norm import LayerNorm
from mpizero.nn.loss import CrossEntropy
from mpizero.nn.regions import Gather
from mpizero.nn.split.linear import SplitProjection
from mpizero.nn.split.parts import complete_shared, own_range, require_length
from mpizero.types import EVALUATE, Array, Group, Params, Run


@dataclass(frozen=True)
class SplitHead(LanguageHeadBase):
    """Apply the final norm to own places of sequences, then compute logits of own vocabulary items for all places.

    Messages: a gather forward, a reduce-scatter backward; in the weight half a gather and a sum of the norm's
    gradients.

    Parameters
    ----------
    whole : LanguageHead
        The unsplit layer.
    group : Group
        The ranks it is split over.
    """

    whole: LanguageHead
    group: Group

    @cached_property
    def _layers(self) -> tuple[LayerNorm, SplitProjection]:
        norm, projection = self.whole._layers
        return norm, SplitProjection(projection, self.group, sequence=True)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map own places (samples, places, dim) to logits (samples, length, own items). Collective over the group."""
        return super().forward(params, x, require_length(run, x, self.group))

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of the norm and of this use of the own items. Collective over the group."""
        super().backward_weights(params, cache, pending, grads)
        complete_shared(self, self.group, grads, "head: shared gradients")

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unsplit layer's. Not collective."""
        return self.whole.output_shape(shape)


@dataclass(frozen=True)
class SplitCrossEntropy:
    """Compute the cross-entropy of logits that are split over the ranks by classes.

    Each rank reduces its logits of a place to their maximum, the sum of their exponentials over it, and the target's
    logit if it is here. One message of these three gives every rank the whole loss, with the same bits; the gradient
    of the own logits needs no other.

    Parameters
    ----------
    whole : CrossEntropy
        The unsplit loss.
    group : Group
        The ranks the classes are split over.
    classes : int
        Number of classes of all ranks.
    """

    whole: CrossEntropy
    group: Group
    classes: int

    def forward(self, prediction: Array, target: Array) -> tuple[float, float, Any]:
        """Sum the losses of all counted targets, in float64. Collective over the group.

        Parameters
        ----------
        prediction : Array
            The own logits, (..., own classes).
        target : Array
            As for :class:`mpizero.nn.CrossEntropy`, the same on every rank.

        Returns
        -------
        loss_sum, weight : float
            The sum and the number of counted targets, the same on every rank.
        cache : Any
            For :meth:`backward`.
        """
        targets = self.whole.as_targets(target, prediction.shape[:-1], self.classes)
        xp, loss = namespace(prediction), kernels.backend(prediction).loss
        logits = xp.ascontiguousarray(prediction.reshape(targets.size, prediction.shape[-1]))
        first = own_range(self.classes, self.group)[0]
        own = xp.empty((1, 3, targets.size), logits.dtype)
        loss.partial_cross_entropy(logits, targets, first, own[0])
        terms = self.group.all_gather(own, 0, (1,) * self.group.size, "cross-entropy")
        merged, losses = xp.empty((2, targets.size), logits.dtype), xp.empty(targets.size, np.float64)
        loss.merged_cross_entropy(terms, targets, merged, losses)
        counted = float((targets >= 0).sum())
        return float(losses.sum()), counted, (logits, targets, merged, prediction.shape)

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Compute ``scale`` times the gradient of the loss sum for the own logits. Not collective."""
        logits, targets, merged, shape = cache
        gradient: Array = namespace(logits).empty_like(logits)
        first = own_range(self.classes, self.group)[0]
        loss = kernels.backend(logits).loss
        loss.partial_cross_entropy_backward(logits, targets, first, merged, vector(logits, scale), gradient)
        return gradient.reshape(shape)

    def joined(self, prediction: Array) -> Array:
        """Return the logits of all classes. Collective over the group."""
        return Gather(self.group, prediction.ndim - 1, self.classes).forward(prediction)
