#!/usr/bin/env bash
# Set up zerojax for development in .venv, then lint, check types, build the documentation and run all tests.
# With options, such as -k wire, pytest runs what they choose, in one process.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."
# Hundreds of processes import the same modules: they are compiled once.
unset PYTHONDONTWRITEBYTECODE
# Modules are compiled when they are first imported, not all of them now: what 0 means here to pip.
PIP_NO_COMPILE=0 "$here/setup.sh" dev
# What compiles for GPU clusters without a GPU; the tests that need it skip themselves without it.
PYTHON=.venv/bin/python "$here/install_cuda_compiler.sh"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
export NO_MKDOCS_2_WARNING=1
site=(.venv/bin/mkdocs build --strict --quiet)
if [ $# -gt 0 ]; then
    "${site[@]}"
    .venv/bin/pyright
    exec .venv/bin/pytest "$@"
fi

# Types and the site beside the tests, which leave a tenth of two cores idle; their output follows.
output=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$output"' EXIT
.venv/bin/pyright >"$output/types" 2>&1 &
types=$!
"${site[@]}" >"$output/site" 2>&1 &
docs=$!
.venv/bin/pytest -n 2 --dist worksteal -m "not slow and not alone"
failed=()
wait $types || failed+=(pyright)
wait $docs || failed+=(mkdocs)
cat "$output/types" "$output/site"
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]} (see above)" >&2
    exit 1
fi
.venv/bin/pytest -n 3 --dist worksteal -m "alone and not slow"
# The kernels are lowered where JAX finds the CUDA compiler as it is imported; skipped above.
compiler=$(.venv/bin/python -c "from zerojax.analysis import aot; print(aot.compiler_dir())")
PYTHONPATH="$compiler" .venv/bin/pytest -q tests/pallas_kernels/test_lowering.py
