#!/usr/bin/env bash
# Builds and runs the example of a fused row operation: on the GPU where there is one and nvcc, otherwise on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
has() { command -v "$1" > /dev/null; }

has cmake || die "please install cmake (3.18 or newer)"
has g++ || has clang++ || die "please install a C++17 compiler, for example g++"
if ! has nvcc && [[ -x /usr/local/cuda/bin/nvcc ]]; then PATH=$PATH:/usr/local/cuda/bin; fi

build=build/demo
generator=()
if has ninja && [[ ! -e $build/CMakeCache.txt ]]; then generator=(-G Ninja); fi

run_example() {  # run_example NAME [cmake options]
  local name=$1 log=$build/build.log
  shift
  mkdir -p "$build"
  say "building examples/$name"
  { cmake -S . -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DKERNELS_BUILD_TESTS=OFF -DKERNELS_BUILD_EXAMPLES=ON "$@" &&
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
