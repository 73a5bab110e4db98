#!/usr/bin/env bash
# Write constraints.txt: the newest versions that pyproject.toml allows, with one exception, for all extras on Linux
# and macOS.
# PYTHON chooses the interpreter, whose pip fetches uv. Then run scripts/test.sh, and commit the file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip install --quiet --disable-pip-version-check --target "$work/uv" uv
# Since 3.30 filelock, which JAX imports, has Python call an audit hook for each id(): tracing takes up to 10% longer.
echo "filelock<3.30" >"$work/below"
"$work/uv/bin/uv" pip compile pyproject.toml --universal --all-extras --quiet --constraint "$work/below" \
    --no-annotate --no-header --output-file "$work/found"
{
    echo "# Tested versions of all dependencies, written by scripts/renew_constraints.sh; scripts/setup.sh installs them."
    grep -v "== 'win32'\|== 'emscripten'" "$work/found"
} >constraints.txt
