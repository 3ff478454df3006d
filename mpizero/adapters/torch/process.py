"""Set PyTorch's settings of the process for one pass through a module, and restore them afterwards.

[Note: bits of PyTorch] A result must not depend on the rank that computes it. Random numbers are drawn from a seed of
their own (:mod:`mpizero.adapters.derived_seed`). The number of threads is the configuration's. PyTorch is asked for
deterministic algorithms. The products of Intel's MKL round differently for arrays of different alignment, and a
parameter lies at another address in every layout; ``MKL_CBWR=AUTO`` makes MKL round in one way. It costs no measurable
time (docs/bring_your_model.md), but MKL reads it only once, before its first product. On a GPU, PyTorch refuses
products while deterministic algorithms are asked for, unless ``CUBLAS_WORKSPACE_CONFIG`` gives cuBLAS memory of its
own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpizero.adapters.torch.functions import OwnKernels
from mpizero.errors import ConfigError

#: PyTorch's generator and settings belong to the process: ranks that are threads of one process take turns.
_TURN = threading.RLock()


@dataclass
class TorchSettings:
    """Hold the settings of PyTorch during a model's passes.

    Attributes
    ----------
    threads : int or None
        The number of threads; None for that which PyTorch has.
    own_kernels : bool
        Whether mpizero's kernels compute the functions that they know.
    """

    threads: int | None = None
    own_kernels: bool = False

    def functions(self) -> AbstractContextManager[Any]:
        """Return a context in which the kernels are used; it takes a moment of every call of PyTorch."""
        return OwnKernels() if self.own_kernels else nullcontext()


#: Does what ``torch.use_deterministic_algorithms`` does, which takes as long as a small layer.
_deterministic = getattr(torch._C, "_set_deterministic_algorithms", torch.use_deterministic_algorithms)


@contextmanager
def torch_pass(settings: TorchSettings, seed: int | None = None) -> Iterator[None]:
    """Let this thread alone use PyTorch, with the settings of a pass and, if given, with a seed; restore them after.

    Not collective.
    """
    with _TURN:
        threads, algorithms = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        filled, state = torch.utils.deterministic.fill_uninitialized_memory, None
        if settings.threads not in (None, threads):
            torch.set_num_threads(int(settings.threads or 1))
        if not algorithms:
            torch.utils.deterministic.fill_uninitialized_memory = False  # with NaN, which only takes time
            _deterministic(True)
        if seed is not None:
            state = random_state()
            for generator in _generators():
                generator.manual_seed(seed)
        try:
            yield
        finally:
            if state is not None:
                set_random_state(state)
            if not algorithms:
                _deterministic(False)
                torch.utils.deterministic.fill_uninitialized_memory = filled
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def _generators() -> list[torch.Generator]:
    """Return the generators that modules draw from: the host's, and that of this thread's GPU if PyTorch uses GPUs."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def random_state() -> list[torch.Tensor]:
    """Return the states of the generators that modules draw from. Not collective."""
    return [generator.get_state() for generator in _generators()]


def set_random_state(state: list[torch.Tensor]) -> None:
    """Give the generators that modules draw from the states that :func:`random_state` returned. Not collective."""
    for generator, before in zip(_generators(), state, strict=False):  # the GPU's may be new
        generator.set_state(before)


def drawn_since(state: list[torch.Tensor]) -> bool:
    """Tell whether random numbers were drawn since :func:`random_state` returned ``state``. Not collective."""
    return not all(torch.equal(before, now) for before, now in zip(state, random_state(), strict=False))


def check_contexts() -> None:
    """Raise :class:`ConfigError` where the program has put a context of PyTorch around a pass that would change it."""
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "TorchModel is used inside of torch.inference_mode(), in which nothing can be trained: leave it out; "
            "evaluate and predict compute no gradients by themselves"
        )
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise ConfigError(
            "TorchModel is used inside of torch.autocast(...), where parameters, loss and gradients are not what they "
            "are elsewhere: put it into the module's forward, around what is to be computed in 16 bits, and let that "
            "end with .float()"
        )


def use_gpu() -> None:
    """Let PyTorch use GPUs in this process, so that their generators are seeded from the first pass on. Not collective.

    Raises
    ------
    ConfigError
        If PyTorch cannot use GPUs.
    """
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f'device = "cuda": PyTorch {torch.__version__} finds no GPU to use: {error}; install its build for CUDA, '
            'or train with device = "cpu"'
        ) from error


def round_in_one_way() -> None:
    """Ask MKL and cuBLAS, if they were not used yet, to round in one way wherever arrays lie. Not collective.

    Values that the environment has already are left as they are.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def check_rounding() -> None:
    """Raise :class:`ConfigError` if products round differently for arrays of different alignment. Not collective."""
    rng = np.random.default_rng(0)
    for dtype, rows, inner, columns in ((np.float32, 1, 64, 10), (np.float64, 1, 64, 10), (np.float64, 7, 13, 31)):
        x = torch.from_numpy(rng.normal(size=(rows, inner)).astype(dtype))
        weight = rng.normal(size=(columns, inner)).astype(dtype)
        found = {
            torch.nn.functional.linear(x, torch.from_numpy(_placed(weight, offset))).numpy().tobytes()
            for offset in (0, weight.itemsize)
        }
        if len(found) > 1:
            raise ConfigError(
                "PyTorch's products depend on where an array lies in memory, so the bits of a training would depend on "
                f"its layout (MKL_CBWR={os.environ.get('MKL_CBWR')!r}): PyTorch computed before mpizero could ask for "
                "another way; import mpizero.adapters.torch before, or set MKL_CBWR=AUTO in the environment"
            )


def _placed(array: np.ndarray, offset: int) -> np.ndarray:
    """Return a copy of ``array`` that begins ``offset`` bytes after a multiple of 64."""
    raw = np.empty(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


round_in_one_way()
