"""Split the layers of a model over a tensor group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mpizero.errors import ConfigError
from mpizero.nn.regions import Gather
from mpizero.nn.split.parts import own_range
from mpizero.types import Array, BlockModel, Group, Layer, Loss, Run


@dataclass(frozen=True)
class JoinedLoss:
    """Compute a loss where each rank holds a part of the predictions' last axis: gather the parts, then apply the loss.

    Parameters
    ----------
    loss : Loss
        The loss of whole predictions.
    group : Group
        The ranks that hold the parts; each of them computes the whole loss.
    outputs : int
        Length of the last axis of whole predictions.
    """

    loss: Loss
    group: Group
    outputs: int

    def forward(self, prediction: Array, target: Array) -> tuple[float, float, Any]:
        """Join the predictions and apply the loss. Collective over the group."""
        join = Gather(self.group, prediction.ndim - 1, self.outputs)
        loss_sum, weight, cache = self.loss.forward(join.forward(prediction), target)
        return loss_sum, weight, (cache, join)

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Compute ``scale`` times the gradient of the loss sum for this rank's part. Not collective."""
        inner, join = cache
        gradient: Array = join.take(self.loss.backward(inner, scale))
        return gradient


@dataclass(frozen=True, eq=False)
class SplitModel:
    """Hold one rank's part of a tensor-parallel model; its passes and its loss are collective over ``group``.

    Loss and weight are those of the whole model, the same on every rank.

    Parameters
    ----------
    whole : BlockModel
        The unsplit model; parameter names, seed and dtype are the same.
    group : Group
        The ranks that the model is split over; all of them work on the same samples.
    blocks : mapping of str to Layer
        The blocks by name, in order.
    loss : Loss
        The loss. It takes what the last block returns on this rank, and the whole target.
    cuts : mapping of str to int
        The blocks of whose output this rank holds only a part. For each of them, the axis of one sample's output that
        is cut by the shard rule.
    outputs : int or None
        Length of the prediction's last axis, if each rank has a part of that axis; None if predictions are whole.
    sequences : bool
        Whether blocks work on parts of sequences, the input's second axis.
    """

    whole: BlockModel
    group: Group
    blocks: Mapping[str, Layer]
    loss: Loss
    cuts: Mapping[str, int] = field(default_factory=dict)
    outputs: int | None = None
    sequences: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """The same as in the unsplit model."""
        return self.whole.dtype

    @property
    def seed(self) -> int:
        """The same as in the unsplit model."""
        return self.whole.seed

    def run_on(self, x: Array, run: Run) -> Run:
        """Return ``run`` with the length of the sequences ``x``, which saves the blocks a message. Not collective."""
        return replace(run, length=x.shape[1]) if self.sequences and getattr(x, "ndim", 0) > 1 else run

    def whole_prediction(self, y: Array) -> Array:
        """Return the whole prediction; ``y`` is what the last block returned on this rank.

        Collective over ``group`` where each rank has a part of the prediction.
        """
        return y if self.outputs is None else Gather(self.group, y.ndim - 1, self.outputs).forward(y)

    def loss_on_parts(self, loss: Loss) -> Loss:
        """Adapt a loss of whole predictions to take what the last block returns on this rank. Not collective."""
        return loss if self.outputs is None else JoinedLoss(loss, self.group, self.outputs)

    def held_shape(self, block: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a block's output of ``shape``, for one sample. Not collective."""
        if block not in self.cuts:
            return shape
        axis = self.cuts[block] % len(shape)
        start, stop = own_range(shape[axis], self.group)
        return (*shape[:axis], stop - start, *shape[axis + 1 :])


def split_model(model: BlockModel, group: Group) -> BlockModel:
    """Split a model over a tensor group. Not collective.

    Parameters
    ----------
    model : BlockModel
        A model with a method ``split(group)``, such as mpizero's own models, or a model of layers with such a method
        (:meth:`mpizero.nn.Layer.split`). Layers without that method stay whole on every rank.
    group : Group
        The ranks to split the model over. If there is only one, ``model`` itself is returned.

    Returns
    -------
    BlockModel
        This rank's part of the model. :func:`whole_prediction` joins the ranks' predictions.

    Raises
    ------
    ConfigError
        Nothing in the model can be split, or the number of ranks does not divide the number of heads.
    """
    if group.size == 1:
        return model
    if callable(own := getattr(model, "split", None)):
        result: BlockModel = own(group)
        return result
    advice = "use pipeline or data parallelism, or give a layer of it a method split(group)"
    if not isinstance(model, BlockModel):
        raise ConfigError(f"a {type(model).__name__} has no blocks, so there is nothing to split over ranks; {advice}")
    given = dict(model.blocks)  # a model may make its blocks anew each time
    blocks = {name: block.split(group) if hasattr(block, "split") else block for name, block in given.items()}
    if all(blocks[name] is block for name, block in given.items()):
        raise ConfigError(
            f"{type(model).__name__} has nothing to split over {group.size} ranks: none of its blocks "
            f"({', '.join(blocks)}) has a part that can be; {advice}"
        )
    return SplitModel(model, group, blocks, model.loss)


def whole_prediction(model: BlockModel, y: Array) -> Array:
    """Return the whole prediction of any model from its output ``y`` on this rank. Collective if ``model`` is split."""
    join = getattr(model, "whole_prediction", None)
    return y if join is None else join(y)


def run_on(model: BlockModel, x: Array, run: Run) -> Run:
    """Return ``run`` with what the blocks of a split model need to know of its input ``x``, such as its length.

    Collective only for a :class:`~mpizero.nn.ContextModel`.
    """
    know = getattr(model, "run_on", None)
    return run if know is None else know(x, run)
