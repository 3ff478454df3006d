"""What examples on cut fields have in common: one set of bits on any cut, a picture, options that are refused."""

import pytest

from tests.support.cut_examples import assert_draws, assert_same_on_cuts

pytestmark = pytest.mark.slow
#: Options of a short run with its ranks and cuts, and of a picture with its ranks.
EXAMPLES = {
    "advected_field": (
        ("--small --steps 3 --rollout 3", ((3, "1 3"), (4, "2 1"))),
        ("--small --steps 1 --rollout 3 --domain 2 1", 2),
    ),
    "darcy_flow": (("--small --steps 2", ((3, "1 3"), (4, "2 1"))), ("--small --steps 1 --domain 2 1", 2)),
    "shallow_water": (
        ("--small --updates 2 --rollout 5", ((3, "1 3"), (4, "2 1"))),
        ("--small --updates 1 --rollout 3 --domain 2 1", 2),
    ),
    "volume_segmentation": (
        ("--extent 17 --steps 2", ((4, "1 1 2"), (4, "2 2 1"))),
        ("--extent 16 --steps 1 --domain 2 1 2", 4),
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_parameters_and_results_have_the_same_bits_on_any_cut(example, name):
    (options, cuts), _ = EXAMPLES[name]
    assert_same_on_cuts(example(name), options.split(), cuts)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_picture_is_drawn_of_a_cut_field(example, name, tmp_path):
    pytest.importorskip("matplotlib")
    _, (options, ranks) = EXAMPLES[name]
    assert_draws(example(name), options.split(), ranks, tmp_path / "field.svg")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("advected_field", "--rollout 0"),
        ("darcy_flow", "--steps 0"),
        ("shallow_water", "--updates 0"),
        ("shallow_water", "--unrolled 24"),
        ("volume_segmentation", "--extent 15"),
        ("volume_segmentation", "--steps 0"),
        ("volume_segmentation", "--limit-mb 0"),
    ],
)
def test_options_out_of_range_are_refused(example, name, wrong, capsys):
    with pytest.raises(SystemExit):
        example(name).main(wrong.split(), "self")
    assert f"{wrong}: " in capsys.readouterr().err
