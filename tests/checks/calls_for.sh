#!/usr/bin/env bash
# calls_for.sh NVCC ARCH cubin|ptx INCLUDE_DIR WORK_DIR FILE...: the calls in the files compile for one more architecture, with the assembler
# or up to it, without a warning. Little is optimized, because nothing runs.
set -euo pipefail
nvcc=$1 arch=$2 to=$3 include_dir=$4 work=$5
shift 5
level=-O1  # the assembler takes longer for code of -O0
if [[ $to == ptx ]]; then level=-O0; fi

"$nvcc" --list-gpu-arch | grep -qx "compute_$arch" || { echo "skipped: this nvcc does not know sm_$arch"; exit 77; }
printf '#include "%s"\n' "$@" > "$work/all_for_$arch.cu"
gencode=arch=compute_$arch,code=$([[ $to == ptx ]] && echo compute || echo sm)_$arch
"$nvcc" -std=c++17 -gencode "$gencode" -Xcicc $level -Xptxas -O0 -Werror all-warnings -I "$include_dir" \
  "-$to" -o "$work/all.sm_$arch.$to" "$work/all_for_$arch.cu"
