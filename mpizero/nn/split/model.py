"""Split the layers of a model over a tensor group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpizero.errors import ConfigError
from mpizero.nn.regions import Gather
from mpizero.nn.split.parts import own_range
from mpizero.types import Array, BlockModel, Group, Layer, Loss, Run


@dataclass(frozen=True)
class JoinedLoss:
    """Compute a loss of predictions whose last axis is split over the ranks: gather the parts, then apply the loss.

    Parameters
    ----------
    loss : Loss
        The loss of whole predictions.
    group : Group
        The ranks that hold the parts of the predictions; each of them computes the whole loss.
    outputs : int
        Length of the last axis of whole predictions.
    """

    loss: Loss
    group: Group
    outputs: int

    def forward(self, prediction: Array, target: Array) -> tuple[float, float, Any]:
        """Gather the predictions; return the loss sum, the weight and the cache for :meth:`backward`.

        ``prediction`` is this rank's part of the predictions, ``target`` is the whole target. Collective over the
        group.
        """
        join = Gather(self.group, prediction.ndim - 1, self.outputs)
        loss_sum, weight, cache = self.loss.forward(join.forward(prediction), target)
        return loss_sum, weight, (cache, join)

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum with respect to this rank's part. Not collective."""
        inner, join = cache
        gradient: Array = join.take(self.loss.backward(inner, scale))
        return gradient


@dataclass(frozen=True, eq=False)
class SplitModel:
    """Hold one rank's part of a tensor-parallel model; its passes and its loss are collective over ``group``.

    The loss sum and its weight are those of the whole model, the same on every rank.

    Parameters
    ----------
    whole : BlockModel
        The unsplit model; parameter names, seed and dtype are the same.
    group : Group
        The ranks that the model is split over; all of them work on the same samples.
    blocks : mapping of str to Layer
        The split blocks by name, in the order in which they run.
    loss : Loss
        The loss. It takes what the last block returns on this rank, and the whole target.
    cuts : mapping of str to int
        For each block of whose output this rank holds only a part: the axis of the output that is cut by the shard
        rule, counted in the shape of one sample.
    outputs : int or None
        Length of the whole prediction's last axis, if each rank has a part of that axis; None if predictions are whole.
    sequences : bool
        Whether blocks work on this rank's positions of the sequences only. Sequences lie along the second axis of the
        model's input.

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.layout import Axes
    >>> from mpizero.testing import run_in_threads
    >>> def held(comm):
    ...     group = mz.ProcessGrid.create(comm, axes=Axes(tensor=comm.size)).tensor_group
    ...     part = mz.nn.split_model(mz.nn.MLP(4, [6], 2), group)
    ...     return type(part).__name__, part.held_shape("hidden.0", (6,))
    >>> run_in_threads(2, held)  # three of six hidden features on each rank
    [('SplitModel', (3,)), ('SplitModel', (3,))]
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
        """The dtype of the unsplit model."""
        return self.whole.dtype

    @property
    def seed(self) -> int:
        """The seed of the unsplit model."""
        return self.whole.seed

    def run_on(self, x: Array, run: Run) -> Run:
        """Return ``run`` with the length of the sequences in the input ``x``, if blocks work on parts of them.

        Without it the blocks would need messages to find the length. Not collective.
        """
        return run.on_whole(x.shape[1]) if self.sequences and getattr(x, "ndim", 0) > 1 else run

    def whole_prediction(self, y: Array) -> Array:
        """Return the whole prediction; ``y`` is what the last block returned on this rank.

        Collective over ``group`` where each rank has a part of the prediction.
        """
        return y if self.outputs is None else Gather(self.group, y.ndim - 1, self.outputs).forward(y)

    def loss_on_parts(self, loss: Loss) -> Loss:
        """Adapt a loss of whole predictions to take what the last block returns on this rank. Not collective."""
        return loss if self.outputs is None else JoinedLoss(loss, self.group, self.outputs)

    def held_shape(self, block: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what this rank holds of a block's output, for one sample. Not collective.

        ``shape`` is the shape of the whole output for one sample.
        """
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
        A model with a method ``split(group)``, such as mpizero's own models, or a model whose blocks have this method
        (:meth:`mpizero.nn.Layer.split`). Blocks without it stay whole on every rank.
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

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.layout import Axes
    >>> from mpizero.testing import run_in_threads
    >>> def shapes(comm):
    ...     group = mz.ProcessGrid.create(comm, axes=Axes(tensor=comm.size)).tensor_group
    ...     return [spec.shape for spec in mz.nn.model_specs(mz.nn.split_model(mz.nn.MLP(4, [6], 2), group))]
    >>> run_in_threads(2, shapes)  # columns of the first weight, rows of the second
    [[(4, 3), (3,), (3, 2), (2,)], [(4, 3), (3,), (3, 2), (2,)]]
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
    """Return the whole prediction of any model from its output ``y`` on this rank. Collective if ``model`` is split.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.layout import Axes
    >>> from mpizero.testing import run_in_threads
    >>> gpt = mz.nn.GPT(dim=8, layers=1, heads=2, sequence=4)
    >>> def logits(comm):
    ...     part = mz.nn.split_model(gpt, mz.ProcessGrid.create(comm, axes=Axes(tensor=comm.size)).tensor_group)
    ...     params = mz.nn.bind(part, mz.nn.initial_parameters(part))
    ...     y = mz.nn.evaluate(part, params, np.zeros((1, 4), int))
    ...     return y.shape, mz.nn.whole_prediction(part, y).shape
    >>> run_in_threads(2, logits)[0]
    ((1, 4, 128), (1, 4, 256))
    """
    join = getattr(model, "whole_prediction", None)
    return y if join is None else join(y)


def whole_scores(model: BlockModel, y: Array) -> Array:
    """Return the prediction for the positions that this rank has, with the scores of all classes.

    ``y`` is what the last block returned on this rank. Collective over the tensor group if ``model`` is split over one.
    """
    join = getattr(model, "whole_scores", None)
    return whole_prediction(model, y) if join is None else join(y)
