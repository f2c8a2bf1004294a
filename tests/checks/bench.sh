#!/usr/bin/env bash
# bench.sh CMAKE SOURCE_DIR GENERATOR C++ NVCC: every benchmark compiles as bench/run.sh and bench/run_cpu.sh would build it. Code is not
# generated and nothing is linked, and what is measured for this machine and for AVX2 too is compiled for this machine alone.
set -euo pipefail
cmake=$1 source=$2 generator=$3 cxx=$4 nvcc=$5
front_end=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/front_end.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
options=(-DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER_LAUNCHER="bash;$front_end"
         -DCMAKE_CXX_LINK_EXECUTABLE=true -DKERNELS_MACHINE_HAS_avx2=OFF -DKERNELS_BUILD_BENCH=ON -DKERNELS_BUILD_TESTS=OFF -DKERNELS_BUILD_EXAMPLES=OFF)
if [[ $nvcc == *-NOTFOUND ]]; then
  options+=(-DKERNELS_CUDA=OFF)
else
  options+=(-DCMAKE_CUDA_COMPILER="$nvcc" -DCMAKE_CUDA_ARCHITECTURES=90a-virtual -DCMAKE_CUDA_COMPILER_LAUNCHER="bash;$front_end"
            -DCMAKE_CUDA_LINK_EXECUTABLE=true -DCMAKE_CUDA_DEVICE_LINK_EXECUTABLE=true -DCMAKE_CUDA_CREATE_SHARED_LIBRARY=true
            -DCMAKE_CUDA_DEVICE_LINK_LIBRARY=true)
fi
"$cmake" -S "$source" -B "$work" -G "$generator" "${options[@]}"
keep_going=-k
if [[ $generator == Ninja* ]]; then keep_going=-k0; fi
"$cmake" --build "$work" -- "$keep_going"
