# shellcheck shell=bash
# Sourced by scripts/quickstart and scripts/test: makes .venv in the checkout with the exact versions of requirements.lock.
# A finished part writes a stamp, so an interrupted part is done again and a finished one costs nothing.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
command=scripts/$(basename -- "$0")
venv=$root/.venv
log=$venv/setup.log
# Keep the packages of other environments out of this one, and install nothing elsewhere.
unset PYTHONHOME PYTHONPATH PIP_PREFIX PIP_TARGET
# The first import of a module writes its bytecode: pip's compiling of all that is installed takes as long as its unpacking.
unset PYTHONDONTWRITEBYTECODE
export PIP_USER=0

unreachable='NewConnectionError|NameResolutionError|ConnectTimeoutError|Network is unreachable|ProxyError'

fail() {
    printf '%s: %s\n' "$command" "$*" >&2
    exit 1
}

# Print the first Python on PATH that is 3.11 to 3.14 and can make an environment; PYTHON=... sets it.
# The packages of requirements.lock have wheels for these; numpy and torch have none for later ones.
find_python() {
    local candidate new="" newer=""
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 </dev/null; then
            if ! "$candidate" -c 'import sys; sys.exit(sys.version_info >= (3, 15))' >/dev/null 2>&1 </dev/null; then
                newer=${newer:-$candidate}
            elif "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null; then
                printf '%s' "$candidate"
                return
            else
                new=${new:-$candidate}
            fi
        fi
        if [ -n "${PYTHON:-}" ]; then break; fi
    done
    if [ -n "$new" ]; then
        fail "$new has no venv module: install it (on Debian and Ubuntu: apt install python3-venv), or set PYTHON to another Python"
    elif [ -n "$newer" ]; then
        fail "$newer is newer than Python 3.14, the last that requirements.lock has packages for: set PYTHON to 3.14 or an older one"
    elif [ -n "${PYTHON:-}" ]; then
        fail "PYTHON=$PYTHON is not Python 3.11 or later: set it to one, or unset it"
    else
        fail "Python 3.11 or later is missing: install it, or set PYTHON to its path"
    fi
}

# phase TITLE COMMAND...: run a command with its output in the log, and print how long it took or why it failed.
phase() {
    local title=$1 start=$SECONDS before reason
    shift
    before=$(wc -l <"$log")
    printf '%s ... ' "$title"
    if "$@" >>"$log" 2>&1 </dev/null; then
        printf '%d s\n' $((SECONDS - start))
        return
    fi
    printf 'failed\n'
    reason=$(tail -n "+$((before + 1))" "$log" | grep -iE '^error' | tail -n 1 || true)
    if tail -n "+$((before + 1))" "$log" | grep -cE "$unreachable" >/dev/null; then
        reason="the package index can't be reached: connect to a network and run this again"
    fi
    fail "$title failed: ${reason:-see the log} (log: $log)"
}

install() {
    "$venv/bin/python" -m pip --disable-pip-version-check install --no-input --no-compile "$@"
}

# The inputs of a part, as text: when it changes, the part is made again.
locked() {
    printf '%s\n' "$root" && cat "$root/requirements.lock"
}

packaged() {
    cat "$root/pyproject.toml"
}

made() {
    [ -x "$venv/bin/python" ] && "$1" | cmp -s - "$venv/$1.stamp"
}

stamp() {
    "$1" >"$venv/$1.stamp.new" && mv "$venv/$1.stamp.new" "$venv/$1.stamp"
}

make_environment() {
    local python
    python=$(find_python)
    if [ -e "$venv" ] && [ ! -e "$log" ]; then
        fail "$venv was not made by this script: move it away"
    fi
    rm -rf "$venv"
    mkdir "$venv" && : >"$log"
    phase "making .venv with $("$python" -V)" "$python" -m venv "$venv"
    mkdir -p "$venv/src" && ln -s ../.. "$venv/src/distrain" # mypy finds the package here under its name
    # The same pins apply to the packages that pip needs to build a source package.
    PIP_CONSTRAINT=requirements.lock PIP_BUILD_CONSTRAINT=requirements.lock \
        phase "installing $(grep -c == requirements.lock) packages of requirements.lock (this takes minutes the first time)" \
        install -r requirements.lock
    stamp locked
}

make_package() {
    rm -f "$venv/packaged.stamp"
    phase "installing distrain into .venv, editable" install --no-deps --no-build-isolation -e .
    stamp packaged
}

cd -- "$root" || exit
# One setup at a time; the lock is released when the process ends. Without flock there is no lock.
exec 9<scripts/setup.sh
if command -v flock >/dev/null && ! flock -n 9; then
    echo "waiting for another setup of this checkout"
    flock 9 || true
fi
if ! made locked || ! "$venv/bin/python" -c pass; then make_environment; fi
if ! made packaged; then make_package; fi
exec 9<&-

compiler=""
for candidate in ${CXX:+"$CXX"} g++ clang++; do
    compiler=${compiler:-$(command -v "$candidate" || true)}
done
if [ -z "$compiler" ]; then echo "warning: no C++ compiler (g++, clang++), so train.compile=true does not work" >&2; fi
