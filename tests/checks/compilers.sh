#!/usr/bin/env bash
# compilers.sh COMPILER INCLUDE_DIR PROGRAM FLAGS...: every door of the CPU compiles with it without a warning, with FLAGS and without
# them and for AVX-512, and gives the right results where the machine can run it.
set -euo pipefail
compiler=$1 include_dir=$2 program=$3
shift 3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$compiler" --version | head -1
build=("$compiler" -std=c++17 -O1 -Wall -Wextra -Werror -I "$include_dir" -pthread "$program")
instruction_sets=("")
[[ $# -eq 0 ]] || instruction_sets+=("$*")
for flags in "${instruction_sets[@]}"; do
  echo "run: $flags"
  # shellcheck disable=SC2086  # several flags
  "${build[@]}" $flags -o "$work/program"
  "$work/program"
done
if [[ $(uname -m) == x86_64 ]]; then
  echo "compile: AVX-512"
  "${build[@]}" -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -fsyntax-only
fi
