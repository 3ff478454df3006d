"""``Mesh``, the ranks, and ``Config``, the settings: what they are, and the layouts that ``distribute`` makes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import MpizeroError, StateError
from mpizero.testing import run_in_threads
from tests.parallel.models import STRATEGIES, gpt, mlp, part, points, tokens

#: Every axis has more than one rank somewhere, with each other one; a pipeline alone is below.
MESHES: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (3, {"data": 3}),
    (4, {"pipeline": 2, "data": 2, "order": "data,pipeline,tensor"}),
    (8, {"pipeline": 4, "ranks_per_node": 2}),
    (2, {"tensor": 2}),
    (4, {"pipeline": 2, "tensor": 2, "share_node_memory": False}),
    (4, {"tensor": 2, "context": 2}),
)
TILES = {"tensor": 2, "context": 2}


def trained(comm: Any, strategy: str, sizes: dict[str, Any], **settings: Any) -> str:
    """Train two steps of eight samples, and return the hash of the parameters."""
    x, y = tokens(8)
    config = mz.Config(micro_batch=2, clip=1.0, **settings)
    with (
        mz.Mesh(comm, **sizes) as mesh,
        mz.distribute(gpt(), mz.AdamW(1e-2), strategy, mesh=mesh, config=config) as model,
    ):
        for _ in range(2):
            model.train(*part(model.batch_group, x, y))
        return model.parameters_sha256()


@pytest.mark.slow
def test_every_mesh_trains_to_the_bits_of_one_process() -> None:
    known = {str(tiles): trained("self", "ddp", {}, tiles=tiles) for tiles in (None, TILES)}
    for number, (ranks, sizes) in enumerate(MESHES):
        tiles, strategy = TILES if {"tensor", "context"} & sizes.keys() else None, STRATEGIES[number % 4]
        found = run_in_threads(ranks, lambda comm, s=strategy, z=sizes, t=tiles: trained(comm, s, z, tiles=t))
        expected = known[str(tiles)]
        assert set(found) == {expected}, (ranks, sizes, strategy)


def test_settings_of_the_pipeline_reach_it() -> None:
    def schedules(comm: Any) -> tuple[Any, Any]:
        config = mz.Config(schedule="interleaved", virtual_stages=2, cuts=[1, 2, 3])
        with mz.Mesh(comm, pipeline=2) as mesh, mz.distribute(gpt(), None, mesh=mesh, config=config) as model:
            return model._parallel_layout.schedule, model._parallel_layout.cuts

    assert run_in_threads(2, schedules)[0] == ("interleaved", (1, 2, 3))


def test_a_mesh_prints_a_picture_of_its_ranks() -> None:
    def picture(comm: Any, **sizes: Any) -> str:
        with mz.Mesh(comm, **sizes) as mesh:
            return str(mesh)

    assert picture("self") == "1 rank"
    assert run_in_threads(3, picture)[0] == "3 ranks: data 3"
    found = run_in_threads(8, lambda comm: picture(comm, tensor=2, context=2, order="data,tensor,pipeline"))[7]
    assert found.splitlines() == [
        "8 ranks: data 2 x tensor 2 x context 2",
        "data 0: tensor 0: 0 1, tensor 1: 2 3",
        "data 1: tensor 0: 4 5, tensor 1: 6 7",
    ]


def test_settings_are_plain_data() -> None:
    config = mz.Config(micro_batch=np.int64(4), tiles={"context": 2, "tensor": 4}, costs=[1, 2.5])
    same = mz.Config(costs=(1, 2.5), micro_batch=4, tiles={"tensor": 4, "context": 2})
    assert config == same == pickle.loads(pickle.dumps(config)) == eval(repr(config), {"Config": mz.Config})
    assert hash(config) == hash(same)
    assert config != config.replace(clip=1.0)
    assert repr(config.replace(tiles=None, costs=None)) == "Config(micro_batch=4)"
    assert mz.ShardingConfig(comm="self") != mz.ShardingConfig(comm="self")


def placed(comm: Any, config: Any = None, strategy: Any = "zero2", **sizes: Any) -> Any:
    return mz.distribute(mlp(), None, strategy, mesh=mz.Mesh(comm, **sizes), config=config)


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no mesh": (lambda comm: mz.distribute(mlp(), None, mesh=comm), "expected a mpizero.Mesh"),
    "no config": (lambda comm: placed(comm, {"clip": 1}), "expected a mpizero.Config"),
    "no name of a strategy": (lambda comm: placed(comm, strategy=["zero2"]), "strategy"),
    "cuts without a pipeline": (lambda comm: placed(comm, mz.Config(cuts=[1])), r"cuts=\[1\] need .* has pipeline=1"),
    "ranks given twice": (lambda comm: placed(comm, mz.ShardingConfig(comm=comm)), "has ranks of its own"),
    "too many stages": (lambda comm: placed(comm, pipeline=3), "2 ranks are not a multiple of pipeline=3"),
    "too many replicas": (lambda comm: placed(comm, data=3), "data=3 .* there are 2"),
    "a class that does not split": (
        lambda comm: mz.ZeRO2Model(mlp(), mz.Config(), mesh=mz.Mesh(comm, tensor=2)),
        "ZeRO2Model does not split a model: give this mesh to mz.distribute",
    ),
    "settings without ranks": (lambda comm: mz.ZeRO2Model(mlp(), mz.Config()), "needs a ShardingConfig"),
    "a stage too few": (lambda comm: mz.Mesh(pipeline=0), "pipeline=0: expected a whole number >= 1"),
    "no replica": (lambda comm: mz.Mesh(data=0), "data=0: expected -1 .* or a whole number"),
    "an unknown axis": (lambda comm: mz.Mesh(order="pipeline,expert"), "expert': expected pipeline, tensor and data"),
    "a misspelt setting": (lambda comm: mz.Config(microbatch=2), "did you mean 'micro_batch'"),
    "an unknown schedule": (lambda comm: mz.Config(schedule="2f2b"), "schedule='2f2b': expected"),
    "cuts that are no list": (lambda comm: mz.Config(cuts=3), "cuts=3: expected a list: the number of the first block"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_refused_on_every_rank(name: str) -> None:
    make, words = WRONG[name]

    def work(comm: Any) -> None:
        with pytest.raises((MpizeroError, TypeError), match=words):
            make(comm)

    run_in_threads(2, work)


def test_a_model_closes_the_ranks_that_were_made_for_it_if_no_other_model_uses_them() -> None:
    x, y = points(6)
    model = mz.distribute(mlp(), mz.SGD(0.1))
    other = mz.distribute(mlp(), mz.SGD(0.1), mesh=model.mesh)
    model.close()
    assert np.isfinite(other.evaluate(x, y).loss)
    other.close()
    other.mesh.close()
    model = mz.distribute(mlp(), mz.SGD(0.1))
    model.close()
    assert (model.rank, model.world_size) == (0, 1)
    assert "communicator" not in vars(model.mesh)
    with pytest.raises(StateError, match=r"this Model \(zero2\) is closed"):
        model.train(x, y)


def test_on_a_part_of_the_job_s_ranks_a_mesh_trains_to_the_same_bits() -> None:
    def work(comm: Any) -> str:
        with comm.split(comm.rank % 2, comm.rank, name="half") as half:
            return trained(half, "zero2", {"pipeline": half.size})

    assert set(run_in_threads(3, work)) == {trained("self", "zero1", {})}
