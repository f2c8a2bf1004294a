#!/usr/bin/env bash
# clang_smoke.sh CLANG++ INCLUDE_DIR EXAMPLES_DIR FLAGS...: the CPU examples compile without a warning, link and run.
set -euo pipefail
clang=$1 include_dir=$2 examples=$3
shift 3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
shopt -s nullglob
files=("$examples"/*.cpp)
if [[ ${#files[@]} -eq 0 ]]; then
  echo "skipped: no CPU examples"
  exit 77
fi
for file in "${files[@]}"; do
  echo "$file"
  "$clang" -std=c++17 -O2 "$@" -Wall -Wextra -Werror -I "$include_dir" "$file" -o "$work/example" -pthread
  "$work/example"
done
