"""Let the ranks of a domain group compute a model of fields together: each rank has a box of space.

:func:`domain_model` makes the form of a model whose layers take and return this rank's part of a field. Values, and
gradients of inputs, have the bits that they have where one rank has the whole field. Of gradients of parameters, loss
sums and weights each rank gets a share; the shares of all ranks add up to the whole. The layers are those of
:mod:`mpizero.nn.fields`, :mod:`mpizero.nn.convolution`, :mod:`mpizero.nn.spectral` and :mod:`mpizero.nn.unet`; what
they need of other ranks they fetch through :class:`mpizero.nn.space.Domain`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, cast

import numpy as np

from mpizero.errors import ConfigError
from mpizero.layout.fields import Cut
from mpizero.nn.convolution import Conv, ConvTranspose
from mpizero.nn.field_losses import IN_SPACE, FieldLoss
from mpizero.nn.fields import (
    AvgPool,
    ChannelLayerNorm,
    Concatenate,
    GroupNorm,
    InstanceNorm,
    MaxPool,
    Residual,
    Upsample,
)
from mpizero.nn.layer import Layer, SamplePart
from mpizero.nn.layers import Activation, Checkpointed, Dropout, Frozen, PartlyFrozen, Sequential
from mpizero.nn.rollout import Repeat
from mpizero.nn.space import Domain, DomainGroup, Space
from mpizero.nn.spectral import FNOBlock, FNOLift, SpectralConv
from mpizero.nn.unet import UNetDown, UNetMiddle, UNetUp
from mpizero.types import EVALUATE, Array, BlockModel, Loss, Params, Run


@dataclass(frozen=True, kw_only=True)
class _InDomain:
    """Give a layer of fields the space that the ranks of a domain group share."""

    domain: Domain = field(repr=False, compare=False)

    @property
    def _space(self) -> Space:
        return self.domain


@dataclass(frozen=True)
class DomainConv(_InDomain, Conv):
    """Compute :class:`Conv` on this rank's part of a field. Its passes are collective."""


@dataclass(frozen=True)
class DomainConvTranspose(_InDomain, ConvTranspose):
    """Compute :class:`ConvTranspose` on this rank's part of a field. Its passes are collective."""


@dataclass(frozen=True)
class DomainMaxPool(_InDomain, MaxPool):
    """Compute :class:`MaxPool` on this rank's part of a field. Its passes are collective."""


@dataclass(frozen=True)
class DomainAvgPool(_InDomain, AvgPool):
    """Compute :class:`AvgPool` on this rank's part of a field. Its passes are collective."""


@dataclass(frozen=True)
class DomainUpsample(_InDomain, Upsample):
    """Compute :class:`Upsample` on this rank's part of a field. Its passes are collective."""


@dataclass(frozen=True)
class DomainGroupNorm(_InDomain, GroupNorm):
    """Compute :class:`GroupNorm` on this rank's part of a field. Its passes are collective."""


@dataclass(frozen=True)
class DomainInstanceNorm(_InDomain, InstanceNorm):
    """Compute :class:`InstanceNorm` on this rank's part of a field. Its passes are collective."""


@dataclass(frozen=True)
class DomainChannelLayerNorm(_InDomain, ChannelLayerNorm):
    """Compute :class:`ChannelLayerNorm` on this rank's part of a field. Its passes are collective."""


@dataclass(frozen=True)
class DomainConcatenate(_InDomain, Concatenate):
    """Compute :class:`Concatenate` on this rank's part of a field. Its passes are collective."""


@dataclass(frozen=True)
class DomainUNetUp(_InDomain, UNetUp):
    """Compute :class:`UNetUp` on this rank's part of a field. Its passes are collective."""


@dataclass(frozen=True)
class DomainSpectralConv(_InDomain, SpectralConv):
    """Compute :class:`SpectralConv` on this rank's part of a field. Its passes are collective."""


@dataclass(frozen=True)
class DomainFNOLift(_InDomain, FNOLift):
    """Compute :class:`FNOLift` on this rank's part of a field. Its passes are collective."""


@dataclass(frozen=True)
class DomainDropout(_InDomain, Dropout):
    """Apply :class:`Dropout` to this rank's part of a field, with the mask that it has in the whole field."""

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` with the mask applied, or ``x`` itself if not in training; and the cache. Collective."""
        if not run.training or self.rate == 0.0:
            return super().forward(params, x, run)
        extents = self._space.extents(x, self)
        return self._masked(x, run, extents), (run, extents)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy`` with the forward pass's mask, and None, as there are no weights."""
        if not isinstance(cache, tuple):
            return super().backward_input(params, cache, dy)
        return self._masked(dy, *cache), None

    def _masked(self, x: Array, run: Run, extents: tuple[int, ...]) -> Array:
        """Return a copy of this rank's part of a field with the mask applied."""
        box = [slice(0, 1)] * (3 - len(extents)) + list(self._space.box(extents))
        (_, rows, columns), channels = [1] * (3 - len(extents)) + list(extents), x.shape[-1]
        first = ((box[0].start * rows + box[1].start) * columns + box[2].start) * channels
        width, height = (part.stop - part.start for part in reversed(box[1:]))
        part = SamplePart(first, width * channels, height, columns * channels, rows * columns * channels)
        return self.mask(x, run, part) if x.size else x


@dataclass(frozen=True)
class DomainLoss(_InDomain, FieldLoss):
    """Compute :class:`FieldLoss` on this rank's part of fields. Its forward pass is collective."""


_FORMS: Mapping[type[Layer], Callable[..., Layer]] = {
    AvgPool: DomainAvgPool,
    ChannelLayerNorm: DomainChannelLayerNorm,
    Concatenate: DomainConcatenate,
    Conv: DomainConv,
    ConvTranspose: DomainConvTranspose,
    Dropout: DomainDropout,
    FNOLift: DomainFNOLift,
    GroupNorm: DomainGroupNorm,
    InstanceNorm: DomainInstanceNorm,
    MaxPool: DomainMaxPool,
    SpectralConv: DomainSpectralConv,
    UNetUp: DomainUNetUp,
    Upsample: DomainUpsample,
}
_WRAPPERS = (Checkpointed, Frozen, PartlyFrozen, Repeat, UNetMiddle)
_COMPOSITES = (FNOBlock, Residual, UNetDown)


def on_domain(layer: Any, domain: Domain, where: str) -> Any:
    """Return the form of ``layer`` for the ranks of ``domain``; ``where`` names the layer in errors.

    A layer made of other layers is rebuilt from the forms of these.

    Raises
    ------
    ConfigError
        If a layer does not say how it works on a part of a field.
    """
    if hasattr(layer, "domain_form"):
        form = layer.domain_form(domain)
        if not callable(getattr(form, "specs", None)):
            raise ConfigError(
                f"{where}: {type(layer).__name__}.domain_form must return a layer, it returned {form!r:.60}"
            )
        return form
    if type(layer) is Sequential:
        inside = {name: on_domain(child, domain, f"{where}, {name!r}") for name, child in layer.layers}
        return Sequential(inside)
    if type(layer) in _WRAPPERS:
        return replace(layer, layer=on_domain(layer.layer, domain, where))
    if isinstance(layer, Activation) and type(layer).forward is Activation.forward:
        return layer
    names = [item.name for item in fields(cast(Any, layer))] if is_dataclass(layer) else []
    settings = {name: getattr(layer, name) for name in names}
    for name, child in settings.items():
        if isinstance(child, Layer):
            settings[name] = on_domain(child, domain, f"{where}, {name!r}")
    if type(layer) in _COMPOSITES:
        return replace(layer, **settings)
    made = _FORMS.get(type(layer))
    if made is None:
        raise ConfigError(
            f"{where}: {type(layer).__name__} does not say how it works on a part of a field; a domain takes layers "
            "of fields (Conv, ConvTranspose, MaxPool, AvgPool, Upsample, GroupNorm, InstanceNorm, ChannelLayerNorm, "
            "SpectralConv, Residual, Concatenate), Dropout, activations, and layers with a method domain_form(domain); "
            "leave domain out for other models"
        )
    return made(**settings, domain=domain)


@dataclass(frozen=True)
class DomainModel:
    """Hold the form of a model in which each rank of a domain group computes its part of fields.

    :func:`domain_model` makes one. Parameters have the names and shapes of ``model``. Gradients, loss sum and weight of
    a rank are its shares; the shares of all ranks of the group add up to what ``model`` computes.
    """

    model: BlockModel
    domain: Domain
    blocks: Mapping[str, Layer]
    loss: Loss

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the whole model."""
        return self.model.dtype

    @property
    def seed(self) -> int:
        """The seed of the whole model."""
        return int(self.model.seed)

    def run_on(self, x: Array, run: Run) -> Run:
        """Begin a forward pass; return ``run``. Not collective."""
        self.domain.begin_pass()
        return run

    def loss_on_parts(self, loss: Loss) -> Loss:
        """Return the form of a loss of whole fields that takes this rank's part of predictions and targets."""
        return loss_on_domain(loss, self.domain, type(self.model).__name__)

    def whole_prediction(self, y: Array) -> Array:
        """Return ``y``, this rank's part of a prediction: whole fields may be too large for a rank."""
        return y


def loss_on_domain(loss: Any, domain: Domain, model: str) -> Loss:
    """Return the form of a loss for the ranks of ``domain``; ``model`` is the model's name in errors.

    Raises
    ------
    ConfigError
        If the loss is not a sum over spatial tiles.
    """
    if isinstance(loss, DomainLoss):
        return loss
    if type(loss) is not FieldLoss:
        kind = type(loss).__name__
        way, inner = ("wrap it", kind) if isinstance(loss, IN_SPACE) else ("use one of fields", "MeanSquaredError")
        raise ConfigError(
            f"{model}: the loss {kind} sums over whole samples, and a domain cuts these; "
            f"{way}, loss=mpizero.nn.FieldLoss({inner}(...))"
        )
    return DomainLoss(loss.loss, loss.weights, domain=domain)


def domain_model(model: BlockModel, cut: Cut, group: DomainGroup) -> DomainModel:
    """Return the form of ``model`` in which each rank of ``group`` has the part of fields that ``cut`` says.

    Not collective.

    Parameters
    ----------
    model : BlockModel
        A model of layers of fields, activations and dropout, or of layers with a method ``domain_form(domain)`` that
        returns their form. Its loss is a :class:`FieldLoss`.
    cut : Cut
        Which part of a field each rank has.
    group : DomainGroup
        The ranks.

    Raises
    ------
    ConfigError
        If a layer or the loss does not work on parts of fields.
    """
    domain = Domain(cut, group)
    blocks = {name: on_domain(layer, domain, f"block {name!r}") for name, layer in model.blocks.items()}
    return DomainModel(model, domain, blocks, loss_on_domain(model.loss, domain, type(model).__name__))
