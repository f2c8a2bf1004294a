#!/usr/bin/env bash
# wide_vectors.sh G++ INCLUDE_DIR PROGRAM: with AVX-512, tuned for a CPU for which the compiler prefers narrower vectors, a product is not
# much slower than tuned for wide ones. The program prints its seconds.
set -euo pipefail
compiler=$1 include_dir=$2 program=$3

grep -q avx512vl /proc/cpuinfo 2> /dev/null || { echo "skipped: this machine has no AVX-512"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=(-std=c++17 -O3 -march=skylake-avx512 -I "$include_dir" -pthread)
"$compiler" "${flags[@]}" "$program" -o "$work/usual"
"$compiler" "${flags[@]}" -mprefer-vector-width=512 "$program" -o "$work/wide"
for try in 1 2 3; do
  usual=$("$work/usual") wide=$("$work/wide")
  echo "tuned for the CPU: $usual s; for wide vectors: $wide s"
  if awk -v a="$usual" -v b="$wide" 'BEGIN { exit !(a < 3 * b) }'; then exit 0; fi
done
echo "vectors of 512 bits are torn apart" >&2
exit 1
