"""Compare what a module's own ``forward`` computes with what its blocks compute one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpizero._util.pytree import map_leaves, paths_of
from mpizero.adapters.derived_seed import derived_seed
from mpizero.adapters.torch.arrays import as_tensor
from mpizero.adapters.torch.bound import begin_training
from mpizero.adapters.torch.calling import arguments_of, called
from mpizero.adapters.torch.process import TorchSettings, torch_pass
from mpizero.errors import LayoutError, MpizeroError
from mpizero.types import Run


@dataclass(frozen=True, eq=False)
class OwnForward:
    """Run a module's own ``forward`` once in training and once in evaluation mode, and compare it with its blocks.

    Hooks see what enters and leaves the blocks, so that dropout, which would differ in a second pass, matters not. The
    pass takes the module that was given, or makes it again, with its start values, on the rank that computes the first
    samples.

    Parameters
    ----------
    made : callable
        Returns the module.
    blocks : sequence of str
        The names of its blocks, in order.
    settings : TorchSettings
        Settings of the process during a pass.
    """

    made: Callable[[], torch.nn.Module]
    blocks: Sequence[str]
    settings: TorchSettings
    _compared: set[bool] = field(default_factory=set)

    def compare(self, x: Any, run: Run) -> None:
        """Raise :class:`LayoutError` if ``forward`` does something that no block does. Not collective.

        ``x`` are the samples. The first samples of the first step are looked at, in both modes; where a program
        does not train, those of the first evaluation.
        """
        modes = {True, False} if run.training else {False}
        if modes <= self._compared:
            return
        if run.first_sample == 0:  # of a training step, one rank has them
            with torch_pass(self.settings, derived_seed(run, 0)), torch.no_grad():
                module = self.made()
                if not _runs_its_blocks(module, self.blocks):
                    for training in sorted(modes - self._compared, reverse=True):
                        self._check(module, x, training)
        self._compared.update(modes)

    def _check(self, module: torch.nn.Module, x: Any, training: bool) -> None:
        if found := self._difference(module, x, training):
            raise LayoutError(
                f"the blocks one after the other are not {type(module).__name__}.forward in "
                f"{'training' if training else 'evaluation'}: {found}; put what lies between blocks into one of them, "
                "or give TorchModel compare_forward=False if it is meant to differ"
            )

    def _difference(self, module: torch.nn.Module, x: Any, training: bool) -> str | None:
        known = dict(module.named_modules(remove_duplicate=False))
        home = next((p.device for p in module.parameters()), None)  # blocks may compute on a GPU, and it not
        given = map_leaves(lambda leaf: as_tensor(leaf).to(home, copy=True), x)
        trace = _Trace({name: known[name] for name in self.blocks}, given)
        modes = [(inner, inner.training) for inner in module.modules()]
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        hooks = trace.hooks()
        try:
            begin_training(module)
            for inner, _ in modes:
                inner.training &= training
            with torch.set_grad_enabled(training):
                return trace.end(called(module, given))
        except MpizeroError:
            raise
        except Exception as error:
            told = f"it raises {type(error).__name__}: {error}"
            return trace.found or f"{told} (a model of blocks calls the first block with the samples)"
        finally:
            for hook in hooks:
                hook.remove()
            for inner, was in modes:
                inner.training = was
            for buffer, before in buffers:
                buffer.copy_(before)


def _runs_its_blocks(module: torch.nn.Module, blocks: Sequence[str]) -> bool:
    """Tell whether a module has no ``forward`` of its own, or one that runs just these blocks."""
    if type(module).forward is torch.nn.Module.forward:
        return True
    plain = type(module).forward is torch.nn.Sequential.forward
    return plain and list(blocks) == [name for name, _ in module.named_children()]


class _Trace:
    """Follow the calls of blocks in a module's ``forward``, and note the first that differs from a chain of them."""

    def __init__(self, blocks: Mapping[str, torch.nn.Module], x: Any) -> None:
        self.found: str | None = None
        self._names, self._modules, self._next = list(blocks), list(blocks.values()), 0
        self._from, self._x = "the samples", map_leaves(torch.clone, x)

    def hooks(self) -> list[Any]:
        """Register the hooks that follow the calls; return their handles."""
        modules = list({id(one): one for one in self._modules}.values())
        begin = [one.register_forward_pre_hook(self._begins, with_kwargs=True) for one in modules]
        return begin + [one.register_forward_hook(self._ends) for one in modules]

    def end(self, output: Any) -> str | None:
        """Return the first difference, or None, from the output of the whole module."""
        if self.found is None and self._next < len(self._names):
            self.found = f"it does not run block {self._names[self._next]!r}"
        elif self.found is None and (unlike := _unlike(self._x, output)):
            self.found = f"after the last block, it changes {self._from} ({unlike})"
        return self.found

    def _begins(self, module: torch.nn.Module, args: Any, named: Any) -> None:
        if self.found is not None:
            return
        if self._next == len(self._names) or self._modules[self._next] is not module:
            name = next(n for n, one in zip(self._names, self._modules, strict=True) if one is module)
            here = f"block {self._names[self._next]!r}" if self._next < len(self._names) else "no further block"
            self.found = f"it runs block {name!r} where blocks= has {here}"
            return
        expected, given = _bound(module, *arguments_of(self._x)), _bound(module, args, named)
        if unlike := _unlike(expected, given):
            self.found = f"block {self._names[self._next]!r} is given something else than {self._from} ({unlike})"

    def _ends(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.found is None:
            self._from = f"the output of block {self._names[self._next]!r}"
            self._x = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)
            self._next += 1


def _bound(module: torch.nn.Module, args: Any, named: Any) -> dict[str, Any]:
    """Return the arguments of a module's ``forward`` by name, or by number where they do not fit."""
    try:
        found = inspect.signature(module.forward).bind(*args, **named)
    except (TypeError, ValueError):
        return {**{str(i): arg for i, arg in enumerate(args)}, **named}
    found.apply_defaults()
    return found.arguments


def _unlike(expected: Any, found: Any) -> str | None:
    """Return in words how two trees of tensors differ, None if they do not."""
    a, b = dict(paths_of(_=expected)), dict(paths_of(_=found))
    if odd := [path for path in (*a, *b) if (path in a) != (path in b)]:
        return f"{len(a)} values become {len(b)}" if len(a) != len(b) else f"{odd[0][1:]} is in one only"
    for path, one in a.items():
        other = b[path]
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if one is not other and not (type(one) is type(other) and one == other):
                return f"{type(one).__name__} and {type(other).__name__}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            return f"{_shown(one)} becomes {_shown(other)}"
        elif not torch.equal(one, other) and not bool(((one == other) | ((one != one) & (other != other))).all()):
            return f"other values of shape {tuple(one.shape)}"
    return None


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
