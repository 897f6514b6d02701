#!/bin/sh
# Makes the virtual environment .venv with pinned versions. Needs only Python 3.11 or newer and pip. Quick when nothing changed.
#   tools/setup.sh            what the demo needs
#   tools/setup.sh dev,docs   plus these extras of pyproject.toml
# PYTHON chooses the interpreter, VENV the folder, TORCH_INDEX an index to take torch from.
set -eu
cd "$(dirname "$0")/.."

extras=${1:-}
venv=${VENV:-.venv}
stamp="$venv/.installed"
torch=$(sed -n 's/^torch==/torch==/p' constraints.txt)
transformers=$(sed -n 's/^transformers==//p' constraints.txt)
cpu_index=https://download.pytorch.org/whl/cpu

say() { echo "setup: $*" >&2; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "no Python 3.11 or newer${PYTHON:+ at $PYTHON}; install one, or name it: PYTHON=/path/to/python make ..."
    exit 1
}

make_venv() {
    python=$(find_python) || exit 1
    say "creating $venv with $("$python" --version)"
    if ! "$python" -m venv --clear "$venv" 2>/dev/null; then # Debian without python3-venv has no ensurepip
        "$python" -m venv --clear --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install --quiet pip
    fi
}

# The smaller CPU build where no NVIDIA GPU is present. Linux only: elsewhere the plain wheel is the CPU build already.
install_torch() {
    if "$venv/bin/python" -c "import sys, importlib.metadata as m; sys.exit(m.version('torch').split('+')[0] != '${torch#torch==}')" 2>/dev/null; then
        return
    fi
    index=${TORCH_INDEX:-}
    if [ -z "$index" ] && [ "$(uname -s)" = Linux ] && ! nvidia-smi >/dev/null 2>&1 && reachable "$cpu_index/torch/"; then
        index=$cpu_index
    fi
    if [ -n "$index" ]; then
        say "installing $torch from $index"
        triton=""
        if [ "$index" = "$cpu_index" ]; then # where torch does not bring it
            pip_install --no-deps triton &
            triton=$!
        fi
        if pip_install --index-url "$index" "$torch"; then
            [ -z "$triton" ] || wait "$triton"
            return
        fi
        [ -z "$triton" ] || wait "$triton" || true
        say "$index failed, trying the default index"
    fi
    say "installing $torch"
    pip_install "$torch"
}

# What extras name, without what that needs in turn: torch needs none of it, so it is installed beside torch.
install_named() {
    "$venv/bin/python" - "$extras" >"$venv/named.txt" <<'END'
import sys, tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(name for extra in sys.argv[1].split(",") for name in extras[extra]), sep="\n")
END
    pip_install --no-deps -r "$venv/named.txt"
}

reachable() {
    "$venv/bin/python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$1" 2>/dev/null
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"
}

"$venv/bin/python" -c 'import pip' 2>/dev/null || make_venv

# The stamp says what is installed: the inputs' checksum, then the extras, one a line.
inputs="$(cat pyproject.toml constraints.txt tools/setup.sh | cksum) $PWD"
if [ "$(sed -n 1p "$stamp" 2>/dev/null)" = "$inputs" ]; then
    installed=$(sed 1d "$stamp")
else
    installed=""
    : >"$stamp"
fi
missing=""
for extra in base $(echo "$extras" | tr , ' '); do
    echo "$installed" | grep -qx "$extra" || missing="$missing $extra"
done
[ -n "$missing" ] || exit 0

# Beside each other, as pip uses one core: torch, what else is large, and what comes from a source distribution.
named=""
if [ -n "$extras" ]; then
    install_named &
    named=$!
fi
checks=""
case ",$extras," in *,dev,*)
    "$venv/bin/python" tools/upstream_tests.py "$transformers" &
    checks=$!
    ;;
esac
install_torch
[ -z "$named" ] || wait "$named"
say "installing sse-convert${extras:+ with $extras}"
pip_install -e ".${extras:+[$extras]}"
[ -z "$checks" ] || wait "$checks"
{
    echo "$inputs"
    for extra in $installed $missing; do echo "$extra"; done
} >"$stamp"
