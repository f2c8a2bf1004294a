#!/usr/bin/env bash
# llm_gpu.sh NVCC INCLUDE_DIR LLM_DIR WORK_DIR: what examples/llm has for a GPU compiles without a warning, as far as the front end looks.
# It is built only where there is a GPU; elsewhere this is all that looks at it.
set -euo pipefail
nvcc=$1 include_dir=$2 llm=$3 work=$4
for part in "80 device/gpu.cu -DUNIT=f16 -DWEIGHTS=i4" "80 device/gpu.cu -DUNIT=bf16" "80 device/gpu.cu -DUNIT=bf16 -DCACHE=i8" \
  "90a device/gpu.cu -DUNIT=f16 -DWEIGHTS=i8" "90a device/gpu.cu -DUNIT=bf16 -DCACHE=bf16" \
  "90a walk/walk.cu -DUNIT=f16 -DWEIGHTS=f8" "90a walk/walk.cu -DUNIT=bf16 -DWEIGHTS="{i4,bf16}; do
  read -r arch file options <<< "$part"
  bash "$(dirname "${BASH_SOURCE[0]}")/front_end.sh" "$nvcc" -std=c++17 -Werror all-warnings -I "$include_dir" -I "$llm" -DCALLS=calls $options "$llm/$file" \
    -gencode "arch=compute_$arch,code=compute_$arch" -ptx -o "$work/llm_gpu.ptx"
done
