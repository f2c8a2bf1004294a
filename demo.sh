#!/usr/bin/env bash
# Tells a story: builds examples/llm and lets it run the small model that comes with it, on the GPU where there is one and nvcc,
# otherwise on the CPU.
#   ./demo.sh                          a story
#   ./demo.sh "One day, a cat"         one that begins like this
#   ./demo.sh "One day" --seed 7       with options of `llm generate`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

source .ci/tools.sh

if [[ -z ${CXX:-} ]] && ! has g++ && has clang++; then export CXX=clang++; fi
need_build_tools
need_llm_libraries

if [[ $# -eq 0 || $1 == -* ]]; then set -- "Once upon a time" "$@"; fi

# tell BUILD_DIR [cmake options] -- PROMPT [options]
tell() {
  local build=$1 log=$1/build.log options=()
  shift
  while [[ $1 != -- ]]; do options+=("$1"); shift; done
  shift
  mkdir -p "$build"
  say "building examples/llm (about a minute on two cores)"
  { configure "$build" -DKERNELS_BUILD_TESTS=OFF -DKERNELS_BUILD_EXAMPLES=ON -DKERNELS_LLM_WEIGHTS=f16 -DKERNELS_LLM_CACHES=f16 "${options[@]}" &&
    cmake --build "$build" -j "$(nproc)" --target llm; } > "$log" 2>&1 || { cat "$log" >&2; die "the build failed"; }
  say "a story by examples/llm/model"
  "$build/examples/llm/llm" generate --model examples/llm/model "$@"
}

# The architecture to compile for: that of the GPU alone, 80 say, or 90a.
gpu_architecture() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | tr -d '. ') || return 1
  [[ $capability =~ ^[0-9]+$ && $capability -ge 80 ]] || return 1
  if [[ $capability -eq 90 ]]; then echo 90a-real; else echo "$capability-real"; fi
}

find_cuda
if has nvcc && architecture=$(gpu_architecture); then
  status=0
  (tell build/demo_gpu -DKERNELS_CUDA=ON -DKERNELS_LLM_GPU=ON "-DCMAKE_CUDA_ARCHITECTURES=$architecture" -- "$@") || status=$?
  if [[ $status -eq 130 ]]; then exit 130; fi  # Ctrl-C
  if [[ $status -ne 0 ]]; then
    say "this did not work on the GPU (exit status $status); on the CPU"
    tell build/demo -DKERNELS_CUDA=OFF -- "$@"
  fi
else
  if has nvcc; then say "no GPU found that nvcc compiles for; on the CPU"; else say "no CUDA toolkit found; on the CPU"; fi
  tell build/demo -DKERNELS_CUDA=OFF -- "$@"
fi
