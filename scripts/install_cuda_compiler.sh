#!/usr/bin/env bash
# Install XLA's CUDA compiler next to a CPU installation of JAX, for zerojax.analysis.aot. No GPU is needed.
#
#   scripts/install_cuda_compiler.sh [DIR]
#
# DIR is where zerojax looks: $ZEROJAX_CUDA_COMPILER, or ~/.cache/zerojax/cuda-compiler-<JAX version>.
# The packages stay out of the environment's site-packages on purpose: JAX loads every plugin it
# finds there in every process, and without a GPU each of those prints warnings.
# PYTHON chooses the interpreter (default: python); its JAX decides the version. What is there stays.
set -euo pipefail

python=${PYTHON:-python}
version=$("$python" -c 'from importlib.metadata import version; print(version("jax"))')
dir=${1:-$("$python" -c 'from zerojax import aot; print(aot.compiler_dir())')}
if [ -e "$dir/complete" ]; then
  exit 0
fi

# jax-cuda12-pjrt is the compiler, jax-cuda12-plugin its glue for this JAX, and nvcc's wheel brings
# ptxas and libdevice. Their dependencies (cuDNN, cuBLAS, NCCL: 3 GB) only matter at run time.
nvcc=$(sed -n 's/^\(nvidia-cuda-nvcc-cu12==[^ ]*\).*/\1/p' "$(dirname "${BASH_SOURCE[0]}")/../constraints.txt")
"$python" -m pip install --quiet --no-deps --upgrade --target "$dir" \
  "jax-cuda12-pjrt==$version" "jax-cuda12-plugin==$version" "$nvcc"
touch "$dir/complete"
echo "CUDA compiler for JAX $version: $dir ($(du -sh "$dir" | cut -f1))"
