#!/usr/bin/env bash
# Checks on a real GPU, within nine minutes, what this library does there. Installs from wheels, without network, into a
# folder of its own, and starts gpu_check.py.
set -uo pipefail
BEGAN=$(date +%s.%N)
ROOT=$(cd "$(dirname "$0")/.." && pwd) || exit 1
. "$ROOT/scripts/environment.sh"

# What a machine with CUDA, CuPy, numba-cuda, h5py and PyTorch may lack.
NEEDED=(isal greenlet mpi4py mpich)
PLATFORMS=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
    manylinux_2_5_x86_64 manylinux1_x86_64)

usage() {
    cat <<HELP
usage: scripts/gpu_check.sh [--wheels FOLDER] [OPTION]... OUT
       scripts/gpu_check.sh --download VERSION [--wheels FOLDER]

  --wheels FOLDER     wheels of ${NEEDED[*]} for this Python (default: .wheels/VERSION, if it exists);
                      they are installed into build/gpu-check, without network, for this check only
  --download VERSION  fetch these wheels for a Python VERSION, such as 3.12, on x86-64 Linux, and end
  all other options go to gpu_check.py, which says:

HELP
    "$(find_python)" "$ROOT/scripts/gpu_check.py" --help
}

WHEELS=
DOWNLOAD=
PASSED=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels | --download)
            [ $# -gt 1 ] || fail "$1 needs a value; see --help"
            if [ "$1" = --wheels ]; then WHEELS=$2; else DOWNLOAD=$2; fi
            shift
            ;;
        --help | -h) usage && exit 0 ;;
        *) PASSED+=("$1") ;;
    esac
    shift
done
PYTHON=$(find_python) || exit 1

if [ -n "$DOWNLOAD" ]; then
    exec "$PYTHON" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
        --python-version "$DOWNLOAD" "${PLATFORMS[@]/#/--platform=}" -d "${WHEELS:-$ROOT/.wheels/$DOWNLOAD}" "${NEEDED[@]}"
fi

VERSION=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ -n "$WHEELS" ] || [ ! -d "$ROOT/.wheels/$VERSION" ] || WHEELS=$ROOT/.wheels/$VERSION
if [ -n "$WHEELS" ]; then
    [ -n "$(ls "$WHEELS"/*.whl 2>/dev/null)" ] || fail "$WHEELS: no wheels there; scripts/gpu_check.sh --download fetches them"
    # A folder for each set of wheels and each Python: a second run need not install again.
    key=$({ ls "$WHEELS" && echo "$PYTHON $VERSION"; } | sha256sum | cut -c 1-12)
    site=$ROOT/build/gpu-check/$key
    if [ ! -e "$site/.installed" ]; then
        said=$("$PYTHON" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
            --ignore-installed --prefix "$site" "$WHEELS"/*.whl 2>&1) ||
            fail "the wheels in $WHEELS do not fit $("$PYTHON" --version) at $PYTHON ($(tail -n 1 <<<"$said")); another" \
                "Python is used by PYTHON=..., wheels for this one come by scripts/gpu_check.sh --download"
        touch "$site/.installed"
    fi
    # Debian's Pythons put packages into dist-packages, below $site/local.
    packages=$(find "$site" -type d \( -name site-packages -o -name dist-packages \) | head -n 1)
    library=$(find "$site" -name 'libmpi.so.*' | sort | head -n 1)
    launcher=$(find "$site" -path '*/bin/mpiexec' | head -n 1)
    export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH}
    [ -z "$library" ] || export MPI4PY_LIBMPI=$library
    [ -z "$launcher" ] || export PATH=${launcher%/mpiexec}:$PATH MPIZERO_CHECK_MPIEXEC=$launcher
fi
export PYTHONPATH=$ROOT:$ROOT/scripts${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
exec "$PYTHON" "$ROOT/scripts/gpu_check.py" --began "$BEGAN" "${PASSED[@]}"
