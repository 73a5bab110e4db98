#!/usr/bin/env bash
# Set up zerojax for development in .venv, then lint, check types, build the documentation and run all tests.
# With options, such as -k wire, pytest runs what they choose, in one process.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."
# Hundreds of processes import the same modules: they are compiled once.
unset PYTHONDONTWRITEBYTECODE
# Huge pages, where Linux leaves them to programs: compiling takes 6% less CPU time.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
# Modules are compiled when they are first imported, not all of them now: what 0 means here to pip.
PIP_NO_COMPILE=0 "$here/setup.sh" dev
export NO_MKDOCS_2_WARNING=1 NOTEBOOK_RESULTS=off
site=(.venv/bin/mkdocs build --strict --quiet)
types=(.venv/bin/pyrefly check --progress-bar no)
prepare() {
    # What compiles for GPU clusters without a GPU; the tests that need it skip themselves without it.
    compiler=$(.venv/bin/python -c "from zerojax import aot; print(aot.compiler_dir())")
    PYTHON=.venv/bin/python "$here/install_cuda_compiler.sh" "$compiler"
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
}
if [ $# -gt 0 ]; then
    prepare
    "${site[@]}"
    "${types[@]}"
    exec .venv/bin/pytest "$@"
fi

# Beside the tests, to which they give way; their output follows.
output=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$output"' EXIT
names=() processes=()
beside() {
    nice -n 19 "${@:2}" >"$output/$1" 2>&1 &
    names+=("$1") processes+=($!)
}
beside types "${types[@]}"
beside mkdocs "${site[@]}"
prepare
# The kernels are lowered where JAX finds the CUDA compiler as it is imported; skipped below. Two processes,
# because the tests that wait leave both cores to them at times.
lowering=(.venv/bin/pytest -n 2 -q -p no:cacheprovider --noconftest tests/pallas_kernels/test_lowering.py)
beside "lowering of kernels" env JAX_PLATFORMS=cpu PYTHONPATH="$compiler" "${lowering[@]}"

failed=()
# These wait most of the time, so there are four at once, and the processes above compute in the meantime. A
# process reads all files that it is given before its first test, so it is given these alone.
mapfile -t files < <(grep -rl --include='test_*.py' 'pytest\.mark\.alone' tests)
.venv/bin/pytest -n 4 --dist worksteal -m "alone and not slow" --cost - "${files[@]}" || failed+=("tests alone")
# Three on two cores, because a tenth of the time a test waits for a process that it has started, or for a clock.
.venv/bin/pytest -n 3 --dist worksteal -m "not slow and not alone" --cost - || failed+=("tests")
for i in "${!names[@]}"; do
    wait "${processes[i]}" || failed+=("${names[i]}")
    cat "$output/${names[i]}"
done
if [ ${#failed[@]} -gt 0 ]; then
    (IFS=,; echo "failed: ${failed[*]} (see above)") >&2
    exit 1
fi
