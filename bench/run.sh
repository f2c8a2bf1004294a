#!/usr/bin/env bash
# Builds the benchmarks, measures them and their peers on this machine's first GPU, and prints a table for each op.
#   bench/run.sh [--quick]      --quick: a few shapes
#   bench/run.sh [--quick] matmul ...        only these: softmax, layernorm, rmsnorm, elementwise, matmul, decode,
#                                          prefill, sampling, router, norm_heads, host_cost, peers, attention_peers,
#                                          sampling_peers
# Writes a JSON file for each, softmax.json and so on, to OUT_DIR (default: bench/results/<gpu>), in place of those that are there.
# What cannot be built or measured does not stop the rest: it is said at the end, and the exit status is 1. Peers that are not
# installed are left out and said, which is no failure. PYTHON: an interpreter with PyTorch and cuDNN (default: python3).
set -euo pipefail
invoked="bench/run.sh${*:+ $*}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source .ci/tools.sh

quick=false
wanted=()
for option in "$@"; do
  case $option in
    --quick) quick=true ;;
    softmax | layernorm | rmsnorm | elementwise | matmul | decode | prefill | sampling | router | norm_heads | host_cost | peers | attention_peers | sampling_peers) wanted+=("$option") ;;
    *) die "unknown option: $option" ;;
  esac
done
if [[ ${#wanted[@]} -eq 0 ]]; then wanted=(softmax layernorm rmsnorm elementwise matmul decode prefill sampling router norm_heads host_cost peers attention_peers sampling_peers); fi
wants() { [[ " ${wanted[*]} " == *" $1 "* ]]; }
programs=()
for op in softmax layernorm rmsnorm elementwise matmul decode prefill sampling router norm_heads host_cost; do
  if wants "$op"; then programs+=("$op"); fi
done

find_cuda
python=${PYTHON:-python3}
has nvcc || die "nvcc is not on the PATH"
nvidia-smi -L > /dev/null 2>&1 || die "no NVIDIA GPU"
has "$python" || die "$python was not found (PYTHON=... names another)"
need_build_tools
if [[ ${#programs[@]} -gt 0 ]]; then has_header benchmark/benchmark.h || need_packages libbenchmark-dev; fi

ask_gpu() { nvidia-smi -i 0 --query-gpu="$1" --format=csv,noheader | head -n 1; }
clocks() { echo "sm $(ask_gpu clocks.sm), mem $(ask_gpu clocks.mem)"; }
gpu=$(ask_gpu name)
arch=$(ask_gpu compute_cap | tr -d .)
if [[ $arch -ge 90 ]]; then arch+=a; fi
slug=$(tr '[:upper:] ' '[:lower:]-' <<< "${gpu#NVIDIA }")
out=${OUT_DIR:-bench/results/$slug}
build=build/bench
mkdir -p "$out" "$build"

cudnn=$("$python" -c 'import nvidia.cudnn; print(list(nvidia.cudnn.__path__)[0])' 2> /dev/null || true)
say "$gpu; building for sm_$arch"
options=(-DCMAKE_CUDA_ARCHITECTURES="$arch-real" -DKERNELS_BUILD_BENCH=ON -DKERNELS_BUILD_TESTS=OFF -DKERNELS_BUILD_EXAMPLES=OFF)
if [[ -n $cudnn ]]; then options+=("-DCUDNN_ROOT=$cudnn"); fi
failed=()
if [[ ${#programs[@]} -gt 0 ]]; then
  rm -f "${programs[@]/#/$build/bench/bench_}"  # what is there afterwards is new
  configure "$build" "${options[@]}" &> "$build/configure.log" || { tail -n 40 "$build/configure.log" >&2; die "configuring failed"; }
  build_all_that_can_be "$build" --target "${programs[@]/#/bench_}" &> "$build/build.log" || tail -n 40 "$build/build.log" >&2
fi

stamp() {  # stamp NAME COMMAND: what made NAME.json goes into its context
  "$python" bench/report.py stamp "$out/$1.json" "command=$invoked: $2" "clocks_before=$before" "clocks_after=$(clocks)"
}

for op in "${programs[@]}"; do
  command=("$build/bench/bench_$op")
  rm -f "$out/$op.json"
  if [[ ! -x ${command[0]} ]]; then
    failed+=("$op, which does not build ($build/build.log)")
    continue
  fi
  if $quick && [[ $op == matmul ]]; then command+=('--benchmark_filter=1x4096x4096/|1x14336x4096/|/16x14336x4096/|4096x4096x4096/');
  elif $quick && [[ $op == decode ]]; then command+=('--benchmark_filter=x(4096|131072),');
  elif $quick && [[ $op == prefill ]]; then command+=('--benchmark_filter=x(512|2048|8192)/');
  elif $quick && [[ $op == elementwise ]]; then command+=('--benchmark_filter=(gelu|swiglu)/fp16/16384x|embed_rmsnorm/');
  elif $quick && [[ $op == router || $op == norm_heads ]]; then command+=('--benchmark_filter=/(1|1024)x');
  elif $quick && [[ $op != host_cost ]]; then command+=('--benchmark_filter=x(128|1024|4096|8192|32768|128256)/'); fi
  say "${command[*]}"
  before=$(clocks)
  if "${command[@]}" --benchmark_out="$build/$op.json" --benchmark_out_format=json > "$build/$op.log" 2>&1; then
    cp "$build/$op.json" "$out/$op.json"
    stamp "$op" "${command[*]}"
  else
    tail -n 20 "$build/$op.log" >&2
    failed+=("$op, which fails ($build/$op.log)")
  fi
done

for name in peers attention_peers sampling_peers; do
  if ! wants "$name"; then continue; fi
  command=("bench/$name.py" --out "$out/$name.json")
  if $quick; then command+=(--quick); fi
  say "$python ${command[*]}"
  rm -f "$out/$name.json"
  before=$(clocks)
  status=0
  "$python" "${command[@]}" > "$build/$name.log" 2>&1 || status=$?
  if [[ $status -eq 0 ]]; then
    grep "^$name.py:" "$build/$name.log" || true
    stamp "$name" "${command[0]} ${command[*]:3}"
  else
    tail -n 5 "$build/$name.log" >&2
    if [[ $status -ne 77 ]]; then
      failed+=("$name, which fails ($build/$name.log)")
    else
      say "without what $name.py measures (PyTorch, torch.compile, Triton)"
    fi
  fi
done

"$python" bench/report.py "$out" || failed+=("the tables")
if [[ ${#failed[@]} -gt 0 ]]; then
  for what in "${failed[@]}"; do say "left out: $what"; done
  exit 1
fi
