"""Refuse modules and losses that would compute wrong results, because a copy still refers to the original module.

``TorchModel`` trains a copy (``copy.deepcopy``) of the module that it is given. Functions are not copied: they still
refer to the original module, which keeps its start values (:func:`check_functions`). A loss that reads an attribute
that the given module sets in its forward pass, such as an auxiliary loss, would read old values, since the copy runs
the passes (:func:`check_loss`). :class:`Originals` detects whether a pass reads tensors of the given module, and
:class:`OriginalForward` compares what a module's own ``forward`` computes with what its blocks compute one after the
other.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dis import get_instructions
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mpizero._util.checks import named
from mpizero._util.pytree import map_leaves, paths_of
from mpizero._util.text import is_users
from mpizero.adapters.torch.autograd import Kernels, as_tensor
from mpizero.adapters.torch.call import TorchSettings, arguments_of, begin_training, called, torch_pass
from mpizero.adapters.user_code import derived_seed
from mpizero.errors import ConfigError, LayoutError, MpizeroError
from mpizero.types import Run


def check_parameters(module: torch.nn.Module) -> None:
    """Raise :class:`ConfigError` if parts of a module, or uses of its parameters, do not work in a copy of the module.

    Not collective. These are DataParallel and DistributedDataParallel, SyncBatchNorm, hooks on the gradients of
    parameters, and parameters that are also held in other containers than the module's own.
    """
    if isinstance(module, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        raise ConfigError(f"TorchModel: {type(module).__name__} shares work itself: give the module inside, .module")
    for path, inner in module.named_modules():
        if isinstance(inner, torch.nn.SyncBatchNorm):
            raise ConfigError(
                f"TorchModel: {path or 'the module'} is a SyncBatchNorm, whose statistics are of all ranks: take a "
                "BatchNorm, which has those of a micro-batch, the same on any number of ranks, and a micro_batch that "
                "is large enough for them"
            )
    parameters = {id(p): name for name, p in module.named_parameters()}
    if hooked := next(
        (name for name, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks), None
    ):
        raise ConfigError(
            f"TorchModel: parameter {hooked!r} has a hook on its gradient, which would not be called: register it on "
            "the layer's output, or change the loss"
        )
    for path, inner in module.named_modules():
        for key, value in vars(inner).items():
            listed = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if (
                key not in ("_parameters", "_flat_weights")
                and (tensor := next((one for one in listed if id(one) in parameters), None)) is not None
            ):
                raise ConfigError(
                    f"TorchModel: {f'{path}.{key}' if path else key} holds parameter {parameters[id(tensor)]!r} beside "
                    "the module's own parameters, where it would have no values: take it from its layer when it is used"
                )


def check_functions(module: torch.nn.Module) -> None:
    """Raise :class:`ConfigError` if the module holds a function that refers to the module or to a submodule.

    A deep copy does not copy functions, so functions in the copy would still use the original module.
    """
    names = {id(inner): name for name, inner in reversed(list(module.named_modules(remove_duplicate=False)))}
    for path, inner in module.named_modules():
        for key, value in vars(inner).items():
            for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,):
                if (child := next((names[id(v)] for v in values_of(one) if id(v) in names), None)) is not None:
                    raise ConfigError(
                        f"TorchModel: {f'{path}.{key}' if path else key} holds the function {one.__qualname__}, which "
                        f"refers to {f'submodule {child!r}' if child else 'the module'}: the module is copied, its "
                        "functions are not, so it would compute with the start values for ever; make it a method, or "
                        "let it take the module as an argument, as hooks do"
                    )


def values_of(function: Any) -> list[Any]:
    """Return the objects to which a function refers by closure, default values and global names. Not collective."""
    if not isinstance(function, FunctionType):
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    values = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names = {one.argval for one in get_instructions(function) if one.opname == "LOAD_GLOBAL"}
    return values + [function.__globals__.get(name) for name in names]


def check_loss(function: Any, module: torch.nn.Module) -> None:
    """Raise :class:`ConfigError` for a loss that reads an attribute which a forward pass of the module sets.

    The bytecode is examined: of the loss and the user's functions that it calls, and of the module's ``forward`` with
    the methods and hooks that it calls. The loss may read an attribute that no forward pass sets, such as the weight of
    a term.
    """
    inside = {id(inner) for inner in module.modules()}
    values = _reached(function)
    if not any(id(value) in inside for value in values):
        return
    methods: dict[str, list[FunctionType]] = {}
    for inner in module.modules():
        for cls in type(inner).__mro__:
            for name, one in vars(cls).items():
                if isinstance(one, FunctionType) and is_users(one.__code__.co_filename):
                    methods.setdefault(name, []).append(one)
    hooks = [hook for inner in module.modules() for hook in inner._forward_hooks.values()]
    passes = _called_by([*methods.get("forward", ()), *filter(_is_users, hooks)], methods)
    stored = {name for one in passes for name in _names(one, ("STORE_ATTR",))}
    losses = _called_by([value for value in values if _is_users(value)], methods)
    if read := sorted(stored & {name for one in losses for name in _names(one, ("LOAD_ATTR", "LOAD_METHOD"))}):
        raise ConfigError(
            f"TorchModel: {named(function, 'loss')} reads {read[0]!r} of the module that was given, where no pass of "
            "the copy that is trained leaves it: let the module return it beside its output, or let the loss have a "
            "parameter module, loss(prediction, target, module), which is given the module that is trained"
        )


def _reached(function: Any) -> list[Any]:
    """Return a loss and the objects that it reaches by its attributes and by references of the user's functions."""
    reached: list[Any] = []
    waiting = [function, getattr(type(function), "__call__", None)]  # noqa: B004 - the function itself
    while waiting:
        one = waiting.pop()
        if any(one is known for known in reached):
            continue
        reached.append(one)
        if isinstance(one, MethodType):
            waiting += [one.__func__, one.__self__]
        elif isinstance(one, partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif one is function and not isinstance(one, FunctionType):
            waiting += getattr(one, "__dict__", {}).values()
        elif _is_users(one):
            waiting += values_of(one)
    return reached


def _is_users(one: Any) -> bool:
    return isinstance(one, FunctionType) and is_users(one.__code__.co_filename)


def _called_by(begin: Iterable[FunctionType], methods: dict[str, list[FunctionType]]) -> list[FunctionType]:
    """Return the functions ``begin`` and, recursively, all ``methods`` whose names they mention."""
    called, waiting = [], list(begin)
    while waiting:
        one = waiting.pop()
        if one not in called:
            called.append(one)
            waiting += [m for name in _names(one, ("LOAD_ATTR", "LOAD_METHOD")) for m in methods.get(name, ())]
    return called


def _names(function: FunctionType, operations: Sequence[str]) -> set[str]:
    """Return the names that a function, or one defined in it, uses in some bytecode ``operations``."""
    codes, names = [function.__code__], set()
    while codes:
        code = codes.pop()
        names |= {str(one.argval) for one in get_instructions(code) if one.opname in operations}
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return names


def mentions_data(module: torch.nn.Module) -> bool:
    """Tell whether the source of a module's classes mentions ``.data``, or cannot be read. Not collective."""
    names = {cls.__module__ for inner in module.modules() for cls in type(inner).__mro__}
    for name in sorted(names - {"builtins"}):
        if not name.startswith("torch."):
            try:
                text = inspect.getsource(sys.modules[name])
            except (OSError, TypeError, KeyError):
                return True
            if re.search(r"(?<!\bmz)(?<!\bmpizero)(?<!\butils)\.data\b", text):
                return True
    return False


class Originals:
    """Hold weak references to the parameters and buffers of a module that was given to ``TorchModel``."""

    def __init__(self, module: torch.nn.Module) -> None:
        #: Whether a sharded model has taken the module's values, and whether a copy of the module has been trained.
        self.placed = self.trained = False
        tensors = (*module.named_parameters(), *module.named_buffers())
        self._references = [(name, weakref.ref(tensor)) for name, tensor in tensors]

    def reads(self) -> Reads:
        """Return a context that notes the first of the tensors that is used in it. Not collective."""
        alive = [(name, reference()) for name, reference in self._references]
        return Reads({_address(tensor): name for name, tensor in alive if tensor is not None})


class Reads(Kernels):
    """Note which tensor is used first by an operation, of those in ``names``, a mapping from address to name."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names, self.first = {address: name for address, name in names.items() if address}, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and note a watched tensor among its arguments, unless one was noted before."""
        used = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        self.first = self.first or next((name for leaf in used if (name := self._names.get(_address(leaf)))), "")
        return func(*args, **(kwargs or {}))


def _address(tensor: torch.Tensor) -> int:
    """Return the address at which a tensor's memory begins; 0 for a tensor without memory."""
    try:
        address: int = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
    return address


@dataclass(frozen=True, eq=False)
class OriginalForward:
    """Run a module's own ``forward`` once in training and once in evaluation mode, and compare it with the blocks.

    Hooks compare the inputs and outputs of blocks within one pass, so dropout, which would differ in a second pass,
    makes no difference. The pass runs the module that was given, or one newly made, with its start values, on the rank
    that computes the first samples.

    Parameters
    ----------
    made : callable
        Returns the module that was given, or a newly made one.
    blocks : sequence of str
        The names of the module's blocks, in order.
    settings : TorchSettings
        Settings of the process during a pass.
    """

    made: Callable[[], torch.nn.Module]
    blocks: Sequence[str]
    settings: TorchSettings
    _compared: set[bool] = field(default_factory=set)

    def compare(self, x: Any, run: Run) -> None:
        """Raise :class:`LayoutError` if ``forward`` computes something else than the chain of blocks. Not collective.

        ``x`` are the samples. The first samples of the first training step are compared in both modes; in a program
        that does not train, those of the first evaluation in evaluation mode.
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
        if unlike := self._difference(module, x, training):
            raise LayoutError(
                f"the blocks one after the other are not {type(module).__name__}.forward in "
                f"{'training' if training else 'evaluation'}: {unlike}; put what lies between blocks into one of them, "
                "or give TorchModel compare_forward=False if it is meant to differ"
            )

    def _difference(self, module: torch.nn.Module, x: Any, training: bool) -> str | None:
        known = dict(module.named_modules(remove_duplicate=False))
        home = next((p.device for p in module.parameters()), None)  # blocks may compute on a GPU, and it not
        samples = map_leaves(lambda leaf: as_tensor(leaf).to(home, copy=True), x)
        trace = _Trace({name: known[name] for name in self.blocks}, samples)
        modes = [(inner, inner.training) for inner in module.modules()]
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        hooks = trace.hooks()
        try:
            begin_training(module)
            for inner, _ in modes:
                inner.training &= training
            with torch.set_grad_enabled(training):
                return trace.end(called(module, samples))
        except MpizeroError:
            raise
        except Exception as error:
            message = f"it raises {type(error).__name__}: {error}"
            return trace.difference or f"{message} (a model of blocks calls the first block with the samples)"
        finally:
            for hook in hooks:
                hook.remove()
            for inner, was in modes:
                inner.training = was
            for buffer, before in buffers:
                buffer.copy_(before)


def _runs_its_blocks(module: torch.nn.Module, blocks: Sequence[str]) -> bool:
    """Tell whether a module has no ``forward``, or is a Sequential whose children are just ``blocks``, in order."""
    if type(module).forward is torch.nn.Module.forward:
        return True
    plain = type(module).forward is torch.nn.Sequential.forward
    return plain and list(blocks) == [name for name, _ in module.named_children()]


class _Trace:
    """Follow the calls of blocks in a module's ``forward``, and note the first difference from a chain of blocks."""

    def __init__(self, blocks: Mapping[str, torch.nn.Module], x: Any) -> None:
        self.difference: str | None = None
        self._names, self._modules, self._next = list(blocks), list(blocks.values()), 0
        self._from, self._x = "the samples", map_leaves(torch.clone, x)

    def hooks(self) -> list[Any]:
        """Register the hooks that follow the calls; return their handles."""
        modules = list({id(one): one for one in self._modules}.values())
        begin = [one.register_forward_pre_hook(self._begins, with_kwargs=True) for one in modules]
        return begin + [one.register_forward_hook(self._ends) for one in modules]

    def end(self, output: Any) -> str | None:
        """Return the first difference, or None, given the output of the whole module."""
        if self.difference is None and self._next < len(self._names):
            self.difference = f"it does not run block {self._names[self._next]!r}"
        elif self.difference is None and (unlike := _unlike(self._x, output)):
            self.difference = f"after the last block, it changes {self._from} ({unlike})"
        return self.difference

    def _begins(self, module: torch.nn.Module, args: Any, named: Any) -> None:
        if self.difference is not None:
            return
        if self._next == len(self._names) or self._modules[self._next] is not module:
            name = next(n for n, one in zip(self._names, self._modules, strict=True) if one is module)
            next_block = f"block {self._names[self._next]!r}" if self._next < len(self._names) else "no further block"
            self.difference = f"it runs block {name!r} where blocks= has {next_block}"
            return
        expected, actual = _bound(module, *arguments_of(self._x)), _bound(module, args, named)
        if unlike := _unlike(expected, actual):
            self.difference = f"block {self._names[self._next]!r} is given something else than {self._from} ({unlike})"

    def _ends(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.difference is None:
            self._from = f"the output of block {self._names[self._next]!r}"
            self._x = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)
            self._next += 1


def _bound(module: torch.nn.Module, args: Any, named: Any) -> dict[str, Any]:
    """Return the arguments of a module's ``forward`` by name, or by position if they do not fit its signature."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **named)
    except (TypeError, ValueError):
        return {**{str(i): arg for i, arg in enumerate(args)}, **named}
    bound.apply_defaults()
    return bound.arguments


def _unlike(expected: Any, actual: Any) -> str | None:
    """Return a description of how two trees of tensors differ, or None if they are equal."""
    a, b = dict(paths_of(_=expected)), dict(paths_of(_=actual))
    if odd := [path for path in (*a, *b) if (path in a) != (path in b)]:
        return f"{len(a)} values become {len(b)}" if len(a) != len(b) else f"{odd[0][1:]} is in one only"
    for path, one in a.items():
        other = b[path]
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if one is not other and not (type(one) is type(other) and one == other):
                return f"{type(one).__name__} and {type(other).__name__}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            return f"{_described(one)} becomes {_described(other)}"
        elif not torch.equal(one, other) and not bool(((one == other) | ((one != one) & (other != other))).all()):
            return f"other values of shape {tuple(one.shape)}"
    return None


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
