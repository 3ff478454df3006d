"""Check and select names of parameters, suggest the known name that a wrong one resembles, and import names lazily.

A parameter's name must be one that an HDF5 file can store (:func:`check_names`), and shell patterns select parameters
(:func:`selected`). An unknown name of any kind raises an error with the most similar one (:func:`nearest`).
:func:`lazy_names` gives a package public names whose modules are imported when a name is first used.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from typing import Any, TypeVar
from unicodedata import is_normalized

from mpizero.errors import ArgumentError, ConfigError, UnknownNameError

T = TypeVar("T", bound=Callable[..., Any])

#: Most characters of a parameter's name, of an optimizer slot's name, and of the path ``optimizer/<slot>/<name>``.
NAME_LIMIT, SLOT_LIMIT, PATH_LIMIT = 440, 60, 512
#: Most parts, between slashes, of a name and of a path. Each part is a group of the HDF5 file, which takes space.
NAME_PARTS, PATH_PARTS = 24, 32
#: Names of this library, and the names of the same things in other libraries.
_WORDS = {
    ("lr",): "learning_rate alpha step_size",
    ("learning_rate", "lr_scale"): "lr",
    ("betas",): "beta1 beta2",
    ("betas", "momentum"): "beta",
    ("eps",): "epsilon",
    ("weight_decay",): "decay l2",
    ("groups", "parameters"): "params",
    ("groups",): "param_groups num_groups",
    ("channels",): "num_channels",
    ("window",): "kernel_size pool_size",
    ("factor",): "scale_factor",
    ("partial",): "ceil_mode",
    ("micro_batch", "global_batch", "batch"): "batch_size",
    ("micro_batch",): "microbatch",
    ("accumulate",): "gradient_accumulation_steps grad_accum",
    ("clip",): "max_grad_norm gradient_clipping clip_norm clip_grad_norm gradient_clip_val",
    ("ema",): "ema_decay",
    ("prefetch",): "num_workers prefetch_factor",
    ("gradient_compression",): "compression",
    ("comm",): "communicator",
    ("threads",): "num_threads",
    ("mixed_precision",): "fp16 bf16",
    ("mixed_precision", "dtype"): "precision",
    ("tensor_parallel_size",): "tp tensor",
    ("pipeline_parallel_size",): "pp pipeline num_stages",
    ("data_parallel_size",): "dp",
    ("context_parallel_size",): "cp",
    ("zero_stage",): "stage",
    ("inputs", "features"): "in_features",
    ("outputs",): "out_features out_channels",
    ("inputs",): "in_channels",
    ("bias",): "use_bias",
    ("items", "vocabulary"): "num_embeddings",
    ("features",): "embedding_dim normalized_shape",
    ("rate",): "p",
    ("dim",): "embed_dim d_model n_embd",
    ("dim", "hidden"): "hidden_size",
    ("hidden",): "hidden_sizes",
    ("heads",): "num_heads n_head nhead",
    ("layers",): "num_layers n_layer depth",
    ("sequence",): "block_size max_length context_length seq_len length",
    ("vocabulary",): "vocab_size",
    ("steps",): "total_steps num_steps max_steps epochs num_epochs max_epochs t_max",
    ("warmup",): "warmup_steps",
    ("end",): "min_lr",
    ("wrapped_model", "parameters"): "model",
    ("wrapped_optimizer",): "optimizer",
    ("MeanSquaredError",): "mse mseloss l2loss",
    ("L1Loss",): "mae",
    ("HuberLoss",): "smoothl1loss",
    ("BCEWithLogitsLoss",): "bceloss",
    ("RelativeL2Loss",): "lploss",
    ("CrossEntropy",): "crossentropyloss softmaxcrossentropy",
    ("CausalSelfAttention",): "multiheadattention selfattention",
    ("Linear",): "dense",
    ("Layer",): "module",
    ("GPT", "TransformerBlock"): "transformer",
    ("SiLU",): "swish",
    ("distribute",): "ddp dataparallel distributeddataparallel fsdp fullyshardeddataparallel",
    ("Mesh",): "pipelinemodel tensormodel hybridmodel devicemesh",
    ("Config", "config"): "config",
    ("FunctionModel",): "blackboxmodel",
    ("cosine",): "cosineannealinglr",
    ("batches",): "dataloader",
    ("ArraySource",): "tensordataset dataset",
}
#: The names in :data:`_WORDS` by each name of other libraries, which is in lower case.
ELSEWHERE: Mapping[str, Sequence[str]] = {word: ours for ours, words in _WORDS.items() for word in words.split()}
RULE = (
    f"printable characters of any language (in Unicode's normal form NFC), in parts joined by /, of which none is "
    f"empty, '.' or '..' or has a space at an end; at most {NAME_LIMIT} characters in {NAME_PARTS} parts"
)


def fault_of(name: object, characters: int = NAME_LIMIT, parts: int = NAME_PARTS) -> str:
    """Return what is wrong with a name, for an error message; "" if nothing is wrong.

    A name may have at most ``characters`` characters, and at most ``parts`` parts between slashes.
    """
    if not isinstance(name, str):
        return f"is of type {type(name).__name__}, not a string"
    if not name or len(name) > characters:
        return f"has {len(name)} characters" if name else "is empty"
    if not name.isprintable():
        hidden = next(character for character in name if not character.isprintable())
        return f"has a character that cannot be shown, U+{ord(hidden):04X}"
    if not name.isascii() and not is_normalized("NFC", name):
        return "is not in Unicode's normal form NFC (unicodedata.normalize gives it)"
    pieces = name.split("/")
    if len(pieces) > parts:
        return f"has {len(pieces)} parts"
    for part in pieces:
        if not part:
            return "has an empty part: / at an end, or twice"
        if part in (".", "..") or ".." in part.split("\\"):  # a folder's name, on some systems
            return f"has the part {part!r}"
        if part != part.strip(" "):
            return f"has the part {part!r}, with a space at an end"
    return ""


def nested_in(names: Iterable[str]) -> tuple[str, str] | None:
    """Return two names that one HDF5 file cannot both store, such as ``a`` and ``a/b``; None if there are none.

    In the file ``a`` would have to be both an array and a group.
    """
    before = ""
    for name in sorted(name.replace("/", "\0") for name in names):  # what lies in a folder then follows its name
        if before and name.startswith(f"{before}\0"):
            return before.replace("\0", "/"), name.replace("\0", "/")
        before = name
    return None


def check_names(names: Iterable[str]) -> None:
    """Raise :class:`ConfigError` if a checkpoint could not store parameters with these names."""
    listed = list(names)
    for name in listed:
        if fault := fault_of(name):
            raise ConfigError(
                f"parameter {shown(name)}: its name {fault}, so no checkpoint could hold it; give it another: {RULE}"
            )
    if clash := nested_in(listed):
        raise ConfigError(
            f"parameters {clash[0]!r} and {clash[1]!r}: no checkpoint could hold both, for the first would also be the "
            "folder of the second; give one of them another name"
        )


def check_slots(optimizer: str, slots: Iterable[str]) -> None:
    """Raise :class:`ConfigError` if a checkpoint could not store optimizer state arrays with these names."""
    for slot in slots:
        if fault := fault_of(slot, SLOT_LIMIT, 1):
            raise ConfigError(
                f"optimizer {optimizer}: the name {shown(slot)} of its state {fault}, so no checkpoint could hold it; "
                f"give it another name of at most {SLOT_LIMIT} printable characters, without /"
            )


def shown(name: object) -> str:
    """Return a name as error messages show it: quoted, on one line, and cut after 80 characters."""
    text = repr(name)  # which escapes what cannot be shown
    return text if len(text) <= 80 else f"{text[:80]}..."


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the text ``" (did you mean 'weight'?)"`` with the most similar known name; "" if no known name is similar.

    Callers append the text to a message about the unknown name. Upper and lower case count as equal. A name that other
    libraries use for the same thing counts as similar (:data:`ELSEWHERE`).
    """
    import difflib  # wanted only when something is wrong already

    alike: dict[str, str] = {}
    for text in known:
        alike.setdefault(text.lower(), text)
    word = str(name).lower()
    elsewhere = [ours for ours in ELSEWHERE.get(word, ()) if ours.lower() in alike]
    matches = elsewhere or [alike[text] for text in difflib.get_close_matches(word, alike, n=1)]
    return f" (did you mean {shown(matches[0])}?)" if matches else ""


def explains(target: T) -> T:
    """Decorate a public class or function so that wrong arguments raise an error that lists the right ones.

    The error is an :class:`ArgumentError`, which suggests the most similar argument, unlike Python's own TypeError:
    ``lr`` for ``learning_rate``, for example. The signature and the docstring of ``target`` do not change.
    """
    if isinstance(target, type):
        init = target.__init__  # type: ignore[misc]
        setattr(target, "__init__", _explained(init, bound=1))  # noqa: B010 - for mypy
        return target
    return _explained(target)  # type: ignore[return-value]


def _explained(function: Callable[..., Any], bound: int = 0) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            if fault := _fault_of_call(function, args, kwargs, bound):
                name = type(args[0]).__name__ if bound else function.__name__
                raise ArgumentError(f"{name}: {fault}") from None
            raise

    return call


def _fault_of_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], bound: int) -> str:
    """Return why a function does not accept these arguments; "" if it accepts them.

    The first ``bound`` arguments (``self``) do not come from the caller, and the message does not count them.
    """
    expected = signature(function)
    try:
        expected.bind(*args, **kwargs)
    except TypeError as error:
        parameters = list(expected.parameters.values())[bound:]
        known = [p.name for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        unknown = next((key for key in kwargs if key not in known), None)
        if unknown is not None:
            return f"there is no argument {shown(unknown)}{nearest(unknown, known)}; {takes}"
        positional = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        if len(args) - bound > len(positional):
            return f"{len(args) - bound} given without a name, at most {len(positional)} can be; {takes}"
        again = ", which is also the first one without a name" if "multiple values" in str(error) else ""
        return f"{error}{again}; {takes}"
    return ""


def unknown_name(module: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error of a name that ``module`` does not have, with the most similar name of ``known``."""
    return UnknownNameError(f"module {module!r} has no attribute {name!r}{nearest(name, known)}")


CLASSES = "the classes of one strategy each, such as mz.ZeRO2Model, which have it"
#: Attributes that sharded models and optimizers lack, with what to use instead: those of PyTorch's modules and
#: optimizers, of the classes of one strategy each, and of an earlier version of this library.
INSTEAD: Mapping[str, str] = {
    "zero_grad": "leave it out: gradients of different calls are never added",
    "backward": "model.train(x, y) computes gradients and makes the step; model.compute_gradients(x, y) leaves it out",
    "eval": "leave it out: evaluate and predict are in evaluation mode, train is in training mode",
    "forward": "model.predict(x), or model.evaluate(x, y)",
    "parameters": "model.named_parameters(), arrays by name",
    "state_dict": "model.named_parameters(), or model.save_model(path)",
    "load_state_dict": "model.load_named(arrays), or model.load_model(path)",
    **dict.fromkeys(
        ("to", "cuda", "cpu"), 'the device is a setting, mz.Config(device="cuda"); without it CPUs compute'
    ),
    "half": 'the precision is a setting, mz.Config(mixed_precision="float16")',
    "bfloat16": 'the precision is a setting, mz.Config(mixed_precision="bfloat16")',
    **dict.fromkeys(("float", "double"), "the model's own dtype decides: give it as float32 or float64"),
    "step": "model.train(x, y) makes the step; model.apply_gradients(gradients, rate) makes one by hand",
    **dict.fromkeys(("modules", "named_modules", "children"), "model.wrapped_model.blocks, layers by name"),
    "requires_grad_": "freeze parameters where the model is made: TorchModel(..., frozen=[...])",
    "compile": "leave it out: mpizero's layers are compiled kernels",
    "apply": "change start values in the module, or by model.load_named(arrays)",
    "no_sync": "leave it out: mz.Config(accumulate=...) adds several micro-batches before one sum over ranks",
    "save_checkpoint": "model.save_model(path)",
    "load_checkpoint": "model.load_model(path)",
    "param_groups": "a learning rate that changes is a function of the step, lr=lambda step: ...; groups= has others",
    "add_param_group": "give the optimizer groups=",
    **dict.fromkeys(("is_main_process", "is_global_zero"), "model.rank == 0"),
    "get_parameters": "model.gather_full_parameters(), an array that cannot be written to",
    "with_parameters": "a model that mz.distribute makes, and its set_parameters(values)",
    "clone": "a model that mz.distribute makes, and its load_named(model.named_parameters())",
    "deep_copy": "a model that mz.distribute makes, and its load_model(path) of what save_model(path) has written",
    "sharding_configuration": "model.config",
    "local_parameter_shard": "model.owned has the ranges, and mz.ZeRO2Model and its like also their values",
    "shard_start": "model.owned has the ranges",
    "shard_size": "model.owned has the ranges",
    "default_loss_function": "model.wrapped_model.loss",
    "invalidate_cache": "leave it out: what changes parameters says so by itself",
    **dict.fromkeys(("serialize", "save_state"), f"model.save_model(path), or {CLASSES}"),
    **dict.fromkeys(("deserialize", "load_state"), f"model.load_model(path), or {CLASSES}"),
    **dict.fromkeys(("supports_jit_compilation", "jit_compile", "export_computation_graph"), CLASSES),
    **dict.fromkeys(("feature_importance", "active_feature_indices", "is_feature_used"), CLASSES),
    "export_npz": "numpy.savez(path, **model.named_parameters())",
    "import_npz": "model.load_parameters(path)",
    "finish_save": "commit() of what begin_save has returned",
    "average_parameters": "model.optimizer.average_parameters()",
    "engine": "model.mesh has the ranks and their groups, model.metadata() what this rank holds",
}
#: Settings of optimizers, which programs for PyTorch change between steps.
SETTINGS = frozenset({"lr", "learning_rate", "momentum", "weight_decay", "betas", "eps", "param_groups"})


def no_attribute(owner: object, name: str) -> UnknownNameError:
    """Return the error of an attribute that an object does not have; for a name of PyTorch's, it says what to use."""
    hint = f": {INSTEAD[name]}" if name in INSTEAD else ""
    return UnknownNameError(f"{type(owner).__name__!r} object has no attribute {name!r}{hint}")


def fits(name: str, pattern: str) -> bool:
    """Tell whether a name matches a shell pattern, or equals the pattern.

    Equality is tested, too, because names such as ``w[0]`` look like patterns.
    """
    return name == pattern or fnmatchcase(name, pattern)


def as_patterns(where: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return patterns as a tuple: a string is one pattern, None gives an empty tuple.

    Raises :class:`ConfigError` if something else is given; ``where`` is the argument's name for the message.
    """
    if value is None:
        return ()
    patterns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if odd := [pattern for pattern in patterns if not isinstance(pattern, str) or not pattern]:
        raise ConfigError(f'{where}={odd[0]!r:.80}: expected patterns of names, such as ["encoder.*", "*.bias"]')
    return patterns


def selected(names: Sequence[str], where: str, patterns: Sequence[str], what: str = "parameter") -> list[str]:
    """Return those of ``names`` that fit one of the patterns, in the order of ``names``.

    Raises
    ------
    ConfigError
        If a pattern fits no name. The message has ``where`` (the argument's name), the pattern, and the most similar
        name; ``what`` says there which objects the names belong to.
    """
    for pattern in patterns:
        if not any(fits(name, pattern) for name in names):
            below = [name for name in names if name.startswith(f"{pattern}.")]
            hint = f" (did you mean {pattern + '.*'!r}?)" if below else nearest(pattern, names)
            known = "" if hint else f"; there are {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            raise ConfigError(f"{where}: {pattern!r} fits the name of no {what}{hint}{known}")
    return [name for name in names if any(fits(name, pattern) for pattern in patterns)]


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for the ``__init__.py`` of ``package``, which calls this.

    The public names are those that ``__init__.py`` imports by statements of the form ``from module import name as
    name``. These usually stand under ``if TYPE_CHECKING:``: type checkers and readers find them there, and a process
    imports only the modules that it uses. Names below a comment ``# Not listed`` can be imported, but are not in
    ``__all__`` and ``__dir__``. For other names ``__getattr__`` raises ``UnknownNameError``, which names the subpackage
    that has the name, or the most similar name.
    """
    listed, unlisted = declared(package)
    homes, names = listed | unlisted, list(listed)

    def find(name: str) -> Any:
        if name not in homes:
            if name.startswith("__"):  # inspect asks so while it goes through a namespace, which must not change
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            if not name.isidentifier() or find_spec(f"{package}.{name}") is None:
                raise _elsewhere(package, name, homes) or unknown_name(package, name, homes)
            # ``from package import module`` asks for the name first, so no similar name is searched for: that is slow.
            alike = "".join(f"; did you mean {public!r}?" for public in names if public.lower() == name)
            raise UnknownNameError(f"module {package!r} has no public name {name!r}, which is a module of it{alike}")
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, names.copy, names


def lazy_modules(package: str) -> Callable[[str], Any]:
    """Return ``__getattr__`` for the ``__init__.py`` of a package that imports its modules when they are first used."""

    def find(name: str) -> Any:
        if name.isidentifier() and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"{package} has no module {name!r}")

    return find


def declared(package: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the module of each public name of a package: one dictionary of names in ``__all__``, one of the others."""
    source = sys.modules[package].__spec__.loader.get_source(package)  # type: ignore[union-attr]
    listed, _, more = source.partition("# Not listed")
    imports = (re.findall(r"from (\S+) import \(?\s*(\w+) as \2\b", text) for text in (listed, more))
    first, second = ({name: module for module, name in pairs} for pairs in imports)
    return first, second


def _elsewhere(package: str, name: str, homes: Mapping[str, str]) -> UnknownNameError | None:
    """Return the error of a name that only a subpackage of ``package`` has; None if no subpackage has it."""
    for inner in (inner for inner, home in homes.items() if home == package):
        if name in getattr(import_module(f"{package}.{inner}"), "__all__", ()):
            where = f"{package}.{inner}.{name}".replace("mpizero", "mz", 1)
            return UnknownNameError(f"module {package!r} has no attribute {name!r}: it is {where}")
    return None
