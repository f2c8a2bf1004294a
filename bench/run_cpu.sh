#!/usr/bin/env bash
# Builds the CPU's benchmarks, runs them on all of this machine's cores, or OMP_NUM_THREADS, and prints those of rows.
# Writes cpu_row.json, cpu_gemv.json, cpu_attention.json, cpu_gemm.json and cpu_gemm_avx2.json to OUT_DIR (default:
# bench/results/<cpu>-<instruction set>-<threads>t), in place of those there. oneDNN and OpenBLAS are left out where they
# are not found.
#   bench/run_cpu.sh [options of Google Benchmark]
set -euo pipefail
invoked="bench/run_cpu.sh${*:+ $*}"
options=("$@")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=build/bench-cpu
mkdir -p "$build"
{ cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DKERNELS_CUDA=OFF -DKERNELS_BUILD_BENCH=ON \
        -DKERNELS_BUILD_TESTS=OFF -DKERNELS_BUILD_EXAMPLES=OFF &&
  cmake --build "$build" -j "$(nproc)" --target bench_cpu_row bench_cpu_gemv bench_cpu_gemm bench_cpu_attention; } &> "$build/build.log" ||
  { tail -n 40 "$build/build.log" >&2; exit 1; }

# measure NAME PROGRAM [VARIABLE=VALUE ...]: what a program finds with these variables set, in NAME.json
measure() {
  local json="$build/$1.json" log="$build/$1.log" program="$build/bench/$2"
  env "${@:3}" "$program" "${options[@]}" --benchmark_out="$json" --benchmark_out_format=json > "$log" 2>&1 ||
    { tail -n 20 "$log" >&2; exit 1; }
}
measure cpu_row bench_cpu_row
# An OpenBLAS older than the machine would guess an older instruction set.
core=Haswell
if grep -qw avx512f /proc/cpuinfo; then core=SkylakeX; fi
measure cpu_gemv bench_cpu_gemv OPENBLAS_CORETYPE=$core
measure cpu_gemm bench_cpu_gemm OPENBLAS_CORETYPE=$core
measure cpu_attention bench_cpu_attention OPENBLAS_CORETYPE=$core
measure cpu_gemm_avx2 bench_cpu_gemm OPENBLAS_CORETYPE=Haswell ONEDNN_MAX_CPU_ISA=AVX2

out=${OUT_DIR:-bench/results/$(python3 bench/report.py slug "$build/cpu_row.json")}
mkdir -p "$out"
for name in cpu_row cpu_gemv cpu_attention cpu_gemm cpu_gemm_avx2; do
  cp "$build/$name.json" "$out/"
  python3 bench/report.py stamp "$out/$name.json" "command=$invoked"
done
python3 bench/report.py "$out"
