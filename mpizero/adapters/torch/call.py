"""Call a PyTorch module with other tensors in place of its parameters and buffers, under the settings of a pass.

:class:`BlockTensors` describes the parameters and buffers of a block's module; :func:`swapped_in` replaces them for a
while. :func:`torch_pass` sets PyTorch's settings of the process for one pass through a module, and restores them
afterwards. :func:`called` calls a module with the input of a block, and explains some of PyTorch's errors.

[Note: bits of PyTorch] A result must not depend on the rank that computes it. Random numbers are drawn from seeds that
do not depend on the rank (:mod:`mpizero.adapters.user_code`). The configuration sets the number of threads. PyTorch is
asked for deterministic algorithms. The products of Intel's MKL round differently for arrays of different alignment, and
the address of a parameter depends on the layout; with ``MKL_CBWR=AUTO``, MKL rounds equally for every alignment. The
variable costs no measurable time (docs/bring_your_model.md), but MKL reads it only once, before its first product. On a
GPU, PyTorch refuses products under deterministic algorithms, unless ``CUBLAS_WORKSPACE_CONFIG`` gives cuBLAS a
workspace.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import torch

from mpizero._util.names import nearest
from mpizero._util.pytree import leaves_of
from mpizero._util.text import users_line
from mpizero.adapters.torch.autograd import MpizeroKernels
from mpizero.errors import ConfigError, DataError
from mpizero.layout.flat import joined
from mpizero.types import IntegerSpec, ParameterSpec

#: A dictionary of a module (its parameters or buffers), and a key of it.
Location = tuple[dict[str, Any], str]


@dataclass(frozen=True)
class ModuleTensor:
    """Describe one parameter or buffer of a module.

    Attributes
    ----------
    name : str
        The first name of the tensor in ``module.state_dict()``.
    shape : tuple of int
        Shape of the tensor.
    trainable : bool
        Whether the tensor is a parameter that is trained.
    locations : tuple of Location
        All entries of the module's dictionaries that hold the tensor; a tied parameter has several.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    locations: tuple[Location, ...] = field(compare=False, repr=False)

    @property
    def now(self) -> torch.Tensor:
        """The tensor that the module holds now, read from the first of its ``locations``."""
        owner, key = self.locations[0]
        return owner[key]


@dataclass(frozen=True)
class BlockTensors:
    """Describe the parameters and buffers of a block's module, and how mpizero stores them.

    Attributes
    ----------
    stored : tuple of ModuleTensor
        The parameters, and the buffers that are stored like parameters: statistics, which are averaged, and constants,
        which are frozen.
    specs : tuple of ParameterSpec
        Descriptions of ``stored``, in the same order, with names relative to the block.
    integers : tuple of ModuleTensor
        Buffers of whole numbers, such as counters of batches.
    integer_specs : tuple of IntegerSpec
        Descriptions of ``integers``, in the same order.
    others : tuple of ModuleTensor
        The other buffers, which stay in the module; no forward pass may change them.
    parameters : frozenset of str
        Names of the tensors in ``stored`` that are parameters of the module, not buffers.
    unused : frozenset of str
        Names of parameters on which the loss may not depend in some passes.
    """

    stored: tuple[ModuleTensor, ...]
    specs: tuple[ParameterSpec, ...]
    integers: tuple[ModuleTensor, ...] = ()
    integer_specs: tuple[IntegerSpec, ...] = ()
    others: tuple[ModuleTensor, ...] = ()
    parameters: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()

    def with_frozen(self, block: str, names: Collection[str]) -> BlockTensors:
        """Return a copy in which the parameters with these global names, and those tied to them, are not trained."""
        specs = (
            replace(spec, trainable=spec.trainable and (spec.tied or joined(block, spec.name)) not in names)
            for spec in self.specs
        )
        return replace(self, specs=tuple(specs))


def without_values(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module whose parameters are on the meta device; buffers are copied. Not collective."""
    empty = {
        id(p): torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    try:
        twin = copy.deepcopy(module, dict(empty))
    except Exception as error:
        raise ConfigError(
            f"TorchModel: the module {type(module).__name__} cannot be copied (copy.deepcopy: {type(error).__name__}: "
            f"{error}); keep what cannot be copied out of it; torch.nn.utils.parametrizations has weight_norm and "
            "spectral_norm that can be"
        ) from error
    for inner in twin.modules():
        if isinstance(inner, torch.nn.Embedding | torch.nn.EmbeddingBag):
            inner.sparse = False  # their gradients would be of a kind that is not added up here
    begin_training(twin)
    return twin


def module_tensors(module: torch.nn.Module, kind: Literal["_parameters", "_buffers"]) -> dict[int, ModuleTensor]:
    """Return a module's parameters or buffers by ``id`` of the tensor, in ``state_dict()`` order. Not collective."""
    locations: dict[int, list[Location]] = {}
    names: dict[int, tuple[str, torch.Tensor]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        owner: dict[str, Any] = getattr(inner, kind)
        for key, tensor in owner.items():
            if tensor is None:
                continue
            names.setdefault(id(tensor), (f"{path}.{key}" if path else key, tensor))
            if not any(owner is known and key == name for known, name in locations.get(id(tensor), ())):
                locations.setdefault(id(tensor), []).append((owner, key))
    return {
        number: ModuleTensor(name, tuple(tensor.shape), tensor.requires_grad, tuple(locations[number]))
        for number, (name, tensor) in names.items()
    }


#: The dtypes that parameters may have.
DTYPES: dict[Any, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


def dtype_of(module: torch.nn.Module) -> np.dtype[Any]:
    """Return the dtype that all parameters of a module have. Not collective.

    Raises
    ------
    ConfigError
        If there is no parameter, one has no shape yet, the module is compiled by ``torch.jit``, or the parameters are
        neither all float32 nor all float64.
    """
    first: dict[torch.dtype, str] = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(f"TorchModel: parameter {name!r} has no shape yet: run the lazy module once before")
        first.setdefault(parameter.dtype, name)
    if not first:
        raise ConfigError(f"TorchModel: the module {type(module).__name__} has no parameters, so nothing is trained")
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"TorchModel: {type(module).__name__} is compiled by torch.jit, and holds its parameters where nothing "
            "else can be put: give the module that it was made of"
        )
    if numbers := next((name for dtype, name in first.items() if dtype.is_complex), None):
        raise ConfigError(
            f"TorchModel: parameter {numbers!r} is complex: register its parts as one real parameter, "
            "nn.Parameter(torch.view_as_real(value)), and compute with torch.view_as_complex of it, which has the same "
            "gradient"
        )
    if len(first) > 1 or next(iter(first)) not in DTYPES:
        listed = ", ".join(f"{name!r} is {str(dtype).removeprefix('torch.')}" for dtype, name in first.items())
        raise ConfigError(
            f"TorchModel: all parameters must be float32, or all float64; {listed}: convert them, module.float()"
        )
    return DTYPES[next(iter(first))]


def begin_training(module: torch.nn.Module) -> None:
    """Call each ``train()`` that the user overrides, which may keep submodules in evaluation mode. Not collective.

    Submodules that are in evaluation mode stay in it.
    """
    modes = [(inner, inner.training) for inner in module.modules()]
    for inner, was in modes:
        if was and type(inner).train is not torch.nn.Module.train:
            inner.train()
    for inner, was in modes:
        inner.training &= was


def running_statistics(module: torch.nn.Module) -> set[int]:
    """Return the ``id`` of each buffer that is a running statistic of a norm. Not collective."""
    kind = torch.nn.modules.batchnorm._NormBase
    norms = (inner for inner in module.modules() if isinstance(inner, kind) and inner.training)
    buffers = (buffer for norm in norms for buffer in norm._buffers.values())
    return {id(buffer) for buffer in buffers if buffer is not None and buffer.is_floating_point()}


@contextmanager
def swapped_in(targets: Sequence[ModuleTensor], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Replace ``targets``, parameters and buffers of a module, by ``tensors`` while the context is active.

    Not collective. Only one thread at a time may be in such a context.
    """
    before = [[owner[owner_key] for owner, owner_key in one.locations] for one in targets]
    try:
        for one, tensor in zip(targets, tensors, strict=True):
            for owner, key in one.locations:
                owner[key] = tensor
        yield
    finally:
        for one, old in zip(targets, before, strict=True):
            for (owner, key), tensor in zip(one.locations, old, strict=True):
                owner[key] = tensor


def bring(targets: Sequence[ModuleTensor], device: torch.device) -> None:
    """Move tensors of a module to ``device``, in all their locations, if they are on another one. Not collective."""
    for one in targets:
        if one.now.device != device:
            moved = one.now.to(device)
            for owner, key in one.locations:
                owner[key] = moved


def chosen_blocks(module: torch.nn.Module, blocks: Any) -> list[str]:
    """Return the names in ``module`` of the submodules that ``blocks`` chooses, in order. Not collective.

    ``blocks`` is an ``nn.Sequential``, or a list of submodules and of names with wildcards.
    """
    known = dict(module.named_modules(remove_duplicate=False))
    name_of = {id(inner): name for name, inner in reversed(known.items())}
    if not isinstance(blocks, torch.nn.Sequential | torch.nn.ModuleList | list | tuple):
        raise ConfigError(
            f"TorchModel: blocks is an nn.Sequential, or a list of submodules or of their names, got {blocks!r:.80}"
        )
    chosen: list[str] = []
    for one in blocks:
        if isinstance(one, str):
            names = [name for name in known if name and name.count(".") == one.count(".") and fnmatchcase(name, one)]
            if not names:
                raise ConfigError(
                    f"TorchModel: blocks: no submodule is called {one!r}{nearest(one, known)}; there are "
                    f"{', '.join(n for n in known if n and '.' not in n)}"
                )
        elif isinstance(one, torch.nn.Module) and id(one) in name_of:
            names = [name_of[id(one)]]
        else:
            raise ConfigError(f"TorchModel: blocks: {type(one).__name__} is no submodule of {type(module).__name__}")
        for name in names:
            if name in chosen:
                raise ConfigError(f"TorchModel: blocks names {name!r} twice")
            chosen.append(name)
    if not chosen:
        raise ConfigError("TorchModel: blocks is empty: name at least one submodule, or leave it out")
    return chosen


def check_blocks_complete(module: torch.nn.Module, blocks: dict[str, torch.nn.Module]) -> None:
    """Raise :class:`ConfigError` if a parameter or buffer is in no block, or if a block contains another block."""
    names = list(blocks)
    for i, name in enumerate(names):
        if inner := next((other for other in names[:i] + names[i + 1 :] if other.startswith(f"{name}.")), None):
            raise ConfigError(f"TorchModel: blocks: {inner!r} is a part of {name!r}; name one of them")
    in_blocks = {id(p) for block in blocks.values() for p in block.parameters()}
    in_blocks |= {id(b) for block in blocks.values() for b in block.buffers()}
    left = [name for name, t in (*module.named_parameters(), *module.named_buffers()) if id(t) not in in_blocks]
    if left:
        raise ConfigError(
            f"TorchModel: no block holds {', '.join(map(repr, left[:4]))}{' and others' if len(left) > 4 else ''}: a "
            "model of blocks runs its blocks one after the other and nothing else of the module; put it into a "
            "submodule that is one of the blocks, or leave blocks out"
        )


@dataclass
class TorchSettings:
    """Hold the settings of PyTorch during a model's passes.

    Attributes
    ----------
    threads : int or None
        Number of PyTorch's threads; None leaves it unchanged.
    mpizero_kernels : bool
        Whether mpizero's kernels compute the functions of :class:`MpizeroKernels`.
    """

    threads: int | None = None
    mpizero_kernels: bool = False

    def functions(self) -> AbstractContextManager[Any]:
        """Return a context that uses mpizero's kernels if :attr:`mpizero_kernels` is true, and does nothing otherwise.

        With these kernels, every call of PyTorch in the context takes a little longer.
        """
        return MpizeroKernels() if self.mpizero_kernels else nullcontext()


#: PyTorch's generator and settings belong to the process: ranks that are threads of one process take turns.
_TURN = threading.RLock()


#: Does what ``torch.use_deterministic_algorithms`` does, which takes as long as a small layer.
_deterministic = getattr(torch._C, "_set_deterministic_algorithms", torch.use_deterministic_algorithms)


@contextmanager
def torch_pass(settings: TorchSettings, seed: int | None = None) -> Iterator[None]:
    """Let this thread alone use PyTorch, with ``settings`` and, if given, random numbers from ``seed``.

    PyTorch's previous settings and states of generators are restored at the end. Not collective.
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
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


def random_state() -> list[torch.Tensor]:
    """Return the states of the generators that modules draw from. Not collective."""
    return [generator.get_state() for generator in _generators()]


def set_random_state(state: list[torch.Tensor]) -> None:
    """Restore states of random generators that :func:`random_state` has returned. Not collective."""
    for generator, before in zip(_generators(), state, strict=False):  # the GPU's may be new
        generator.set_state(before)


def drawn_since(state: list[torch.Tensor]) -> bool:
    """Tell whether random numbers were drawn since :func:`random_state` returned ``state``. Not collective."""
    return not all(torch.equal(before, now) for before, now in zip(state, random_state(), strict=False))


def check_contexts() -> None:
    """Raise :class:`ConfigError` inside ``torch.inference_mode`` or ``torch.autocast``, which would change a pass."""
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


# So MKL and cuBLAS, if they were not used yet, round in one way wherever arrays lie. What the environment says stays.
os.environ.setdefault("MKL_CBWR", "AUTO")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def check_rounding() -> None:
    """Raise :class:`ConfigError` if products round differently for arrays of different alignment. Not collective."""
    rng = np.random.default_rng(0)
    for dtype, rows, inner, columns in ((np.float32, 1, 64, 10), (np.float64, 1, 64, 10), (np.float64, 7, 13, 31)):
        x = torch.from_numpy(rng.normal(size=(rows, inner)).astype(dtype))
        weight = rng.normal(size=(columns, inner)).astype(dtype)
        products = {
            torch.nn.functional.linear(x, torch.from_numpy(_placed(weight, offset))).numpy().tobytes()
            for offset in (0, weight.itemsize)
        }
        if len(products) > 1:
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


def called(module: torch.nn.Module, x: Any) -> Any:
    """Call a module: a tuple becomes several arguments, a dictionary keyword arguments. Not collective.

    Raises
    ------
    DataError
        If PyTorch raises an error that mpizero can explain, such as for samples of another dtype, or too few for a
        batch norm.
    """
    args, named = arguments_of(x)
    try:
        return module(*args, **named)
    except (RuntimeError, ValueError, TypeError) as error:
        if (message := _in_words(error, module, x)) is None:
            raise
        line = users_line(error.__traceback__)
        raise DataError(f"{type(module).__name__}: {message}{'' if line is None else f' ({line})'}") from error


#: What PyTorch says where a derivative is asked for without a graph.
UNDIFFERENTIATED = ("does not require grad", "not have been used in the graph")


def _in_words(error: Exception, module: torch.nn.Module, x: Any) -> str | None:
    """Return what an error of PyTorch means and how to avoid it, or None if that is unknown."""
    tensors = [leaf for leaf in leaves_of(x) if isinstance(leaf, torch.Tensor)]
    if isinstance(error, TypeError):
        return _of_arguments(str(error), module, x)
    if any(words in str(error) for words in UNDIFFERENTIATED) and not torch.is_grad_enabled():
        return (
            f"its forward differentiates ({error}), but evaluate and predict run it without a graph, as PyTorch does "
            "under no_grad: put with torch.enable_grad(): around what it differentiates"
        )
    if "Expected more than 1 value per channel" in str(error):
        return (
            f"a batch norm has one sample in a micro-batch of {len(tensors[0]) if tensors else 1}, which has no "
            "variance: choose a larger micro_batch, and a global batch that leaves no rest of one sample"
        )
    expected = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    actual = next((t.dtype for t in tensors if t.is_floating_point() and t.dtype != expected), None)
    if expected is not None and actual is not None and "type" in str(error):
        kinds = [str(dtype).removeprefix("torch.") for dtype in (actual, expected)]
        return f"its input is {kinds[0]}, its parameters are {kinds[1]}: convert the samples, x.astype(np.{kinds[1]})"
    return None


def _of_arguments(message: str, module: torch.nn.Module, x: Any) -> str | None:
    """Return a message about how an input becomes arguments, if ``forward`` does not take these; otherwise None."""
    if not message.startswith(f"{type(module).__qualname__}.forward() "):
        return None
    if isinstance(x, tuple):
        return f"{message}: a tuple of {len(x)} becomes {len(x)} arguments; a list or a dataclass is one"
    if isinstance(x, Mapping):
        return f"{message}: a dictionary becomes keyword arguments, {', '.join(map(str, x))}"
    return f"{message}: it is given one argument, {type(x).__name__}; a tuple becomes several, a dictionary keywords"


def arguments_of(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for an input: several for a tuple, keywords for a dictionary, else one. Not collective."""
    if isinstance(x, tuple):
        return x, {}
    return ((), dict(x)) if isinstance(x, Mapping) else ((x,), {})
