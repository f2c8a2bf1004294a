#!/usr/bin/env bash
# compile_budget.sh NVCC ARCH INCLUDE_DIR FILE: what one call in FILE costs whoever compiles it, above FILE's includes alone:
# as many kernels and CPU-seconds for one architecture as its first line allows, "// budget: 16 kernels, 3 seconds", and no
# warning. The number of kernels is exact; for the time a slower machine is allowed a factor, KERNELS_BUDGET_SLACK (2 unless set).
set -euo pipefail
nvcc=$1 arch=$2 include_dir=$3 file=$4
slack=${KERNELS_BUDGET_SLACK:-2.0}
read -r kernel_budget seconds_budget < <(sed -nE '1s,^// budget: ([0-9]+) kernels\, ([0-9]+) seconds$,\1 \2,p' "$file")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
grep '^#include' "$file" > "$work/includes.cu"
: > "$work/empty.cu"

# User and system seconds of compiling a file to machine code.
cpu_seconds() {
  local TIMEFORMAT='%U %S'
  { time "$nvcc" -std=c++17 -gencode "arch=compute_$arch,code=sm_$arch" -I "$include_dir" -c "$1" -o "$work/out.o" \
      > "$work/log" 2>&1 || touch "$work/failed"; } 2>&1 | awk '{ printf "%.2f", $1 + $2 }'
  [[ ! -e $work/failed ]] || { cat "$work/log" >&2; return 1; }
}

"$nvcc" -std=c++17 -arch="compute_$arch" -Werror all-warnings -I "$include_dir" -ptx "$file" -o "$work/out.ptx"
kernels=$(grep -cE '^ *(\.visible|\.weak)? *\.entry' "$work/out.ptx" || true)
echo "kernels: $kernels (budget $kernel_budget)"
[[ $kernels -ge 1 && $kernels -le $kernel_budget ]] || exit 1

# A busy machine can only make it slower: a second look before it counts as too slow.
for _ in 1 2; do
  empty=$(cpu_seconds "$work/empty.cu") includes=$(cpu_seconds "$work/includes.cu") call=$(cpu_seconds "$file")
  echo "CPU-seconds, sm_$arch: empty file $empty, with the includes $includes, with the call $call"
  if awk -v i="$includes" -v c="$call" -v b="$seconds_budget" -v s="$slack" \
      'BEGIN { printf "the call: %.2f (budget %.1f x %.1f)\n", c - i, b, s; exit !(c - i <= b * s) }'; then
    exit 0
  fi
done
exit 1
