#!/usr/bin/env bash
# Make .venv and install zerojax into it, with the tested versions of constraints.txt: scripts/setup.sh [EXTRA]
# Needs Python 3.12 or newer with pip. Choose another interpreter by PYTHON=/path/to/python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    echo "zerojax needs Python 3.12 or newer, and '$python' is $("$python" --version 2>&1 || true)." >&2
    echo "Install one, and name it: PYTHON=python3.12 $0" >&2
    exit 1
fi
if ! [ -x .venv/bin/python ]; then
    "$python" -m venv .venv
fi
extra=${1:-}
what=(--editable ".${extra:+[$extra]}")
stamp=.venv/installed-${extra:-base}
if cat pyproject.toml constraints.txt | cmp -s - "$stamp"; then
    exit 0 # installed before from the same files
fi
# In the environment, so that they also hold for what builds the package.
export PIP_CONSTRAINT="${PIP_CONSTRAINT:-} constraints.txt" PIP_BUILD_CONSTRAINT=constraints.txt
export UV_CONSTRAINT=constraints.txt UV_BUILD_CONSTRAINT=constraints.txt
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
# uv takes an eighth of pip's time, but does not read pip's settings, such as a mirror's.
if ! "${pip[@]}" uv || ! .venv/bin/uv pip install --quiet --python .venv/bin/python "${what[@]}"; then
    echo "uv could not install zerojax (see above): pip does." >&2
    "${pip[@]}" "${what[@]}"
fi
cat pyproject.toml constraints.txt >"$stamp"
