"""A wrong keyword or name is an error of one line, which says what was meant and what there is."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle

import pytest

import mpizero as mz
from mpizero._util.names import ELSEWHERE, declared, explains, nearest
from mpizero.errors import ArgumentError, ConfigError, MpizeroError, UnknownNameError
from mpizero.train.config.toml import ConfigDocument, parse_config

#: Public classes and functions with what they cannot do without, and a wrong keyword with what is suggested.
WRONG = [
    (mz.ShardingConfig, (), "micro_bach", "micro_batch"),
    (mz.AdamW, (), "learning_rate", "lr"),
    (mz.optim.cosine, (0.1,), "total_steps", "steps"),
    (mz.HybridShardedModel, (None, None), "tp", "tensor_parallel_size"),
    (mz.data.ArraySource, (), "inputs", None),
]


@pytest.mark.parametrize(("target", "given", "wrong", "meant"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_keyword_names_the_class_what_was_meant_and_what_there_is(target, given, wrong, meant):
    with pytest.raises(ArgumentError) as caught:
        target(*given, **{wrong: 1})
    text, known = str(caught.value), list(inspect.signature(target).parameters)
    assert text.startswith(f"{target.__name__}: there is no argument {wrong!r}")
    assert (f"did you mean {meant!r}?" in text) == (meant is not None)
    assert text.endswith(f"it takes {', '.join(known) or 'none'}")
    assert isinstance(caught.value, TypeError)  # as Python's own


def test_what_is_missing_or_too_much_is_named():
    with pytest.raises(ArgumentError, match=r"^Linear: missing a required argument: 'outputs'; it takes inputs, "):
        mz.nn.Linear(3)
    with pytest.raises(ArgumentError, match=r"^AdamW: 2 given without a name, at most 1 can be; it takes lr, "):
        mz.AdamW(0.1, 0.01)


def test_an_error_of_types_inside_of_a_call_stays_what_it_is():
    @explains
    def fail(value):
        return value + "text"

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        fail(1)
    assert not isinstance(caught.value, MpizeroError)


def test_a_class_that_explains_is_the_same_class():
    layer = mz.nn.Linear(2, 3)
    assert list(inspect.signature(mz.nn.Linear).parameters) == ["inputs", "outputs", "bias", "init", "input_gradient"]
    assert pickle.loads(pickle.dumps(layer)) == layer == copy.deepcopy(layer)
    assert dataclasses.replace(layer, inputs=4) == mz.nn.Linear(4, 3)

    @dataclasses.dataclass(frozen=True)
    class Wider(mz.nn.Linear):
        more: int = 0

    assert Wider(2, 3, more=4).more == 4
    with pytest.raises(TypeError):
        Wider(2, 3, moer=4)


@pytest.mark.parametrize(
    ("module", "wrong", "meant"),
    [(mz, "Zero2Model", "ZeRO2Model"), (mz.nn, "MSELoss", "MeanSquaredError"), (mz.checkpoint, "latst", "latest")],
)
def test_a_name_that_a_module_does_not_have_is_told_the_nearest(module, wrong, meant):
    with pytest.raises(UnknownNameError, match=rf"no attribute '{wrong}' \(did you mean '{meant}'\?\)"):
        getattr(module, wrong)
    assert not hasattr(module, wrong)


def test_the_configuration_file_suggests_in_the_same_words():
    text = '[model]\nname = "gpt"\n[data]\ntext = "stdlib"\n[optimizer]\nlearning_rate = 1\n'
    known = ["lr", "weight_decay"]
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate: unknown key \(did you mean 'lr'\?\)"):
        parse_config(ConfigDocument("run.toml", text))
    assert nearest("learning_rate", known) == " (did you mean 'lr'?)"


def test_what_other_libraries_say_leads_to_names_that_exist():
    """An entry without a target would be of no use to anybody."""
    modules = [mz, mz.nn, mz.optim, mz.data]
    targets = {name for module in modules for name in module.__all__}
    values = [getattr(module, name) for module in modules for name in module.__all__]
    for value in [*values, *(getattr(mz, name) for name in declared("mpizero")[1])]:
        if callable(value):
            targets |= set(inspect.signature(value).parameters)
    assert {ours for names in ELSEWHERE.values() for ours in names} <= targets
    assert all(word == word.lower() for word in ELSEWHERE)
