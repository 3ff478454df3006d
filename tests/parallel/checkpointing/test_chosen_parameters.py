"""Parameters alone come from checkpoints, safetensors and npz files, on any layout, with a report of what was taken."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.checkpoint.convert import export
from mpizero.errors import CheckpointError, ConfigError
from mpizero.testing import run_in_threads


def network(outputs=3, seed=0, dtype="f4"):
    return mz.nn.MLP(4, (8, 6), outputs, seed=seed, dtype=dtype)


def placed(net, comm, **layout):
    config = mz.ShardingConfig(comm=comm)
    if layout:
        return mz.HybridShardedModel(net, config, **layout, optimizer=mz.SGD(0.1))
    return mz.ZeRO3Model(net, config, optimizer=mz.SGD(0.1))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same parameters, float64 with five outputs, in every kind of file; and their values."""
    folder = tmp_path_factory.mktemp("files")
    with placed(network(5, seed=3, dtype="f8"), "self") as model:
        model.set_parameters(np.random.default_rng(1).normal(size=model.parameter_count))
        model.save_model(folder / "checkpoint")
        values = model.named_parameters()
        np.savez(folder / "file.npz", **values)
    with mz.checkpoint.open_checkpoint(folder / "checkpoint", "self") as reader:
        export(reader, folder / "file.safetensors", "safetensors", dtype="bfloat16")
    names = {"checkpoint": "checkpoint", "npz": "file.npz", "safetensors": "file.safetensors"}
    return {kind: folder / name for kind, name in names.items()}, values


TAKEN = ("hidden.0.linear.weight", "hidden.0.linear.bias", "hidden.1.linear.weight")


@pytest.mark.parametrize(
    ("kind", "ranks", "layout"),
    [
        ("checkpoint", 1, {}),
        ("npz", 2, {"tensor_parallel_size": 2}),
        ("safetensors", 3, {}),
        ("checkpoint", 4, {"pipeline_parallel_size": 2, "zero_stage": 3}),
    ],
)
def test_chosen_parameters_are_loaded_and_the_others_stay(kind, ranks, layout, files, capsys):
    path, wanted = files[0][kind], files[1]

    def run(comm):
        with placed(network(), comm, **layout) as model:
            before = model.named_parameters()
            report = model.load_parameters(path, include=["hidden.*", "output.linear.weight"], exclude="*.1.*.bias")
            model.train(np.ones((4, 4), "f4"), np.zeros(4, int))  # what was read is what is used
            return report, before, model.named_parameters()

    with placed(network(), "self") as alone:
        values = {name: value for name, value in rounded(wanted, kind).items() if name in TAKEN}
        alone.load_named({**alone.named_parameters(), **values})
        start = alone.named_parameters()
        alone.train(np.ones((4, 4), "f4"), np.zeros(4, int))
        trained = alone.named_parameters()
    report, before, after = run_in_threads(ranks, run)[0]
    assert report.taken == TAKEN
    assert report.left == ("hidden.1.linear.bias", "output.linear.bias")
    assert report.different == {"output.linear.weight": "shape [6, 5] in the file, [6, 3] in the model"}
    assert (report.missing, report.unused) == ((), ())
    assert f"3 of 6 parameters loaded from {path}" in capsys.readouterr().err
    for name, value in after.items():
        np.testing.assert_allclose(value, trained[name], rtol=1e-5, atol=1e-6, err_msg=name)
        assert (start[name] == before[name]).all() == (name not in report.taken)


def rounded(values, kind):
    if kind == "safetensors":
        cut = {name: value.astype("f4").view(np.uint32) for name, value in values.items()}
        return {n: ((v + 0x7FFF + ((v >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view("f4") for n, v in cut.items()}
    return {name: value.astype("f4") for name, value in values.items()}


def test_all_parameters_of_another_model_under_other_names(files, capsys):
    named = files[1]
    with placed(network(5), "self") as model:
        report = model.load_parameters(files[0]["npz"])
        assert len(report.taken) == 6
        assert not capsys.readouterr().err
        name = "output.linear.weight"
        np.testing.assert_array_equal(model.named_parameters()[name], named[name].astype("f4"))
        again = model.load_parameters(
            files[0]["checkpoint"], include="hidden.1.*", rename={"hidden.0.linear.bias": "hidden.7.x"}, strict=True
        )
        assert again.unused == ("hidden.0.linear.bias",)
        assert str(again).startswith("2 of 6 parameters loaded from ")


def test_what_cannot_be_loaded_changes_nothing_and_is_told(files, tmp_path):
    path = files[0]["checkpoint"]
    np.savez(tmp_path / "huge.npz", **{"hidden.0.linear.bias": np.full(8, 1e300)})
    np.savez(tmp_path / "other.npz", **{"hidden.0.linear.weigth": np.zeros((4, 8)), "x": np.zeros(3)})
    np.savez(tmp_path / "ints.npz", **{"hidden.0.linear.bias": np.zeros(8, int)})
    (tmp_path / "text").write_text("nothing")
    wrong = {
        "a pattern": (path, {"include": "encoder.*"}, ConfigError, r"include: 'encoder\.\*' fits the name of no param"),
        "a block": (path, {"exclude": ["hidden.0"]}, ConfigError, r"exclude: .*did you mean 'hidden\.0\.\*'"),
        "all left out": (path, {"exclude": "*"}, ConfigError, "exclude leaves nothing"),
        "a number": (path, {"include": [3]}, ConfigError, "include=3: expected patterns of names"),
        "a pair": (path, {"rename": ["a", "b"]}, ConfigError, r"rename=\['a', 'b'\]: expected names in the file"),
        "no such name": (
            path,
            {"rename": {"enc.*": "hidden.*"}},
            ConfigError,
            r"rename: 'enc\.\*' fits the name of no",
        ),
        "another model": (path, {}, CheckpointError, r"different output.linear.weight: shape \[6, 5\] in the file"),
        "strict": (path, {"include": "output.*", "strict": True}, CheckpointError, r"include=\[\.\.\.\], or map names"),
        "nothing fits": (tmp_path / "other.npz", {"include": "*"}, CheckpointError, "none of the chosen.*did you mean"),
        "too large": (tmp_path / "huge.npz", {"include": "*"}, CheckpointError, "8 values are too large"),
        "whole numbers": (tmp_path / "ints.npz", {"include": "*"}, CheckpointError, "int64 in the file, float32"),
        "no file": (tmp_path / "none", {}, FileNotFoundError, "none: no such file or folder"),
        "another kind": (tmp_path / "text", {}, CheckpointError, "neither a checkpoint .* torch.save_file|save_file"),
    }

    def run(comm):
        with placed(network(), comm) as model:
            begun = model.parameters_sha256()
            for name, (file, keywords, kind, message) in wrong.items():
                with pytest.raises(Exception, match=message) as raised:
                    model.load_parameters(file, **keywords)
                assert isinstance(raised.value, kind) or comm.size > 1, name
                assert model.parameters_sha256() == begun, name

    for ranks in (1, 2):
        run_in_threads(ranks, run)


def test_ranks_that_choose_differently_are_told(files):
    def run(comm):
        with placed(network(), comm) as model:
            model.load_parameters(files[0]["npz"], include=f"hidden.{comm.rank}.*")

    with pytest.raises(ConfigError, match="ranks differ: include of the arguments of load_parameters"):
        run_in_threads(2, run)


@pytest.mark.parametrize("folder", ["", "checkpoints"])
def test_of_a_run_the_newest_checkpoint_is_taken(folder, tmp_path):
    with placed(network(), "self") as model:
        for step in (1, 2):
            model.set_parameters(np.full(model.parameter_count, step))
            model.save_model(tmp_path / folder / f"step_{step:08d}")
        model.set_parameters(np.zeros(model.parameter_count))
        model.load_parameters(tmp_path)
        assert set(model.get_parameters()) == {2.0}


def test_parameters_that_are_trained_again_are_told_by_name_with_the_way(tmp_path):
    with placed(mz.nn.freeze(network(), ["hidden.0.*"]), "self") as model:
        mz.ZeRO3Optimizer(mz.Adam(0.1)).set_model(model)
        model.train(np.ones((4, 4), "f4"), np.zeros(4, int))
        model.save_model(tmp_path / "c")
        wanted = model.get_parameters()
    with placed(network(), "self") as model:
        mz.ZeRO3Optimizer(mz.Adam(0.1)).set_model(model)
        with pytest.raises(CheckpointError, match=r"no optimizer state .*hidden\.0\..* load_parameters\(path\)"):
            model.load_model(tmp_path / "c")
        model.load_parameters(tmp_path / "c")
        assert model.get_parameters().tobytes() == wanted.tobytes()
