"""Split a model over tensor and context groups into more tiles than there are ranks."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from mpizero.kernels.matmul_tile import fold
from mpizero.nn.arrays import namespace
from mpizero.nn.context.context_forms import context_model
from mpizero.nn.models.block_model import run_on
from mpizero.nn.split.model import split_model, whole_prediction, whole_scores
from mpizero.nn.tiles.coroutines import run_in_turns
from mpizero.nn.tiles.tiled_block import Hosted, TiledBlock, TileGrid, bound
from mpizero.nn.tiles.virtual_group import VirtualRanks
from mpizero.types import Array, BlockModel, Group, Layer, Loss, Run


def tiled_model(
    model: BlockModel, tensor: Group, context: Group, tiles: tuple[int, int], ends: Container[str] = ()
) -> BlockModel:
    """Split a model over a tensor and a context group, with the bits of groups of as many ranks as there are tiles.

    Not collective.

    Parameters
    ----------
    model : BlockModel
        The whole model.
    tensor, context : Group
        The ranks that its layers, and that sequences are split over.
    tiles : tuple of int
        Numbers of tiles of both groups: multiples of their sizes by powers of two.
    ends : container of str
        The blocks whose outputs are sent to other pipeline stages.

    Returns
    -------
    BlockModel
        ``model`` itself if both numbers are 1. Without several tiles on a rank, the split model; else a
        :class:`TiledModel`, whose blocks run the split blocks of the rank's tiles in turns.

    Raises
    ------
    ConfigError
        The model cannot be split into so many tiles.
    """
    tensor_tiles, context_tiles = tiles
    across, along = _groups(tensor, tensor_tiles), _groups(context, context_tiles)
    if len(across) * len(along) == 1:
        return context_model(split_model(model, tensor), context)
    rows = [_groups(tensor, tensor_tiles) for _ in along]
    columns = [_groups(context, context_tiles) for _ in across]
    forms = tuple(
        context_model(split_model(model, rows[c][t]), columns[t][c])
        for c in range(len(along))
        for t in range(len(across))
    )
    grid = TileGrid(_hosted(tensor, tensor_tiles), _hosted(context, context_tiles))
    return TiledModel(model, forms, grid, context, ends)


def _groups(group: Group, tiles: int) -> Sequence[Group]:
    return [group] if tiles == group.size else VirtualRanks(group, tiles).groups


def _hosted(group: Group, tiles: int) -> Hosted:
    each = tiles // group.size
    return Hosted(range(group.rank * each, (group.rank + 1) * each), tiles)


@dataclass(frozen=True)
class TiledLoss:
    """Compute the loss of the parts of predictions that a rank's tiles hold.

    Parameters
    ----------
    losses : tuple of Loss
        The loss of each tile.
    grid : TileGrid
        Numbers of tiles.
    axis : int or None
        The axis of predictions that is cut over the tensor tiles.
    context : Group
        The real ranks that sequences are split over.
    """

    losses: tuple[Loss, ...]
    grid: TileGrid
    axis: int | None
    context: Group

    def forward(self, prediction: Array, target: Any) -> tuple[float, float, Any]:
        """Return the sum of the losses and of the weights of this rank's tiles, and the cache for :meth:`backward`.

        Collective over the groups that the model is split over.
        """
        length = _whole_length(prediction, self.context) if self.grid.along > 1 else 0
        predictions, targets = self.grid.cut(prediction, length, self.axis), self.grid.cut(target, length, None)
        tiles = zip(self.losses, predictions, targets, strict=True)
        found = run_in_turns([bound(loss.forward, p, y) for loss, p, y in tiles])
        rows = found[:: self.grid.across]  # the tensor tiles of a context tile find the same numbers
        return _tree_sum([row[0] for row in rows]), _tree_sum([row[1] for row in rows]), [cache for *_, cache in found]

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum with respect to this rank's part of the prediction."""
        found = run_in_turns([bound(loss.backward, c, scale) for loss, c in zip(self.losses, cache, strict=True)])
        gradient: Array = self.grid.join(found, self.axis)
        return gradient


@dataclass(frozen=True, eq=False)
class TiledModel:
    """Hold the split forms of a model for all tiles of a rank, as one model of blocks.

    Parameters
    ----------
    whole : BlockModel
        The unsplit model.
    forms : tuple of SplitModel or ContextModel
        The split model of each tile of the rank; see :class:`TileGrid` for their order.
    grid : TileGrid
        Numbers of tiles.
    context : Group
        The real ranks that sequences are split over.
    ends : container of str
        The blocks whose outputs are sent to other pipeline stages.
    """

    whole: BlockModel
    forms: tuple[Any, ...]
    grid: TileGrid
    context: Group
    ends: Container[str] = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the unsplit model."""
        return self.whole.dtype

    @property
    def seed(self) -> int:
        """The seed of the unsplit model."""
        return self.whole.seed

    @cached_property
    def blocks(self) -> Mapping[str, Layer]:
        """The blocks by name, in the order in which they run; each runs its split forms for all tiles of the rank.

        A block that no axis splits is the unsplit block, which runs once.
        """
        names = list(self.whole.blocks)
        cuts = [getattr(self.forms[0], "cuts", {}).get(name) for name in names]
        leaves = [cut if cut is None or cut < 0 else cut + 1 for cut in cuts]  # axes of whole outputs, with samples
        found: dict[str, Any] = {}
        for name, entry, leave in zip(names, [None, *leaves], leaves, strict=False):
            block, forms = self.whole.blocks[name], tuple(form.blocks[name] for form in self.forms)
            alone = self.grid.along == 1 and entry is leave is None and all(form is block for form in forms)
            found[name] = block if alone else TiledBlock(forms, self.grid, entry, leave)
        for (name, block), (after, following) in pairwise(list(found.items())):
            if isinstance(block, TiledBlock) and isinstance(following, TiledBlock) and name not in self.ends:
                found[name] = replace(found[name], gives_parts=True)
                found[after] = replace(following, takes_parts=True)
        return found

    @property
    def _prediction_axis(self) -> int | None:
        return None if getattr(self.forms[0], "outputs", None) is None else -1

    @property
    def loss(self) -> Loss:
        """The loss of what the last block returns on this rank."""
        return self._tiled([form.loss for form in self.forms])

    def loss_on_parts(self, loss: Loss) -> Loss:
        """Adapt a loss of whole predictions to take what the last block returns on this rank. Not collective."""
        return self._tiled([form.loss_on_parts(loss) for form in self.forms])

    def _tiled(self, losses: Sequence[Loss]) -> Loss:
        return TiledLoss(tuple(losses), self.grid, self._prediction_axis, self.context)

    def run_on(self, x: Array, run: Run) -> Run:
        """Return ``run`` with the length of the whole sequences, if the blocks need it.

        ``x`` is this rank's part of the input. Collective over the context group if ``run.length`` is 0.
        """
        if self.grid.context.tiles > 1 and not run.length:
            run = replace(run, length=_whole_length(x, self.context))
        inputs = self.grid.cut(x, run.length, None)
        told: list[Run] = run_in_turns(
            [bound(run_on, form, part, run) for form, part in zip(self.forms, inputs, strict=True)]
        )
        return replace(told[0], ranges=()) if self.grid.along > 1 else told[0]  # each tile finds its own

    def whole_prediction(self, y: Array) -> Array:
        """Return the whole prediction; ``y`` is what the last block returned on this rank.

        Collective over the groups.
        """
        return self._joined(whole_prediction, y)[0]

    def whole_scores(self, y: Array) -> Array:
        """Return the prediction for this rank's positions, with the scores of all classes; see :func:`whole_scores`.

        Collective over the tensor group.
        """
        scores: Array = self.grid.join(self._joined(whole_scores, y), None)
        return scores

    def _joined(self, join: Callable[[Any, Array], Array], y: Array) -> list[Array]:
        length = _whole_length(y, self.context) if self.grid.along > 1 else 0
        parts = self.grid.cut(y, length, self._prediction_axis)
        return run_in_turns([bound(join, form, part) for form, part in zip(self.forms, parts, strict=True)])

    def held_shape(self, block: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what this rank holds of a block's output, for one sample. Not collective.

        ``shape`` is the shape of the whole output for one sample.
        """
        axis = getattr(self.forms[0], "cuts", {}).get(block)
        if axis is None:
            return shape
        axis %= len(shape)
        held = sum(form.held_shape(block, shape)[axis] for form in self.forms[: self.grid.across])
        return (*shape[:axis], held, *shape[axis + 1 :])


def _whole_length(x: Array, context: Group) -> int:
    """Return the number of positions of whole sequences; ``x`` has those of this rank.

    Collective over ``context``.
    """
    if context.size == 1:
        return int(x.shape[1])
    own = namespace(x).full(1, x.shape[1], np.int64)
    return int(context.all_gather(own, 0, (1,) * context.size, "context lengths").sum())


def _tree_sum(terms: Sequence[float]) -> float:
    total = np.empty(1)
    fold(np.add, [np.full(1, term) for term in terms], total)
    return float(total[0])
