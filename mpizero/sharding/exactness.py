"""Say on what the bits of a training depend, and set the number of BLAS threads, so that they do not depend on it.

:func:`within_rounding` lists why results do not equal those of one process bit by bit. :func:`foreign_arithmetic` lists
why they may have other bits on another CPU: how products, functions and decompositions of other libraries are rounded
depends on the library and on the CPU. Such a library may also round differently with another number of threads, or in
another build: :func:`limit_blas_threads` sets the number and compares the builds of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from mpizero import nn
from mpizero._util.text import notice
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.guard.guard import ProcessSetting
from mpizero.kernels.matmul import foreign_products, library
from mpizero.sharding.partition import ParallelLayout, can_host, incompatible_axes
from mpizero.types import BlockModel

#: What results of most layouts are equal to.
SAME = "the bits of one process"
EVERY_CPU = "every CPU"
#: Modules of this package whose classes compute with its own arithmetic alone.
_OWN = ("mpizero.nn.", "mpizero.optim.", "mpizero.sharding.")
#: What computes in the classes of other modules of this package.
_ADAPTERS = {
    "mpizero.adapters.torch.": "PyTorch",
    "mpizero.adapters.jax.": "JAX",
    "mpizero.adapters.function.": "a function of yours",
}


def foreign_arithmetic(model: Any, device: str = "cpu", optimizer: Any = None) -> list[str]:
    """Return what computes in a training besides this library's own arithmetic, in words; [] if nothing does.

    If the list is empty, the bits are the same on every CPU that has fused multiply-adds. Code that reads or transforms
    samples is not considered. Not collective.

    Parameters
    ----------
    model : model
        The user's model: its layers and its loss.
    device : str
        Where the model computes: "cpu" or "cuda".
    optimizer : optimizer, optional
        The optimizer, with its learning rate.
    """
    found = [foreign_products(), "a GPU computes" if device != "cpu" else ""]
    if isinstance(model, BlockModel):
        found += [why for name, layer in model.blocks.items() for why in _of_layer(layer, f"block {name!r}")]
        found += [
            _of_class(loss, "the loss") for loss in (model.loss, getattr(model.loss, "loss", None)) if loss is not None
        ]
    else:
        found.append(_of_class(model, "the model"))
    if optimizer is not None:
        found.append(getattr(optimizer, "foreign_arithmetic", "") or _of_class(optimizer, "updates"))
        if callable(rate := getattr(optimizer, "lr", None)):
            found.append(_of_class(rate, "the learning rate"))
    return list(dict.fromkeys(filter(None, found)))


def bits(reasons: Sequence[str]) -> str:
    """Return, as text, on which CPUs a training has the same bits, given what :func:`foreign_arithmetic` returned."""
    return f"this CPU, because {'; '.join(reasons)}" if reasons else EVERY_CPU


def _of_layer(layer: Any, place: str) -> list[str]:
    """Return a text for a layer and for each layer inside it: what computes in it besides this library.

    The text is "" where nothing else computes. ``place`` names the layer's block in the texts.
    """
    inside = layer.children().values() if isinstance(layer, nn.Layer) else ()
    return [_of_class(layer, place), *(why for child in inside for why in _of_layer(child, place))]


def _of_class(part: Any, role: str) -> str:
    """Return a text that says what computes in the object ``part``; "" if its class is this library's own.

    ``role`` says in the text what the object computes, such as "updates".
    """
    kind = part if hasattr(part, "__qualname__") else type(part)
    module = f"{kind.__module__}."
    if module.startswith(_OWN):
        return ""
    known = next((name for prefix, name in _ADAPTERS.items() if module.startswith(prefix)), None)
    return f"{known} computes the model" if known else f"{kind.__module__}.{kind.__qualname__} computes {role}"


def within_rounding(
    parallel_layout: ParallelLayout,
    model: Any,
    compression: str | None = None,
    accumulate: int = 1,
    optimizer: Any = None,
) -> tuple[str, ...]:
    """Return why results equal those of one process with the same tiles only within rounding; () if bits are equal.

    ``parallel_layout`` is the result of :func:`resolve_tiles`, ``compression`` and ``accumulate`` the settings
    ``gradient_compression`` and ``accumulate``. A layer whose bits depend on the size of the group says why in its
    attribute ``within_rounding``. An optimizer that makes small differences large says so in its attribute
    ``magnifies_rounding``. Not collective.
    """
    reasons = incompatible_axes(parallel_layout)
    for axis, count in parallel_layout.virtual_ranks.items():
        if count == parallel_layout.wanted_virtual_ranks[axis] and not can_host(1, count):
            reasons.append(f"{axis}={count} is no power of two, so one process cannot compute {count} tiles")
    if max(parallel_layout.virtual_ranks.values()) > 1:
        reasons += layer_reasons(model)
    if accumulate > 1 and parallel_layout.context_virtual_ranks > 1:
        reasons.append(
            f"accumulate={accumulate}: a rank with several tiles of the sequences adds these first, a rank with one "
            "its micro-batches"
        )
    if compression is not None:
        reasons.append(f"gradient_compression={compression!r} rounds what ranks send")
    if reasons and (magnified := getattr(optimizer, "magnifies_rounding", "")):
        reasons.append(magnified)
    return tuple(reasons)


def exactness(tiles: Mapping[str, int], reasons: Sequence[str]) -> str:
    """Return a text that says what results are equal to: one process, one with ``tiles``, or only within rounding.

    ``reasons`` are what :func:`within_rounding` returned: why the results are equal only within rounding, if any.
    """
    if reasons:
        return f"within rounding ({'; '.join(reasons)})"
    return SAME if max(tiles.values()) == 1 else f"{SAME} with {tiles_setting(tiles)}"


def tiles_setting(tiles: Mapping[str, int]) -> str:
    """Return the text of the setting for numbers of tiles by axis, such as "tiles=8" or "tiles={'tensor': 4}"."""
    several = {axis: count for axis, count in tiles.items() if count > 1}
    equal = len(set(tiles.values())) == 1
    return f"tiles={next(iter(tiles.values()))}" if equal else f"tiles={several}"


def layer_reasons(model: Any) -> list[str]:
    """Return the reasons, stated by the model's layers, why bits depend on the sizes of groups. Not collective."""
    blocks = model.blocks if isinstance(model, BlockModel) else {}
    return [f"block {name!r}: {reason}" for name, layer in blocks.items() for reason in _reasons(layer)]


def _reasons(layer: Any) -> list[str]:
    """Return the attributes ``within_rounding`` of a layer and of the layers in it."""
    inside = layer.children().values() if isinstance(layer, nn.Layer) else ()
    stated = getattr(layer, "within_rounding", "")
    return [*([str(stated)] if stated else []), *(reason for child in inside for reason in _reasons(child))]


def limit_blas_threads(comm: Communicator, threads: int, model: Any, device: str) -> Callable[[], None]:
    """Limit BLAS to ``threads`` threads, and print a warning on rank 0 if ranks may round differently.

    Collective over ``comm``. Another build of BLAS, or one for another type of CPU core, may round matrix products
    differently. If another library computes in ``model`` on ``device`` (:func:`foreign_arithmetic`), the result of a
    training would then depend on which rank computes which grain.

    Returns
    -------
    callable
        A function that ends the limit. BLAS then uses the number of threads of the newest limit that has not ended; if
        there is none, the number from before the first limit.

    Raises
    ------
    ConfigError
        If the environment variable ``MPIZERO_BLAS`` names a library that this rank cannot use. The other ranks raise
        ``RemoteError``.
    """
    with all_ranks(comm, "BLAS"):
        beside, foreign = library(), foreign_arithmetic(model, device)
    builds = numpy_builds(ThreadpoolController().info()) + ([] if beside is None else [beside.name])
    ranks = comm.allgather_object((builds, foreign), "BLAS builds")
    message = different_builds([builds for builds, _ in ranks])
    reasons: list[str] = next((reasons for _, reasons in ranks if reasons), [])
    if message is not None and reasons and comm.rank == 0:
        notice(f"{message} ({'; '.join(reasons)})")
    return _of_process().hold(threads)


@cache
def _of_process() -> ProcessSetting[int]:
    setting = _BlasThreads()
    return ProcessSetting(setting.set, setting.restore)


class _BlasThreads:
    """Set the number of threads of every BLAS library of this process, and remember the previous numbers."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[Any, int]] = {}

    def set(self, threads: int) -> None:
        """Set the number of threads of all BLAS libraries that are loaded now."""
        for one in ThreadpoolController().select(user_api="blas").lib_controllers:
            self._before.setdefault(one.filepath, (one, one.num_threads))
            one.set_num_threads(threads)

    def restore(self) -> None:
        """Restore the numbers of threads from before the first :meth:`set`."""
        for one, threads in self._before.values():
            one.set_num_threads(threads)
        self._before.clear()


def numpy_builds(libraries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the BLAS builds that NumPy uses: library, version and type of CPU core of each. Not collective.

    ``libraries`` are all libraries that this process has loaded, as ``ThreadpoolController.info()`` returns them. Some
    may be copies of BLAS that belong to other packages such as SciPy. So if NumPy was installed with its own BLAS, only
    that BLAS is returned; otherwise all in ``libraries`` are.
    """
    blas = [library for library in libraries if library["user_api"] == "blas"]
    home = Path(np.__file__).parent
    folders = (home, home.with_name("numpy.libs"))
    numpys = [library for library in blas if any(Path(library["filepath"]).is_relative_to(f) for f in folders)]
    return sorted(
        f"{library['internal_api']} {library['version']} for {library.get('architecture', 'unknown cores')}"
        for library in numpys or blas
    )


def different_builds(builds: Sequence[Sequence[str]]) -> str | None:
    """Return a warning that names the first rank whose BLAS is not rank 0's; None if there is none. Not collective.

    ``builds[r]`` are the BLAS builds of rank r, as :func:`numpy_builds` describes them.
    """
    if all(list(build) == list(builds[0]) for build in builds):
        return None
    rank = next(r for r, build in enumerate(builds) if list(build) != list(builds[0]))
    return (
        f"rank {rank} has BLAS {', '.join(builds[rank]) or 'none'}, rank 0 has {', '.join(builds[0]) or 'none'}: "
        "results may differ in their last bits between runs that assign grains differently; use nodes of one kind"
    )
