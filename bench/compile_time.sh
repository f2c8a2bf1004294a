#!/usr/bin/env bash
# What one call of each operation costs whoever compiles it: CPU-seconds above those of its includes, the most memory that a compiler
# process takes, kernels and bytes of machine code. The calls are those of tests/calls.
#   bench/compile_time.sh [ARCH] [call ...]      ARCH: 80, 90a (default: 90a); e.g. bench/compile_time.sh 80 softmax matmul
# Seconds are those of an idle machine only if the machine is idle.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/tools.sh
find_cuda
has nvcc || die "nvcc is not on the PATH"

arch=90a
if [[ ${1:-} =~ ^[0-9]+[af]?$ ]]; then arch=$1; shift; fi
calls=("$@")
if [[ ${#calls[@]} -eq 0 ]]; then
  for file in tests/calls/*.cu; do calls+=("$(basename "$file" .cu)"); done
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# CPU-seconds of compiling a file to machine code, in $seconds.
compile() {
  local TIMEFORMAT='%U %S' times
  times=$( { time nvcc -std=c++17 -gencode "arch=compute_$arch,code=sm_$arch" -I include -cubin -o "$work/call.cubin" "$1" 2> "$work/log" >&2; } 2>&1) ||
    { cat "$work/log" >&2; die "$1 does not compile"; }
  seconds=$(awk '{ printf "%.1f", $1 + $2 }' <<< "$times")
}

# Megabytes of the largest process, with GNU time where it is installed.
memory() {
  if [[ -x /usr/bin/time ]]; then
    /usr/bin/time -f %M nvcc -std=c++17 -gencode "arch=compute_$arch,code=sm_$arch" -I include -cubin -o "$work/call.cubin" "$1" 2>&1 |
      awk 'END { printf "%.0f", $1 / 1024 }'
  else
    printf '?'
  fi
}

printf '%-16s %9s %9s %9s %8s %10s   sm_%s\n' call seconds includes MB kernels bytes "$arch"
for call in "${calls[@]}"; do
  file=tests/calls/$call.cu
  grep '^#include' "$file" > "$work/includes.cu"
  compile "$work/includes.cu"
  includes=$seconds
  compile "$file"
  read -r kernels bytes < <(bash tests/checks/code_size.sh "$work/call.cubin")
  printf '%-16s %9.1f %9.1f %9s %8d %10d\n' "$call" "$(awk "BEGIN { print $seconds - $includes }")" "$includes" "$(memory "$file")" "$kernels" "$bytes"
done
