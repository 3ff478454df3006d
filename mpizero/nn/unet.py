"""Define the U-Net, a model of fields that computes on grids from fine to coarse and back (Ronneberger et al., 2015).

:class:`UNet` is made of blocks, between any two of which a pipeline can cut. Blocks pass on a tree ``(x, skips)``: the
field ``x`` on the current grid, and the fields of all finer grids, the finest first, which blocks after the middle
need. A :class:`UNetDown` appends to the skips, :class:`UNetMiddle` passes them on, and a :class:`UNetUp` takes the last
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpizero._util.checks import is_whole, require, seed, whole
from mpizero._util.names import explains, nearest
from mpizero.errors import ConfigError
from mpizero.nn.arrays import require_numbers
from mpizero.nn.convolution import Conv, ConvTranspose
from mpizero.nn.field_losses import IN_SPACE, FieldLoss
from mpizero.nn.fields import GroupNorm, Upsample
from mpizero.nn.layer import Composite, Graph, Layer, Operations, Wrapper, require_positive, require_rate
from mpizero.nn.layers import Checkpointed, Dropout, Sequential, named_activation
from mpizero.nn.losses import TASKS, loss_for
from mpizero.nn.models import export_computation_graph, model_dtype
from mpizero.nn.space import FieldLayer
from mpizero.types import EVALUATE, Params, Run

#: How a U-Net makes a field finer.
REFINEMENTS = ("nearest", "linear", "transposed")


@dataclass(frozen=True)
class UNetDown(Composite):
    """Compute on one grid, keep the result as a skip, and make it coarser: (x, skips) -> (coarser, (*skips, result)).

    Parameters
    ----------
    convolutions, coarsen : Layer
        The layer that computes on the grid, and the layer that makes its result coarser.
    finest : bool
        Whether the input is ``x`` alone, in any real dtype.
    """

    convolutions: Sequential
    coarsen: Layer
    finest: bool

    def children(self) -> dict[str, Layer]:
        """Return the two layers by name: ``convolutions`` and ``coarsen``."""
        return {"convolutions": self.convolutions, "coarsen": self.coarsen}

    def forward(self, params: Params, x: Any, run: Run = EVALUATE) -> tuple[Any, Any]:
        """Return the coarser field with all skips, and the cache."""
        x, skips = (x, ()) if self.finest else x
        if self.finest:
            require_numbers(x, "UNet")
            x = x.astype(params["coarsen"]["weight"].dtype, copy=False)
        fine, first = self.convolutions.forward(params["convolutions"], x, run)
        coarse, second = self.coarsen.forward(params["coarsen"], fine, run)
        return (coarse, (*skips, fine)), ([first, second],)

    def backward_input(self, params: Params, cache: Any, dy: Any) -> tuple[Any, Any]:
        """Return the gradients of ``x`` and of the skips before this one, and what :meth:`backward_weights` needs."""
        (first, second), (dcoarse, (*dskips, dfine)) = cache[0], dy
        d: Any
        d, after = self.coarsen.backward_input(params["coarsen"], second, dcoarse)
        dx, before = self.convolutions.backward_input(params["convolutions"], first, d + dfine)
        return (dx if self.finest else (dx, tuple(dskips))), [before, after]

    def output_shape(self, shape: Any) -> Any:
        """Return the shapes of the coarser field and of all skips, for one sample of ``shape``."""
        shape, skips = (shape, ()) if self.finest else shape
        fine = self.convolutions.output_shape(shape)
        return self.coarsen.output_shape(fine), (*skips, fine)

    def operations(self, shape: Any) -> Operations:
        """Return the sum of both layers' operations for one sample of ``shape``."""
        shape = shape if self.finest else shape[0]
        return self.convolutions.operations(shape) + self.coarsen.operations(self.convolutions.output_shape(shape))

    def trace(self, graph: Graph, name: str, source: Any) -> Any:
        """Add the nodes of both layers; return the outputs that are the coarser field and all skips."""
        source, skips = (source, ()) if self.finest else source
        fine = self.convolutions.trace(graph, f"{name}.convolutions", source)
        return self.coarsen.trace(graph, f"{name}.coarsen", fine), (*skips, fine)


@dataclass(frozen=True)
class UNetMiddle(Wrapper):
    """Compute on the coarsest grid: (x, skips) -> (layer(x), skips). Parameters keep the layer's names."""

    def forward(self, params: Params, x: Any, run: Run = EVALUATE) -> tuple[Any, Any]:
        """Return the layer's output with all skips, and the layer's cache."""
        y, cache = self.layer.forward(params, x[0], run)
        return (y, x[1]), cache

    def backward_input(self, params: Params, cache: Any, dy: Any) -> tuple[Any, Any]:
        """Return the gradients of ``x`` and of the skips, and what :meth:`backward_weights` needs."""
        dx, pending = self.layer.backward_input(params, cache, dy[0])
        return (dx, dy[1]), pending

    def output_shape(self, shape: Any) -> Any:
        """Return the shapes of the layer's output and of all skips, for one sample of ``shape``."""
        return self.layer.output_shape(shape[0]), shape[1]

    def operations(self, shape: Any) -> Operations:
        """Return the layer's operations for one sample of ``shape``."""
        return self.layer.operations(shape[0])

    def trace(self, graph: Graph, name: str, source: Any) -> Any:
        """Add the layer's nodes; return its output and the skips."""
        return self.layer.trace(graph, name, source[0]), source[1]


@dataclass(frozen=True)
class UNetUp(Composite, FieldLayer):
    """Make a field finer, append it to the channels of the last skip, and compute: (x, (*skips, skip)) -> (y, skips).

    Where an axis of the skip has an odd number of positions, the finer field has one more, which is left out.

    Parameters
    ----------
    refine, convolutions : Layer
        The layer that makes the field finer, and the layer that computes on the skip's grid.
    finest : bool
        Whether there are no further skips, so that the output is ``y`` alone.
    """

    refine: Layer
    convolutions: Sequential
    finest: bool

    def children(self) -> dict[str, Layer]:
        """Return the two layers by name: ``refine`` and ``convolutions``."""
        return {"refine": self.refine, "convolutions": self.convolutions}

    def forward(self, params: Params, x: Any, run: Run = EVALUATE) -> tuple[Any, Any]:
        """Return the result on the skip's grid, with the other skips if there are any, and the cache."""
        x, (*skips, skip) = x
        fine, first = self.refine.forward(params["refine"], x, run)
        have, wanted = (self._space.extents(field, self) for field in (fine, skip))
        kept = fine if have == wanted else self._space.resize(fine, have, wanted, "UNet skip")
        joined = np.concatenate([skip, kept], axis=-1)
        y, second = self.convolutions.forward(params["convolutions"], joined, run)
        return (y if self.finest else (y, tuple(skips))), ([first, second], skip.shape[-1], have, wanted)

    def backward_input(self, params: Params, cache: Any, dy: Any) -> tuple[Any, Any]:
        """Return the gradients of ``x`` and of all skips, and what :meth:`backward_weights` needs."""
        (first, second), channels, have, wanted = cache
        dy, dskips = (dy, ()) if self.finest else dy
        djoined: Any
        djoined, after = self.convolutions.backward_input(params["convolutions"], second, dy)
        dfine = djoined[..., channels:]
        if have != wanted:
            dfine = self._space.resize(dfine, wanted, have, "UNet skip backward")
        dx, before = self.refine.backward_input(params["refine"], first, dfine)
        return (dx, (*dskips, djoined[..., :channels])), [before, after]

    def _joined(self, shape: Any) -> tuple[int, ...]:
        """Return the shape of the last skip and the refined field, joined along their channels."""
        skip = shape[1][-1]
        return (*skip[:-1], skip[-1] + self.refine.output_shape(shape[0])[-1])

    def output_shape(self, shape: Any) -> Any:
        """Return the shape of the result, with the shapes of the other skips if there are any."""
        y = self.convolutions.output_shape(self._joined(shape))
        return y if self.finest else (y, shape[1][:-1])

    def operations(self, shape: Any) -> Operations:
        """Return the sum of both layers' operations for one sample of ``shape``."""
        return self.refine.operations(shape[0]) + self.convolutions.operations(self._joined(shape))

    def trace(self, graph: Graph, name: str, source: Any) -> Any:
        """Add the nodes of both layers and of what joins them; return the result, with the other skips if any."""
        x, (*skips, skip) = source
        node = self.refine.trace(graph, f"{name}.refine", x)
        if node.shape[:-1] != skip.shape[:-1]:
            node = graph.add("Crop", f"{name}.crop", (node,), (*skip.shape[:-1], node.shape[-1]))
        shape = (*skip.shape[:-1], skip.shape[-1] + node.shape[-1])
        joined = graph.add("Concatenate", f"{name}.concatenate", (skip, node), shape)
        y = self.convolutions.trace(graph, f"{name}.convolutions", joined)
        return y if self.finest else (y, tuple(skips))


class FieldModel:
    """Define what the models of fields have in common; a subclass is a frozen dataclass with ``blocks``."""

    inputs: int
    axes: int
    task: str
    loss: Any
    dtype: Any
    seed: int
    space: tuple[int, ...] | None

    @property
    def blocks(self) -> Mapping[str, Layer]:
        """The blocks by name, in the order in which they run."""
        raise NotImplementedError

    def _resolve_settings(self) -> None:
        """Check the settings that all models of fields have; replace names by what they stand for.

        Raises
        ------
        ConfigError
            If a setting is not allowed.
        """
        where = type(self).__name__
        require(f"{where}: axes", self.axes, whole(1, 3))
        if self.task not in TASKS:
            raise ConfigError(f'{where}: task={self.task!r} is not one of "classification", "regression"')
        loss = loss_for(where, self.task, self.loss)
        object.__setattr__(self, "loss", FieldLoss(loss) if isinstance(loss, IN_SPACE) else loss)
        require(f"{where}: seed", self.seed, seed)
        object.__setattr__(self, "dtype", model_dtype(where, self.dtype))
        if self.space is not None:
            space = tuple(self.space) if isinstance(self.space, list | tuple) else ()
            if len(space) != self.axes or not all(is_whole(extent, 1) for extent in space):
                raise ConfigError(f"{where}: space={self.space!r} must be None or the extents of its {self.axes} axes")
            object.__setattr__(self, "space", space)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample. Without ``space`` it is not known, and the model has no such attribute."""
        if self.space is None:
            where = type(self).__name__
            raise AttributeError(f"a {where} has a sample_shape if it is given the extents of fields: space=(64, 64)")
        return (*self.space, self.inputs)

    def export_computation_graph(self) -> dict[str, Any]:
        """Describe the model as a dict of JSON values; see :func:`mpizero.nn.export_computation_graph`."""
        return export_computation_graph(self, self.sample_shape)


@explains
@dataclass(frozen=True)
class UNet(FieldModel):
    """Describe a U-Net, made of the blocks "down.0", "down.1", ..., "middle", ..., "up.1", "up.0", "output".

    Inputs are fields (samples, one to three axes of space, inputs), outputs (samples, space, outputs). For regression
    targets have the output's shape; for classification they are integers (samples, space), of which negative ones are
    ignored. Inputs of another dtype are cast to ``dtype``.

    On each of ``levels`` grids a convolution, a group norm and an activation run twice. Grid l has ``width * 2**l``
    channels. A convolution with stride 2 makes a field coarser, so that an axis of n positions becomes one of
    ceil(n / 2): any extents will do. On the way back from coarse to fine, the field that was made finer is appended to
    the channels of the skip: the result of the convolutions on the same grid on the way down. (U-Nets after
    Ronneberger, Fischer and Brox, *U-Net*, 2015, normalize batches, or nothing; here a sample's prediction does not
    depend on other samples.) Blocks cannot be split over tensor groups.

    Parameters
    ----------
    inputs, outputs : int
        Number of channels of the input and of the output; for classification ``outputs`` is the number of classes.
    axes : int
        Number of axes of space, 1 to 3.
    width : int
        Number of channels on the finest grid.
    levels : int
        Number of grids, 2 to 16.
    groups : int
        Number of groups of channels that are normalized together; divides ``width``.
    kernel : int
        Size of the windows of convolutions along each axis.
    activation : str
        "gelu", "silu", "relu" or "tanh".
    padding : str or tuple of str
        What surrounds a field, for all axes or by axis: "zeros", "periodic" or "reflect", as in
        :class:`~mpizero.nn.Conv`. Periodic axes need extents that ``2**(levels - 1)`` divides.
    dropout : float
        Rate of the dropout after the last activation on each grid.
    refine : str
        How a field is made finer: "nearest" and "linear" by :class:`~mpizero.nn.Upsample` ("linear" does not
        interpolate across the ends of an axis, not even of a periodic one), "transposed" by
        :class:`~mpizero.nn.ConvTranspose`.
    task : str
        "regression" or "classification".
    loss : str, Loss or None
        As for :class:`~mpizero.nn.MLP`. The attribute ``loss`` is the loss object, wrapped in a
        :class:`~mpizero.nn.FieldLoss` if it adds up over positions.
    dtype : dtype
        float32 or float64.
    seed : int
        Seed of the start values.
    space : tuple of int or None
        Extents of the fields, by which work is counted, for example to cut a pipeline into stages of equal work. The
        model takes other extents, too. None if they are not known.
    activation_checkpointing : bool
        Whether a block keeps only its input for the backward pass, and computes its other activations again.

    Raises
    ------
    ConfigError
        A setting is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> net = mz.nn.UNet(inputs=1, outputs=1, axes=1, width=8, levels=2, groups=2, padding="periodic")
    >>> list(net.blocks)
    ['down.0', 'middle', 'up.0', 'output']
    >>> x = np.random.default_rng(0).normal(size=(8, 16, 1))
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     with mz.distribute(net, mz.Adam(lr=0.01), "ddp", config=config) as model:
    ...         losses = [model.train(x, x[:, ::-1]) for step in range(20)]
    >>> losses[-1] < losses[0]
    True
    """

    inputs: int
    outputs: int
    axes: int = 2
    width: int = 32
    levels: int = 3
    groups: int = 8
    kernel: int = 3
    activation: str = "silu"
    padding: str | tuple[str, ...] = "zeros"
    dropout: float = 0.0
    refine: str = "nearest"
    task: str = "regression"
    loss: Any = None
    dtype: Any = "float32"
    seed: int = 0
    space: tuple[int, ...] | None = None
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "width", "groups", "kernel"):
            require_positive("UNet", **{name: getattr(self, name)})
        require("UNet: levels", self.levels, whole(2, 16))
        if self.width % self.groups:
            raise ConfigError(f"UNet: groups={self.groups} must divide width={self.width}")
        if "none" in (self.padding if isinstance(self.padding, tuple) else (self.padding,)):
            raise ConfigError(
                'UNet: padding="none" is not allowed: a field would become smaller than its skip; choose "zeros", '
                '"periodic" or "reflect"'
            )
        if self.refine not in REFINEMENTS:
            known = ", ".join(REFINEMENTS) + nearest(self.refine, REFINEMENTS)
            raise ConfigError(f"UNet: refine={self.refine!r} is not known; choose one of {known}")
        require_rate("UNet", self.dropout)
        self._resolve_settings()
        _ = self.blocks  # raises the errors of its layers

    @cached_property
    def blocks(self) -> dict[str, Layer]:
        """The blocks by name, in the order in which they run."""
        widths, last = [self.width * 2**level for level in range(self.levels)], self.levels - 1
        blocks: dict[str, Layer] = {}
        for level, (width, coarse) in enumerate(zip(widths, widths[1:], strict=False)):
            convolutions = self._convolutions(width if level else self.inputs, width, level, input_gradient=level > 0)
            blocks[f"down.{level}"] = UNetDown(convolutions, self._conv(width, coarse, stride=2), level == 0)
        blocks["middle"] = UNetMiddle(self._convolutions(widths[-1], widths[-1], last))
        for level in reversed(range(last)):
            convolutions = self._convolutions(2 * widths[level], widths[level], self.levels + level)
            blocks[f"up.{level}"] = UNetUp(self._refinement(widths[level]), convolutions, level == 0)
        if self.activation_checkpointing:
            blocks = {name: Checkpointed(block) for name, block in blocks.items()}
        return blocks | {"output": Conv(self.width, self.outputs, (1,) * self.axes)}

    def _conv(self, inputs: int, outputs: int, **settings: Any) -> Conv:
        return Conv(inputs, outputs, (self.kernel,) * self.axes, padding=self.padding, **settings)

    def _convolutions(self, inputs: int, width: int, site: int, **settings: Any) -> Sequential:
        layers: dict[str, Layer] = {}
        for number, conv in enumerate((self._conv(inputs, width, **settings), self._conv(width, width)), start=1):
            norm, activation = GroupNorm(self.groups, width), named_activation(self.activation)
            layers |= {f"conv{number}": conv, f"norm{number}": norm, f"activation{number}": activation}
        return Sequential(layers | ({"dropout": Dropout(self.dropout, site)} if self.dropout else {}))

    def _refinement(self, width: int) -> Layer:
        """Return a layer that doubles the extents of a field, and halves its channels to ``width``."""
        if self.refine == "transposed":
            return ConvTranspose(2 * width, width, (2,) * self.axes, stride=2)
        return Sequential({"conv": Conv(2 * width, width, (1,) * self.axes), "upsample": Upsample(2, self.refine)})
