#!/usr/bin/env bash
# clang_smoke.sh CLANG++ INCLUDE_DIR EXAMPLES_DIR FLAGS...: the CPU examples compile without a warning, link and run.
set -euo pipefail
clang=$1 include_dir=$2 examples=$3
shift 3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
shopt -s nullglob
files=("$examples"/*.cpp)
if [[ ${#files[@]} -eq 0 ]]; then
  echo "skipped: no CPU examples"
  exit 77
fi
for file in "${files[@]}"; do
  echo "$file"
  build=("$clang" -std=c++17 -O1 -Wall -Wextra -Werror -I "$include_dir" -pthread)
  if [[ $file == */dispatch_cpu.cpp ]]; then
    [[ $(uname -m) == x86_64 ]] || continue
    avx2="-mavx2 -mfma -mf16c"
    # shellcheck disable=SC2086  # several flags
    for unit in "scalar" "avx2 $avx2" "avx512 $avx2 -mavx512f -mavx512bw -mavx512dq -mavx512vl"; do
      "${build[@]}" -DUNIT=$unit -c "${file%.cpp}/unit.cpp" -o "$work/${unit%% *}.o"
    done
    "${build[@]}" "$file" "$work"/*.o -o "$work/example"
  else
    "${build[@]}" "$@" "$file" -o "$work/example"
  fi
  "$work/example"
done
