#!/usr/bin/env bash
# Says in one line each what this machine lacks, before anything is installed.
# Prints the Python to use on stdout; PYTHON=... chooses one. Exits 1 if anything is missing.
set -u

NEEDED_GB=6   # .venv and pip's downloads, with torch's CPU build

missing=0
lack() { echo "preflight: $*" >&2; missing=1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" && echo "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13; do
        new_enough "$candidate" && echo "$candidate" && return
    done
}

check_python() {
    local include
    if [ -z "$python" ]; then
        lack "no Python 3.11 or newer${PYTHON:+ ($PYTHON is none)}: install one, or name it with PYTHON=/path/to/python3"
        return
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        lack "$python cannot make virtual environments: install its venv module (Debian: python3-venv)"
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -e "$include/Python.h" ] ||
        lack "$python has no C headers ($include/Python.h): install them (Debian: python3-dev)"
}

check_compiler() {
    local candidate
    for candidate in ${CXX:-c++ g++ clang++}; do
        command -v "$candidate" >/dev/null || continue
        echo '#include <span>' | "$candidate" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null && return
        lack "$candidate does not compile C++20: install g++ 10 or clang 13 or newer, or name one with CXX=..."
        return
    done
    lack "no C++ compiler${CXX:+ ($CXX is not found)}: install one (Debian: g++), or name it with CXX=..."
}

check_disk() {
    local free_gb
    free_gb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free_gb" -ge "$NEEDED_GB" ] ||
        lack "$free_gb GB of disk are free in $PWD, $NEEDED_GB GB are needed: free some, or clone elsewhere"
}

[ "$(uname -s)" = Linux ] || lack "this is $(uname -s): SGLang serves on Linux"
python=$(find_python)
check_python
check_compiler
[ -e .venv/bin/sglang ] || check_disk   # the big part is in place by then
[ "$missing" -eq 0 ] && echo "$python"
