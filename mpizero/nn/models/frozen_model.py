"""Keep parameters of a model from being trained, chosen by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mpizero._util.names import as_patterns, selected
from mpizero.errors import ConfigError
from mpizero.layout.flat import joined
from mpizero.nn.layer import Layer
from mpizero.nn.layers.frozen import Frozen, PartlyFrozen, completed, frozen_specs
from mpizero.nn.models.block_model import model_specs
from mpizero.types import Array, BlockModel, ParameterSpec, Params


def freeze(model: Any, patterns: str | Iterable[str]) -> Any:
    """Return a model that does not train the parameters whose names fit one of the patterns. Not collective.

    Frozen parameters have no gradient and no optimizer state. Other uses of a frozen parameter (tied ones) are frozen,
    too. ``model`` itself stays as it is; what it offers besides blocks and parameters, the returned model offers, too.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The model.
    patterns : str or sequence of str
        Shell patterns of parameter names, such as ``["encoder.*", "*.bias"]``; ``*`` stands for dots, too.

    Raises
    ------
    ConfigError
        If a pattern fits no parameter, if they leave nothing to train, or if there is none.

    Examples
    --------
    >>> import mpizero as mz
    >>> tuned = mz.nn.freeze(mz.nn.MLP(2, [3], 1), ["hidden.*", "*.bias"])
    >>> [spec.name for spec in mz.nn.model_specs(tuned) if spec.trainable]
    ['output.linear.weight']
    """
    chosen = as_patterns("freeze", patterns)
    if not chosen:
        raise ConfigError('freeze: expected patterns of names, such as ["encoder.*"], got none')
    if isinstance(model, BlockModel):
        trained = {spec.name: spec.trainable and not spec.averaged for spec in model_specs(model) if spec.tied is None}
    elif isinstance(getattr(model, "parameters", None), Mapping):
        held = {*getattr(model, "frozen", ()), *getattr(model, "averaged", ())}
        trained = {name: name not in held for name in model.parameters}
    else:
        raise ConfigError(f"freeze takes a model of blocks, or one function as a model, got {model!r:.80}")
    names = frozenset(selected(list(trained), "freeze", chosen))
    if not any(trained[name] and name not in names for name in trained):
        raise ConfigError(f"freeze: {', '.join(map(repr, chosen))} leave no parameter to train")
    if callable(own := getattr(model, "with_frozen", None)):
        model = own(names)  # a module of another library, which then computes no gradients of them
    return FrozenModel(model, names) if isinstance(model, BlockModel) else FrozenFunction(model, names)


def unfrozen(model: Any) -> Any:
    """Return the model that :func:`freeze` was given, or ``model`` itself. Not collective."""
    return model.model if isinstance(model, FrozenModel | FrozenFunction) else model


@dataclass(frozen=True)
class _Delegate:
    """Offer what ``model`` offers, but for what a subclass defines; ``names`` are the frozen parameters."""

    model: Any
    names: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("model", "names"):  # asked for before there are any, by copies
            raise AttributeError(name)
        found = getattr(self.model, name)
        if name == "with_active_features":
            return lambda indices: replace(self, model=found(indices))
        return found


@dataclass(frozen=True)
class FrozenFunction(_Delegate):
    """Hold a function as a model, of whose parameters some are not trained."""

    @property
    def frozen(self) -> frozenset[str]:
        """The names of all parameters that are not trained."""
        return self.names | frozenset(getattr(self.model, "frozen", ()))


@dataclass(frozen=True)
class FrozenModel(_Delegate):
    """Hold a model of blocks, of whose parameters some are not trained."""

    @property
    def blocks(self) -> Mapping[str, Any]:
        """The blocks by name; those with frozen parameters are wrapped."""
        return self._blocks

    @cached_property
    def _blocks(self) -> dict[str, Any]:
        return _frozen_blocks(self.model.blocks, self.names)

    @property
    def loss(self) -> Any:
        """The model's loss."""
        return self.model.loss

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the model's parameters."""
        dtype: np.dtype[Any] = self.model.dtype
        return dtype

    @property
    def seed(self) -> int:
        """The model's seed."""
        seed: int = self.model.seed
        return seed

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return self._split if name == "split" else found

    def _split(self, group: Any) -> Any:
        from mpizero.nn.split.model import SplitModel

        inner = self.model.split(group)
        if isinstance(inner, SplitModel):
            return replace(inner, whole=self, blocks=_frozen_blocks(inner.blocks, self.names))
        return replace(self, model=inner)


def _frozen_blocks(blocks: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the blocks with those wrapped of which parameters are in ``names``, the full names."""
    found: dict[str, Any] = {}
    for block, layer in blocks.items():
        specs = layer.specs()
        own = tuple(s.name for s in specs if s.trainable and (s.tied or joined(block, s.name)) in names)
        if own and isinstance(layer, Layer):
            found[block] = Frozen(layer) if len(own) == sum(s.trainable for s in specs) else PartlyFrozen(layer, own)
        else:
            found[block] = _FrozenBlock(layer, own) if own else layer
    return found


@dataclass(frozen=True)
class _FrozenBlock:
    """Wrap a layer that is no :class:`Layer`; it offers what the layer offers. ``names`` are as in its specs."""

    layer: Any
    names: tuple[str, ...]

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the parameters, the frozen ones as not trainable."""
        return frozen_specs(tuple(self.layer.specs()), self.names)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Call the layer's ``backward_weights``."""
        self.layer.backward_weights(params, cache, pending, completed(params, grads, self.names))

    def backward(self, params: Params, cache: Any, dy: Array, grads: Params) -> Array | None:
        """Call the layer's ``backward``."""
        dx: Array | None = self.layer.backward(params, cache, dy, completed(params, grads, self.names))
        return dx

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("layer", "names"):
            raise AttributeError(name)
        found = getattr(self.layer, name)
        return (lambda group: replace(self, layer=found(group))) if name in ("split", "context") else found
