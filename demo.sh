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
  { configure "$build" -DKERNELS_BUILD_TESTS=OFF -DKERNELS_BUILD_EXAMPLES=ON -DKERNELS_LLM_WEIGHTS=f16 "${options[@]}" &&
    cmake --build "$build" -j "$(nproc)" --target llm; } > "$log" 2>&1 || { cat "$log" >&2; die "the build failed"; }
  say "a story by examples/llm/model"
  "$build/examples/llm/llm" generate --model examples/llm/model "$@"
}

tell build/demo -DKERNELS_CUDA=OFF -- "$@"
