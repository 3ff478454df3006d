"""Count what the kernels that PyTorch calls in a pass do: their work, and the memory that they make."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mpizero._util.pytree import map_leaves
from mpizero.adapters.grain_cost import EfficientSamples, PassWork
from mpizero.adapters.torch.arrays import as_tensor
from mpizero.adapters.torch.first.first_loss import MOST_ADDED
from mpizero.adapters.torch.module_call import ModuleCall

#: Kernel calls, and work, of a forward and backward pass over those of the forward pass.
_BOTH = 3


class _Kernels(TorchDispatchMode):  # type: ignore[misc]
    """See, in a ``with`` block, the kernels that PyTorch calls."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch's compiler out of the calls only if it is imported, which takes as long as PyTorch itself."""
        return "torch._dynamo" in sys.modules


def efficient_samples(calls: Sequence[ModuleCall], dtype: np.dtype[Any]) -> EfficientSamples:
    """Return what finds with how many samples a grain's fixed cost is small, from passes of copies of the blocks.

    ``calls`` are the blocks in the order in which they run, ``dtype`` is the type of the parameters.
    """
    size = sum(int(spec.size) for call in calls for spec in call.tensors.specs)
    return EfficientSamples(partial(_work, calls, dtype), size)


def _work(calls: Sequence[ModuleCall], dtype: np.dtype[Any], x: Any, y: Any) -> PassWork:
    """Return the work of a forward and backward pass on ``x``, with parameters that are zero."""
    counter, x = _Counter(), map_leaves(as_tensor, x)
    for call in calls:
        x = call.on_zeros(x, dtype, counter)
    return counter.work


class _Counter(_Kernels):
    """Count the kernels that PyTorch calls in forward passes, and their work, times :data:`_BOTH`."""

    def __init__(self) -> None:
        super().__init__()
        self.work = PassWork()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the kernel, and count it, unless it makes a view or a copy."""
        kwargs = dict(kwargs or {})
        output = function(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, torch.Tensor)]
        if not function.is_view and function is not torch.ops.aten.clone.default and tensors:
            operations: Callable[..., int] | None = flop_registry.get(function.overloadpacket)
            count = operations(*args, **kwargs, out_val=output) if operations is not None else 0
            moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            one = PassWork(1, "convolution" in str(function), count, moved)
            self.work = self.work.plus(PassWork(*(_BOTH * int(number) for number in one)))
        return output


class Allocations(_Kernels):
    """Count, in a ``with`` block, the bytes of the tensors that operations of PyTorch make and that are still used.

    What an operation takes for itself and gives back before it ends is :attr:`unseen`.

    Attributes
    ----------
    now, most : int
        Bytes in use, and the most bytes in use since :meth:`begin`.
    unseen : str
        What is not counted, for people.
    looks : int
        The most passes on samples of one shape in which a module and a loss may also be looked at, which takes memory.
    """

    unseen: ClassVar[str] = "what an operation of PyTorch takes while it runs (convolutions do)"
    looks: ClassVar[int] = MOST_ADDED + 1

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def begin(self) -> None:
        """Start a new measurement of :attr:`most`. Not collective."""
        self.most = self.now

    def size_at(self, address: int) -> int:
        """Return the bytes in use of the memory that begins at ``address``; 0 if no operation made it."""
        return self._sizes.get(address, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and count the memory that it has made."""
        self._see((args, kwargs), made=False)
        result = function(*args, **(kwargs or {}))
        self._see(result, made=True)
        return result

    def _see(self, tree: Any, *, made: bool) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if not address or address in self._sizes:
                continue
            self._sizes[address] = storage.nbytes() if made else 0
            self.now += self._sizes[address]
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._freed, address).atexit = False

    def _freed(self, address: int) -> None:
        self.now -= self._sizes.pop(address, 0)
