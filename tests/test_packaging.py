"""What package managers and those who cite read is what setup.cfg says."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "scripts" / "packaging"
SETUP = configparser.ConfigParser()
SETUP.optionxform = str  # names of extras keep their letters
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")
ABOUT, OPTIONS = SETUP["metadata"], SETUP["options"]
#: Names of conda-forge that differ from those of PyPI.
CONDA = {"isal": "python-isal", "torch": "pytorch", "tensorboardX": "tensorboardx"}


def needs(text: str) -> dict[str, str]:
    """The least version of each library in lines NAME>=VERSION; "" if any will do."""
    return dict(line.split(">=") if ">=" in line else (line, "") for line in text.split())


REQUIRED, PYTHON = needs(OPTIONS["install_requires"]), OPTIONS["python_requires"].removeprefix(">=")
EXTRAS = {k: needs(v) for k, v in SETUP["options.extras_require"].items() if k not in ("docs", "test")}


def recipe(name: str) -> str:
    (path,) = RECIPES.glob(name)
    return path.read_text(encoding="utf-8")


def numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def test_every_recipe_and_the_citation_have_name_version_and_words_of_the_package():
    version = ABOUT["version"]
    for name, said in {
        "conda/recipe.yaml": f'version: "{version}"',
        "spack/package.py": f'version("{version}")',
        f"easybuild/{ABOUT['name']}-{version}-*.eb": f"version = '{version}'",
        "apptainer/*.def": f"dist/{ABOUT['name']}-{version}-py3-none-any.whl",
        "../../CITATION.cff": f"\nversion: {version}\n",
    }.items():
        text = recipe(name)
        assert said in text
        assert all(ABOUT[key] in text for key in ("name", "description") + ("license",) * ("easybuild" not in name)), (
            name
        )
    assert set(re.findall(r"^  - (?!name)(.*)$", recipe("../../CITATION.cff"), re.M)) == set(
        ABOUT["keywords"].split(", ")
    )


def test_conda_has_every_requirement_and_every_bound_of_an_extra():
    text = recipe("conda/recipe.yaml")
    run, optional = (
        set(re.findall(r"    - (\S+) >=([\d.]+)", part)) for part in text.split("run:")[1].split("run_constraints:")
    )
    assert run == {(CONDA.get(name, name), least) for name, least in REQUIRED.items()}
    bounds = {pair for extra in EXTRAS.values() for pair in extra.items() if pair[1]}
    assert optional == {(CONDA.get(name, name), least) for name, least in bounds}
    assert f'python_min: "{PYTHON}"' in text


def test_spack_has_every_requirement_and_its_variants_those_of_the_extras():
    text = recipe("spack/package.py")

    def specs(needed: dict[str, str]) -> set[str]:
        return {f"py-{name}{least and f'@{least}:'}" for name, least in needed.items()}

    found = re.findall(r'^        depends_on\("(.*?)(?:\+mpi)?"(?:, when="\+(\w+)")?\)', text, re.M)
    variants = re.findall(r'variant\("(\w+)"', text)
    assert {spec for spec, extra in found if not extra} == specs(REQUIRED) | {f"python@{PYTHON}:"}
    for variant in variants:
        assert {spec for spec, extra in found if extra == variant} == specs(EXTRAS[variant])
    assert f"the way: {', '.join(extra for extra in EXTRAS if extra not in variants)}." in text


def test_easybuild_has_a_library_for_every_requirement_that_is_new_enough():
    """A bundle says in a comment which version of the library it has."""
    text = recipe("easybuild/*.eb")
    found = dict(
        re.findall(r"^    \('(?:python-)?([\w-]+)', '([\d.]+)'", text, re.M)
        + re.findall(r"# (\w+) ([\d.]+)$", text, re.M)
    )
    for name, least in (REQUIRED | {"Python": PYTHON}).items():
        assert numbers(found[name]) >= numbers(least), name
