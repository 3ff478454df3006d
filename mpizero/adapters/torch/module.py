"""Make a model of a PyTorch module.

:class:`TorchModel` trains a copy of the module, as blocks or as one function. If the loss takes the module or the
module's input as an argument, module and loss are computed together (:class:`JointFunctions`). Such a loss has terms
that do not depend on the prediction alone: a penalty on weights, a residual with derivatives with respect to the input.
The loss needs all parameters while it runs, so module and loss form one function, as in
:class:`~mpizero.adapters.FunctionModel`. :class:`LeftBehind` prints a notice when the module that was given is used
while it still has its start values.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, replace
from operator import itemgetter
from threading import Lock
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from mpizero._util import checks
from mpizero._util.checks import named
from mpizero._util.names import explains, no_attribute
from mpizero._util.pytree import map_leaves
from mpizero._util.text import Line, is_users, notice
from mpizero.adapters.torch.autograd import Gradients, as_array, as_tensor, gradient_leaves
from mpizero.adapters.torch.blocks import Describer, TorchBlock, chosen_names
from mpizero.adapters.torch.call import (
    BlockTensors,
    TorchSettings,
    called,
    check_blocks_complete,
    check_contexts,
    check_rounding,
    chosen_blocks,
    dtype_of,
    torch_pass,
    use_gpu,
    without_values,
)
from mpizero.adapters.torch.first_pass import FirstPass, Trial
from mpizero.adapters.torch.optimizers import convert_optimizer
from mpizero.adapters.torch.originals import (
    OriginalForward,
    Originals,
    check_functions,
    check_loss,
    check_parameters,
    mentions_data,
)
from mpizero.adapters.torch.passes import ModuleCall, Passed, TorchLoss, efficient_samples
from mpizero.adapters.user_code import PassTimes
from mpizero.errors import ArgumentError, ConfigError, LayoutError
from mpizero.layout.flat import joined, nested
from mpizero.types import EVALUATE, Array, Run

#: Held while a module is looked at, copied and given hooks, because ranks that are threads may be given the same one.
_COPYING = Lock()
#: Largest number of samples of a micro-batch that is reported as too small for batch norms.
FEW_FOR_BATCH_NORM = 2


@explains
class TorchModel:
    """Make a model of a PyTorch module, which every strategy can train.

    The module's code runs with parameters in mpizero's memory, one copy per node, and autograd computes the gradients.
    The module that is given keeps its values; ``model.named_parameters()`` of the sharded model has the trained ones,
    under the names of ``module.state_dict()``, and :meth:`fill` copies them to the module.

    Parameters
    ----------
    module : torch.nn.Module or callable
        The module, or a function without arguments that makes it. The function is called when the model is made, with
        PyTorch's generator seeded by ``seed``, and again for each sharded model, for its start values; so no rank keeps
        a copy of them. All parameters must be float32, or all float64.
    loss : callable
        ``loss(prediction, target)``, on tensors. The loss returns the sum over samples, or that sum and the
        samples' weight. The weight is the number of samples if it is not returned, as by
        ``torch.nn.CrossEntropyLoss(reduction="sum")``. If the loss has a parameter ``module``, it is given the module
        that is trained, for a penalty on weights or another pass; if it has a parameter ``x``, it is given the module's
        input, with respect to which the prediction can be differentiated. Module and loss then form a model of one
        function, without blocks. Multiply a term that does not depend on the samples by their number.
    blocks : nn.Sequential, list of submodules and names, or None
        The submodules that the module runs one after the other, in this order, and nothing else: ``["embedding",
        "layers.*", "head"]``. These blocks are the units that ZeRO-3 gathers, pipelines distribute and activation
        checkpointing repeats. A tuple that a block returns becomes several arguments of the next block, a dictionary
        keyword arguments. With None, the module is one block, and ZeRO-3 gathers all its parameters together.
    seed : int
        Seed of random numbers, such as those of dropout.
    frozen : collection of str
        Names, or shell patterns, of parameters that are not trained, besides those without ``requires_grad``.
    unused : collection of str
        Names, or shell patterns, of parameters that the loss of some samples does not depend on. Their gradient is then
        zero; a missing gradient of any other parameter is an error.
    averaged : collection of str
        Names, or shell patterns, of buffers that hold statistics of the samples. Every micro-batch of a step begins
        with the values from before the step; the step ends with the mean of the micro-batches' new values, weighted by
        numbers of samples. Running means and variances of norms count as such statistics without being named. Of all
        other buffers, a forward pass may change only those of whole numbers in ``state_dict()``, such as counters of
        batches.
    compare_forward : bool
        Whether the first samples, in training and in evaluation, also run through the module's own ``forward``, which
        must compute what the blocks compute. A module without a ``forward``, and an ``nn.Sequential`` whose children
        are the blocks, are not run. The argument also says whether the first samples run in two parts, whose results
        must be those of the samples together. Give False if one of these results is meant to differ.
    activation_checkpointing : collection of str
        Names, or shell patterns, of blocks of which only the input is kept for the backward pass. The backward pass
        runs these blocks again, with the same random numbers, so results have the same bits.
    kernels : {"torch", "mpizero"}
        Library that computes ``gelu(approximate="tanh")``, ``silu``, and
        ``scaled_dot_product_attention(is_causal=True)`` without mask and dropout, on CPUs: PyTorch, or mpizero's
        kernels, which take less time and round differently.

    Raises
    ------
    ConfigError
        If the module or its loss cannot be used in training; the message tells what to change.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> import mpizero as mz
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> model = mz.adapters.torch.TorchModel(net, torch.nn.MSELoss(reduction="sum"), blocks=net)
    >>> x = np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(8, 1)
    >>> with mz.distribute(model, mz.AdamW(lr=0.05), strategy="zero3") as placed:
    ...     losses = [placed.train(x, x**2) for _ in range(20)]
    ...     list(placed.named_parameters())
    ['0.weight', '0.bias', '2.weight', '2.bias']
    >>> losses[-1] < losses[0]
    True
    """

    def __init__(
        self,
        module: torch.nn.Module | Callable[[], torch.nn.Module],
        loss: Callable[..., Any],
        *,
        blocks: Any = None,
        seed: int = 0,
        frozen: Collection[str] = (),
        unused: Collection[str] = (),
        averaged: Collection[str] = (),
        compare_forward: bool = True,
        activation_checkpointing: Collection[str] = (),
        kernels: str = "torch",
    ) -> None:
        self.seed = checks.require("seed", seed, checks.seed)
        if kernels not in ("torch", "mpizero"):
            raise ConfigError(f"TorchModel: kernels is 'torch' or 'mpizero', got {kernels!r}")
        self._settings = TorchSettings(mpizero_kernels=kernels == "mpizero")
        check_contexts()
        check_rounding()
        self._source = module
        original = self._made()
        self.dtype = dtype_of(original)
        with _COPYING:
            check_parameters(original)
            check_functions(original)
            check_loss(loss, original)
            self._originals = Originals(original)
            trained = original.named_parameters(remove_duplicate=False)
            self._had_gradients = {name: p.requires_grad for name, p in trained}
            self._module = without_values(original)
            if original is module:
                LeftBehind(module, self._originals)
        self._trial = Trial(done=not compare_forward)
        chosen = {"": self._module}
        besides = extra_arguments(loss)
        if besides and (blocks is not None or activation_checkpointing):
            raise ConfigError(
                f"TorchModel: the loss has a parameter {besides[0]}, so module and loss run together: leave blocks and "
                "activation_checkpointing out, or the parameter"
            )
        if blocks is not None:
            if hasattr(original, "_orig_mod"):
                raise ConfigError("TorchModel: torch.compile has made one function of the module: give it uncompiled")
            known = dict(self._module.named_modules(remove_duplicate=False))
            chosen = {name: known[name] for name in chosen_blocks(original, blocks)}
            check_blocks_complete(self._module, chosen)
        original_forward = (
            OriginalForward(self._made, tuple(chosen), self._settings)
            if blocks is not None and compare_forward
            else None
        )
        again = chosen_names(list(chosen), "activation_checkpointing", activation_checkpointing, "block")
        describer = Describer(self._module, self.dtype, frozen=frozen, unused=unused, averaged=averaged)
        self._calls = {
            name: self._call(number, inner, describer.describe(name, inner))
            for number, (name, inner) in enumerate(chosen.items())
        }
        #: Times the first passes.
        self.times = PassTimes()
        #: Computes from counted work with how many samples a grain's fixed cost is small.
        self.efficient_samples = efficient_samples(tuple(self._calls.values()), self.dtype)
        describer.forget_values()
        self.loss: Any = TorchLoss(loss, self._settings, self._originals, self._trial)
        if besides:
            self._be_function(ModuleAndLoss(self._module, self.loss, besides))
            return
        #: Blocks by name, in the order in which they run.
        self.blocks: Mapping[str, TorchBlock] = {
            name: TorchBlock(call, original_forward if call.number == 0 else None, name in again, self.times)
            for name, call in self._calls.items()
        }

    def _be_function(self, together: ModuleAndLoss) -> None:
        """Set the attributes of a model whose module and loss are one function of all parameters."""
        tensors, loss = self._calls[""].tensors, together.loss
        alone, call = (self._call(0, module, tensors) for module in (together.module, together))
        start = self.start_values
        specs, integers = tensors.specs, tensors.integer_specs
        call.first_pass.label, call.first_pass.sums = f"{alone.label}, with {named(loss.function, 'loss')},", True
        functions = JointFunctions(call, alone, named(loss.function, "loss"), self.times)
        self._calls[""] = call
        self.parameters = {spec.name: start[spec.name] for spec in specs}
        self.integers = {spec.name: start[spec.name] for spec in integers}
        self.frozen = frozenset(spec.name for spec in specs if not spec.trainable)
        self.averaged = frozenset(spec.name for spec in specs if spec.averaged)
        self.in_place, self.has_loss = True, True
        self.loss_and_grad, self.predict = functions.loss_and_grad, functions.predict
        self.loss = functions.loss

    @property
    def fingerprint(self) -> Any:
        """Parts of the model that must be equal on all ranks, besides blocks, loss and start values."""
        parts = {"seed": self.seed, "own_kernels": self._settings.mpizero_kernels, "torch": str(torch.__version__)}
        if hasattr(self, "blocks"):
            return parts
        return parts | {"module": self._module, "loss": self._calls[""].module.function, "frozen": self.frozen}

    if not TYPE_CHECKING:  # where it would hide what is misspelt

        def __getattr__(self, name: str) -> Any:
            """Raise :class:`AttributeError` for an unknown attribute; the message says what to use instead."""
            raise no_attribute(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise :class:`ArgumentError`, since the module trains as part of a sharded model."""
        raise ArgumentError("a TorchModel is not called: mz.distribute makes a model of it, which has predict(x)")

    def convert_optimizer(self, optimizer: Any) -> Any:
        """Convert an optimizer of PyTorch to one of mpizero; return any other object itself. Not collective."""
        trained = [
            joined(block, spec.name)
            for block, call in self._calls.items()
            for spec in call.tensors.specs
            if spec.trainable
        ]
        return convert_optimizer(optimizer, self._source, trained)

    def batch_norm_notice(self, samples: int) -> str:
        """Return a warning if micro-batches of ``samples`` are too small for batch norms, else "". Not collective."""
        norms = [name for name, one in self._module.named_modules() if isinstance(one, _BatchNorm) and one.training]
        if not norms or samples > FEW_FOR_BATCH_NORM:
            return ""
        which = f"{norms[0]!r}" + (f" (of {len(norms)})" if len(norms) > 1 else "")
        return (
            f"the batch norm {which} takes mean and variance from micro-batches of {samples}, which say little about "
            "all samples: a larger micro_batch says more, and fewer ranks work; GroupNorm and LayerNorm need no others"
        )

    @property
    def random_by_grain(self) -> bool:
        """Tell whether passes so far have drawn random numbers, which depend on where the grains begin."""
        return any(call.first_pass.random for call in self._calls.values())

    @property
    def other_names(self) -> dict[str, str]:
        """The other names of parameters and buffers that the module holds in several places, mapped to their first."""
        homes: dict[int, str] = {}
        names: dict[str, str] = {}
        for block, call in self._calls.items():
            for one in (*call.tensors.stored, *call.tensors.integers):
                for owner, key in one.locations:
                    homes.setdefault(id(owner[key]), joined(block, one.name))
        module = self._module
        for listed in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
            for name, tensor in listed:
                if homes.get(id(tensor), name) != name:
                    names[name] = homes[id(tensor)]
        return names

    @property
    def start_values(self) -> dict[str, Array]:
        """The start values of all parameters, by name: arrays that share the memory of the module that was given."""
        module = self._made()
        state = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in state.items():
            if parameter.requires_grad != self._had_gradients.get(name, parameter.requires_grad):
                raise ConfigError(
                    f"TorchModel: {name!r} has requires_grad={parameter.requires_grad} now, and had "
                    f"{not parameter.requires_grad} when the TorchModel was made, which is what it trains by: set it "
                    "before, or name what is not trained in TorchModel(frozen=[...])"
                )
        self._originals.placed = True
        state |= dict(module.named_buffers(remove_duplicate=False))
        names = [
            joined(block, spec.name)
            for block, call in self._calls.items()
            for specs in (call.tensors.specs, call.tensors.integer_specs)
            for spec in specs
        ]
        return {name: state[name].detach().cpu().numpy() for name in names}

    def state_dict(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Return what ``module.load_state_dict(..., strict=True)`` takes, from arrays of the parameters by name.

        Not collective.

        Parameters
        ----------
        arrays : mapping of str to Array
            For example ``model.named_parameters()`` of the sharded model, or what ``safetensors.numpy.load_file`` reads
            from an exported checkpoint.

        Returns
        -------
        dict of str to torch.Tensor
            Copies of the arrays, also under the other names of tied parameters, and the buffers that training never
            changes.

        Raises
        ------
        LayoutError
            If an array is missing.
        """
        tied = self.other_names
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        state = {}
        for name in self._module.state_dict():
            home = tied.get(name, name)
            if home in arrays:
                state[name] = torch.from_numpy(np.array(arrays[home]))
            elif name in buffers and not buffers[name].is_meta:
                state[name] = buffers[name].cpu().clone()
            else:
                raise LayoutError(f"state_dict: there is no array {home!r}; it was given {len(arrays)} arrays")
        return state

    def fill(self, arrays: Mapping[str, Array], module: torch.nn.Module | None = None) -> torch.nn.Module:
        """Give a module the values of ``arrays``, and return it. Not collective.

        Training does not change the module that was given, because mpizero trains a copy.

        Parameters
        ----------
        arrays : mapping of str to Array
            As in :meth:`state_dict`: ``model.named_parameters()`` of the sharded model, which all ranks call.
        module : torch.nn.Module or None
            The module to fill; None for the module that was given to the constructor.

        Raises
        ------
        ConfigError
            If ``module`` is None, and the constructor was given a function that makes a module.

        Examples
        --------
        >>> import numpy as np
        >>> import torch
        >>> import mpizero as mz
        >>> net = torch.nn.Linear(2, 1)
        >>> model = mz.adapters.torch.TorchModel(net, torch.nn.MSELoss(reduction="sum"))
        >>> x = np.ones((4, 2), np.float32)
        >>> with mz.distribute(model, mz.SGD(0.1)) as placed:
        ...     loss = placed.train(x, x[:, :1])
        ...     net = model.fill(placed.named_parameters())
        ...     np.allclose(net(torch.from_numpy(x)).detach(), placed.predict(x))
        True
        """
        if module is None and not isinstance(self._source, torch.nn.Module):
            raise ConfigError("TorchModel.fill: the module was made by a function: give one, fill(arrays, module)")
        filled: torch.nn.Module = self._source if module is None else module
        filled.load_state_dict(self.state_dict(arrays))
        return filled

    def with_frozen(self, names: Collection[str]) -> TorchModel:
        """Return a copy of the model in which the parameters ``names`` are frozen, too. Not collective."""
        twin = copy(self)
        twin._calls = {
            block: replace(call, tensors=call.tensors.with_frozen(block, names)) for block, call in self._calls.items()
        }
        if hasattr(self, "blocks"):
            twin.blocks = {name: replace(block, call=twin._calls[name]) for name, block in self.blocks.items()}
        else:
            twin._be_function(self._calls[""].module)
        return twin

    def set_sharding_config(self, config: Any) -> None:
        """Apply the number of threads and the device of a :class:`ShardingConfig`. Not collective."""
        self._settings.threads = config.threads
        if config.device != "cpu":
            use_gpu()

    def _made(self) -> torch.nn.Module:
        """Return the module that was given, or a new one from the function that was given."""
        if isinstance(self._source, torch.nn.Module):
            module: Any = self._source
        elif not _takes_nothing(self._source):
            raise ConfigError(
                "TorchModel: module is a torch.nn.Module, or a function without arguments that makes one, got "
                f"{self._source!r:.80}"
            )
        else:
            with torch_pass(self._settings, self.seed):
                module = self._source()
            if not isinstance(module, torch.nn.Module):
                raise ConfigError(f"TorchModel: the function made a {type(module).__name__}, not a torch.nn.Module")
        if not module.training:
            raise ConfigError(
                f"TorchModel: the module {type(module).__name__} is in evaluation mode, so dropout and batch norms "
                "would not train: call module.train(); submodules that shall stay in evaluation mode may"
            )
        return module

    def _call(self, number: int, module: torch.nn.Module, tensors: BlockTensors) -> ModuleCall:
        training = tuple((inner, inner.training) for inner in module.modules())
        first_pass = FirstPass(type(module).__name__, number, self._originals, self._trial)
        return ModuleCall(module, number, tensors, self._settings, training, first_pass, mentions_data(module))


def _takes_nothing(function: Any) -> bool:
    """Tell whether ``function`` can be called without arguments."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


#: Keyword arguments that a loss may take after prediction and target.
KEYWORDS = ("module", "x")


def extra_arguments(loss: Callable[..., Any]) -> tuple[str, ...]:
    """Return those of :data:`KEYWORDS` that a loss takes after prediction and target. Not collective."""
    try:
        parameters = list(inspect.signature(loss).parameters.values())
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(one.name for one in parameters[2:] if one.name in KEYWORDS and one.kind in kinds)


class ModuleAndLoss(torch.nn.Module):  # type: ignore[misc]
    """Combine a module and a loss: a module that returns the sum of losses and the weight, for samples and targets.

    ``names`` are the keyword arguments that the loss takes. ``forward`` enables autograd in evaluation, too, because
    the loss may differentiate.
    """

    def __init__(self, module: torch.nn.Module, loss: TorchLoss, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module, self.loss, self.names = module, loss, names
        self.function = loss.function

    def forward(self, x: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the module on ``x``, and the loss."""
        with torch.enable_grad():
            if "x" in self.names:
                for leaf in gradient_leaves(x):
                    leaf.requires_grad_()
            prediction = called(self.module, x)
            extra = {name: {"module": self.module, "x": x}[name] for name in self.names}
            loss, weight = self.loss.value(prediction, target, **extra)
        return loss, torch.tensor(weight, dtype=torch.float64)


@dataclass(frozen=True)
class JointFunctions:
    """Compute the loss, gradients and predictions of a :class:`ModuleAndLoss` from parameters by name.

    Parameters
    ----------
    together : ModuleCall
        Calls a :class:`ModuleAndLoss`.
    alone : ModuleCall
        Calls the module without the loss, with the same parameters.
    label : str
        The loss's name, for messages.
    times : PassTimes
        Times the first passes.
    """

    together: ModuleCall
    alone: ModuleCall
    label: str
    times: PassTimes

    def loss_and_grad(
        self, parameters: Mapping[str, Array], batch: Any, gradients: Mapping[str, Array], run: Run = EVALUATE
    ) -> tuple[float, float]:
        """Write gradients and new values of buffers to ``gradients``; return the sum of losses and its weight."""
        start = perf_counter()
        passed, weights = self._differentiated(parameters, batch, run)
        self.together.write(nested(dict(gradients)), weights, passed, self.label)
        if run.training:
            seconds, alone = perf_counter() - start, replace(run, count=0)

            def one() -> None:
                self._differentiated(parameters, map_leaves(itemgetter(slice(1)), batch), alone)

            self.times.add(0, run.count, seconds, one)
        loss, weight = passed.output
        return float(loss.detach()), float(weight)

    def _differentiated(self, parameters: Mapping[str, Array], batch: Any, run: Run) -> tuple[Passed, Gradients]:
        """Return the results of a forward pass, and the gradients of the loss with respect to trained parameters."""
        call, params = self.together, nested(dict(parameters))
        specs = call.tensors.specs
        with call.prepared(run), torch.enable_grad():
            values = call.forward_values(params)
            weights = [t.requires_grad_() for t, s in zip(values, specs, strict=True) if s.optimized]
            passed = call(params, values, map_leaves(as_tensor, batch), run)
            loss, _ = passed.output
            if not loss.requires_grad:
                raise LayoutError(f"{self.label} returned a loss that depends on no parameter: does it use .detach()?")
            with call.placed(params):
                return passed, torch.autograd.grad(loss, weights, allow_unused=True)

    def loss(self, parameters: Mapping[str, Array], batch: Any, run: Run = EVALUATE) -> tuple[float, float]:
        """Return the sum of losses and its weight."""
        loss, weight = self._output(self.together, parameters, batch, run)
        return float(loss.detach()), float(weight)

    def predict(self, parameters: Mapping[str, Array], x: Any) -> Any:
        """Return what the module returns for ``x``."""
        return map_leaves(as_array, self._output(self.alone, parameters, x, EVALUATE))

    @staticmethod
    def _output(call: ModuleCall, parameters: Mapping[str, Array], x: Any, run: Run) -> Any:
        params = nested(dict(parameters))
        with call.prepared(run), torch.no_grad():
            return call(params, call.forward_values(params), map_leaves(as_tensor, x), run).output


class LeftBehind:
    """Print a notice at the first use of a module of which mpizero trains a copy: it still has its start values.

    The object is a hook on calls and on ``state_dict()`` of the module and its submodules. In copies of the module,
    pickled ones too, the hook prints nothing. Nor does the hook print if the module's parameters have changed since the
    hook was made, for example by ``load_state_dict``. A notice is printed, too, if values are loaded into the module
    after the copy was made, but before the first step: the copy does not get these values.

    Parameters
    ----------
    module : torch.nn.Module
        The module that was given.
    originals : Originals or None
        The module's tensors, and whether a copy of the module is trained.
    """

    def __init__(self, module: torch.nn.Module | None = None, originals: Originals | None = None) -> None:
        self._originals = originals
        self._module = None if module is None else weakref.ref(module)
        inside = [] if module is None else list(module.modules())
        self._versions = {id(inner): _versions(inner) for inner in inside}
        for inner in inside:
            inner.register_forward_pre_hook(self)
            inner.register_state_dict_pre_hook(self.before_state_dict)
        if module is not None:
            module.register_load_state_dict_pre_hook(self.before_load)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a hook that prints nothing, for the copy of the module."""
        return type(self)()

    def __reduce__(self) -> Any:
        """Print the notice: ``torch.save(module)`` uses the module. The pickled copy gets a hook that is silent."""
        if self._module is not None and (module := self._module()) is not None:
            self._used(module, "is pickled")
        return type(self), ()

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        """Print the notice at a call of the module or of a submodule."""
        self._used(module, "is called")

    def before_state_dict(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        """Print the notice at a call of ``state_dict()`` of the module or of a submodule."""
        self._used(module, "is asked for its state_dict")

    def before_load(self, module: torch.nn.Module, *details: Any) -> None:
        """Print a notice at ``load_state_dict()`` between the making of the copy and its first step."""
        if self._originals is None or self._originals.trained or not self._originals.placed:
            return
        if (at := _caller(2)) is not None:
            notice(
                f"{type(module).__name__} is given other values{at}, but mpizero has made the copy that it trains, "
                "which keeps those from before: load them before mz.distribute, or model.load_named(arrays)"
            )

    def _used(self, module: torch.nn.Module, how: str) -> None:
        if self._originals is None or not self._originals.trained or (at := _caller(3)) is None:
            return
        if _versions(module) == self._versions.get(id(module)):
            notice(
                f"{type(module).__name__} {how}{at}, but mpizero trains a copy of it, and it still has its start "
                "values: TorchModel.fill(model.named_parameters()) gives it the trained ones; model.predict has them"
            )
        self._originals = None


def _caller(depth: int) -> str | None:
    """Return the line of the user's code that uses a module, for a notice; None if it is mpizero that uses it.

    ``depth`` is the number of frames of this function and of the hook, which are left out.
    """
    frame, line = sys._getframe(depth), None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("mpizero.adapters"):
            return None  # compares it with its blocks, or fills it
        line = line or _users(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return "" if line is None else f" ({line})"


def _users(frame: FrameType) -> Line | None:
    code = frame.f_code
    return Line(code.co_filename, frame.f_lineno, code.co_name) if is_users(code.co_filename) else None


def _versions(module: torch.nn.Module) -> list[int]:
    return [parameter._version for parameter in module.parameters()]
