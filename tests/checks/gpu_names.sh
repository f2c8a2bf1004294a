#!/usr/bin/env bash
# gpu_names.sh NVCC INCLUDE_DIR: the name of the inline namespace tells apart .cu files that are compiled for other GPUs, or for a linker of
# device code.
set -euo pipefail
nvcc=$1 include_dir=$2

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf '#include <kernels/core/macros.h>\n#define TEXT_(x) #x\n#define TEXT(x) TEXT_(x)\nname TEXT(KERNELS_ISA)\n' > "$work/name.cu"
for_80=(-gencode "arch=compute_80,code=sm_80") for_90=(-gencode "arch=compute_90,code=sm_90")

# Both passes, that of the host and that of each GPU, have the same name.
name_of() {
  local names
  names=$("$nvcc" -std=c++17 -I "$include_dir" "$@" -E "$work/name.cu" | sed -n 's/^name "\(.*\)"$/\1/p' | sort -u)
  [[ $names =~ ^[a-z0-9_]+$ ]] || { echo "no name, or several, or a bad one: $* '$names'" >&2; exit 1; }
  echo "$names"
}
names=$(name_of "${for_80[@]}"; name_of "${for_90[@]}"; name_of "${for_80[@]}" "${for_90[@]}"; name_of "${for_80[@]}" -rdc=true)
echo "$names"
[[ $(sort -u <<< "$names" | wc -l) -eq 4 ]]
