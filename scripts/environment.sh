# Virtual environments for the scripts beside this file, which source it. Bash.

fail() {
    printf '%s\n' "$*" >&2
    exit 1
}

say() {
    if [ -t 1 ]; then printf '\n\033[1m%s\033[0m\n' "$*"; else printf '\n%s\n' "$*"; fi
}

# The first Python that is at least 3.11; $PYTHON wins.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "mpizero needs Python 3.11 or newer; set PYTHON=/path/to/python"
}

# add_part [PART]: what follows --only; PART must be one of PARTS, and is added to ONLY.
add_part() {
    [ $# -gt 0 ] || fail "--only needs a part: ${PARTS[*]}"
    require_part --only "$1"
    ONLY+=("$1")
}

# require_part WHERE PART: an error if PART, which stands in WHERE, is none of PARTS.
require_part() {
    [[ " ${PARTS[*]} " == *" $2 "* ]] || fail "$1: unknown part '$2'; there are: ${PARTS[*]}"
}

can_apt() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null
}

apt_install() { # one at a time: apt-get does not wait for another one
    (
        flock 9
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    ) 9>"${TMPDIR:-/tmp}/mpizero-apt.lock"
}

# make_venv FOLDER: safe over an environment that is already there or half made.
make_venv() {
    local folder=$1 python
    python=$(find_python) || exit 1
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then # Debian keeps these in a package of their own
        { can_apt && apt_install python3-venv; } ||
            fail "$python cannot make virtual environments: install python3-venv (Debian, Ubuntu), then start again"
    fi
    "$python" -m venv "$folder" || fail "cannot make a virtual environment in $folder"
}

# ensure_venv FOLDER INSTALLER: make the environment and call INSTALLER FOLDER, unless the same requirements,
# interpreter and source folder were installed there before. INSTALLER is a function; its text is part of the key.
ensure_venv() {
    local folder=$1 installer=$2 key
    key=$({
        pwd
        "$(find_python)" --version
        declare -f "$installer"
        cat setup.cfg
    } | sha256sum)
    if [ -x "$folder/bin/python" ] && [ "$(cat "$folder/.requirements" 2>/dev/null)" = "$key" ]; then
        return
    fi
    make_venv "$folder"
    "$installer" "$folder" || return 1
    printf '%s\n' "$key" >"$folder/.requirements"
}
