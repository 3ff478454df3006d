"""Pass calls for inspection and compilation to the wrapped model, with the current parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpizero.comm.agreement import agree_equal, collective
from mpizero.errors import ConfigError, UnsupportedError
from mpizero.layout.flat import nested
from mpizero.parallel.model.parameter_access import ParameterAccess
from mpizero.parallel.partition.blocks import blocks_of
from mpizero.types import Array


class Inspection(ParameterAccess):
    """Provide feature importance, computation graph and compiled prediction, if the wrapped model has such methods."""

    @collective
    def feature_importance(self) -> dict[str, float]:
        """Return the importance of each input feature by its name, computed by the wrapped model. Collective.

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
        """Indices of the input features that the wrapped model uses.

        Reading is not collective. Setting is collective, and every rank must set the same indices.
        """
        indices: Sequence[int] = self._delegate("active_feature_indices")
        return tuple(indices)

    @active_feature_indices.setter
    @collective
    def active_feature_indices(self, indices: Sequence[int]) -> None:
        chosen = tuple(int(i) for i in indices)
        agree_equal(self._config.communicator, lambda: {"active_feature_indices": chosen}, "active_feature_indices")
        self._replace_wrapped(self._delegate("with_active_features")(chosen))

    def is_feature_used(self, index: int) -> bool:
        """Tell whether the wrapped model uses input feature number ``index``. Not collective."""
        return index in self.active_feature_indices

    @property
    def supports_jit_compilation(self) -> bool:
        """Tell whether the wrapped model has the method that :meth:`jit_compile` needs. Not collective."""
        return hasattr(self._wrapped, "compile_predictor")

    def export_computation_graph(self) -> dict[str, Any]:
        """Return the graph of the wrapped model's operations as values that JSON can hold. Not collective.

        Raises
        ------
        NotImplementedError
            If the wrapped model has no ``export_computation_graph()``.
        """
        graph: dict[str, Any] = self._delegate("export_computation_graph")()
        return graph

    @collective
    def jit_compile(self) -> Callable[[Array], Array]:
        """Return a compiled function from inputs to predictions. Collective.

        The function keeps a copy of the current parameters, so later training does not change its predictions.

        Raises
        ------
        NotImplementedError
            If the wrapped model has no ``compile_predictor(params)``.
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
        """Gather all parameters and return them as the wrapped model takes them. Collective.

        A model of blocks takes a nested dictionary for each block, a black box takes arrays by name.
        """
        full = self.gather_full_parameters()
        blocks: dict[str, dict[str, Any]] = {block: {} for unit in self.layout.units for block in unit.blocks}
        for entry in self.layout.entries:
            blocks[entry.block][entry.local_name] = entry.spec.view(full[entry.span.start : entry.span.stop])
        if not hasattr(self._wrapped, "blocks"):
            return {block: np.asarray(arrays[""]) for block, arrays in blocks.items()}
        return {block: nested(arrays) for block, arrays in blocks.items()}


def same_parameters(old: Any, new: Any) -> None:
    """Check that a new wrapped model has the same parameters as the old one. Not collective.

    ``old`` and ``new`` are the parameters of each block, as ``blocks_of`` returns them.

    Raises
    ------
    ConfigError
        If names or shapes differ.
    """
    if old != new:
        raise ConfigError("the new model's parameters differ from the old one's in name or shape")
