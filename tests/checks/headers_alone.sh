#!/usr/bin/env bash
# headers_alone.sh COMPILER INCLUDE_DIR: each header compiles without a warning behind nothing but what it includes itself, twice included,
# as C++17; all together do so as C++17 and 20, for each instruction set, with and without the CUDA headers. With nvcc these are the .cuh
# files and the doors of the CPU, which a .cu file may include too, all together as C++20; otherwise the .h files.
set -euo pipefail
compiler=$1 include_dir=$2

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0 checked=0
# Rows of headers, each of which includes the one before it, whatever the compiler and its flags: one compile is enough for a row.
rows() {
  (cd "$include_dir" && find kernels -name '*.h' -o -name '*.cuh' | sort | xargs awk -v asked="$*" '
    FNR == 1 { depth = 0 }
    /^ *# *if/ { ++depth }
    /^ *# *endif/ { --depth }
    depth == 0 && /^ *# *include *("|<kernels\/)/ {
      split($0, part, /["<>]/)
      path = part[2]
      if (/"/) path = substr(FILENAME, 1, match(FILENAME, /[^\/]*$/) - 1) path
      while (sub(/[^\/.]+\/\.\.\//, "", path)) { }
      includes[FILENAME] = includes[FILENAME] " " path
    }
    function find(from, file,    list, i, n) {  # what a header includes, and what that does
      if ((from, file) in found) return
      found[from, file] = 1
      ++size[from]
      n = split(includes[file], list, " ")
      for (i = 1; i <= n; ++i) find(from, list[i])
    }
    END {
      count = split(asked, header, " ")
      for (i = 1; i <= count; ++i) find(header[i], header[i])
      # Those that include the least come first; each goes behind the one that has the most of what it includes.
      for (n = 1; n <= count; ++n) {
        next_one = 0
        for (i = 1; i <= count; ++i)
          if (!(i in done) && (!next_one || size[header[i]] < size[header[next_one]])) next_one = i
        done[next_one] = 1
        best = 0
        for (row = 1; row <= many; ++row)
          if ((header[next_one], last[row]) in found && (!best || size[last[row]] > size[last[best]])) best = row
        if (!best) best = ++many
        last[best] = header[next_one]
        text[best] = text[best] " " last[best]
      }
      for (row = 1; row <= many; ++row) print substr(text[row], 2)
    }')
}
try() {  # try WHAT COMMAND...
  local what=$1
  shift
  checked=$((checked + 1))
  "$@" > "$work/log" 2>&1 || { echo "$what:"; head -n 20 "$work/log"; failures=$((failures + 1)); }
}

if [[ $(basename "$compiler") == nvcc* ]]; then
  mapfile -t headers < <(cd "$include_dir" && find kernels -name '*.cuh' -o -path 'kernels/cpu/*' ! -path '*/detail/*' -name '*.h' | sort)
  front_end=$(dirname "${BASH_SOURCE[0]}")/front_end.sh
  flags=(-arch=sm_80 -I "$include_dir" -Werror all-warnings)
  while read -ra row; do
    for header in "${row[@]}"; do printf '#include <%s>\n#include <%s>\n' "$header" "$header"; done > "$work/alone.cu"
    try "${row[*]}" bash "$front_end" "$compiler" -std=c++17 "${flags[@]}" -ptx "$work/alone.cu" -o "$work/out.ptx"
  done < <(rows "${headers[@]}")
  printf '#include <%s>\n' "${headers[@]}" > "$work/all.cu"
  try "all headers, C++20" "$compiler" -std=c++20 "${flags[@]}" -Xcompiler=-Wall,-Wextra,-Werror -c "$work/all.cu" -o "$work/all.o"
  refused() {  # an older standard: in one line, and not by whatever it lacks
    local said
    if said=$("$compiler" -std=c++14 -arch=sm_80 -I "$include_dir" -ptx "$1" -o "$work/out.ptx" 2>&1); then return 1; fi
    printf '%s\n' "$said"
    [[ $(grep -c 'error' <<< "$said") -le 2 && $said == *'#error "kernels needs C++17 or later"'* ]]
  }
  printf '#include <kernels/softmax.cuh>\n' > "$work/alone.cu"
  try "C++14" refused "$work/alone.cu"
else
  mapfile -t headers < <(cd "$include_dir" && find kernels -name '*.h' | sort)
  # The compiler's own include folders, without the one in which a CUDA toolkit lies, if there is one.
  hide_cuda=(-nostdinc -nostdinc++)
  while read -r folder; do
    [[ -e $folder/cuda_fp16.h && ! -e $folder/stdio.h ]] || hide_cuda+=(-isystem "$folder")
  done < <("$compiler" -E -v -x c++ /dev/null 2>&1 | sed -n '/^#include </,/^End of search/p' | grep '^ /')
  flags=(-I "$include_dir" -Wall -Wextra -Wpedantic -Werror -fsyntax-only)

  while read -ra row; do
    for header in "${row[@]}"; do printf '#include <%s>\n#include <%s>\n' "$header" "$header"; done > "$work/alone.cpp"
    try "${row[*]}" "$compiler" -std=c++17 "${hide_cuda[@]}" "${flags[@]}" "$work/alone.cpp"
  done < <(rows "${headers[@]}")

  printf '#include <%s>\n' "${headers[@]}" > "$work/all.cpp"
  instruction_sets=("")
  if [[ $(uname -m) == x86_64 ]]; then
    instruction_sets+=("-mavx2 -mfma" "-mavx2 -mfma -mf16c" "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c")
    # Not every compiler knows the last of these.
    if "$compiler" -mavx512bf16 -mavx512vnni -mavx512vbmi -E -x c++ /dev/null &> /dev/null; then
      instruction_sets+=("-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mavx512vbmi -mfma -mf16c")
    fi
  fi
  # Each pair of standard, instruction set and CUDA headers or none, which half of all the combinations have.
  standard=17 other=20
  for set in "${instruction_sets[@]}"; do
    # shellcheck disable=SC2086  # several flags in one word
    try "all headers, C++$standard $set" "$compiler" "-std=c++$standard" $set "${flags[@]}" "$work/all.cpp"
    # shellcheck disable=SC2086
    try "all headers, no CUDA, C++$other $set" "$compiler" "-std=c++$other" $set "${hide_cuda[@]}" "${flags[@]}" "$work/all.cpp"
    read -r standard other <<< "$other $standard"
  done
fi

in_rows=$(rows "${headers[@]}" | wc -w)
echo "${#headers[@]} headers, $in_rows of them in rows, $checked compiles, $failures wrong"
[[ ${#headers[@]} -gt 0 && $in_rows -eq ${#headers[@]} && $failures -eq 0 ]]
