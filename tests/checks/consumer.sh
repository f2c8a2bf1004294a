#!/usr/bin/env bash
# consumer.sh installed|subdirectory CMAKE GENERATOR SOURCE_DIR BUILD_DIR C++ NVCC: a project of its own (tests/consumer) builds against
# an installed copy of the library, or against its source folder, and its programs run.
set -euo pipefail
how=$1 cmake=$2 generator=$3 source=$4 build=$5 cxx=$6 nvcc=$7

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

options=(-DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_BUILD_TYPE=Release)
if [[ $how == installed ]]; then
  "$cmake" --install "$build" --prefix "$work/prefix" > "$work/log"
  options+=(-DCMAKE_PREFIX_PATH="$work/prefix")
else
  options+=(-DKERNELS_SOURCE="$source")
fi
# The GPU half once is enough: it is the slow one.
if [[ $how == installed && $nvcc != *-NOTFOUND ]]; then
  options+=(-DCMAKE_CUDA_COMPILER="$nvcc" -DCMAKE_CUDA_ARCHITECTURES=80 -DCONSUMER_CUDA=ON)
fi

"$cmake" -S "$source/tests/consumer" -B "$work/build" -G "$generator" "${options[@]}"
"$cmake" --build "$work/build"
"$work/build/consumer_cpu"
if [[ -x $work/build/consumer_cuda ]]; then
  "$work/build/consumer_cuda" || [[ $? -eq 77 ]]  # built is enough where no device is
fi
