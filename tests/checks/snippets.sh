#!/usr/bin/env bash
# snippets.sh CXX|NVCC SOURCE_DIR [flags]: every C++ example of the README and the docs that includes a header of the library compiles
# as it stands, without a warning. With nvcc those with .cuh headers, otherwise the others, which are also run where they have a main().
set -euo pipefail
compiler=$1 source=$2
shift 2
front_end=$(dirname "${BASH_SOURCE[0]}")/front_end.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cuda=false
if [[ $(basename "$compiler") == nvcc* ]]; then cuda=true; fi

for page in "$source"/README.md "$source"/docs/*.md; do
  awk -v to="$work/$(basename "$page" .md)" '/^```cpp/ { on = 1; name = to "_" NR ".cpp"; next } /^```/ { on = 0 } on { print > name }' "$page"
done
checked=0 failures=0
for snippet in "$work"/*.cpp; do
  grep -q '^#include <kernels/' "$snippet" || continue
  is_cuda=false
  if grep -q '^#include <kernels/.*\.cuh>' "$snippet"; then is_cuda=true; fi
  [[ $is_cuda == "$cuda" ]] || continue
  checked=$((checked + 1))
  if $cuda; then
    mv "$snippet" "${snippet%.cpp}.cu"
    bash "$front_end" "$compiler" -std=c++17 -arch=sm_80 -Werror all-warnings -I "$source/include" -ptx "${snippet%.cpp}.cu" -o "$work/out.ptx" > "$work/log" 2>&1
  elif grep -q '^int main' "$snippet"; then
    { "$compiler" -std=c++17 -O1 -Wall -Wextra -Werror "$@" -I "$source/include" "$snippet" -o "$work/out" -pthread && "$work/out"; } > "$work/log" 2>&1
  else
    "$compiler" -std=c++17 -Wall -Wextra -Werror "$@" -I "$source/include" -fsyntax-only "$snippet" > "$work/log" 2>&1
  fi || { echo "$(basename "$snippet") (page and line):"; head -n 20 "$work/log"; failures=$((failures + 1)); }
done
echo "$checked examples, $failures wrong"
[[ $checked -gt 0 && $failures -eq 0 ]]
