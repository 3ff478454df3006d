"""What the tests of examples on cut fields have in common."""

from mpizero.testing import run_in_threads


def assert_same_on_cuts(program, options, cuts):
    """Assert that ``program`` returns the same on each number of ranks and domain of ``cuts`` as in one process."""
    alone = program.main(options, "self")
    for ranks, domain in cuts:
        run = [*options, "--domain", *domain.split()]
        assert set(run_in_threads(ranks, lambda comm, run=run: program.main(run, comm))) == {alone}


def assert_draws(program, options, ranks, path):
    """Assert that ``program`` writes a picture to ``path``, and nothing beside it."""
    run_in_threads(ranks, lambda comm: program.main([*options, "--picture", str(path)], comm))
    assert [written.name for written in path.parent.iterdir()] == [path.name]
    assert "<svg" in path.read_text(encoding="utf-8")
