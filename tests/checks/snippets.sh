#!/usr/bin/env bash
# snippets.sh CXX|NVCC SOURCE_DIR [flags]: every C++ example of the README and the docs includes a header of the library and compiles without a
# warning: with nvcc those with .cuh headers, otherwise the others. They are one translation unit, each in a namespace of its own behind what it
# includes. Those with a main() are also run, with nvcc where there is a GPU, and print what stands in a ```text block right behind them, if there is one.
# Blocks of ```cuda, which need more than CUDA, are copies of files in examples.
set -euo pipefail
compiler=$1 source=$2
shift 2
front_end=$(dirname "${BASH_SOURCE[0]}")/front_end.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cuda=false
if [[ $(basename "$compiler") == nvcc* ]]; then cuda=true; fi

for page in "$source"/README.md "$source"/docs/*.md; do
  awk -v to="$work/$(basename "$page" .md)" '
    /^```cpp/ { kind = ".cpp"; name = to "_" NR; next }
    /^```cuda/ { kind = ".cuda"; name = to "_" NR; next }
    /^```text/ && name != "" { kind = ".txt"; next }
    /^```/ { if (kind != ".cpp") name = ""; kind = ""; next }
    kind != "" { print > (name kind); next }
    NF { name = "" }' "$page"
done
checked=0 failures=0
fail() {
  echo "$1 (page and line):"
  head -n 20 "$work/log"
  failures=$((failures + 1))
}
: > "$work/all"
: > "$work/calls"
for snippet in "$work"/*.cpp; do
  name=$(basename "$snippet" .cpp)
  grep -q '^#include <kernels/' "$snippet" || { echo "no header of the library is included" > "$work/log"; fail "$name"; continue; }
  is_cuda=false
  if grep -q '^#include <kernels/.*\.cuh>' "$snippet"; then is_cuda=true; fi
  [[ $is_cuda == "$cuda" ]] || continue
  checked=$((checked + 1))
  code=$(sed 's/^#include.*//' "$snippet")
  if grep -q '^int main' "$snippet"; then
    code=${code%\}}$'return 0;\n}'  # as only the real main() returns 0 by itself
    printf '  if (name == "%s") return %s::main();\n' "$name" "$name" >> "$work/calls"
  fi
  printf '%s\nnamespace %s {\n#line 1 "%s"\n%s\n}\n' "$(grep '^#include' "$snippet")" "$name" "$name" "$code" >> "$work/all"
done
for copy in "$work"/*.cuda; do
  find "$source/examples" -name '*.cu' -exec cmp -s {} "$copy" \; -print | grep -q . || { echo "no file of examples is this" > "$work/log"; fail "$(basename "$copy" .cuda)"; }
done
all=$work/all.cpp build=("$compiler" -std=c++17 -DKERNELS_UNOPTIMIZED=1 -Wall -Wextra -Werror "$@" -pthread)
if $cuda; then all=$work/all.cu build=("$compiler" -std=c++17 -Werror all-warnings -arch=native); fi
{
  cat "$work/all"
  printf '#include <string>\nint main(int, char** arguments) {\n  const std::string name = arguments[1];\n%s\n  return 1;\n}\n' "$(cat "$work/calls")"
} > "$all"
if $cuda && ! nvidia-smi -L > /dev/null 2>&1; then
  bash "$front_end" "${build[@]/native/sm_80}" -I "$source/include" "$all" -ptx -o "$work/out.ptx" > "$work/log" 2>&1 || fail "all together"
elif "${build[@]}" -I "$source/include" "$all" -o "$work/out" > "$work/log" 2>&1; then
  for name in $(sed 's/.*"\(.*\)".*/\1/' "$work/calls"); do
    { "$work/out" "$name" > "$work/printed" && { [[ ! -e $work/$name.txt ]] || diff "$work/$name.txt" "$work/printed"; }; } > "$work/log" 2>&1 || fail "$name"
  done
else
  fail "all together"
fi
echo "$checked examples, $failures wrong"
[[ $checked -gt 0 && $failures -eq 0 ]]
