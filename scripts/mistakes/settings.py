"""Make mistakes with settings, names and the order of calls."""

from __future__ import annotations

import case
import numpy as np

import mpizero as mz


def model(config=None, **arguments):
    """Return the sharded linear model of these mistakes."""
    given = {"parameters": case.parameters(), "loss_and_grad": case.squares} | arguments
    return mz.ZeRO2Model(mz.FunctionModel(**given), config or mz.ShardingConfig())


@case.mistake("ArgumentError", "'micro_bach'", "did you mean 'micro_batch'?", status=78)
def a_setting_misspelt():
    """Misspell a setting: `ShardingConfig(micro_bach=2)`."""
    mz.ShardingConfig(micro_bach=2)


@case.mistake("ArgumentError", "AdamW", "'learning_rate'", "did you mean 'lr'?", status=78)
def another_librarys_keyword():
    """Give `AdamW` the keyword of another library: `learning_rate=`."""
    mz.AdamW(learning_rate=1e-3)


@case.mistake("UnknownNameError", "'MSELoss'", "did you mean 'MeanSquaredError'?", status=78)
def another_librarys_name():
    """Ask `mpizero.nn` for `MSELoss`."""
    mz.nn.MSELoss()


@case.mistake("ConfigError", "auto_sync_gradients='no'", "True or False", status=78)
def a_word_for_a_flag():
    """Give a word where True or False is asked."""
    mz.ShardingConfig(auto_sync_gradients="no")


@case.mistake("LayoutError", "'layer' is a mapping of 'weight'", "flatten the names", status=70)
def nested_parameters():
    """Give parameters as a dictionary of dictionaries."""
    model(parameters={"layer": case.parameters()})


@case.mistake("ConfigError", "arrays by name", "got list", status=78)
def a_list_of_parameters():
    """Give parameters as a list of arrays."""
    model(parameters=list(case.parameters().values()))


@case.mistake("ConfigError", "'a' and 'a/b'", "no checkpoint could hold both", status=78)
def names_that_no_checkpoint_holds():
    """Name two parameters `a` and `a/b`."""
    model(parameters={"a": np.zeros(2), "a/b": np.zeros(2)})


@case.mistake("ArgumentError", "GPT is a class, not a model", "call it", status=78)
def a_class_for_a_model():
    """Give the class of a model in the place of a model."""
    mz.ZeRO2Model(mz.nn.GPT, mz.ShardingConfig())


@case.mistake("ArgumentError", "ZeRO2Model needs a ShardingConfig", status=78)
def arguments_in_another_order():
    """Give the configuration before the model."""
    mz.ZeRO2Model(mz.ShardingConfig(), mz.FunctionModel(case.parameters(), case.squares))


@case.mistake("StateError", "configuration of this ZeRO2Model is closed", "close the model first", status=(1, 70))
def a_configuration_closed_first():
    """Close the configuration, then train on."""
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
    """Give the class of an optimizer: `ZeRO2Optimizer(AdamW, config)`."""
    mz.ZeRO2Optimizer(mz.AdamW, mz.ShardingConfig())


@case.mistake("ConfigError", "lr(step)", status=78)
def a_schedule_without_a_step():
    """Give a learning rate as a function without an argument."""
    mz.SGD(lr=lambda: 0.1)


@case.mistake("LayoutError", "unknown ['wieght']", "did you mean 'weight'?", status=70)
def a_name_misspelt():
    """Load parameters of which one name is misspelt."""
    values = case.parameters()
    model().load_named({"wieght": values["weight"], "bias": values["bias"]})


@case.mistake("ConfigError", "unknown strategy 'zero4'", "did you mean", status=78)
def an_unknown_strategy():
    """Ask `distribute` for the strategy `zero4`."""
    mz.distribute(mz.FunctionModel(case.parameters(), case.squares), mz.SGD(), strategy="zero4")


@case.mistake("ValueError: no convergence in cell 3", 'settings.py", line', status=(1, 70))
def an_error_of_the_users_function():
    """Raise an error in `loss_and_grad`: it keeps its traceback."""

    def loss_and_grad(parameters, batch):
        raise ValueError("no convergence in cell 3")

    model(loss_and_grad=loss_and_grad).train(*case.samples())


@case.mistake(
    "ConfigError: threads=0",
    'settings.py", line',
    status=78,
    environment={"MPIZERO_TRACEBACK": "1"},
)
def a_traceback_that_is_asked_for():
    """Ask for the whole traceback of an error: `MPIZERO_TRACEBACK=1`."""
    mz.ShardingConfig(threads=0)


if __name__ == "__main__":
    case.main()
