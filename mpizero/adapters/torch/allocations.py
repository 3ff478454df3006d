"""Count the memory that PyTorch allocates in a pass, which no tracer of Python's memory sees."""

from __future__ import annotations

import sys
import weakref
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpizero.adapters.torch.first.first_loss import MOST_ADDED


class Allocations(TorchDispatchMode):  # type: ignore[misc]
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch's compiler out of :meth:`__torch_dispatch__` only if it is imported, which takes seconds."""
        return "torch._dynamo" in sys.modules

    def begin(self) -> None:
        """Start a new measurement of :attr:`most`. Not collective."""
        self.most = self.now

    def size_at(self, address: int) -> int:
        """Return the bytes in use of the memory that begins at ``address``; 0 if no operation made it."""
        return self._sizes.get(address, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and count the memory that it has made."""
        self._see((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
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
