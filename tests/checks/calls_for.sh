#!/usr/bin/env bash
# calls_for.sh NVCC ARCH INCLUDE_DIR WORK_DIR FILE...: the calls in the files compile for one more architecture, assembler included, without
# a warning. Little is optimized, because nothing runs.
set -euo pipefail
nvcc=$1 arch=$2 include_dir=$3 work=$4
shift 4

"$nvcc" --list-gpu-arch | grep -qx "compute_$arch" || { echo "skipped: this nvcc does not know sm_$arch"; exit 77; }
printf '#include "%s"\n' "$@" > "$work/all_for_$arch.cu"
"$nvcc" -std=c++17 -gencode "arch=compute_$arch,code=sm_$arch" -Xcicc -O1 -Xptxas -O0 -Werror all-warnings -I "$include_dir" \
  -cubin -o "$work/all.sm_$arch.cubin" "$work/all_for_$arch.cu"
