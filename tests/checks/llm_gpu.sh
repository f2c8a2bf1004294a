#!/usr/bin/env bash
# llm_gpu.sh NVCC INCLUDE_DIR LLM_DIR WORK_DIR: what examples/llm has for a GPU compiles without a warning, as far as the front end looks.
# It is built only where there is a GPU; elsewhere this is all that looks at it.
set -euo pipefail
nvcc=$1 include_dir=$2 llm=$3 work=$4

# look ARCH FILE OPTIONS...
look() {
  local arch=$1 file=$2
  shift 2
  bash "$(dirname "${BASH_SOURCE[0]}")/front_end.sh" "$nvcc" -std=c++17 -Werror all-warnings -I "$include_dir" -I "$llm" -DCALLS=calls "$@" "$file" \
    -gencode "arch=compute_$arch,code=compute_$arch" -ptx -o "$work/llm_gpu.ptx"
}
# Most of the time goes into the headers. So device/gpu.cu is compiled for all of these at once, each in a namespace of its own behind them.
calls_for() {  # calls_for ARCH DEFINES...
  local all=$work/llm_gpu_$1.cu part=0 arch=$1 defines define
  shift
  {
    sed '/^namespace/,$d' "$llm/device/gpu.cu" | grep '^#include'
    for defines in "$@"; do
      part=$((part + 1))
      printf 'namespace part_%s {\nnamespace llm {\nusing namespace ::llm;\n}\n' $part
      for define in $defines; do printf '#define %s\n' "${define/=/ }"; done
      printf '#include "device/gpu.cu"\n}\n'
      for define in $defines; do printf '#undef %s\n' "${define%=*}"; done
    done
  } > "$all"
  look "$arch" "$all"
}

calls_for 80 "UNIT=f16 WEIGHTS=i4" "UNIT=bf16" "UNIT=bf16 CACHE=i8"
calls_for 90a "UNIT=f16 WEIGHTS=i8" "UNIT=bf16 CACHE=bf16"
for part in "UNIT=f16 -DWEIGHTS=f8" "UNIT=bf16 -DWEIGHTS="{i4,bf16}; do
  # shellcheck disable=SC2086  # two options
  look 90a "$llm/walk/walk.cu" -D$part
done
