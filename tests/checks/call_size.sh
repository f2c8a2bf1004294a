#!/usr/bin/env bash
# call_size.sh FOLDER FILE...: what calls add to a user's program: for each architecture no more kernels and bytes of machine code than the
# first lines of their files allow together, "// budget: 16 kernels, 90 KB". FOLDER holds what the compiler kept of them, compiled as one.
# What compiling a call takes is measured by bench/compile_time.sh.
set -euo pipefail
folder=$1 most_kernels=0 most_kilobytes=0
shift
for file in "$@"; do
  read -r kernels kilobytes < <(sed -nE '1s,^// budget: ([0-9]+) kernels\, ([0-9]+) KB$,\1 \2,p' "$file")
  most_kernels=$((most_kernels + kernels)) most_kilobytes=$((most_kilobytes + kilobytes))
done

shopt -s nullglob
failures=0 images=0
for image in "$folder"/*.cubin; do
  read -r kernels bytes < <(bash "$(dirname "${BASH_SOURCE[0]}")/code_size.sh" "$image")
  echo "$(basename "$image"): $kernels kernels (at most $most_kernels), $bytes bytes (at most $most_kilobytes KB)"
  images=$((images + 1))
  [[ $kernels -ge 1 && $kernels -le $most_kernels && $bytes -le $((most_kilobytes * 1000)) ]] || failures=$((failures + 1))
done
[[ $images -gt 0 && $failures -eq 0 ]]
