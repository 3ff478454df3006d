"""Pass calls for inspection and compilation on to the wrapped model, with the current parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpizero.comm.calls import collective
from mpizero.comm.equality import agree_equal
from mpizero.errors import ConfigError, UnsupportedError
from mpizero.layout.flat import nested
from mpizero.parallel.model.parameter_access import ParameterAccess
from mpizero.parallel.partition.blocks import blocks_of
from mpizero.types import Array


class Inspection(ParameterAccess):
    """Provide feature importance, computation graph and compiled prediction, if the wrapped model implements them."""

    @collective
    def feature_importance(self) -> dict[str, float]:
        """Return the importance of each feature, which the wrapped model computes from its parameters. Collective.

        Raises
        ------
        NotImplementedError
            If the wrapped model has no ``feature_importance(params)``.
        """
        function = self._delegate("feature_importance")
        result: dict[str, float] = function(self._bound_parameters())
        return result

    @property
    def active_feature_indices(self) -> tuple[int, ...]:
        """Return the features that the wrapped model uses. Setting it is collective: every rank sets the same."""
        indices: Sequence[int] = self._delegate("active_feature_indices")
        return tuple(indices)

    @active_feature_indices.setter
    @collective
    def active_feature_indices(self, indices: Sequence[int]) -> None:
        chosen = tuple(int(i) for i in indices)
        agree_equal(self._config.communicator, lambda: {"active_feature_indices": chosen}, "active_feature_indices")
        self._replace_wrapped(self._delegate("with_active_features")(chosen))

    def is_feature_used(self, index: int) -> bool:
        """Tell whether the wrapped model uses a feature. Not collective."""
        return index in self.active_feature_indices

    @property
    def supports_jit_compilation(self) -> bool:
        """Return whether :meth:`jit_compile` works. Not collective."""
        return hasattr(self._wrapped, "compile_predictor")

    def export_computation_graph(self) -> dict[str, Any]:
        """Return the wrapped model's operations as plain values that JSON can hold. Not collective."""
        graph: dict[str, Any] = self._delegate("export_computation_graph")()
        return graph

    @collective
    def jit_compile(self) -> Callable[[Array], Array]:
        """Return a compiled prediction function on a copy of the current parameters. Collective.

        Raises
        ------
        NotImplementedError
            If the wrapped model cannot be compiled.
        """
        function = self._delegate("compile_predictor")
        compiled: Callable[[Array], Array] = function(self._bound_parameters())
        return compiled

    def _delegate(self, name: str) -> Any:
        if not hasattr(self._wrapped, name):
            raise UnsupportedError(
                f"{type(self._wrapped).__name__} has no {name!r}: a wrapped model that offers it makes this work"
            )
        return getattr(self._wrapped, name)

    def _replace_wrapped(self, wrapped: Any) -> None:
        same_parameters(blocks_of(self._wrapped), blocks_of(wrapped))
        self._wrapped = wrapped
        self.engine.exchange_model(wrapped)

    def _bound_parameters(self) -> dict[str, Any]:
        """Return all parameters, nested by block, as the wrapped model takes them; by name for a black box."""
        full = self.gather_full_parameters()
        blocks: dict[str, dict[str, Any]] = {block: {} for unit in self.layout.units for block in unit.blocks}
        for entry in self.layout.entries:
            blocks[entry.block][entry.local_name] = full[entry.span.start : entry.span.stop].reshape(entry.spec.shape)
        if not hasattr(self._wrapped, "blocks"):
            return {block: np.asarray(arrays[""]) for block, arrays in blocks.items()}
        return {block: nested(arrays) for block, arrays in blocks.items()}


def same_parameters(old: Any, new: Any) -> None:
    """Check that a new wrapped model has the same parameters as the old one. Not collective.

    Raises
    ------
    ConfigError
        If names or shapes differ.
    """
    if old != new:
        raise ConfigError("the new model's parameters differ from the old one's in name or shape")
