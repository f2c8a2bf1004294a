#!/usr/bin/env bash
# Builds and runs the example of a fused row operation: on the GPU where there is one and nvcc, otherwise on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

source .ci/tools.sh

if [[ -z ${CXX:-} ]] && ! has g++ && has clang++; then export CXX=clang++; fi
need_build_tools
find_cuda

build=build/demo

run_example() {  # run_example NAME [cmake options]
  local name=$1 log=$build/build.log
  shift
  mkdir -p "$build"
  say "building examples/$name"
  { configure "$build" -DKERNELS_BUILD_TESTS=OFF -DKERNELS_BUILD_EXAMPLES=ON "$@" &&
    cmake --build "$build" --target "$name"; } > "$log" 2>&1 || { cat "$log" >&2; die "the build failed"; }
  say "running it"
  "$build/examples/$name"
}

has_gpu() { [[ -e /dev/nvidia0 ]] || { has nvidia-smi && nvidia-smi -L > /dev/null 2>&1; }; }

if has nvcc && has_gpu; then
  status=0
  run_example fused_row -DKERNELS_CUDA=ON || status=$?
  [[ $status -eq 77 ]] || exit "$status"
  say "the program found no usable CUDA device; on the CPU instead"
elif has nvcc; then
  say "no GPU found; on the CPU"
else
  say "no CUDA toolkit found; on the CPU"
fi
run_example fused_row_cpu -DKERNELS_CUDA=OFF
