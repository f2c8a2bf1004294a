#!/usr/bin/env bash
# from_c.sh GCC CXX|NVCC SOURCE_DIR [flags]: a program in C11 links to the function of docs/building.md, with nvcc that of the GPU, otherwise that
# of the CPU, with the libraries that are named there. It runs and gets results, or on the GPU the reason why there are none.
set -euo pipefail
gcc=$1 compiler=$2 source=$3
shift 3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
snippet() {  # snippet FILE: the example that begins with its name
  awk -v first="// $1:" '
    /^```/ { here = 0; begins = /^```cpp/; next }
    begins { here = index($0, first) == 1; begins = 0 }
    here' "$source/docs/building.md" > "$work/$1"
  [[ -s $work/$1 ]] || { echo "docs/building.md has no $1"; exit 1; }
}

libraries=(-lstdc++ -ldl -lrt -pthread) program=("$gcc" -std=c11 -Wall -Wextra -Wpedantic -Werror)
if [[ $(basename "$compiler") == nvcc* ]]; then
  snippet engine_softmax.cu
  # As no kernel runs, none is assembled.
  "$compiler" -std=c++17 -gencode arch=compute_80,code=compute_80 -Xcicc -O0 -I "$source/include" -c "$work/engine_softmax.cu" -o "$work/engine.o"
  mapfile -t folders < <("$compiler" -dryrun "$work/engine_softmax.cu" 2>&1 | sed -n 's/^#\$ LIBRARIES=//p' | grep -oE -- '-L[^" ]*')
  libraries=("${folders[@]}" -lcudart_static "${libraries[@]}") program+=(-DON_GPU)
else
  snippet engine_cpu.cpp
  "$compiler" -std=c++17 -O2 "$@" -I "$source/include" -c "$work/engine_cpu.cpp" -o "$work/engine.o"
fi
"${program[@]}" "$(dirname "${BASH_SOURCE[0]}")/from_c.c" "$work/engine.o" "${libraries[@]}" -o "$work/program"
"$work/program"
