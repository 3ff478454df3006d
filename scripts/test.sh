#!/usr/bin/env bash
# The whole test suite, from nothing: makes its own virtual environments and prints one table at the end.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. scripts/environment.sh

# In the order in which they begin: first what needs no other environment, and early what waits longest.
PARTS=(lint serial types package mpich slurm cuda torch openmpi gpu exactness hybrid torture ptx site)
LANES=3 # one more than cores: a lane runs one part after the other, and many parts wait now and then
# The parts that share a budget, and its minutes on two cores: half of the processor time. The other parts are "core".
declare -A GROUP=([openmpi]='second MPI' [slurm]='second MPI' [torch]='PyTorch, JAX' [setup]=installs [site]=pages)
declare -A BUDGET=([core]=9 ['second MPI']=4 ['PyTorch, JAX']=3 [installs]=2 [pages]=2)
LIMIT=20 # minutes of everything on two cores, waiting included

usage() {
    cat <<HELP
usage: scripts/test.sh [--quick] [--only PART]... [--help]

  lint       ruff check, ruff format --check
  types      mypy --strict on the package
  package    sdist and wheel are built, hold all they should, and train where they are installed, outside of the tree
  serial     tests without MPI
  mpich      tests with MPI on 1, 2, 3 and 8 ranks (MPICH from PyPI, no system package needed)
  cuda       the GPU kernels in Numba's CUDA simulator
  gpu        scripts/gpu_check.sh rehearsed in the simulator, in an environment as a bare machine has it, with its wheels
  ptx        the GPU kernels compiled to machine code by numba-cuda and ptxas, no GPU needed: errors, spills, doubles
  torch      layers, losses, gradients and training compared with PyTorch's (its CPU build); recipes with it and JAX;
             models of PyTorch, JAX, C, Fortran and Numba on layouts in which every pair occurs: the same bits
  openmpi    tests with MPI on 4 ranks of the system's Open MPI with parallel HDF5; of MPICH where that is left out
  exactness  trainings in which every pair of MPI, number of ranks, strategy and kind of memory occurs: the same bits
  hybrid     the same for pipeline x tensor x context x data, schedule and ZeRO stage: the same bits in equal tiles
  torture    saves killed, refused, damaged, on full disks: a sample of scripts/torture.py
  slurm      the batch scripts under a real Slurm on this machine: signal, requeue, time limit
  site       the documentation built, warnings are errors; its links, and in a headless Chromium errors, search, widths

  --quick      lint, types, serial, and MPI tests on 2 ranks; one case of each test, without tests/peers and those marked slow
  --only PART  this part (may be repeated)

Environment: PYTHON (interpreter, >= 3.11), TEST_VENV (.venv-test), OPENMPI_VENV (.venv-openmpi),
CUDA_VENV (.venv-cuda), TORCH_VENV (.venv-torch), SITE_VENV (.venv-site), TEST_LOGS (build/test-logs: the output of all
ranks), RANKS ("1 2 3 8"). Open MPI, parallel HDF5, gfortran, Slurm and Chromium are installed with apt-get when this is
run by root and they are missing. Where one cannot be had, its part fails, unless SKIP_PARTS names it:
SKIP_PARTS="slurm openmpi" leaves out these two.
$LANES parts run at a time; what a part prints comes when it has ended.

The table at the end has for each part the minutes that passed and those of processors. A group of parts has a budget:
minutes of two cores, which is half of the processor time. More is marked, and is no failure.
HELP
}

QUICK=false
ONLY=()
while [ $# -gt 0 ]; do
    case $1 in
        --quick) QUICK=true ;;
        --only)
            add_part "${@:2:1}"
            shift
            ;;
        --help | -h) usage && exit 0 ;;
        *) usage >&2 && exit 64 ;;
    esac
    shift
done
$QUICK && [ ${#ONLY[@]} -eq 0 ] && ONLY=(lint types serial mpich)
[ ${#ONLY[@]} -gt 0 ] || ONLY=("${PARTS[@]}")
for part in ${SKIP_PARTS:-}; do
    require_part SKIP_PARTS "$part"
done

VENV=${TEST_VENV:-$PWD/.venv-test}
OPENMPI_VENV=${OPENMPI_VENV:-$PWD/.venv-openmpi}
CUDA_VENV=${CUDA_VENV:-$PWD/.venv-cuda}
TORCH_VENV=${TORCH_VENV:-$PWD/.venv-torch}
SITE_VENV=${SITE_VENV:-$PWD/.venv-site}
LOGS=${TEST_LOGS:-$PWD/build/test-logs}
RANKS=${RANKS:-$($QUICK && echo 2 || echo 1 2 3 8)}
FAST=$($QUICK && echo ' and not slow')
ONE_CASE=$($QUICK && echo --one-case)
PY=$VENV/bin/python
mkdir -p "$LOGS"
# One BLAS thread a rank: other numbers of threads give other bits, and 8 ranks share the cores.
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would compile the package and the tests anew, each for a second
if [ "$(id -u)" = 0 ]; then # Open MPI refuses root otherwise
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
export OMPI_MCA_rmaps_base_oversubscribe=1 # more ranks than cores
# Ranks of MPICH that wait sleep where they outnumber the cores: beside other programs the tests on 8 ranks of 2 cores
# took 231 s of processor time in place of 475 s, and a small message 1 ms in place of 7 ms.
export MPIR_CVAR_ENABLE_HEAVY_YIELD=1

# ---------------------------------------------------------------------------------------------- environments

install_test() {
    "$1/bin/pip" install -q --no-compile -e '.[mpich,test]'
}

# h5py and mpi4py, and what the first is built with; all else is the test environment's. mpi4py must come as a wheel:
# its source build takes 20 GB of memory. Hence no build isolation for h5py either, which would build mpi4py. Without
# optimization h5py, a thin wrapper, compiles in a quarter of the time; no cache, so that this build never serves
# anybody else.
install_openmpi() {
    "$1/bin/pip" install -q --no-compile cython numpy pkgconfig 'setuptools>=77' wheel &&
        "$1/bin/pip" install -q --no-compile --only-binary=mpi4py 'mpi4py>=4.1' &&
        CC=mpicc.openmpi CFLAGS='-O0 -g0' HDF5_MPI=ON HDF5_INCLUDEDIR=/usr/include/hdf5/openmpi \
            HDF5_LIBDIR=$(hdf5_libraries) \
            "$1/bin/pip" install -q --no-compile --no-cache-dir --no-binary=h5py --no-build-isolation h5py &&
        link_test_environment "$1"
}

hdf5_libraries() {
    dirname "$(find /usr/lib -path '*/hdf5/openmpi/libhdf5.so' 2>/dev/null | head -n 1)"
}

python_headers() {
    [ -f "$("$(find_python)" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" ]
}

have_openmpi() {
    command -v mpicc.openmpi mpiexec.openmpi gcc >/dev/null && [ -f /usr/include/hdf5/openmpi/hdf5.h ] && python_headers
}

# numba-cuda with the compilers that it uses, and ptxas, of one release; neither a GPU nor its driver. What a bare machine
# with a GPU lacks is not there either: scripts/gpu_check.sh takes it from wheels.
install_cuda() {
    "$1/bin/pip" install -q --no-compile -e . 'numba-cuda[cu13]' 'cuda-toolkit[nvcc]==13.*' pytest &&
        "$1/bin/pip" uninstall -q -y isal greenlet mpi4py
}

# PyTorch's CPU build (another version may come with gigabytes for GPUs), an implementation of SOAP for it, JAX and optax, over
# what the test environment has. PyTorch brings all that it needs, because the part gpu takes it from here alone.
install_torch() {
    "$1/bin/pip" install -q --no-compile torch==2.13.0 jax==0.10.2 optax &&
        "$1/bin/pip" install -q --no-compile --no-deps pytorch-optimizer==4.1.0 &&
        link_test_environment "$1"
}

# What the extra "docs" asks for, over what the test environment has and is not installed a second time.
install_site() {
    link_test_environment "$1" && "$1/bin/python" - >"$LOGS/docs-requirements" <<'LIST' &&
import configparser
setup = configparser.ConfigParser()
setup.read("setup.cfg")
print(setup["options.extras_require"]["docs"])
LIST
        "$1/bin/pip" install -q --no-compile -r "$LOGS/docs-requirements"
}

link_test_environment() {
    "$1/bin/python" - "$("$PY" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" <<'LINK'
import pathlib, sys, sysconfig
link = pathlib.Path(sysconfig.get_paths()["purelib"], "test-environment.pth")
link.write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")
LINK
}

# processor_seconds: what this shell and the commands that it has waited for have computed so far. Sets REPLY; a
# pipeline or a substitution would ask another process. What is counted by itself runs in a subshell: the main shell
# also counts the groups in the background, when they end.
processor_seconds() {
    local file=$LOGS/times.$BASHPID
    times >"$file"
    REPLY=$(tr 'ms' '  ' <"$file" | awk '{ sum += 60 * ($1 + $3) + $2 + $4 } END { printf "%.1f", sum }')
    rm -f "$file"
}

prepare_test() {
    ensure_venv "$VENV" install_test && compile_kernels
}

# All CPU kernels, before any part begins: parts that run beside each other would wait for one another's kernels, and
# each of hundreds of processes would compile anew what several kernels share.
compile_kernels() {
    PYTHONPATH=scripts "$PY" -m harness.kernels
}

# The other prepare_NAME print "yes", or the reason why their environment cannot be had.
prepare_cuda() { prepare_venv cuda "$CUDA_VENV" "numba-cuda and ptxas"; }

prepare_torch() { prepare_venv torch "$TORCH_VENV" PyTorch; }

prepare_venv() { # NAME FOLDER WHAT
    ensure_venv "$2" "install_$1" >"$LOGS/$1-venv.log" 2>&1 && echo yes && return
    echo "$3 cannot be installed (see $LOGS/$1-venv.log)"
}

prepare_site() {
    if ! command -v chromium >/dev/null; then
        can_apt || { echo "needs chromium; root could install it" && return; }
        apt_install chromium >"$LOGS/chromium.log" 2>&1 ||
            { echo "chromium cannot be installed (see $LOGS/chromium.log)" && return; }
    fi
    prepare_venv site "$SITE_VENV" Sphinx
}

prepare_openmpi() {
    if ! have_openmpi && can_apt; then
        apt_install gcc libc6-dev pkg-config openmpi-bin libopenmpi-dev libhdf5-openmpi-dev >"$LOGS/apt.log" 2>&1
        python_headers || apt_install python3-dev >>"$LOGS/apt.log" 2>&1
        have_openmpi || { echo "the system packages cannot be installed (see $LOGS/apt.log)" && return; }
    fi
    if ! have_openmpi; then
        echo "needs openmpi-bin, libopenmpi-dev, libhdf5-openmpi-dev and Python's headers; root could install them"
    elif ensure_venv "$OPENMPI_VENV" install_openmpi >"$LOGS/openmpi-venv.log" 2>&1; then
        echo yes
    else
        echo "h5py cannot be built (see $LOGS/openmpi-venv.log)"
    fi
}

# start_group COMMAND...: in the background, as a group of processes that all end when this script does.
GROUPS_STARTED=()
start_group() {
    set -m
    "$@" &
    set +m
    GROUPS_STARTED+=(-$!)
    trap 'kill -- "${GROUPS_STARTED[@]}" 2>/dev/null' EXIT
}

# start_preparing NAME: compiling h5py takes minutes of one core, downloads wait: start early, wait late.
declare -A PREPARING=()
start_preparing() {
    start_group prepare "$1" >"$LOGS/$1.state"
    PREPARING[$1]=$!
}

prepare() {
    local status=0
    "prepare_$1" || status=$?
    processor_seconds
    echo "$REPLY" >"$LOGS/installs-$1"
    return $status
}

# wait_prepared NAME: whether NAME's environment is there; says why it is not.
wait_prepared() {
    local state
    # Not by `wait`: parts that run beside the others have a shell of their own, which is not the parent.
    while kill -0 "${PREPARING[$1]}" 2>/dev/null; do sleep 0.5; done
    state=$(cat "$LOGS/$1.state")
    [ "$state" = yes ] && return
    NOTE="${state:-its virtual environment cannot be made (see $LOGS/$1-venv.log)}; SKIP_PARTS can name it"
    echo "$NOTE"
    return 1
}

# ---------------------------------------------------------------------------------------------- running

# passed LOG: pytest can end well without having run anything.
passed() {
    grep -qE '(^|[ =])[1-9][0-9]* passed' "$1" || {
        echo "no test passed: this is a failure of the suite itself"
        return 1
    }
}

# failures LOG: what a reader who sees only the end of the output must know of a part that failed.
failures() {
    grep -aE '^(FAILED|ERROR) |^E   |[0-9]+ failed' "$1" | tail -n 40 | grep . || tail -n 25 "$1"
}

# run_pytest NAME SECONDS ARGUMENT...: one process, without MPI.
run_pytest() {
    local name=$1 seconds=$2
    shift 2
    timeout -k 10 "$seconds" "$PY" -m pytest --no-header --color=no -p no:cacheprovider "$@" 2>&1 | tee "$LOGS/$name.log" &&
        passed "$LOGS/$name.log" && return
    grep -A 60 'Fatal Python error' "$LOGS/$name.log" # a process that crashed says so long before the summary
    return 1
}

# One rank of run_mpi. Rank 0 speaks; the others write to files that are shown when something fails. Each has temporary
# folders of its own: pytest clears those of earlier runs at its end, and ranks that clear the same ones fail.
# shellcheck disable=SC2016
RANK_COMMAND='
rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:?no rank: was this started by mpiexec?}}
export PYTEST_DEBUG_TEMPROOT=$TEMPORARY/$rank
mkdir -p "$PYTEST_DEBUG_TEMPROOT"
[ "$rank" = 0 ] && exec "$@"
exec "$@" >"$LOG.rank$rank" 2>&1'

# The files that have tests marked mpi: ranks which would collect all others, too, take seconds of a core for it, each.
mpi_files() {
    (
        flock 9 # another lane may be asking
        [ -s "$LOGS/mpi-files" ] || "$PY" -m pytest --with-mpi -m mpi --collect-only -qq -p no:cacheprovider tests |
            sed -n 's/^\(tests[^:]*\.py\):.*/\1/p' | sort -u >"$LOGS/mpi-files"
    ) 9>"$LOGS/collecting"
    [ -s "$LOGS/mpi-files" ] || fail "no test is marked mpi"
}

# run_mpi NAME RANKS MPIEXEC PYTHON: the tests marked mpi, in one launch.
run_mpi() {
    local name=$1 n=$2 mpiexec=$3 python=$4 log=$LOGS/$1-$2 file status=0
    local temporary
    temporary=$(mktemp -d)
    rm -f "$log" "$log".rank*
    mpi_files
    # shellcheck disable=SC2086
    # -m mpi4py ends all ranks when one fails; faulthandler ends them when one hangs; timeout when even that hangs. The
    # last words of a rank that ends the job are written past Python: --capture=fd would take them along.
    LOG=$log TEMPORARY=$temporary MPIR_CVAR_ENABLE_HEAVY_YIELD=$((n > 2)) timeout -k 10 1200 "$mpiexec" -n "$n" bash -c "$RANK_COMMAND" rank \
        "$python" -m mpi4py -m pytest --with-mpi -m "mpi$FAST" --no-header --color=no -p no:cacheprovider --capture=sys \
        $ONE_CASE --durations=12 -o faulthandler_timeout=120 -o faulthandler_exit_on_timeout=true $(<"$LOGS/mpi-files") 2>&1 | tee "$log" &&
        passed "$log" || status=1
    rm -rf "$temporary"
    [ $status = 1 ] || return 0
    for file in "$log".rank*; do
        [ -f "$file" ] && printf '\n--- end of %s\n' "$file" && tail -n 60 "$file"
    done
    return 1
}

part_lint() {
    "$VENV/bin/ruff" check . && "$VENV/bin/ruff" format --check .
}

part_types() {
    "$VENV/bin/mypy" --strict mpizero
}

part_package() {
    local missing
    rm -rf build/wheel build/lib build/bdist*
    "$PY" -m build -q --no-isolation --outdir build/wheel . >"$LOGS/build.log" 2>&1 || { cat "$LOGS/build.log" && return 1; }
    "$PY" -m twine check --strict build/wheel/* || return 1
    missing=$(LC_ALL=C comm -23 <(git ls-files | grep -v '^\.' | LC_ALL=C sort) \
        <(tar tzf build/wheel/*.tar.gz | sed 's,^[^/]*/,,' | LC_ALL=C sort))
    [ -z "$missing" ] || { echo "not in the source distribution, see MANIFEST.in: $missing" && return 1; }
    "$PY" - <<'CHECK' || return 1
import glob, pathlib, sys, zipfile
(wheel,) = glob.glob("build/wheel/*.whl")
packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("mpizero/")}
source = {str(p) for p in pathlib.Path("mpizero").rglob("*") if p.suffix in (".py", ".in") or p.name == "py.typed"}
print(f"{wheel}: {len(packed)} files")
sys.exit(f"missing: {sorted(source - packed)}, too many: {sorted(packed - source)}" if packed != source else 0)
CHECK
    wheel_trains
}

# The wheel in an environment of its own, in a folder without sources. The libraries are the test environment's; a plain
# path brings no links of that one, so none to the sources either.
wheel_trains() {
    local installed=$PWD/build/installed folder status=0
    rm -rf "$installed"
    "$PY" -m venv --without-pip "$installed" &&
        env -u PYTHONPATH "$VENV/bin/pip" --python "$installed/bin/python" install -q --no-deps build/wheel/*.whl &&
        "$installed/bin/python" - "$("$PY" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" <<'LINK' || return 1
import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_paths()["purelib"], "test-environment.pth").write_text(sys.argv[1] + "\n")
LINK
    folder=$(mktemp -d)
    cat >"$folder/tiny.toml" <<'TOML'
model = { name = "gpt", dim = 16, layers = 1, heads = 2, sequence = 16 }
data = { text = "*.toml" }
train = { steps = 2, global_batch = 4, validate_every = 0 }
TOML
    (
        cd "$folder" && unset PYTHONPATH && export MPI4PY_LIBMPI=$VENV/lib/libmpi.so.12 &&
            "$installed/bin/python" -c "import mpizero, sys; sys.exit(not mpizero.__file__.startswith('$installed'))" &&
            "$installed/bin/mpizero" doctor && "$VENV/bin/mpiexec" -n 2 "$installed/bin/mpizero" train tiny.toml
    ) || status=1
    rm -rf "$folder"
    return $status
}

# All of tests/peers is in the part torch.
part_serial() {
    local beside=()
    ! chosen torch || skipped torch || beside=(--ignore tests/peers)
    ! $QUICK || beside=(--ignore tests/peers)
    run_pytest serial 3600 -n 2 --dist worksteal --durations=40 -m "not mpi$FAST" $ONE_CASE "${beside[@]}" tests
}

part_mpich() {
    local n status=0
    for n in $RANKS; do
        say "MPICH, $n ranks"
        run_mpi mpich "$n" "$VENV/bin/mpiexec" "$PY" || status=1
    done
    return $status
}

part_cuda() {
    NUMBA_ENABLE_CUDASIM=1 run_pytest cuda 1200 -n 2 --dist worksteal tests/cuda
}

# With PyTorch and JAX in the environment, as there.
part_gpu() {
    local wheels=$PWD/build/gpu-wheels out=$PWD/build/gpu-rehearsal
    wait_prepared cuda && wait_prepared torch || return 1
    rm -rf "$out" "$wheels"
    scripts/gpu_check.sh --wheels "$wheels" \
        --download "$("$CUDA_VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" >"$LOGS/gpu-wheels.log" 2>&1 || { cat "$LOGS/gpu-wheels.log" && return 1; }
    env -u MPI4PY_LIBMPI PYTHON="$CUDA_VENV/bin/python" \
        PYTHONPATH="$("$TORCH_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" \
        timeout -k 10 1800 scripts/gpu_check.sh --rehearse --wheels "$wheels" "$out" && return
    tail -n 60 "$out/log.txt"
    return 1
}

part_ptx() {
    wait_prepared cuda || return 1
    timeout -k 10 900 "$CUDA_VENV/bin/python" scripts/cuda_kernels.py || return 1
    # The environment has no more than this takes: no plugins of tests/conftest.py.
    PY=$CUDA_VENV/bin/python run_pytest ptx 600 --noconftest tests/cuda/test_machine_code.py
}

part_torch() {
    wait_prepared torch || return 1
    # Most of the time is XLA's: all processes share what it has compiled. Without a limit of size they would not lock.
    rm -rf "$LOGS/jax-cache"
    export JAX_COMPILATION_CACHE_DIR=$LOGS/jax-cache JAX_COMPILATION_CACHE_MAX_SIZE=1000000000 \
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
    # One program is in Fortran; where gfortran is missing and cannot be had, its tests are skipped.
    command -v gfortran >/dev/null || { can_apt && apt_install gfortran gcc libc6-dev >"$LOGS/gfortran.log" 2>&1; }
    # Recipes run under the other environment's MPICH: mpi4py would take the system's library first.
    MPI4PY_LIBMPI=$VENV/lib/libmpi.so.12 MPIZERO_MPIEXEC="$VENV/bin/mpiexec $TORCH_VENV/bin/python" \
        PY=$TORCH_VENV/bin/python run_pytest torch 1800 tests/peers || return 1
    command -v gfortran >/dev/null || { NOTE='without Fortran: there is no gfortran' && return; }
    grep -E '[0-9]+ skipped' "$LOGS/torch.log" && echo 'a comparison was skipped here' && return 1
    own_models
}

# Every pair of model, number of ranks, strategy and kind of memory. Each process imports PyTorch and JAX and compiles
# anew, so few are started, and most ranks are threads.
own_models() {
    local first="env MPI4PY_LIBMPI=$VENV/lib/libmpi.so.12 $TORCH_VENV/bin/python" second=() packages
    packages=$("$TORCH_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    skipped openmpi || { wait_prepared openmpi && second=(--second-mpiexec mpiexec.openmpi
        --second-python "env -u MPI4PY_LIBMPI PYTHONPATH=$PWD:$packages $OPENMPI_VENV/bin/python") || return 1; }
    # shellcheck disable=SC2086
    timeout -k 10 1800 $first scripts/own_models.py --covering --steps 1 --ranks 2 --second-ranks 3 --threads 1,4,8 \
        --mpiexec "$VENV/bin/mpiexec" --python "$first" "${second[@]}"
}

part_openmpi() {
    wait_prepared openmpi && run_mpi openmpi 4 mpiexec.openmpi "$OPENMPI_VENV/bin/python"
}

part_exactness() {
    local second=()
    if ! skipped openmpi; then
        wait_prepared openmpi || return 1
        second=(--second-mpiexec mpiexec.openmpi --second-python "$OPENMPI_VENV/bin/python")
    fi
    timeout -k 10 1200 "$PY" scripts/exactness.py --covering --steps 4 --mpiexec "$VENV/bin/mpiexec" "${second[@]}"
}

part_hybrid() { # eight ranks are threads: eight processes on two cores take half as long again
    timeout -k 10 1200 "$PY" scripts/exactness_hybrid.py --covering --steps 2 --ranks 4 --threads 2,6,8 \
        --mpiexec "$VENV/bin/mpiexec"
}

part_torture() {
    timeout -k 10 1200 "$PY" scripts/torture.py --short --mpiexec "$VENV/bin/mpiexec"
}

part_slurm() {
    local status=0
    wait_prepared openmpi || return 1
    timeout -k 60 1200 scripts/test_slurm.sh --python "$OPENMPI_VENV/bin/python" --mpich-python "$PY" || status=$?
    [ $status != 77 ] || NOTE='Slurm cannot be had; SKIP_PARTS can name this part'
    return $status
}

part_site() {
    wait_prepared site || return 1
    rm -rf build/site # pages of files that are gone
    timeout -k 10 1200 "$SITE_VENV/bin/python" -m sphinx -q -W --keep-going -b html docs build/site || return 1
    PY=$SITE_VENV/bin/python run_pytest site 1200 --durations=5 tests/site || return 1
    ! grep -E '[0-9]+ skipped' "$LOGS/site.log" || { echo 'a page was not looked at' && return 1; }
}

# ---------------------------------------------------------------------------------------------- the parts in order

chosen() {
    [[ " ${ONLY[*]} " =~ " "($1)" " ]]
}

skipped() {
    [[ " ${SKIP_PARTS:-} " == *" $1 "* ]]
}

# row PART RESULT SECONDS PROCESSOR_SECONDS NOTE: a line of the table, in a file.
row() {
    awk -v part="$1" -v result="$2" -v passed="$3" -v processor="$4" -v note="$5" \
        'BEGIN { printf "%-10s %-7s %6.1f %9.1f  %s\n", part, result, passed / 60, processor / 60, note }' >"$LOGS/row-$1"
}

# run_part PART: what it prints goes to a log, and its row of the table to a file.
run_part() {
    local started=$SECONDS result=ok NOTE='' before
    skipped "$1" && row "$1" skipped 0 0 'SKIP_PARTS names it' && return
    processor_seconds && before=$REPLY
    "part_$1" >"$LOGS/part-$1" 2>&1 || result=FAILED
    processor_seconds
    row "$1" $result $((SECONDS - started)) "$(awk "BEGIN { print $REPLY - $before }")" "$NOTE"
    (
        flock 9 # one part speaks at a time
        say "== $1"
        cat "$LOGS/part-$1"
    ) 9>"$LOGS/speaking"
}

# One lane: takes the next part that no other lane has taken, until none is left.
lane() {
    local part
    for part in "${ONLY[@]}"; do
        ! mkdir "$LOGS/taken-$part" 2>/dev/null || (run_part "$part")
    done
}

# print_budgets: the minutes of each group on two cores, and its budget.
print_budgets() {
    local part group
    for part in setup "${ONLY[@]}"; do
        group=${GROUP[$part]:-core}
        awk -v group="$group" -v budget="${BUDGET[$group]}" '{ print group "\t" budget "\t" $4 / 2 }' "$LOGS/row-$part"
    done | awk -F '\t' '
        { if (!($1 in sum)) order[++n] = $1; sum[$1] += $3; budget[$1] = $2 }
        END {
            for (i = 1; i <= n; i++) {
                g = order[i]
                printf "%-14s %6.1f %9d%s\n", g, sum[g], budget[g], (sum[g] > budget[g] ? "  more than its budget" : "")
            }
        }'
}

say "virtual environment: $VENV"
rm -rf "$LOGS"/row-* "$LOGS"/taken-* "$LOGS"/installs-* "$LOGS/mpi-files"
STARTED=$SECONDS
chosen 'openmpi|exactness|slurm|torch' && ! { skipped openmpi && skipped slurm; } && start_preparing openmpi
(prepare test) || fail "cannot install the test requirements"
SETUP=$((SECONDS - STARTED))
! chosen 'torch|gpu' || start_preparing torch
! chosen 'ptx|gpu' || start_preparing cuda
! chosen site || skipped site || start_preparing site
RUNNING=()
for ((i = 0; i < LANES; i++)); do
    start_group lane
    RUNNING+=($!)
done
wait "${RUNNING[@]}"
row setup ok $SETUP "$(cat "$LOGS"/installs-* | awk '{ sum += $1 } END { print sum }')" 'all environments'

STATUS=0
for part in "${ONLY[@]}"; do # again, at the very end: a reader may see no more than that
    grep -qs " FAILED " "$LOGS/row-$part" && say "what failed in $part" && failures "$LOGS/part-$part"
    grep -qsE " (ok|skipped) " "$LOGS/row-$part" || STATUS=1
done
say "summary"
echo 'part       result   passed processor  (minutes)'
for part in setup "${ONLY[@]}"; do
    cat "$LOGS/row-$part"
done
printf '\nminutes of 2 cores   budget\n'
print_budgets
printf '\ntotal      %-7s %6.1f  of %d minutes\n' "$([ $STATUS = 0 ] && echo ok || echo FAILED)" \
    "$(awk "BEGIN { print $SECONDS / 60 }")" "$LIMIT"
exit $STATUS
