"""Run copies of a block's module, which leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from mpizero._util.pytree import leaves_of, map_leaves
from mpizero.adapters.torch.arrays import gradient_leaves
from mpizero.adapters.torch.backward import gradients_of
from mpizero.adapters.torch.bound import BlockTensors, in_places
from mpizero.adapters.torch.calling import called
from mpizero.adapters.torch.process import TorchSettings, random_state, set_random_state


class Outcome(NamedTuple):
    """Hold what a pass has computed: output, gradients of parameters and input by name, new values of buffers."""

    output: Any
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    changes_input: bool


class CopyGraph(NamedTuple):
    """Hold a forward pass with its graph: the output, and the tensors whose gradients are wanted by name.

    ``half_precision`` says whether a function of PyTorch has returned numbers of 16 bits in it.
    """

    output: Any
    ends: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    changes_input: bool
    half_precision: bool


class _Kinds(TorchFunctionMode):  # type: ignore[misc]
    """Note whether a function returns numbers of 16 bits."""

    half_precision = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call one function."""
        found = func(*args, **(kwargs or {}))
        self.half_precision |= isinstance(found, torch.Tensor) and found.dtype in (torch.bfloat16, torch.float16)
        return found


@dataclass(eq=False)
class ModuleCopy:
    """Hold a copy of a block's module, and run passes of it that leave no trace."""

    module: torch.nn.Module
    tensors: BlockTensors
    modes: Sequence[tuple[torch.nn.Module, bool]]
    settings: TorchSettings
    values: Sequence[torch.Tensor]
    numbers: Sequence[torch.Tensor]

    def run(self, x: Any, *, training: bool, gradients: bool, of_input: bool) -> CopyGraph:
        """Run the module on ``x``, with copies of everything that it is given."""
        for module, was in self.modes:
            module.training = was and training
        own = self.tensors
        given = [value.detach().clone() for value in self.values]
        numbers = [number.clone() for number in self.numbers]
        ends: dict[str, torch.Tensor] = {}
        if gradients:
            ends = {s.name: t.requires_grad_() for s, t in zip(own.specs, given, strict=True) if s.optimized}
        x = map_leaves(lambda leaf: leaf.detach().clone(), x)
        if gradients and of_input:
            ends |= {f"input {number}": leaf.requires_grad_() for number, leaf in enumerate(gradient_leaves(x))}
        x = map_leaves(torch.clone, x)  # which may be changed in place, as a leaf of the graph may not
        versions = [leaf._version for leaf in leaves_of(x)]
        held = (*own.stored, *own.integers)
        with in_places(held, [*given, *numbers]), _Kinds() as kinds, self.settings.functions():
            with torch.set_grad_enabled(gradients):
                output = called(self.module, x)
            now = {one.name: one.now.detach() for one in held}
        names = {s.name for s in own.specs if s.averaged} | {one.name for one in own.integers}
        changed = [leaf._version for leaf in leaves_of(x)] != versions
        buffers = {name: value for name, value in now.items() if name in names}
        return CopyGraph(output, ends, buffers, changed, kinds.half_precision)

    def outcome(self, x: Any, **modes: bool) -> Outcome:
        """Run the module forward and, if there are ``gradients``, backward."""
        graph = self.run(x, **modes)
        output = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, graph.output)
        return Outcome(output, self.gradients(graph), graph.buffers, graph.changes_input)

    def gradients(
        self, graph: CopyGraph, leaves: Sequence[torch.Tensor] | None = None, *, linear: bool = False
    ) -> dict[str, torch.Tensor | None]:
        """Return the gradients of the sum of the sines of some tensors of the output: of all if None.

        Those of the sum of the tensors themselves if ``linear``.
        """
        if leaves is None:
            leaves = gradient_leaves([leaf for leaf in leaves_of(graph.output) if isinstance(leaf, torch.Tensor)])
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        if not graph.ends or not leaves:
            return {}
        pairs = zip(self.tensors.specs, self.values, strict=True)
        present = [graph.ends[s.name] if s.optimized else value.clone() for s, value in pairs]
        present += [number.clone() for number in self.numbers]
        with in_places((*self.tensors.stored, *self.tensors.integers), present), self.settings.functions():
            given = [torch.ones_like(t) if linear else torch.cos(t.detach()).conj() for t in leaves]
            found = gradients_of(leaves, list(graph.ends.values()), given)
        return dict(zip(graph.ends, found, strict=True))


@dataclass(eq=False)
class Copies:
    """Make copies of a block's module as it was before its first pass.

    Parameters
    ----------
    module, tensors, modes
        The module, what it holds, and whether each of its submodules is in training mode.
    settings : TorchSettings
        Settings of the process during a pass.
    """

    module: torch.nn.Module
    tensors: BlockTensors
    modes: Sequence[tuple[torch.nn.Module, bool]]
    settings: TorchSettings
    _first: tuple[torch.nn.Module, BlockTensors, Any] | None = None

    def maker(self, values: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor]) -> Callable[[], ModuleCopy]:
        """Return a function that makes a copy for passes with these values of what is stored. Not collective."""
        if self._first is None:  # a pass may leave what cannot be copied, such as a tensor with its graph
            self._first = copy.deepcopy((self.module, self.tensors, self.modes))
        first = self._first

        def fresh() -> ModuleCopy:
            module, tensors, modes = copy.deepcopy(first)
            return ModuleCopy(module, tensors, modes, self.settings, values, numbers)

        return fresh


@contextmanager
def seeded() -> Iterator[Callable[[], None]]:
    """Yield a function that sets PyTorch's generators to the present state; set them so again at the end."""
    state = random_state()

    def again() -> None:
        set_random_state(state)

    try:
        yield again
    finally:
        again()
