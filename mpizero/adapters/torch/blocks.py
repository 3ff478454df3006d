"""Run a submodule of PyTorch as a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from mpizero.adapters.derived_seed import derived_seed
from mpizero.adapters.torch.arrays import as_array, as_tensor, gradient_leaves, put
from mpizero.adapters.torch.backward import Gradients, Pass, PendingWeights, input_half, weight_half, whole_backward
from mpizero.adapters.torch.bound import Held, in_places
from mpizero.adapters.torch.process import TorchSettings, torch_pass
from mpizero.adapters.torch.saved import SavedParameters
from mpizero.errors import DataError, LayoutError
from mpizero.nn.layer import Layer
from mpizero.sampletree import leaves_of, map_leaves, paths_of
from mpizero.types import EVALUATE, Array, ParameterSpec, Params, Run


@dataclass(frozen=True)
class BlockTensors:
    """Hold what a block's module holds, and the specs of its parameters in the same order.

    Attributes
    ----------
    parameters : tuple of Held
        The parameters.
    specs : tuple of ParameterSpec
        Their descriptions, with names relative to the block.
    constants : tuple of Held
        Buffers that the forward pass must not change.
    unused : frozenset of str
        Names of parameters that need no gradient in every forward pass.
    """

    parameters: tuple[Held, ...]
    specs: tuple[ParameterSpec, ...]
    constants: tuple[Held, ...] = ()
    unused: frozenset[str] = frozenset()
    paths: tuple[tuple[str, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(tuple(spec.name.split(".")) for spec in self.specs))


@dataclass
class _Cache:
    """Hold the graph of a forward pass; or its input alone, of an evaluation, whose backward pass runs it again.

    ``paths`` names the outputs of the graph within the output's tree.
    """

    x: Any
    run: Run
    graph: Pass | None = None
    paths: tuple[str, ...] = ()
    saved: SavedParameters | None = None


@dataclass(frozen=True, eq=False)
class TorchBlock(Layer):
    """Run a submodule of PyTorch as a layer: autograd computes both halves of its backward pass.

    The module holds no values; each call puts the arrays that it is given in the places of its parameters, without a
    copy. A tuple as input becomes several arguments of the module, a dictionary keyword arguments.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    number : int
        Number of the block within the model; its random numbers depend on it.
    tensors : BlockTensors
        Its parameters and buffers.
    settings : TorchSettings
        Settings of the process during a pass.
    training : tuple of (torch.nn.Module, bool)
        Every submodule, and whether it was in training mode when the model was made.
    """

    module: torch.nn.Module
    number: int
    tensors: BlockTensors
    settings: TorchSettings
    training: tuple[tuple[torch.nn.Module, bool], ...]

    @property
    def fingerprint(self) -> Any:
        """Parts of the block that ranks compare."""
        return {"module": self.module, "specs": self.tensors.specs, "number": self.number}

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the parameters of the module, with their names in ``state_dict()``. Not collective."""
        return self.tensors.specs

    def forward(self, params: Params, x: Any, run: Run = EVALUATE) -> tuple[Any, Any]:
        """Return the module's output for ``x``, and the graph of the pass; without training, only ``x`` is kept.

        Not collective.
        """
        cache = _Cache(x, run)
        if not run.training:
            with self._pass(run), torch.no_grad():
                return map_leaves(as_array, self._call(self._tensors(params), map_leaves(as_tensor, x))), cache
        y = self._record(params, cache)
        return map_leaves(as_array, y), cache

    def _record(self, params: Params, cache: _Cache) -> Any:
        """Run the module with autograd's graph, put the graph into the cache, and return the output's tensors."""
        with self._pass(cache.run), torch.enable_grad():
            tensors = self._tensors(params)
            for tensor, spec in zip(tensors, self.tensors.specs, strict=True):
                tensor.requires_grad_(spec.trainable)
            x = map_leaves(as_tensor, cache.x)
            inputs = gradient_leaves(x) if self.number else []  # block 0 takes samples, which need no gradient
            for tensor in inputs:
                tensor.requires_grad_()
            hooks: Any = nullcontext()
            if getattr(params, "gathered", False):
                cache.saved = SavedParameters(tensors)
                hooks = saved_tensors_hooks(cache.saved.pack, cache.saved.unpack)
            with hooks:
                y = self._call(tensors, x)
            outputs = {path: tensor for path, tensor in paths_of(y=y) if tensor.requires_grad}
            weights = [t for t in tensors if t.requires_grad]
            self._check_versions(tensors)
            cache.graph, cache.paths = Pass(list(outputs.values()), inputs, weights), tuple(outputs)
            return y

    def backward(self, params: Params, cache: Any, dy: Any, grads: Params) -> Any:
        """Write the gradients of the parameters to ``grads``; return that of the input, or None. Not collective."""
        graph, given = self._graph(params, cache, dy)
        with torch_pass(self.settings):
            inputs, weights = whole_backward(graph, given)
            self._write(grads, weights)
            return self._input_gradient(cache, graph, inputs)

    def backward_input(self, params: Params, cache: Any, dy: Any) -> tuple[Any, Any]:
        """Return the gradient of the input, or None, and what :meth:`backward_weights` needs. Not collective."""
        graph, given = self._graph(params, cache, dy)
        with torch_pass(self.settings):
            inputs, pending = input_half(graph, given)
            return self._input_gradient(cache, graph, inputs), pending

    def backward_weights(self, params: Params, cache: Any, pending: PendingWeights, grads: Params) -> None:
        """Write the gradients of the parameters to ``grads``. Not collective."""
        if cache.saved is not None:
            cache.saved.tensors = self._tensors(params)
        with torch_pass(self.settings):
            self._write(grads, weight_half(cache.graph, pending))

    def _graph(self, params: Params, cache: _Cache, dy: Any) -> tuple[Pass, list[torch.Tensor]]:
        """Return the graph of the forward pass, and the gradients of its outputs as tensors."""
        if cache.graph is None:
            self._record(params, cache)
        assert cache.graph is not None
        if cache.saved is not None:
            cache.saved.tensors = self._tensors(params)
        found = dict(paths_of(y=dy))  # the blocks after this one may use some of its outputs only
        used = [(t, found[path]) for path, t in zip(cache.paths, cache.graph.outputs, strict=True) if path in found]
        return cache.graph._replace(outputs=[t for t, _ in used]), [as_tensor(gradient) for _, gradient in used]

    def _input_gradient(self, cache: _Cache, graph: Pass, found: Gradients) -> Any:
        """Return the gradients of the input as a tree like the input, with None for leaves that have none."""
        if not self.number:
            return None
        left = iter(found)

        def gradient(leaf: Any) -> Any:
            if getattr(getattr(leaf, "dtype", None), "kind", "") != "f":
                return None
            tensor = next(left)
            return np.zeros_like(leaf) if tensor is None else as_array(tensor)

        return map_leaves(gradient, cache.x)

    def _write(self, grads: Params, weights: Gradients) -> None:
        trained = (i for i, spec in enumerate(self.tensors.specs) if spec.trainable)
        for place, weight in zip(trained, weights, strict=True):
            view = _found(grads, self.tensors.paths[place])
            if weight is not None:
                put(view, weight)
                continue
            name = self.tensors.specs[place].name
            if name not in self.tensors.unused:
                raise LayoutError(
                    f"{type(self.module).__name__}: the loss does not depend on parameter {name!r}, so it has no "
                    "gradient: freeze it (frozen=), or name it in unused= if only some samples use it"
                )
            view[...] = 0

    def _tensors(self, params: Params) -> list[torch.Tensor]:
        return [as_tensor(_found(params, path)) for path in self.tensors.paths]

    @contextmanager
    def _pass(self, run: Run) -> Iterator[None]:
        """Prepare the process and the module for a forward pass."""
        with torch_pass(self.settings, derived_seed(run, self.number)):
            for module, was in self.training:
                module.training = was and run.training
            yield

    def _call(self, tensors: Sequence[torch.Tensor], x: Any) -> Any:
        """Call the module on ``x`` with these parameters."""
        with in_places(self.tensors.parameters, tensors):
            if isinstance(x, tuple):
                y = self.module(*x)
            elif isinstance(x, Mapping):
                y = self.module(**x)
            else:
                y = self.module(x)
        if odd := [leaf for leaf in leaves_of(y) if not isinstance(leaf, torch.Tensor)]:
            raise DataError(
                f"{type(self.module).__name__} returned a {type(odd[0]).__name__}: a block returns tensors, alone or "
                "in tuples, lists and dictionaries"
            )
        return y

    def _check_versions(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor, spec in zip(tensors, self.tensors.specs, strict=True):
            if tensor._version:
                raise LayoutError(
                    f"{type(self.module).__name__} changes its parameter {spec.name!r} in its forward pass: only "
                    "the optimizer may; compute with a changed copy"
                )


def _found(tree: Mapping[str, Any], path: Sequence[str]) -> Array:
    found: Any = tree
    for part in path:
        found = found[part]
    return found  # type: ignore[no-any-return]
