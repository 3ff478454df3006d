"""Make mistakes with settings, names, argument types and the order of calls."""

from __future__ import annotations

import case
import numpy as np

import mpizero as mz


def model(config=None, **arguments):
    """Return a sharded linear model; ``arguments`` replace those of FunctionModel."""
    given = {"parameters": case.parameters(), "loss_and_grad": case.squares} | arguments
    return mz.ZeRO2Model(mz.FunctionModel(**given), config or mz.ShardingConfig())


@case.mistake("ArgumentError", "'micro_bach'", "did you mean 'micro_batch'?", status=78)
def a_setting_misspelt():
    """Misspell a setting: `ShardingConfig(micro_bach=2)`."""
    mz.ShardingConfig(micro_bach=2)


@case.mistake("ArgumentError", "AdamW", "'learning_rate'", "did you mean 'lr'?", status=78)
def another_librarys_keyword():
    """Pass `learning_rate=` to `AdamW`, the keyword of another library."""
    mz.AdamW(learning_rate=1e-3)


@case.mistake("UnknownNameError", "'MSELoss'", "did you mean 'MeanSquaredError'?", status=78)
def another_librarys_name():
    """Use `mpizero.nn.MSELoss`, the name of another library."""
    mz.nn.MSELoss()


@case.mistake("ConfigError", "auto_sync_gradients='no'", "True or False", status=78)
def a_word_for_a_flag():
    """Pass a text for a setting that takes True or False."""
    mz.ShardingConfig(auto_sync_gradients="no")


@case.mistake("LayoutError", "'layer' is a mapping of 'weight'", "flatten the names", status=70)
def nested_parameters():
    """Pass parameters as a dictionary of dictionaries."""
    model(parameters={"layer": case.parameters()})


@case.mistake("ConfigError", "arrays by name", "got list", status=78)
def a_list_of_parameters():
    """Pass parameters as a list of arrays."""
    model(parameters=list(case.parameters().values()))


@case.mistake("ConfigError", "'a' and 'a/b'", "no checkpoint could hold both", status=78)
def names_that_no_checkpoint_holds():
    """Name two parameters `a` and `a/b`."""
    model(parameters={"a": np.zeros(2), "a/b": np.zeros(2)})


@case.mistake("ArgumentError", "GPT is a class, not a model", "call it", status=78)
def a_class_for_a_model():
    """Pass the class of a model instead of a model."""
    mz.ZeRO2Model(mz.nn.GPT, mz.ShardingConfig())


@case.mistake("ArgumentError", "ZeRO2Model needs a ShardingConfig", status=78)
def arguments_in_another_order():
    """Pass configuration and model in the wrong order."""
    mz.ZeRO2Model(mz.ShardingConfig(), mz.FunctionModel(case.parameters(), case.squares))


@case.mistake("StateError", "(or ShardingConfig) of this ZeRO2Model is closed", "close the model first", status=(1, 70))
def a_configuration_closed_first():
    """Close the configuration, and then train its model."""
    config = mz.ShardingConfig()
    sharded = model(config)
    config.close()
    sharded.train(*case.samples())


@case.mistake("StateError", "this ZeRO2Model is closed", status=70)
def a_model_that_is_closed():
    """Save a model after the end of its `with` block."""
    with model() as sharded:
        sharded.train(*case.samples())
    sharded.save_model("run")


@case.mistake("ArgumentError", "the class AdamW", "call it to make one", status=78)
def a_class_for_an_optimizer():
    """Pass the class of an optimizer instead of an optimizer: `ZeRO2Optimizer(AdamW, config)`."""
    mz.ZeRO2Optimizer(mz.AdamW, mz.ShardingConfig())


@case.mistake("ConfigError", "lr(step)", status=78)
def a_schedule_without_a_step():
    """Pass a learning-rate schedule (a function) that takes no argument."""
    mz.SGD(lr=lambda: 0.1)


@case.mistake("LayoutError", "unknown ['wieght']", "did you mean 'weight'?", status=70)
def a_name_misspelt():
    """Load parameters by name, with one name misspelt."""
    values = case.parameters()
    model().load_named({"wieght": values["weight"], "bias": values["bias"]})


@case.mistake("ConfigError", "unknown strategy 'zero4'", "did you mean", status=78)
def an_unknown_strategy():
    """Pass the unknown strategy `zero4` to `distribute`."""
    mz.distribute(mz.FunctionModel(case.parameters(), case.squares), mz.SGD(), strategy="zero4")


@case.mistake("ValueError: no convergence in cell 3", 'settings.py", line', status=(1, 70))
def an_error_of_the_users_function():
    """Raise an error in `loss_and_grad`; its traceback is printed."""

    def loss_and_grad(parameters, batch):
        raise ValueError("no convergence in cell 3")

    model(loss_and_grad=loss_and_grad).train(*case.samples())


@case.mistake("ConfigError: threads=0", 'settings.py", line', status=78, environment={"MPIZERO_TRACEBACK": "1"})
def a_traceback_that_is_asked_for():
    """Set `MPIZERO_TRACEBACK=1`, which prints the whole traceback of an error."""
    mz.ShardingConfig(threads=0)
