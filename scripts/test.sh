#!/usr/bin/env bash
# Set up zerojax for development in .venv, then lint, check types, build the documentation and run all tests.
# With options, such as -k wire, pytest runs what they choose, in one process.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."
# Hundreds of processes import the same modules: they are compiled once.
unset PYTHONDONTWRITEBYTECODE
"$here/setup.sh" dev
# What compiles for GPU clusters without a GPU; the tests that need it skip themselves without it.
PYTHON=.venv/bin/python "$here/install_cuda_compiler.sh"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
if [ $# -gt 0 ]; then
    .venv/bin/pyright
    exec .venv/bin/pytest "$@"
fi
.venv/bin/pyright &  # beside the tests, which leave a tenth of two cores idle
types=$!
.venv/bin/pytest -n 2 --dist worksteal -m "not slow and not alone"
wait $types
.venv/bin/pytest -n 3 --dist worksteal -m "alone and not slow"
