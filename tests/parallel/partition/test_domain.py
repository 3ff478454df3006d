"""Ranks that share the space of fields have the bits of one process, and are told what is no part of a field."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero import nn
from mpizero.errors import ConfigError, DataError, GridError, OutOfMemoryError
from mpizero.nn.domain_parallel import on_domain
from mpizero.testing import parallel_assert, run_in_threads
from mpizero.types import EVALUATE

SPACE, SAMPLES, STEPS = (13, 11), 5, 3
WIDE = (9, 6, 7)


def net(space: tuple[int, ...] = SPACE, **settings: Any) -> nn.UNet:
    """A U-Net whose coarse grids have odd extents, too."""
    chosen = {"width": 4, "levels": 2, "groups": 2, "dropout": 0.2, "refine": "linear", **settings}
    return nn.UNet(2, 1, axes=len(space), **chosen)


def data(space: tuple[int, ...] = SPACE) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(STEPS, SAMPLES, *space, 2)).astype("f4"), rng.normal(size=(STEPS, SAMPLES, *space, 1))


def trained(
    comm: Any, cut: tuple[int, ...], strategy: str = "zero2", space: tuple[int, ...] = SPACE, folder: Any = None,
    settings: dict[str, Any] | None = None, **mesh: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Hash, losses, evaluation and predictions after some steps; the first come from ``folder`` if it exists."""
    config = mz.Config(clip=0.5, ema=0.9, micro_batch=2, **(settings or {}))
    with (
        mz.Mesh(comm, domain=cut, **mesh) as ranks,
        mz.distribute(net(space), mz.AdamW(lr=0.01), strategy, mesh=ranks, config=config) as model,
    ):
        at, replicas = ranks.axes.coordinates(ranks.rank).data, ranks.axes.data
        mine = (slice(SAMPLES * at // replicas, SAMPLES * (at + 1) // replicas),)
        mine += ranks.slab(space) if cut else ()
        losses, batches = [], list(zip(*data(space), strict=True))
        if folder is not None and Path(folder).exists():
            model.load_model(folder)
            batches = batches[-1:]
        for number, (x, y) in enumerate(batches):
            if folder is not None and number == len(batches) - 1 and len(batches) > 1:
                model.save_model(folder)
            losses.append(model.train(x[mine], y[mine]))
        evaluated = model.evaluate(x[mine], y[mine], ema=True)
        prediction = model.predict(x[mine])
        whole = np.zeros((SAMPLES, *space, 1), np.float32)
        whole[mine] = prediction
        assert model.metadata().exactness == "the bits of one process"
        return model.parameters_sha256(), losses[-1], evaluated, whole


@cache
def alone(space: tuple[int, ...] = SPACE) -> tuple[Any, ...]:
    return trained(None, (), "ddp", space)


def require_the_same(parts: list[tuple[Any, ...]], expected: tuple[Any, ...]) -> None:
    assert {part[:3] for part in parts} == {expected[:3]}
    held = np.array([part[3] for part in parts])
    np.testing.assert_array_equal(np.where(held != 0, held, -np.inf).max(axis=0), expected[3])


@pytest.mark.parametrize(
    ("ranks", "cut", "strategy", "more"),
    [
        (2, (2, 1), "ddp", {}),
        (2, (1, 2), "zero3", {"share_node_memory": False}),
        (3, (1, 3), "zero1", {}),
        (4, (2, 2), "zero2", {"ranks_per_node": 2}),
        (4, (2, 1), "zero3", {}),  # two replicas
        (4, (1, 2), "zero1", {"pipeline": 2}),
        (6, (3, 2), "zero3", {}),
        (8, (2, 2), "zero2", {"pipeline": 2}),
    ],
)
def test_on_every_cut_a_training_has_the_bits_of_one_process(ranks, cut, strategy, more):
    require_the_same(run_in_threads(ranks, lambda comm: trained(comm, cut, strategy, **more)), alone())


@pytest.mark.parametrize("parts", [3, 5])
def test_losses_of_many_grains_are_added_in_one_order_however_many_ranks_share_them(parts):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 11, 24, 2)).astype("f4")

    def losses(comm: Any, cut: tuple[int, ...]) -> Any:
        settings = {"mesh": mz.Mesh(comm, domain=cut), "config": mz.Config(micro_batch=1)}
        with mz.distribute(
            nn.UNet(2, 2, axes=1, width=2, groups=1, levels=2), mz.SGD(lr=0.1), "ddp", **settings
        ) as model:
            own = (slice(None), *(model.mesh.slab((24,)) if cut else ()))
            return model.train(x[own], y[own]), model.evaluate(x[own], y[own])

    assert set(run_in_threads(parts, lambda comm: losses(comm, (parts,)))) == {losses("self", ())}


@dataclass(frozen=True)
class TwoFields(nn.Layer):
    """Add the mean of a convolution of one field to another."""

    conv: Any = nn.Conv(1, 1, (3,))
    domain: Any = None

    def domain_form(self, domain: Any) -> Any:
        return replace(self, conv=on_domain(self.conv, domain, "two fields"), domain=domain)

    def children(self) -> Any:
        return {"conv": self.conv}

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> Any:
        y, cache = self.conv.forward(params["conv"], x["b"], run)
        return x["a"] + nn.domain_sum(y, group=self.domain)[:, None], (cache, y.shape)

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        above = np.broadcast_to(nn.domain_sum(dy, group=self.domain)[:, None], cache[1])
        db, pending = self.conv.backward_input(params["conv"], cache[0], above)
        return {"a": dy, "b": db}, pending

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        self.conv.backward_weights(params["conv"], cache[0], pending, grads["conv"])


def test_the_extents_of_a_second_field_may_change_from_batch_to_batch():
    rng = np.random.default_rng(0)

    def field(extent: int) -> Any:
        return rng.normal(size=(2, extent, 1)).astype("f4")

    batches = [({"a": field(16), "b": field(extent)}, field(16)) for extent in (16, 17, 24)]

    def losses(comm: Any, cut: tuple[int, ...]) -> Any:
        model = Own()
        model.blocks = {"both": TwoFields(), "conv": nn.Conv(1, 1, (3,))}
        with mz.distribute(model, mz.SGD(lr=0.01), "zero2", mesh=mz.Mesh(comm, domain=cut)) as trains:

            def part(whole: Any) -> Any:
                return whole[:, *trains.mesh.slab(whole.shape[1:-1])] if cut else whole

            return tuple(trains.train({k: part(v) for k, v in x.items()}, part(y)) for x, y in batches)

    assert set(run_in_threads(2, lambda comm: losses(comm, (2,)))) == {losses("self", ())}


def test_a_volume_is_cut_along_three_axes():
    parts = run_in_threads(8, lambda comm: trained(comm, (2, 2, 2), "zero3", WIDE))
    require_the_same(parts, alone(WIDE))


@pytest.mark.mpi
def test_in_a_job_ranks_that_share_space_have_the_bits_of_one_process(world):
    cut = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2), 8: (4, 2)}[world.size]
    expected = world.broadcast_object(trained("self", (), "ddp")[:3] if world.rank == 0 else None)
    strategy, shared = ("zero1", False) if world.size in (2, 3) else ("zero3", True)
    with world.split(0) as comm:
        found = trained(comm, cut, strategy, share_node_memory=shared)[:3]
        parallel_assert(world, found == expected, f"{strategy}, shared memory {shared}")


def test_a_training_goes_on_from_each_cut_on_another(tmp_path, capfd):
    cuts = [(None, ()), (4, (2, 2)), (3, (1, 3))]

    def run(ranks: int | None, cut: tuple[int, ...], folder: Path) -> set[str]:
        if ranks is None:
            return {trained(None, cut, folder=folder)[0]}
        return {part[0] for part in run_in_threads(ranks, lambda comm: trained(comm, cut, folder=folder))}

    for number, (ranks, cut) in enumerate(cuts):
        assert run(ranks, cut, tmp_path / str(number)) == {alone()[0]}
        assert run(*cuts[number - 1], tmp_path / str(number)) == {alone()[0]}
    assert "tiles" not in capfd.readouterr().err


def test_a_mesh_shows_its_domain():
    def shown(comm: Any) -> str:
        with mz.Mesh(comm, domain=(2, 1)) as mesh:
            return str(mesh)

    assert run_in_threads(4, shown)[0].startswith("4 ranks: data 2 x domain 2 x 1")


class Linear(nn.Layer):
    """A user's layer without a form for a domain."""

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> Any:
        return x, None

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return dy, None


class Twice(nn.Sequential):
    """A user's layer that computes something else than its base class."""

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> Any:
        y, cache = super().forward(params, x, run)
        return 2 * y, cache


class Own:
    """A model of one's own."""

    dtype, seed = np.dtype("f4"), 0

    def __init__(self, last: Any = None, loss: Any = None) -> None:
        self.blocks = {"conv": nn.Conv(2, 1, (3, 3))} | ({} if last is None else {"last": last})
        self.loss = loss or nn.FieldLoss(nn.MeanSquaredError())


def refused(model: Any = None, give: Any = None, cut: tuple[int, ...] = (2, 2), **mesh: Any) -> str:
    """The error of four ranks, which is the same on all."""
    errors = []

    def step(comm: Any) -> None:
        with mz.Mesh(comm, domain=cut, **mesh) as ranks:
            trains = mz.distribute(Own() if model is None else model, mz.SGD(lr=0.1), "zero2", mesh=ranks)
            x, y = (array[0] for array in data())
            own = (slice(None), *ranks.slab(SPACE))
            trains.train(*(give or (lambda rank, x, y, own: (x[own], y[own])))(ranks.rank, x, y, own))

    def caught(comm: Any) -> None:
        with pytest.raises((ConfigError, DataError, GridError)) as error:
            step(comm)
        errors.append(str(error.value))

    run_in_threads(4, caught)
    assert len({error.replace("its samples", "") for error in errors}) == 1
    return errors[0]


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda rank, x, y, own: (x, y), r"x is the same array, of \(13, 11\) positions, on all ranks of a domain"),
        (lambda rank, x, y, own: (x[own], y), "y is the same array"),
        (lambda rank, x, y, own: (x[own[:2]], y[own[:2]]), "on ranks 0 and 1 of a domain .* cut along each axis"),
        (
            lambda rank, x, y, own: (x if rank == 1 else x[own], y[own]),
            r"x has \(13, 11\) positions on rank 1, .* that is \[0:7, 6:11\] of a domain of 2 x 2; give x",
        ),
        (
            lambda rank, x, y, own: (x[:, :7, :6] if rank == 3 else x[own], y[own]),
            r"x has \(7, 6\) positions on rank 3, which is not its part of the field of \(13, 11\) positions",
        ),
        (
            lambda rank, x, y, own: (x[own][:4], y[own][:4]) if rank == 2 else (x[own], y[own]),
            "x has 5 samples on rank 0 and 4 on rank 2: the ranks of a domain .* parts of the same samples",
        ),
    ],
)
def test_what_is_not_a_rank_s_part_of_the_samples_is_told_on_all_ranks(give, said):
    assert re.search(said, refused(give=give))


@pytest.mark.parametrize(
    ("model", "mesh", "said"),
    [
        (Own(Linear()), {}, "block 'last': Linear does not say how it works on a part of a field"),
        (Own(Twice([nn.Tanh()])), {}, "block 'last': Twice does not say how it works on a part of a field"),
        (Own(loss=nn.MeanSquaredError()), {}, "wrap it, loss=mpizero.nn.FieldLoss(MeanSquaredError(...))"),
        (Own(loss=nn.H1Loss()), {}, "wrap it, loss=mpizero.nn.FieldLoss(H1Loss(...))"),
        (nn.MLP(2, [3], 1), {}, "block 'hidden.0', 'linear': Linear does not say"),
        (Own(), {"tensor": 2, "cut": (2, 1)}, "tensor=2: must be 1 with domain"),
        (Own(), {"context": 2, "cut": (2, 1)}, "context=2: must be 1 with domain"),
        (Own(), {"cut": (9, 1)}, "at most as many parts as it has tiles (8 with 1, 8 with 2, 4 with 3 axes)"),
        (Own(), {"cut": (3, 1)}, "domain=(3, 1) = 3 ranks of one replica"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_way_out(model, mesh, said):
    assert said in refused(model, **mesh)


def test_a_field_that_repeats_itself_is_taken_from_a_model_that_knows_its_extents():
    x = np.tile(np.random.default_rng(0).normal(size=(2, 4, 4, 2)).astype("f4"), (1, 2, 2, 1))

    def loss(comm: Any, **known: Any) -> float:
        with (
            mz.Mesh(comm, domain=(2, 2)) as mesh,
            mz.distribute(nn.UNet(2, 1, width=4, groups=2, **known), mz.SGD(lr=0.1), mesh=mesh) as model,
        ):
            own = (slice(None), *mesh.slab((8, 8)))
            return model.train(x[own], x[own][..., :1])

    with pytest.raises(DataError, match="repeats itself so, tell the model its extents"):
        run_in_threads(4, loss)
    assert len(set(run_in_threads(4, lambda comm: loss(comm, space=(8, 8))))) == 1


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_an_error_of_one_rank_s_part_is_the_one_that_is_raised(strategy):
    """Of 17 positions rank 0 has 9, where it has 8 of the targets; rank 1 has 8 of both, and waits inside a layer."""
    model = Own()
    model.blocks = {"finer": nn.ConvTranspose(2, 2, (2,), padding="none"), "conv": nn.Conv(2, 2, (3,))}
    x = np.random.default_rng(0).normal(size=(2, 16, 2)).astype("f4")

    def step(comm: Any) -> None:
        with mz.distribute(model, mz.SGD(lr=0.1), strategy, mesh=mz.Mesh(comm, domain=(2,))) as trains:
            own = (slice(None), *trains.mesh.slab((16,)))
            trains.train(x[own], x[own])

    with pytest.raises(DataError, match=r"at the samples and positions of the prediction, \(1, 9\)"):
        run_in_threads(2, step)


class Greedy(Linear):
    """A user's layer that no memory suffices for."""

    def domain_form(self, domain: Any) -> Any:
        return self

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> Any:
        raise MemoryError("Unable to allocate 9 TiB")


@pytest.mark.parametrize("call", ["train", "evaluate", "predict"])
def test_refused_memory_in_a_layer_is_told_with_the_way_out(call):
    def step(comm: Any) -> None:
        with mz.distribute(Own(Greedy()), mz.SGD(lr=0.1), mesh=mz.Mesh(comm, domain=(1, 2))) as model:
            x, y = (array[0][:, *model.mesh.slab(SPACE)] for array in data())
            getattr(model, call)(*((x,) if call == "predict" else (x, y)))

    with pytest.raises(OutOfMemoryError, match=r"a micro-batch \(Unable to allocate 9 TiB\); .*mz.Mesh\(domain="):
        run_in_threads(2, step)


def test_a_constant_field_that_is_given_whole_is_told_where_the_model_knows_its_extents():
    model, x = nn.UNet(2, 1, width=4, groups=2, levels=2, space=SPACE), np.ones((2, *SPACE, 2), np.float32)
    assert "is the same array, of (13, 11) positions, on all ranks" in refused(model, lambda *_: (x, x[..., :1]))


def test_a_form_that_is_no_layer_is_told_by_the_name_of_its_layer():
    class Formless(Linear):
        def domain_form(self, domain: Any) -> Any:
            return None

    assert "block 'last': Formless.domain_form must return a layer, it returned None" in refused(Own(Formless()))
