#!/usr/bin/env bash
# calls_for.sh NVCC ARCH HOW INCLUDE_DIR WORK_DIR [FLAG...] FILE...: the calls in the files compile for one more architecture, with these flags,
# without a warning. HOW is one of
#   assemble   to machine code, with the host's half
#   device     to machine code, without it
#   link       with the host's half, and through the linker of device code
#   look       by the front end alone
# Little is optimized where that compiles, because nothing runs.
set -euo pipefail
nvcc=$1 arch=$2 how=$3 include_dir=$4 work=$5
shift 5

"$nvcc" --list-gpu-arch | grep -qx "compute_${arch%a}" || { echo "skipped: this nvcc does not know sm_$arch"; exit 77; }
flags=()
while [[ ${1-} == -* ]]; do
  flags+=("$1")
  shift
done
all=$work/${how}_for_$arch
printf '#include "%s"\n' "$@" > "$all.cu"
build=("$nvcc" -std=c++17 -Werror all-warnings "${flags[@]}" -I "$include_dir" "$all.cu")
if [[ $how == look ]]; then
  bash "$(dirname "${BASH_SOURCE[0]}")/front_end.sh" "${build[@]}" -gencode "arch=compute_$arch,code=compute_$arch" -ptx -o "$all.ptx"
elif [[ $how == link ]]; then  # what is not optimized calls functions that are inlined otherwise
  "${build[@]}" -gencode "arch=compute_$arch,code=sm_$arch" -rdc=true -Xcompiler -O0 -c -o "$all.o"
  "$nvcc" -gencode "arch=compute_$arch,code=sm_$arch" -dlink "$all.o" -o "$all.linked.o"
else
  less=(-Xcicc -O1 -Xptxas -O0)                # the assembler takes longer for code of -O0
  if [[ $arch == *a ]]; then less=(); fi       # kernels that trade registers do not get by with them
  what=-c
  if [[ $how == device ]]; then what=-fatbin; fi
  "${build[@]}" -gencode "arch=compute_$arch,code=sm_$arch" "${less[@]}" -Xcompiler -O0 $what -o "$all.o"
fi
