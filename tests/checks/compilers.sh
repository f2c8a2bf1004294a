#!/usr/bin/env bash
# compilers.sh COMPILER INCLUDE_DIR PROGRAM FLAGS...: every door of the CPU compiles with it without a warning, with FLAGS and without
# them and for AVX-512, and gives the right results with FLAGS, which this machine can run.
set -euo pipefail
compiler=$1 include_dir=$2 program=$3
shift 3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$compiler" --version | head -1
optimize=-O1
if [[ $(basename "$compiler") == clang* ]]; then optimize=-O0; fi  # clang warns as it parses, g++ of some things as it optimizes
build=("$compiler" -std=c++17 "$optimize" -Wall -Wextra -Wshadow -Wconversion -Werror -I "$include_dir" -pthread "$program")
echo "run: $*"
"${build[@]}" "$@" -o "$work/program"
"$work/program"

instruction_sets=("")
if [[ $(uname -m) == x86_64 ]]; then instruction_sets+=("-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c"); fi
for flags in "${instruction_sets[@]}"; do
  echo "compile: $flags"
  # shellcheck disable=SC2086  # several flags
  "${build[@]}" $flags -fsyntax-only -DWITHOUT_CODE
done
