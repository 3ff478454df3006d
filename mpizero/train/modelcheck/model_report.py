"""Hold the result of checking a model, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelFinding:
    """Describe one thing that is wrong with a model.

    Attributes
    ----------
    check : str
        The check with this finding: "values", "repeats", "sum", "gradient", "prediction", "layers" or "ranks".
    what : str
        The wrong value: "loss", "weight", "prediction", "gradient of 'w'", ...
    seen : str
        What is wrong with the value, with numbers.
    cause : str
        The probable cause.
    remedy : str
        How to repair it.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.testing import check_model
    >>> def mean(parameters, batch):  # wrong: training adds the sums of pieces of a batch
    ...     error = parameters["slope"] * batch[0] - batch[1]
    ...     return float((error**2).mean()), {"slope": np.array([2 * (error * batch[0]).mean()])}, float(len(error))
    >>> x = np.array([0.5, 1.0, 2.0, 3.0])
    >>> try:
    ...     check_model(mz.FunctionModel({"slope": np.ones(1)}, mean), x, 3 * x, comm="self")
    ... except mz.errors.ModelCheckError as error:
    ...     finding = error.report.findings[0]
    >>> finding.check, finding.what
    ('sum', 'loss')
    >>> print(finding.remedy)
    return the sum over the samples, and float(len(x)) as the weight
    """

    check: str
    what: str
    seen: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.seen}; probably {self.cause}: {self.remedy}"


@dataclass(frozen=True)
class ModelReport:
    """Hold the result of :func:`~mpizero.testing.check_model`.

    Attributes
    ----------
    findings : tuple of ModelFinding
        What is wrong with the model; empty if nothing is wrong.
    passed : tuple of str
        One line for each check that passed, with what the check measured.
    notes : tuple of str
        Lines about what could not be checked, or is worth knowing.
    evaluations : int
        How often the model was evaluated.
    seconds : float
        Duration of all checks.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.testing import check_model
    >>> x, y = np.random.default_rng(0).normal(size=(4, 2)), np.array([0, 1, 1, 0])
    >>> report = check_model(mz.nn.MLP(2, [3], 2), x, y, comm="self")
    >>> report.right, report.findings
    (True, ())
    >>> print(report.passed[1])
    repeats: the same bits every time, in any memory
    """

    findings: tuple[ModelFinding, ...]
    passed: tuple[str, ...]
    notes: tuple[str, ...]
    evaluations: int
    seconds: float

    @property
    def right(self) -> bool:
        """Tell whether there are no findings."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, for JSON."""
        return {
            "right": self.right,
            "findings": [vars(finding) for finding in self.findings],
            "passed": list(self.passed),
            "notes": list(self.notes),
            "evaluations": self.evaluations,
            "seconds": self.seconds,
        }

    @property
    def told(self) -> tuple[str, ...]:
        """Return one line for each pair of check and cause; it names all values that are wrong for that cause."""
        groups: dict[tuple[str, str], list[ModelFinding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.check, finding.cause), []).append(finding)
        return tuple(_of_group(group) for group in groups.values())

    def __str__(self) -> str:
        lines = [f"wrong: {line}" for line in self.told]
        lines += [f"ok:    {line}" for line in self.passed]
        lines += [f"note:  {line}" for line in self.notes]
        return "\n".join(lines)


def _of_group(group: list[ModelFinding]) -> str:
    first, *others = group
    listed = ", ".join(finding.what for finding in others[:6]) + (", ..." if len(others) > 6 else "")
    return f"{first}{f' (and so with {listed})' if others else ''}"


class UnusableEvaluation(Exception):  # noqa: N818 - never leaves the package
    """Report that the values returned by the model cannot be used; all checks end, with ``findings``."""

    def __init__(self, *findings: ModelFinding) -> None:
        super().__init__()
        self.findings = findings
