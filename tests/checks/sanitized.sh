#!/usr/bin/env bash
# sanitized.sh COMPILER INCLUDE_DIR PROGRAM SANITIZERS FLAGS...: a program of calls on the CPU has no fault that the sanitizers see. The
# short form of tests/sanitize.sh cpu. Not optimized, for which GCC's AddressSanitizer takes minutes; and without OpenMP, whose library ThreadSanitizer cannot follow.
set -euo pipefail
compiler=$1 include_dir=$2 program=$3 sanitizers=$4
shift 4

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
build=("$compiler" -std=c++17 -O0 -DKERNELS_UNOPTIMIZED=1 -g1 --param=ggc-min-heapsize=500000 "-fsanitize=$sanitizers" -fno-sanitize-recover=all -pthread)
echo 'int main() {}' > "$work/empty.cpp"
"${build[@]}" "$work/empty.cpp" -o "$work/program" && "$work/program" ||
  { echo "skipped: $compiler -fsanitize=$sanitizers does not work here"; exit 77; }
"${build[@]}" "$@" -I "$include_dir" "$program" -o "$work/program"
"$work/program"
