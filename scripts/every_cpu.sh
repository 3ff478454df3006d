#!/usr/bin/env bash
# The same bits on every CPU: all that can be shown on this machine, in one table.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. scripts/environment.sh

PARTS=(native narrow code haswell aarch64 environments)

usage() {
    cat <<HELP
usage: scripts/every_cpu.sh [--only PART]... [--help]

  native        the golden trainings (tests/golden) and the bits of elementary functions, by this CPU's best registers
  narrow        the same by narrower registers (MPIZERO_CPU=avx2 on a CPU with AVX-512)
  code          fused and other arithmetic in the machine code of all kernels, for AVX-512, AVX2 and NEON (4 minutes)
  haswell       two of the trainings, and the functions, on an emulated Haswell (qemu-user; 8 minutes)
  aarch64       the same on an emulated AArch64 (qemu-user, an arm64 Python of Debian's and wheels; 10 minutes)
  environments  native and narrow with the oldest and the newest NumPy and Numba, by Python 3.11 and 3.13 (10 minutes)

What cannot be done here is said, and is no failure. Environment: PYTHON (the interpreter of native, narrow, code, with
mpizero's requirements), EVERY_CPU (build/every-cpu: emulated Python, environments, compiled kernels).
HELP
}

ONLY=()
while [ $# -gt 0 ]; do
    case $1 in
        --only)
            add_part "${@:2:1}"
            shift
            ;;
        --help | -h) usage && exit 0 ;;
        *) usage >&2 && exit 64 ;;
    esac
    shift
done
[ ${#ONLY[@]} -gt 0 ] || ONLY=("${PARTS[@]}")

FOLDER=${EVERY_CPU:-$PWD/build/every-cpu}
mkdir -p "$FOLDER"
PY=$(find_python) || exit 1
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
ROWS=()
FAILED=0

# row PART RESULT TEXT
row() {
    ROWS+=("$(printf '%-14s %-8s %s' "$1" "$2" "$3")")
    [ "$2" != FAILED ] || FAILED=1
}

# compare PART WHAT COMMAND... : trainings and functions whose lines say "the same" or not
compare() {
    local part=$1 what=$2 log=$FOLDER/${1// /-}.log good bad status
    shift 2
    say "$part"
    "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]} good=$(grep -c 'the same$' "$log") bad=$(grep -c 'DIFFERS$' "$log")
    if [ "$status" -eq 0 ] && [ "$bad" -eq 0 ] && [ "$good" -gt 0 ]; then
        row "$part" ok "$what: $good hashes, all the same"
    else
        row "$part" FAILED "$what: $good the same, $bad differ; $log"
    fi
}

# every PYTHON... : the functions' bits, then all trainings; some PYTHON... : two of these
every() {
    "$@" -m tests.golden.elementary_cases 1e5 && "$@" -m tests.golden.trainings
}

some() {
    "$@" -m tests.golden.elementary_cases 1e5 && "$@" -m tests.golden.trainings gpt "mlp float64"
}

run_native() {
    compare native "$(instructions "$PY") of this CPU" every "$PY"
}

# is_wide PYTHON: whether the CPU has AVX-512
is_wide() {
    [ "$(instructions "$1")" = avx512 ]
}

instructions() {
    "$1" -c 'from mpizero.kernels.machine_code import instruction_set; print(instruction_set())'
}

run_narrow() {
    if ! is_wide "$PY"; then
        row narrow - "this CPU has no wider registers than AVX2"
        return
    fi
    MPIZERO_CPU=avx2 compare narrow "avx2 on this CPU" every "$PY"
}

run_code() {
    say code
    if "$PY" scripts/cpu_instructions.py | tee "$FOLDER/code.log"; then
        row code ok "$(tail -n 1 "$FOLDER/code.log")"
    else
        row code FAILED "$(tail -n 1 "$FOLDER/code.log")"
    fi
}

# An emulator of another CPU for single processes.
has_qemu() {
    command -v "$1" >/dev/null || { can_apt && apt_install qemu-user; } || {
        row "$2" - "needs $1 (Debian: qemu-user)"
        return 1
    }
}

run_haswell() {
    has_qemu qemu-x86_64 haswell || return
    local real
    real=$("$PY" -c 'import os, sys; print(os.path.realpath(sys.executable))')
    # What Haswell has and the emulator has not, which it would warn of.
    local cpu=Haswell,-pcid,-x2apic,-tsc-deadline,-hle,-invpcid,-rtm
    export MPIZERO_CACHE_DIR=$FOLDER/kernels-haswell
    PYTHONPATH=$PWD:$("$PY" -c 'import numpy, os; print(os.path.dirname(os.path.dirname(numpy.__file__)))')
    compare haswell "emulated Haswell" some qemu-x86_64 -cpu $cpu "$real"
    unset MPIZERO_CACHE_DIR
    export PYTHONPATH=$PWD
}

# An arm64 Python with the wheels that mpizero needs, unpacked side by side, not installed.
make_aarch64() (
    set -e
    cd "$FOLDER"
    [ ! -f aarch64/ready ] || exit 0
    rm -rf aarch64
    mkdir -p aarch64/debs aarch64/root aarch64/site aarch64/wheels
    dpkg --add-architecture arm64
    apt-get update -qq
    cd aarch64/debs
    libraries=(libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libtinfo6 libuuid1
        libcrypt1 libsqlite3-0 libreadline8 libncursesw6)
    pythons=(python3.11-minimal python3.11 libpython3.11-minimal libpython3.11-stdlib)
    apt-get download -qq "${pythons[@]/%/:arm64}" "${libraries[@]/%/:arm64}"
    for package in *.deb; do dpkg -x "$package" ../root; done
    cd ..
    "$PY" -m pip download -q --only-binary=:all: --python-version 3.11 --implementation cp -d wheels \
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux_2_28_aarch64 numpy numba h5py isal greenlet threadpoolctl tqdm mpi4py
    for wheel in wheels/*.whl; do (cd site && "$PY" -m zipfile -e "../$wheel" .); done
    touch ready
)

run_aarch64() {
    has_qemu qemu-aarch64 aarch64 || return
    if ! can_apt || ! make_aarch64 >"$FOLDER/aarch64-made.log" 2>&1; then
        row aarch64 - "needs an arm64 Python 3.11 from Debian 12, by root; $FOLDER/aarch64-made.log"
        return
    fi
    local root=$FOLDER/aarch64/root
    compare aarch64 "emulated AArch64" some env PYTHONHOME="$root/usr" \
        PYTHONPATH="$PWD:$FOLDER/aarch64/site" MPIZERO_CACHE_DIR="$FOLDER/kernels-aarch64" \
        qemu-aarch64 -L "$root" "$root/usr/bin/python3.11"
}

run_environments() {
    local version versions place interpreter
    for version in 3.11 3.13; do
        interpreter=$("python$version" -c 'import sys; print(sys.executable)' 2>/dev/null ||
            ls -d "$HOME"/.pyenv/versions/$version.*/bin/python 2>/dev/null | head -n 1)
        if [ -z "$interpreter" ]; then
            row "python $version" - "python$version is not installed"
            continue
        fi
        for versions in oldest newest; do
            place=$FOLDER/python$version-$versions
            local wanted=(numpy numba)
            if [ $versions = oldest ]; then
                # NumPy 2.1 is the first for Python 3.13
                wanted=("numpy==2.$([ $version = 3.11 ] && echo 0 || echo 1).*" "numba==0.62.*")
            fi
            if ! { "$interpreter" -m venv "$place" && "$place/bin/pip" install -q "${wanted[@]}" -e .; } >"$place.log" 2>&1; then
                row "$version $versions" - "cannot be installed: $place.log"
                continue
            fi
            local what
            what=$("$place/bin/python" -c 'import numba, numpy; print("NumPy", numpy.__version__, "Numba", numba.__version__)')
            compare "$version $versions" "$what" every "$place/bin/python"
            if is_wide "$place/bin/python"; then
                MPIZERO_CPU=avx2 compare "$version $versions" "$what, avx2" every "$place/bin/python"
            fi
        done
    done
}

for part in "${ONLY[@]}"; do "run_$part"; done
say summary
printf '%s\n' "${ROWS[@]}"
exit $FAILED
