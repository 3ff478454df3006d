"""Members of an ensemble train beside one another, with their own bits; one that fails ends alone if asked to."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import mpizero as mz
from mpizero.cli.main import main
from mpizero.cli.train import EnsembleSettings
from mpizero.errors import ArgumentError, ConfigError, DataError, MpizeroError
from mpizero.testing import run_in_threads
from mpizero.tools.ensemble import Member
from mpizero.train.config.toml import ConfigDocument, tables_of

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(16, 1)


def trains(member):
    config = mz.ShardingConfig(comm=member.comm, micro_batch=2)
    model = mz.nn.MLP(1, (4,), 1, task="regression", seed=member.number)
    settings = {"optimizer": mz.AdamW(1e-2), "steps": 3, "global_batch": 8, "run": member.run, "progress": False}
    with mz.Trainer(model, mz.data.ArraySource(X, X), config, **settings) as trainer:
        return trainer.fit()


def fails(member):
    if member.number == 2:
        raise FloatingPointError("diverged")
    return trains(member)


def hashes(summary):
    return [one["result"]["parameters_sha256"] for one in summary["members"]]


def test_members_have_the_bits_of_jobs_of_their_own_and_one_summary(tmp_path):
    together = run_in_threads(4, lambda comm: mz.run_members(trains, 2, comm, run=tmp_path / "together"))
    assert together[1:] == together[:-1]
    for number in range(2):
        alone = mz.run_members(trains, 2, "self", run=tmp_path / "alone", only=number)
        assert alone["counts"]["unfinished"] == 1 - number
    assert hashes(together[0]) == hashes(alone)
    assert len(set(hashes(alone))) == 2
    losses = [one["result"]["loss"] for one in alone["members"]]
    figures = {"mean": np.mean(losses), "deviation": np.std(losses), "least": min(losses), "largest": max(losses)}
    assert alone["figures"]["loss"] == pytest.approx(figures)
    assert json.loads((tmp_path / "alone" / "ensemble.json").read_text()) == alone
    assert (tmp_path / "together" / "member_0001" / "run_complete").exists()


def test_of_four_members_on_two_ranks_each_three_end_well_when_one_raises(tmp_path, capsys):
    def work(comm):
        told = "1 of 4 members have failed: member 2: FloatingPointError: diverged"
        with pytest.raises(mz.errors.MemberError, match=told):
            mz.run_members(fails, 4, comm, run=tmp_path, on_failure="continue")

    run_in_threads(8, work)
    summary = json.loads((tmp_path / "ensemble.json").read_text())
    assert [one["status"] for one in summary["members"]] == ["complete", "complete", "failed", "complete"]
    assert "member 2 has failed, the others go on: FloatingPointError: diverged" in capsys.readouterr().err


def test_by_default_a_member_that_raises_ends_all(tmp_path):
    with pytest.raises(FloatingPointError):
        run_in_threads(4, lambda comm: mz.run_members(fails, 4, comm, run=tmp_path))


def test_the_command_summarizes_members_that_ran_as_jobs(tmp_path, capsys):
    mz.run_members(trains, 2, "self", run=tmp_path, only=1)
    assert main(["ensemble", str(tmp_path), "--members", "2"]) == 70
    assert capsys.readouterr().out.startswith("member 0  unfinished\nmember 1  complete\nsteps  mean 3")
    mz.run_members(trains, 2, "self", run=tmp_path, only=0)
    assert main(["ensemble", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"complete": 2, "failed": 0, "unfinished": 0}


def test_wrong_arguments_and_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="members=2: the job has 1 ranks"):
        mz.run_members(trains, 2, "self", run=tmp_path)
    with pytest.raises(ConfigError, match="only=2: expected the number of a member, 0 to 1"):
        mz.run_members(trains, 2, "self", run=tmp_path, only=2)
    with pytest.raises(ConfigError, match="on_failure='go': expected"):
        mz.run_members(trains, 1, "self", run=tmp_path, on_failure="go")
    with pytest.raises(ArgumentError, match="the function returned int"):
        mz.run_members(lambda member: 3, 1, "self", run=tmp_path)
    with pytest.raises(DataError, match="holds no folder of a member"):
        mz.summarize_members(tmp_path / "none")
    (tmp_path / "member_0000" / "member.json").write_text("{")
    with pytest.raises(MpizeroError, match="not the outcome of a member"):
        mz.summarize_members(tmp_path)


CONFIG = """
[model]
name = "mlp"
hidden = [8]
[data]
arrays = "digits"
[train]
steps = 2
global_batch = 8
[ensemble]
members = 2
on_failure = "continue"
[ensemble.each]
optimizer.lr = [1e-2, {second}]
"""


def command(tmp_path, second, *more):
    (tmp_path / "config.toml").write_text(CONFIG.format(second=second))
    folder = f"checkpoint.folder={tmp_path}/run/checkpoints"

    def work(comm):
        return main(["train", str(tmp_path / "config.toml"), "--set", folder, *more], comm)

    return run_in_threads(2, work)


def test_a_configuration_trains_members_that_differ_in_seed_and_in_lists_of_settings(tmp_path, capsys):
    assert command(tmp_path, "1e-3") == [0, 0]
    assert len(set(hashes(json.loads(capsys.readouterr().out)))) == 2
    for number in range(2):
        lines = (tmp_path / "run" / f"member_{number:04d}" / "metrics.jsonl").read_text().splitlines()
        assert {json.loads(line)["learning_rate"] for line in lines} == {(1e-2, 1e-3)[number]}
    assert json.loads((tmp_path / "run" / "ensemble.json").read_text())["counts"]["complete"] == 2


def test_members_take_every_kind_of_value_that_a_file_has(tmp_path):
    """Tables, times, texts of any characters; and so does the folder of the ensemble."""
    each = {
        "model.rename": "[{a = 1, b = [1, 2]}, {}]",
        "train.time_limit": "[07:32:00, 08:00:00.5]",
        "data.began": "[1979-05-27T07:32:00Z, 1979-05-27]",
        "model.title": '["\U0001f600 \\"quoted\\"", "line\\nend"]',
        "optimizer.lr": "[1e-3, inf]",
    }
    text = "[ensemble]\nmembers = 2\n[ensemble.each]\n" + "".join(f"{key} = {value}\n" for key, value in each.items())
    document = ConfigDocument("file.toml", text)
    settings = EnsembleSettings.of(tables_of(document)["ensemble"])
    config = SimpleNamespace(train=SimpleNamespace(seed=3, threads=1))
    for number in range(2):
        member = Member(number, None, tmp_path / "run \U0001f600")
        found = tables_of(replace(document, values=settings.values(config, member)))
        for key, values in tomllib.loads("".join(f"{key} = {value}\n" for key, value in each.items())).items():
            for name, value in values.items():
                assert found[key][name] == value[number]
        assert found["train"]["seed"] == 3 + number
        assert found["checkpoint"]["folder"] == str(tmp_path / "run \U0001f600" / "checkpoints")


def test_a_member_with_a_wrong_setting_fails_alone(tmp_path, capsys):
    with pytest.raises(mz.errors.MemberError, match="1 of 2 members have failed: member 1: ConfigError"):
        command(tmp_path, "-1.0")


def test_a_wrong_section_names_its_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"--set: ensemble.member: unknown key \(did you mean 'members'"):
        command(tmp_path, "1e-3", "--set", "ensemble.member=0")
    with pytest.raises(ConfigError, match="must be a list of 3 values, one a member"):
        command(tmp_path, "1e-3", "--set", "ensemble.members=3")


def test_members_may_go_into_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def solve(member):
        member.run.mkdir(parents=True, exist_ok=True)
        os.chdir(member.run)
        return {"name": member.run.name}

    found = mz.run_members(solve, 1, "self", run="all")
    assert found["members"][0]["result"] == {"name": "member_0000"}
    assert os.listdir(tmp_path) == ["all"]
    assert sorted(os.listdir(tmp_path / "all")) == ["ensemble.json", "member_0000"]
