"""Run the training of a configuration on several layouts and compare it with one process: ``mpizero verify``.

:func:`verify` is the command, and :func:`choose` decides which layouts are compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, repeat
from typing import Any

import numpy as np

from mpizero._util.checks import whole
from mpizero._util.settings import check_option, optional
from mpizero._util.text import notice
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.data import batches
from mpizero.data.batches import full_batch
from mpizero.errors import ConfigError, ExitStatus
from mpizero.layout.mesh import shard_groups
from mpizero.nn.models import unfrozen
from mpizero.nn.unet import FieldModel
from mpizero.sharding import Model
from mpizero.tools.check_model.checks import examine
from mpizero.tools.check_model.model import ModelReport
from mpizero.tools.verify.compare import compare_layouts
from mpizero.tools.verify.verdicts import Layout, Report, default_layouts, each_once, parse_layouts
from mpizero.train.config.build import (
    build_model,
    build_optimizer,
    build_source,
    computing_settings,
    user_functions,
    users_modules,
    with_batch,
)
from mpizero.train.config.schema import RunConfig
from mpizero.train.events import Progress
from mpizero.types import BlockModel

#: Exit status if a layout differs from one process, or the model itself is wrong.
DIFFERS = 1
#: Most samples on which the model itself is checked.
SAMPLES = 2


def verify(config: RunConfig, comm: Communicator, options: argparse.Namespace) -> int:
    """Compare the layouts that the options name, print the verdicts on rank 0, and return the exit status.

    Before that, the model itself is checked; if it is wrong, no layout is compared. The status is 0 if the model is
    right and all layouts agree with one process, else 1. Collective over ``comm``.
    """
    check_option("--steps", options.steps, whole(1))
    if options.tolerance is not None and not 0 <= options.tolerance < 1:
        raise ConfigError(f"--tolerance {options.tolerance}: must be a number from 0 to 1")
    check_option("--ranks", options.ranks, optional(whole(1)))
    with users_modules(config):
        return _verify(config, comm, options)


def _verify(config: RunConfig, comm: Communicator, options: argparse.Namespace) -> int:
    with all_ranks(comm):
        source, validation = build_source(config)
        config = with_batch(config, source)
        layouts = choose(config, build_model(config, source, validation), comm, options.layouts, options.ranks)

    def feed(model: Model) -> Iterator[Any]:
        if config.optimizer.kind.needs_vectors:
            return repeat(full_batch(source, model))
        return batches(source, model, config.train.global_batch, seed=config.train.seed)

    # Comparing layouts does not find a model that is also wrong in one process: check the model first.
    few = min(SAMPLES, config.train.global_batch, len(source))
    model = examine(build_model(config, source, validation), *source.samples(np.arange(few)), comm=comm)
    if any(finding.check != "ranks" for finding in model.findings):  # comparing layouts finds ranks that differ
        if comm.rank == 0:
            print(json.dumps({"model": model.to_dict()}) if options.json else model, flush=True)
            notice("the model is wrong, so no layout was compared")
        return DIFFERS
    progress = Progress(options.steps * (len(layouts) + 1), active=comm.rank == 0)
    progress.begin()
    try:
        report = compare_layouts(
            lambda _: build_model(config, source, validation),
            feed,
            layouts,
            make_optimizer=lambda: build_optimizer(config),
            comm="self" if comm.size == 1 else comm,
            steps=options.steps,
            tolerance=options.tolerance,
            progress=_step_callback(progress),
            timeout=config.train.timeout,
            **computing_settings(config),
        )
    finally:
        progress.close()
    if comm.rank == 0:
        _print(report, model, as_json=options.json)
        if comm.size == 1 and user_functions(config):
            notice(
                "ranks were threads of this process: what a process has of its own, such as its rank in COMM_WORLD, is "
                "seen under mpiexec only"
            )
    return int(ExitStatus.OK) if report.agrees and model.right else DIFFERS


def choose(config: RunConfig, model: Any, comm: Communicator, named: str | None, ranks: int | None) -> list[Layout]:
    """Return the layouts to compare, and check that the model fits them.

    Not collective. ``model`` is the model of ``config``. ``named`` is the option ``--layouts``; None means the layout
    of the configuration and the default layouts for ``ranks`` ranks. ``ranks`` is the option ``--ranks``; None means
    the ranks of the job, or 2 threads.

    Raises
    ------
    ConfigError
        If a layout does not fit the model or the job. The message names the layout and the reason.
    """
    launched = comm.size
    if ranks is not None and launched > 1 and ranks > launched:
        raise ConfigError(f"--ranks {ranks}: this job has {launched}")
    if named is None:
        heads, sequence = config.model.split_sizes
        if config.optimizer.kind.needs_whole_tensors:
            heads = 1  # tensors that are updated as a whole cannot be split by a tensor group
        if config.train.wire is not None:
            sequence = 0  # context groups cannot round the gradients of grains, of which each rank has a part
        size = ranks if ranks is not None else launched if launched > 1 else 2
        blocks = len(model.blocks) if isinstance(model, BlockModel) else 1
        network = unfrozen(model)
        space = network.axes if isinstance(network, FieldModel) and config.train.wire is None else 0
        layouts_by_default = default_layouts(size, blocks=blocks, heads=heads, sequence=sequence, space=space)
        return each_once([*_configured_layout(config, size), *layouts_by_default], config.parallel.tiles)
    layouts = each_once(parse_layouts(named, config.parallel.strategy), config.parallel.tiles)
    if not layouts:
        raise ConfigError(
            f"--layouts {named!r}: names no layout; for example --layouts '2; zero3*4; pipeline=2, data=2'"
        )
    for layout in layouts:
        try:
            config.model.check_layout(layout.parallel, model)
        except ConfigError as error:
            raise ConfigError(f"--layouts: {str(layout)!r} does not fit: {error}") from None
        if launched > 1 and layout.ranks > launched:
            raise ConfigError(f"--layouts: {str(layout)!r} needs {layout.ranks} ranks, this job has {launched}")
    return layouts


def _configured_layout(config: RunConfig, ranks: int) -> list[Layout]:
    """Return a list with the configuration's layout for ``ranks`` ranks; empty if it does not fit that number."""
    parallel = config.parallel
    try:
        axes = parallel.axes_of(ranks)
        shard_groups(axes, [rank // (parallel.ranks_per_node or ranks) for rank in range(ranks)], parallel.shard_nodes)
        return [Layout(replace(parallel, data=axes.data))]
    except ConfigError:
        return []


def _step_callback(progress: Progress) -> Callable[[str, int], None]:
    done = count(1)

    def show(layout: str, step: int) -> None:
        if step:
            progress.step(next(done), {"layout": layout, "at": str(step)})

    return show


def _print(report: Report, model: ModelReport, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**report.to_dict(), "model": model.to_dict()}), flush=True)
        return
    right = f"model: right in {len(model.passed)} ways, {model.evaluations} evaluations in {model.seconds:.1f} s"
    print(right if model.right else model)
    print(report, flush=True)
    if not report.agrees:
        bad = len(report.findings)
        notice(f"{bad} of {len(report.verdicts) - 1} layouts {'differs' if bad == 1 else 'differ'} from one process")
