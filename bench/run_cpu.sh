#!/usr/bin/env bash
# Builds the CPU's row benchmark, runs it on all of this machine's cores, or OMP_NUM_THREADS, and prints it.
# Writes cpu_row.json to OUT_DIR (default: bench/results/<cpu>-<instruction set>-<threads>t), in place of the one there.
# oneDNN is left out where it is not found.
#   bench/run_cpu.sh [options of Google Benchmark]
set -euo pipefail
invoked="bench/run_cpu.sh${*:+ $*}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=build/bench-cpu
mkdir -p "$build"
{ cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DKERNELS_CUDA=OFF -DKERNELS_BUILD_BENCH=ON \
        -DKERNELS_BUILD_TESTS=OFF -DKERNELS_BUILD_EXAMPLES=OFF &&
  cmake --build "$build" -j "$(nproc)" --target bench_cpu_row; } &> "$build/build.log" ||
  { tail -n 40 "$build/build.log" >&2; exit 1; }

"$build/bench/bench_cpu_row" "$@" --benchmark_out="$build/cpu_row.json" --benchmark_out_format=json > "$build/run.log" 2>&1 ||
  { tail -n 20 "$build/run.log" >&2; exit 1; }
out=${OUT_DIR:-bench/results/$(python3 bench/report.py slug "$build/cpu_row.json")}
mkdir -p "$out"
cp "$build/cpu_row.json" "$out/"
python3 bench/report.py stamp "$out/cpu_row.json" "command=$invoked"
python3 bench/report.py "$out"
