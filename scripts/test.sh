#!/usr/bin/env bash
# Set up zerojax for development in .venv, then lint, check types and run all tests.
# Options go to pytest, such as -k wire.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."
"$here/setup.sh" dev
# What compiles for GPU clusters without a GPU; the tests that need it skip themselves without it.
PYTHON=.venv/bin/python "$here/install_cuda_compiler.sh"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/pyright
.venv/bin/pytest "$@"
