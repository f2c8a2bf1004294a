#!/usr/bin/env bash
# others_macros.sh COMPILER INCLUDE_DIR: all headers compile, and calls of them, behind the macros that other headers define (others_macros.h).
# What the headers themselves include stands before the macros, as some of it does not compile behind them.
set -euo pipefail
compiler=$1 include_dir=$2
checks=$(realpath "$(dirname "${BASH_SOURCE[0]}")")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
file=$work/all.cpp kinds=(-name '*.h') calls=("$checks/doors.cpp")
compile=(bash "$checks/front_end.sh" "$compiler" -std=c++17 -I "$include_dir")
if [[ $(basename "$compiler") == nvcc* ]]; then
  file=$work/all.cu kinds=(-name '*.cuh')
  calls=("$checks"/../calls/{softmax,rmsnorm,matmul,attention_128,decode,sampling}.cu)
  compile+=(-arch=sm_90a -Werror all-warnings -ptx)
else
  compile+=(-Wall -Wextra -DWITHOUT_CODE)
  if [[ $(uname -m) == x86_64 ]]; then compile+=(-mavx2 -mfma -mf16c); fi
fi

mapfile -t headers < <(cd "$include_dir" && find kernels "${kinds[@]}" | sort)
{
  # What is behind a condition in the library may not be on this machine. The calls need <vector>.
  (cd "$include_dir" && grep -rhoE '^ *# *include <[^>]*>' "${headers[@]}" kernels/core kernels/functor) |
    sed -E 's/.*(<.*>)/\1/' | sort -u | sed 's/.*/#if __has_include(&)\n#include &\n#endif/'
  printf '#include <vector>\n'
  printf '#include "%s"\n' "$checks/others_macros.h"
  printf '#include <%s>\n' "${headers[@]}"
  printf '#include "%s"\n' "${calls[@]}"
} > "$file"
"${compile[@]}" "$file" -o "$work/out" > "$work/log" 2>&1 || { head -n 30 "$work/log"; exit 1; }
echo "${#headers[@]} headers"
[[ ${#headers[@]} -gt 0 ]]
