#!/usr/bin/env bash
# header_alone.sh COMPILER INCLUDE_DIR HEADER: the header compiles as the first and only thing in a file, twice included,
# without a warning, as C++17, and those that users include as C++20 too. With g++ or clang++ a .h does so with and without the CUDA
# headers, and for each instruction set.
set -euo pipefail
compiler=$1 include_dir=$2 header=$3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf '#include <%s>\n#include <%s>\n' "$header" "$header" > "$work/alone.cu"
cp "$work/alone.cu" "$work/alone.cpp"

standards="17 20"
if [[ $header == kernels/*/* && $header != kernels/cpu/* || $header == */detail/* ]]; then standards=17; fi

if [[ $header == *.cuh || $(basename "$compiler") == nvcc ]]; then
  for standard in $standards; do
    echo "nvcc -std=c++$standard"
    "$compiler" -std=c++$standard -arch=sm_80 -I "$include_dir" -Werror all-warnings -Xcompiler=-Wall,-Wextra,-Werror \
      -c "$work/alone.cu" -o /dev/null
  done
  exit 0
fi

# The compiler's own include folders, without the one in which a CUDA toolkit lies, if there is one.
hide_cuda=(-nostdinc -nostdinc++)
while read -r folder; do
  [[ -e $folder/cuda_fp16.h && ! -e $folder/stdio.h ]] || hide_cuda+=(-isystem "$folder")
done < <("$compiler" -E -v -x c++ /dev/null 2>&1 | sed -n '/^#include </,/^End of search/p' | grep '^ /')

check() {  # check FLAGS...: with the CUDA headers, if there are any, and without
  echo "$*"
  local strict=(-I "$include_dir" -Wall -Wextra -Wpedantic -Werror -fsyntax-only)
  "$compiler" "$@" "${strict[@]}" "$work/alone.cpp"
  "$compiler" "$@" "${hide_cuda[@]}" "${strict[@]}" "$work/alone.cpp"
}

instruction_sets=("")
if [[ $(uname -m) == x86_64 ]]; then
  instruction_sets+=("-mavx2 -mfma -mf16c" "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c")
fi
for flags in "${instruction_sets[@]}"; do
  for standard in $standards; do
    check -std=c++$standard $flags
  done
done
