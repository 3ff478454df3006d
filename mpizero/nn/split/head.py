"""Split a language model's last block and its loss over a tensor group, so that no rank holds all logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero.nn.arrays import namespace, vector
from mpizero.nn.layers.language_head import LanguageHead, LanguageHeadBase
from mpizero.nn.layers.norm import LayerNorm
from mpizero.nn.losses.cross_entropy import CrossEntropy
from mpizero.nn.losses.weighted_target import times
from mpizero.nn.regions import Gather
from mpizero.nn.split.linear import SplitProjection
from mpizero.nn.split.parts import complete_shared, located, own_range
from mpizero.types import EVALUATE, Array, Group, Params, Run


@dataclass(frozen=True)
class SplitHead(LanguageHeadBase):
    """Apply the final norm to this rank's positions, then compute its vocabulary items' logits at all positions.

    The messages are: in :meth:`forward` an all-gather, in ``backward_input`` a reduce-scatter, and in
    :meth:`backward_weights` an all-gather and an all-reduce of the norm's gradients.

    Parameters
    ----------
    whole : LanguageHead
        The unsplit layer.
    group : Group
        The ranks that the layer is split over.
    """

    whole: LanguageHead
    group: Group

    @cached_property
    def _layers(self) -> tuple[LayerNorm, SplitProjection]:
        norm, projection = self.whole._layers
        return norm, SplitProjection(projection, self.group, sequence=True)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (samples, positions of this rank, dim) to logits (samples, length, vocabulary items of this rank).

        Returns the logits and the cache. Collective over the group.
        """
        return super().forward(params, x, located(run, x, self.group))

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of the norm, and of the weight's rows for this rank's vocabulary items.

        Collective over the group.
        """
        super().backward_weights(params, cache, pending, grads)
        complete_shared(self, self.group, grads, "head: shared gradients")

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unsplit layer's output shape for one sample of ``shape``. Not collective."""
        return self.whole.output_shape(shape)


@dataclass(frozen=True)
class SplitCrossEntropy:
    """Compute the cross-entropy of logits whose classes are split over the ranks.

    For each target a rank reduces its logits to three numbers: their maximum, the sum of exp(logit - maximum), and the
    target's logit if this rank holds it. One all-gather of these numbers is enough for every rank to compute the whole
    loss, with the same bits. The gradient of this rank's logits needs no other message.

    Parameters
    ----------
    whole : CrossEntropy
        The unsplit loss.
    group : Group
        The ranks that the classes are split over.
    classes : int
        Number of classes of all ranks together.
    """

    whole: CrossEntropy
    group: Group
    classes: int

    def forward(self, prediction: Array, target: Any) -> tuple[float, float, Any]:
        """Sum the losses of all targets that are not negative, in float64. Collective over the group.

        Parameters
        ----------
        prediction : Array
            The logits of this rank's classes: (..., number of these classes).
        target : Array or dict
            Class numbers (...), the same on every rank, maybe with weights and a mask; see
            :meth:`mpizero.nn.CrossEntropy.forward`.

        Returns
        -------
        loss_sum, weight : float
            The sum of the losses, and the number (the sum of the weights) of the targets that are not negative; the
            same on every rank.
        cache : Any
            The intermediate results that :meth:`backward` needs.
        """
        targets, weights = self.whole.as_targets(target, prediction.shape[:-1], self.classes)
        xp, loss = namespace(prediction), kernels.backend(prediction).loss
        logits = xp.ascontiguousarray(prediction.reshape(targets.size, prediction.shape[-1]))
        first = own_range(self.classes, self.group)[0]
        own = xp.empty((1, 3, targets.size), logits.dtype)
        loss.partial_cross_entropy(logits, targets, first, own[0])
        terms = self.group.all_gather(own, 0, (1,) * self.group.size, "cross-entropy")
        merged, losses = xp.empty((2, targets.size), logits.dtype), xp.empty(targets.size, np.float64)
        loss.merged_cross_entropy(terms, targets, merged, losses)
        return *self.whole.totals(losses, targets, weights), (logits, targets, weights, merged, prediction.shape)

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum with respect to this rank's logits. Not collective."""
        logits, targets, weights, merged, shape = cache
        gradient: Array = namespace(logits).empty_like(logits)
        first = own_range(self.classes, self.group)[0]
        loss = kernels.backend(logits).loss
        loss.partial_cross_entropy_backward(logits, targets, first, merged, vector(logits, scale), gradient)
        return times(gradient, weights).reshape(shape)

    def joined(self, prediction: Array) -> Array:
        """Return the logits of all classes; ``prediction`` holds those of this rank's classes.

        Collective over the group.
        """
        return Gather(self.group, prediction.ndim - 1, self.classes).forward(prediction)
