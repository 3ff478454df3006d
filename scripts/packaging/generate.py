"""Write the recipes of package managers, and CITATION.cff, from setup.cfg; or check that they agree with it.

The name, version, summary, license, least Python, requirements, extras and console script are those of setup.cfg. The
tables here say what else a package manager must be told: under which name it has a library, and in which version.
"""

from __future__ import annotations

import argparse
import configparser
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = "Written by scripts/packaging/generate.py from setup.cfg: change these, not this file."
#: Extras for those who work on mpizero itself.
FOR_CONTRIBUTORS = ("docs", "test")
#: Names of conda-forge that differ from those of PyPI.
CONDA = {"isal": "python-isal", "torch": "pytorch", "tensorboardX": "tensorboardx"}
#: Extras that are variants of the Spack package; Spack has their libraries in the versions that setup.cfg asks for.
SPACK_VARIANTS = ("torch", "zarr", "netcdf", "digits", "plot")
#: EasyBuild's toolchain, and its modules by requirement: name and version of the module, version of the library in it.
TOOLCHAIN = ("foss", "2025b")
EASYBUILD_PYTHON = "3.13.5"
EASYBUILD = {
    "numpy": ("SciPy-bundle", "2025.07", "2.3.2"),
    "mpi4py": ("mpi4py", "4.1.0", "4.1.0"),
    "numba": ("numba", "0.62.0", "0.62.0"),
    "h5py": ("h5py", "3.14.0", "3.14.0"),
    "isal": ("python-isal", "1.8.0", "1.8.0"),
    "threadpoolctl": ("Python-bundle-PyPI", "2025.07", "3.6.0"),
    "tqdm": ("tqdm", "4.67.1", "4.67.1"),
}
#: Libraries that EasyBuild has no module for in this toolchain: version and SHA-256 of the source distribution.
EASYBUILD_EXTENSIONS = {"greenlet": ("3.2.4", "0dca0d95ff849f9a364385f36ab49f50065d76964944638be9691e1832e9f86d")}


class GenerationError(Exception):
    """Report that a recipe cannot be written from what setup.cfg says."""


@dataclass(frozen=True)
class Requirement:
    """Hold the PyPI name of a library and the least version that is needed; "" if any version will do."""

    name: str
    least: str

    @classmethod
    def parse(cls, text: str) -> Requirement:
        """Read ``name>=version`` or ``name``."""
        found = re.fullmatch(r"([\w-]+(?:\[[\w,-]+\])?)\s*(?:>=\s*([\d.]+))?", text)
        if not found:
            raise GenerationError(f"setup.cfg: {text!r}: this script reads NAME or NAME>=VERSION; teach it more")
        return cls(found[1], found[2] or "")


@dataclass(frozen=True)
class Metadata:
    """Hold what setup.cfg says about the package."""

    name: str
    version: str
    summary: str
    authors: str
    license: str
    keywords: list[str]
    python: str
    command: str
    requirements: list[Requirement]
    extras: dict[str, list[Requirement]]

    @classmethod
    def read(cls, path: Path) -> Metadata:
        """Read setup.cfg."""
        parser = configparser.ConfigParser()
        parser.optionxform = str  # type: ignore[assignment, method-assign]  # names of extras keep their letters
        parser.read_string(path.read_text(encoding="utf-8"), source=str(path))
        about, options = parser["metadata"], parser["options"]
        scripts = _lines(parser["options.entry_points"]["console_scripts"])
        return cls(
            name=about["name"],
            version=about["version"],
            summary=about["description"],
            authors=about["author"],
            license=about["license"],
            keywords=[word.strip() for word in about["keywords"].split(",")],
            python=options["python_requires"].removeprefix(">="),
            command=scripts[0].partition("=")[0].strip(),
            requirements=[Requirement.parse(line) for line in _lines(options["install_requires"])],
            extras={
                name: [Requirement.parse(line) for line in _lines(text)]
                for name, text in parser["options.extras_require"].items()
                if name not in FOR_CONTRIBUTORS
            },
        )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _at_least(version: str, least: str) -> bool:
    numbers, needed = ([int(part) for part in text.split(".")] for text in (version, least or "0"))
    return numbers >= needed


def conda(package: Metadata) -> str:
    """Return a recipe of the format v1 for conda-forge."""

    def named(need: Requirement) -> str:
        return f"{CONDA.get(need.name, need.name)}{need.least and f' >={need.least}'}"

    run = "\n".join(f"    - {named(need)}" for need in package.requirements)
    bounded = [need for needs in package.extras.values() for need in needs if need.least]
    optional = "\n".join(f"    - {named(need)}" for need in bounded)
    return f"""\
# Tried: parsed and rendered by rattler-build (py-rattler-build 0.73.0). Not built: the channel could not be reached.
# {WRITTEN}
# conda-forge has every requirement. It builds MPI variants of mpi4py and h5py: one is chosen where it is installed,
#   conda install {package.name} mpich          or openmpi
#   conda install {package.name} "h5py=*=mpi_mpich*"   with parallel HDF5
# The source is this tree; staged-recipes also wants url and sha256 of a published one, a homepage and maintainers.
schema_version: 1

context:
  version: "{package.version}"
  python_min: "{package.python}"

package:
  name: {package.name}
  version: ${{{{ version }}}}

source:
  path: ../../..

build:
  number: 0
  noarch: python
  script: ${{{{ PYTHON }}}} -m pip install . -vv --no-deps --no-build-isolation

requirements:
  host:
    - python ${{{{ python_min }}}}.*
    - pip
    - setuptools >=77
  run:
    - __linux
    - python >=${{{{ python_min }}}}
{run}
  run_constraints:
{optional}

tests:
  - python:
      imports:
        - {package.name}
      pip_check: true
      python_version: ${{{{ python_min }}}}.*
  - requirements:
      run:
        - mpich
    script:
      - {package.command} doctor
      - mpiexec -n 2 {package.command} doctor

about:
  summary: {package.summary}
  license: {package.license}
  license_file: LICENSE
"""


def spack(package: Metadata) -> str:
    """Return a package of Spack's builtin repository."""

    def spec(need: Requirement) -> str:
        return f"py-{need.name.lower()}{need.least and f'@{need.least}:'}{'+mpi' if need.name == 'h5py' else ''}"

    needs = "\n".join(f'        depends_on("{spec(need)}")' for need in package.requirements)
    variants = "\n".join(
        f'    variant("{name}", default=False, description="Install what the extra {name} needs")'
        for name in SPACK_VARIANTS
    )
    optional = "\n".join(
        f'        depends_on("{spec(need)}", when="+{name}")'
        for name in SPACK_VARIANTS
        for need in package.extras[name]
    )
    others = ", ".join(name for name in package.extras if name not in SPACK_VARIANTS)
    return f'''\
# Tried: compiled by Python, and the names of its packages looked up in Spack's. Not built: there was no Spack.
# {WRITTEN}
# Spack's py-isal was at 1.1 and lacks newer versions: `spack checksum --add-to-package py-isal 1.8.0` adds one.
# The source is the folder in which it is started: spack dev-build py-{package.name}@{package.version}
# Extras without a variant, for which pip is the way: {others}.
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class Py{package.name.capitalize()}(PythonPackage):
    """{package.summary}."""

    license("{package.license}")

    version("{package.version}")

{variants}

    depends_on("mpi", type=("build", "link", "run"))
    depends_on("py-setuptools@77:", type="build")
    with default_args(type=("build", "run")):
        depends_on("python@{package.python}:")
{needs}
{optional}

    import_modules = ["{package.name}"]
'''


def easybuild(package: Metadata) -> str:
    """Return an easyconfig."""
    modules, extensions = [], []
    for need in package.requirements:
        if need.name in EASYBUILD_EXTENSIONS:
            version, checksum = EASYBUILD_EXTENSIONS[need.name]
            extensions.append(f"    ('{need.name}', '{version}', {{\n        'checksums': ['{checksum}'],\n    }}),")
        elif need.name in EASYBUILD:
            module, module_version, version = EASYBUILD[need.name]
            modules.append(f"    ('{module}', '{module_version}'),")
        else:
            raise GenerationError(f"{need.name}: add the module that has it to EASYBUILD, or to EASYBUILD_EXTENSIONS")
        if not _at_least(version, need.least):
            raise GenerationError(f"setup.cfg needs {need.name}>={need.least}, the easyconfig has {version}")
    if not _at_least(EASYBUILD_PYTHON, package.python):
        raise GenerationError(f"setup.cfg needs Python {package.python}, the easyconfig has {EASYBUILD_PYTHON}")
    listed, extended, (chain, release) = "\n".join(modules), "\n".join(extensions), TOOLCHAIN
    return f"""\
# Tried: parsed, and its dependencies resolved, by EasyBuild 5.4.1 (eb --dry-run --robot). Not built.
# {WRITTEN}
# EasyBuild has a module for every requirement but those in exts_list. The source is what `python -m build` makes: eb
# finds it in --sourcepath. MPI is the toolchain's Open MPI, and its h5py has parallel HDF5.
easyblock = 'PythonBundle'

name = '{package.name}'
version = '{package.version}'

homepage = ''
description = "{package.summary}"

toolchain = {{'name': '{chain}', 'version': '{release}'}}

dependencies = [
    ('Python', '{EASYBUILD_PYTHON}'),
{listed}
]

exts_list = [
{extended}
    (name, version),
]

sanity_check_paths = {{
    'files': ['bin/{package.command}'],
    'dirs': ['lib/python%(pyshortver)s/site-packages/{package.name}'],
}}

sanity_check_commands = ['{package.command} --version', '{package.command} doctor']

moduleclass = 'tools'
"""


def apptainer(package: Metadata) -> str:
    """Return the definition file of a container."""
    wheel = f"{package.name}-{package.version}-py3-none-any.whl"
    return f"""\
# Tried: %post and %test in a Debian 13 made by debootstrap, for either MPI. Not built: there was no Apptainer.
# {WRITTEN}
# In this tree:  python -m build && apptainer build {package.name}.sif scripts/packaging/apptainer/{package.name}.def
# MPI is Debian's Open MPI 5, with --build-arg mpi=mpich MPICH. The host's launcher, of the same MPI, starts the ranks:
#   mpiexec -n 8 apptainer exec {package.name}.sif {package.command} train config.toml
Bootstrap: docker
From: debian:trixie-slim

%arguments
    mpi=openmpi

%labels
    org.opencontainers.image.title {package.name}
    org.opencontainers.image.version {package.version}
    org.opencontainers.image.description {package.summary}
    org.opencontainers.image.licenses {package.license}

%files
    dist/{wheel} /opt/{wheel}

%post
    set -e
    export DEBIAN_FRONTEND=noninteractive
    apt-get update
    apt-get install -y --no-install-recommends python3 python3-venv
    python3 -m venv /opt/{package.name}
    if [ "{{{{ mpi }}}}" = mpich ]; then
        /opt/{package.name}/bin/pip install --no-cache-dir "/opt/{wheel}[mpich]"
    else
        apt-get install -y --no-install-recommends openmpi-bin
        /opt/{package.name}/bin/pip install --no-cache-dir "/opt/{wheel}"
    fi
    rm -rf /opt/{wheel} /var/lib/apt/lists/*

%environment
    export PATH=/opt/{package.name}/bin:$PATH

%runscript
    exec {package.command} "$@"

%test
    export PATH=/opt/{package.name}/bin:$PATH OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    {package.command} doctor
    mpiexec -n 2 {package.command} doctor

%help
    {package.summary}.
    Try it: mpiexec -n 2 apptainer exec {package.name}.sif {package.command} doctor
"""


def citation(package: Metadata) -> str:
    """Return CITATION.cff."""
    keywords = "\n".join(f"  - {word}" for word in package.keywords)
    return f"""\
# {WRITTEN}
cff-version: 1.2.0
message: If you use this software, please cite it with these metadata.
type: software
title: {package.name}
abstract: {package.summary}.
authors:
  - name: {package.authors}
version: {package.version}
license: {package.license}
keywords:
{keywords}
"""


def outputs(package: Metadata) -> dict[str, Callable[[Metadata], str]]:
    """Return, for each file below the root, the function that writes its text."""
    here = "scripts/packaging"
    return {
        f"{here}/conda/recipe.yaml": conda,
        f"{here}/spack/package.py": spack,
        f"{here}/easybuild/{package.name}-{package.version}-{'-'.join(TOOLCHAIN)}.eb": easybuild,
        f"{here}/apptainer/{package.name}.def": apptainer,
        "CITATION.cff": citation,
    }


def differences(root: Path) -> list[str]:
    """Return the files below ``root`` that are missing, outdated, or left of another version."""
    package = Metadata.read(root / "setup.cfg")
    wanted = outputs(package)
    found = [
        name
        for name, text in wanted.items()
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != text(package)
    ]
    return found + _left(root, wanted)


def _left(root: Path, wanted: dict[str, Callable[[Metadata], str]]) -> list[str]:
    """Return the easyconfigs of other versions: the version is in their name."""
    easyconfigs = {path.relative_to(root).as_posix() for path in root.glob("scripts/packaging/easybuild/*.eb")}
    return sorted(easyconfigs - set(wanted))


def write(root: Path) -> None:
    """Write all files below ``root``."""
    package = Metadata.read(root / "setup.cfg")
    wanted = outputs(package)
    for name, text in {name: text(package) for name, text in wanted.items()}.items():  # all or none
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    for name in _left(root, wanted):
        (root / name).unlink()


def main(arguments: list[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1, with names, if files disagree")
    parser.add_argument(
        "--root", metavar="FOLDER", type=Path, default=ROOT, help="where setup.cfg is (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        if options.check:
            for name in (wrong := differences(options.root)):
                print(f"{name} does not agree with setup.cfg: run scripts/packaging/generate.py", file=sys.stderr)
            return int(bool(wrong))
        write(options.root)
    except GenerationError as error:
        print(f"generate.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
