#!/usr/bin/env bash
# Builds the benchmarks, measures them and their peers on this machine's first GPU, prints a table for each op and makes a page of all of it.
#   bench/run.sh                      everything for which 20 minutes of measuring are enough
#   bench/run.sh --quick              a few shapes, for at most 3
#   bench/run.sh softmax matmul ...   only these: softmax, layernorm, rmsnorm, elementwise, matmul, matmul_in_eight, decode, prefill, step,
#                                     router, norm_heads, host_cost, peers, attention_peers, sampling_peers
#   bench/run.sh --filter 'fp16/.*x4096/'   only cases whose names this regular expression finds
#   bench/run.sh --fresh              not on from where the same command was interrupted
#   bench/run.sh --budget 300         stops measuring after so many seconds
#   bench/run.sh --dry-run            says what would be measured, how long it takes, and which peers are installed
# First the ceilings of the machine are measured: a copy, a read, products, a launch. Writes a JSON file for each program, softmax.json and so
# on, and report.html to OUT_DIR. By default that is bench/results/<gpu>, and build/bench/results/<gpu> with --quick or --filter: a few cases
# never replace all.
# What cannot be built or measured does not stop the rest: it is said at the end, and the exit status is 1. Peers that are not installed are
# left out and said, which is no failure. A GPU that others use is refused: exit status 3. PYTHON: an interpreter with PyTorch and the other
# peers (default: python3).
set -euo pipefail
invoked="bench/run.sh${*:+ $*}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source .ci/tools.sh

names=(softmax layernorm rmsnorm elementwise matmul matmul_in_eight decode prefill step sampling router norm_heads host_cost peers attention_peers sampling_peers)
suite=(--invoked "$invoked")
wanted=() few=false quickly=OFF dry=false
while [[ $# -gt 0 ]]; do
  case $1 in
    --quick) few=true quickly=ON suite+=(--quick) ;;
    --fresh) suite+=(--fresh) ;;
    --dry-run) dry=true ;;
    --filter) few=true suite+=(--filter "${2:?--filter wants a regular expression}"); shift ;;
    --budget) suite+=(--budget "${2:?--budget wants seconds}"); shift ;;
    *) [[ " ${names[*]} " == *" $1 "* ]] || die "unknown option: $1"
       wanted+=("$1") ;;
  esac
  shift
done
python=${PYTHON:-python3}
has "$python" || die "$python was not found (PYTHON=... names another)"
build=build/bench
if $dry; then exec "$python" bench/suite.py --build "$build" --out "${OUT_DIR:-$build}" "${suite[@]}" --dry-run "${wanted[@]}"; fi

find_cuda
has nvcc || die "nvcc is not on the PATH"
nvidia-smi -L > /dev/null 2>&1 || die "no NVIDIA GPU"
need_build_tools
has_header benchmark/benchmark.h || need_packages libbenchmark-dev

ask_gpu() { nvidia-smi -i 0 --query-gpu="$1" --format=csv,noheader | head -n 1; }
gpu=$(ask_gpu name)
arch=$(ask_gpu compute_cap | tr -d .)
if [[ $arch -ge 90 ]]; then arch+=a; fi
slug=$(tr '[:upper:] ' '[:lower:]-' <<< "${gpu#NVIDIA }")
folder=bench/results
if $few; then folder=$build/results; fi
mkdir -p "$build"

targets=(bench_ceilings)
for name in "${names[@]}"; do
  if [[ $name != *peers && (${#wanted[@]} -eq 0 || " ${wanted[*]} " == *" $name "*) ]]; then targets+=("bench_$name"); fi
done
if [[ ${#wanted[@]} -eq 0 || " ${wanted[*]} " == *" attention_peers "* ]]; then targets+=(attention_calls); fi
cudnn=$("$python" -c 'import nvidia.cudnn; print(list(nvidia.cudnn.__path__)[0])' 2> /dev/null || true)
say "$gpu; building for sm_$arch"
options=(-DCMAKE_CUDA_ARCHITECTURES="$arch-real" -DKERNELS_BUILD_BENCH=ON -DKERNELS_BUILD_TESTS=OFF -DKERNELS_BUILD_EXAMPLES=OFF
         "-DKERNELS_BENCH_QUICKLY=$quickly")
if [[ -n $cudnn ]]; then options+=("-DCUDNN_ROOT=$cudnn"); fi
configure "$build" "${options[@]}" &> "$build/configure.log" || { tail -n 40 "$build/configure.log" >&2; die "configuring failed"; }
rm -f "${targets[@]/#/$build/bench/}" "$build/bench/libattention_calls.so"  # what is there afterwards is new
build_all_that_can_be "$build" --target "${targets[@]}" &> "$build/build.log" || tail -n 40 "$build/build.log" >&2
# A run goes on only with the sources that it began with.
version=$({ git rev-parse HEAD && git diff HEAD; } 2> /dev/null | cksum || true)
exec "$python" bench/suite.py --build "$build" --out "${OUT_DIR:-$folder/$slug}" --version "$version" "${suite[@]}" "${wanted[@]}"
