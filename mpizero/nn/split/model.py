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
    """Compute a loss of whole predictions on ranks that hold a part of the last axis each: join the parts first.

    Parameters
    ----------
    loss : Loss
        The loss of whole predictions.
    group : Group
        The ranks; each computes the whole loss.
    outputs : int
        Length of the last axis.
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
        """Compute ``scale`` times the gradient of the loss sum for the own part. Not collective."""
        inner, join = cache
        gradient: Array = join.take(self.loss.backward(inner, scale))
        return gradient


@dataclass(frozen=True, eq=False)
class SplitModel:
    """Hold one rank's part of a model: a block model whose passes and loss are collective over ``group``.

    Loss and weight are those of the whole model, the same on every rank.

    Parameters
    ----------
    whole : BlockModel
        The unsplit model, which names, seed and dtype come from.
    group : Group
        The ranks it is split over; all of them work on the same samples.
    blocks : mapping of str to Layer
        The blocks by name, in order.
    loss : Loss
        The loss, which takes what the last block returns on this rank, and the whole target.
    cuts : mapping of str to int
        For each block whose output this rank holds a part of, the axis of one sample's output that is cut by the
        shard rule.
    outputs : int or None
        Length of the prediction's last axis where each rank has a part of it; None where predictions are whole.
    sequences : bool
        Whether blocks work on parts of the input's second axis.
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
        """The unsplit model's."""
        return self.whole.dtype

    @property
    def seed(self) -> int:
        """The unsplit model's."""
        return self.whole.seed

    def run_on(self, x: Array, run: Run) -> Run:
        """Add to ``run`` what blocks must know of the whole ``x``; without it they ask each other. Not collective."""
        return replace(run, length=x.shape[1]) if self.sequences and getattr(x, "ndim", 0) > 1 else run

    def whole_prediction(self, y: Array) -> Array:
        """Return the prediction as one process would give it, from what the last block returned here.

        Collective over ``group`` where ranks have parts of it.
        """
        return y if self.outputs is None else Gather(self.group, y.ndim - 1, self.outputs).forward(y)

    def loss_on_parts(self, loss: Loss) -> Loss:
        """Return a loss of whole predictions as one of what the last block returns here. Not collective."""
        return loss if self.outputs is None else JoinedLoss(loss, self.group, self.outputs)

    def held_shape(self, block: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what this rank holds of a block's output ``shape``, for one sample. Not collective."""
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
        A model with a method ``split(group)``, as the library's own have, or one of layers with such a method
        (:meth:`mpizero.nn.Layer.split`); layers without stay whole on every rank.
    group : Group
        The ranks; one rank gets ``model`` itself.

    Returns
    -------
    BlockModel
        What this rank computes; :func:`whole_prediction` joins what it predicts.

    Raises
    ------
    ConfigError
        Nothing can be split, or what can be has too few heads.
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
    """Return the prediction as one process would give it, of any model. Collective where ``model`` is split."""
    join = getattr(model, "whole_prediction", None)
    return y if join is None else join(y)


def run_on(model: BlockModel, x: Array, run: Run) -> Run:
    """Add to ``run`` what the blocks of a split model must know of its whole input ``x``. Not collective."""
    know = getattr(model, "run_on", None)
    return run if know is None else know(x, run)
