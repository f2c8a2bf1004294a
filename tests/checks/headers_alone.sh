#!/usr/bin/env bash
# headers_alone.sh COMPILER INCLUDE_DIR: each header compiles without a warning as the first thing in a file, twice included, as C++17; all
# together do so as C++17 and 20, for each instruction set, with and without the CUDA headers. With nvcc these are the .cuh files and the
# doors of the CPU, which a .cu file may include too, otherwise the .h files. A header that begins with another one compiles for both.
set -euo pipefail
compiler=$1 include_dir=$2

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0 checked=0
# The header that a header includes before it says anything else, if it does.
first_of() {
  local included
  included=$(sed -nE '/^ *(\/\/.*|#pragma once)?$/d; s/^#include "(.*)"$/\1/p; q' "$include_dir/$1")
  [[ -z $included ]] || realpath -ms --relative-to="$include_dir" "$(dirname "$include_dir/$1")/$included"
}
# Those of the headers that no other one begins with.
alone() {
  local header first
  local -A begun=()
  for header in "$@"; do
    first=$(first_of "$header")
    [[ -z $first ]] || begun[$first]=yes
  done
  for header in "$@"; do
    [[ -n ${begun[$header]:-} ]] || echo "$header"
  done
}
try() {  # try WHAT COMMAND...
  local what=$1
  shift
  checked=$((checked + 1))
  "$@" > "$work/log" 2>&1 || { echo "$what:"; head -n 20 "$work/log"; failures=$((failures + 1)); }
}

if [[ $(basename "$compiler") == nvcc* ]]; then
  mapfile -t headers < <(cd "$include_dir" && find kernels -name '*.cuh' -o -path 'kernels/cpu/*' ! -path '*/detail/*' -name '*.h' | sort)
  front_end=$(dirname "${BASH_SOURCE[0]}")/front_end.sh
  flags=(-arch=sm_80 -I "$include_dir" -Werror all-warnings)
  for header in $(alone "${headers[@]}"); do
    printf '#include <%s>\n#include <%s>\n' "$header" "$header" > "$work/alone.cu"
    try "$header" bash "$front_end" "$compiler" -std=c++17 "${flags[@]}" -ptx "$work/alone.cu" -o "$work/out.ptx"
  done
  printf '#include <%s>\n' "${headers[@]}" > "$work/all.cu"
  for standard in 17 20; do
    try "all headers, C++$standard" "$compiler" "-std=c++$standard" "${flags[@]}" -Xcompiler=-Wall,-Wextra,-Werror -c "$work/all.cu" -o "$work/all.o"
  done
else
  mapfile -t headers < <(cd "$include_dir" && find kernels -name '*.h' | sort)
  # The compiler's own include folders, without the one in which a CUDA toolkit lies, if there is one.
  hide_cuda=(-nostdinc -nostdinc++)
  while read -r folder; do
    [[ -e $folder/cuda_fp16.h && ! -e $folder/stdio.h ]] || hide_cuda+=(-isystem "$folder")
  done < <("$compiler" -E -v -x c++ /dev/null 2>&1 | sed -n '/^#include </,/^End of search/p' | grep '^ /')
  flags=(-I "$include_dir" -Wall -Wextra -Wpedantic -Werror -fsyntax-only)

  for header in $(alone "${headers[@]}"); do
    printf '#include <%s>\n#include <%s>\n' "$header" "$header" > "$work/alone.cpp"
    try "$header" "$compiler" -std=c++17 "${hide_cuda[@]}" "${flags[@]}" "$work/alone.cpp"
  done

  printf '#include <%s>\n' "${headers[@]}" > "$work/all.cpp"
  instruction_sets=("")
  if [[ $(uname -m) == x86_64 ]]; then
    instruction_sets+=("-mavx2 -mfma" "-mavx2 -mfma -mf16c" "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c")
    # Not every compiler knows the last of these.
    if "$compiler" -mavx512bf16 -mavx512vnni -E -x c++ /dev/null &> /dev/null; then
      instruction_sets+=("-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mfma -mf16c")
    fi
  fi
  # Each pair of standard, instruction set and CUDA headers or none, which half of all the combinations have.
  standard=17 other=20
  for set in "${instruction_sets[@]}"; do
    # shellcheck disable=SC2086  # several flags in one word
    try "all headers, C++$standard $set" "$compiler" "-std=c++$standard" $set "${flags[@]}" "$work/all.cpp"
    # shellcheck disable=SC2086
    try "all headers, no CUDA, C++$other $set" "$compiler" "-std=c++$other" $set "${hide_cuda[@]}" "${flags[@]}" "$work/all.cpp"
    read -r standard other <<< "$other $standard"
  done
fi

echo "${#headers[@]} headers, $checked compiles, $failures wrong"
[[ ${#headers[@]} -gt 0 && $failures -eq 0 ]]
