#!/usr/bin/env bash
# bench.sh CMAKE SOURCE_DIR GENERATOR C++ NVCC: every benchmark compiles as bench/run.sh and bench/run_cpu.sh would build it. Code is not
# generated and nothing is linked, and what is measured for this machine and for AVX2 too is compiled for this machine alone. Those of the
# GPU are compiled together, with the flags of all, each in a namespace of its own behind what it includes: most of the time goes into that.
set -euo pipefail
cmake=$1 source=$2 generator=$3 cxx=$4 nvcc=$5
front_end=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/front_end.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
options=(-DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER_LAUNCHER="bash;$front_end"
         -DCMAKE_CXX_LINK_EXECUTABLE=true -DKERNELS_MACHINE_HAS_avx2=OFF -DKERNELS_BUILD_BENCH=ON -DKERNELS_BUILD_TESTS=OFF -DKERNELS_BUILD_EXAMPLES=OFF)
if [[ $nvcc == *-NOTFOUND ]]; then
  options+=(-DKERNELS_CUDA=OFF)
else
  # As a launcher: keeps the command, and leaves its outputs empty.
  mkdir "$work/commands"
  cat > "$work/keep.sh" << end
to=\$(mktemp "$work/commands/XXXXXX")
while [[ \$# -gt 0 ]]; do
  if [[ \$1 == -o || \$1 == -MF ]]; then : > "\$2"; fi
  if [[ \$1 == --options-file ]]; then shift && xargs -n1 < "\$1"; else printf '%s\n' "\$1"; fi
  shift
done > "\$to"
end
  options+=(-DCMAKE_CUDA_COMPILER="$nvcc" -DCMAKE_CUDA_ARCHITECTURES=90a-virtual -DCMAKE_CUDA_COMPILER_LAUNCHER="bash;$work/keep.sh"
            -DCMAKE_CUDA_LINK_EXECUTABLE=true -DCMAKE_CUDA_DEVICE_LINK_EXECUTABLE=true -DCMAKE_CUDA_CREATE_SHARED_LIBRARY=true
            -DCMAKE_CUDA_DEVICE_LINK_LIBRARY=true)
fi
"$cmake" -S "$source" -B "$work" -G "$generator" "${options[@]}"
keep_going=-k
if [[ $generator == Ninja* ]]; then keep_going=-k0; fi
"$cmake" --build "$work" -- "$keep_going"
if [[ ! -d $work/commands ]]; then exit; fi

declare -A known
files=() flags=()
for command in "$work"/commands/*; do
  mapfile -t words < "$command"
  for ((i = 1; i < ${#words[@]}; ++i)); do
    word=${words[i]}
    case $word in
      -MD) ;;
      -x | -o | -MT | -MF) i=$((i + 1)) ;;
      -c) i=$((i + 1)) files+=("${words[i]}") ;;
      *)
        [[ -n ${known[$word]-} ]] || flags+=("$word")
        known[$word]=1
        ;;
    esac
  done
done
echo "${#files[@]} files together: ${flags[*]}"
{
  grep -h '^#include' "${files[@]}" | awk '!seen[$0]++'
  for file in "${files[@]}"; do
    name=$(basename "$file" .cu)
    printf 'namespace file_%s {\n#line 1 "%s"\n' "$name" "$file"
    sed 's/^#include.*//' "$file"
    printf '}\n'
  done
} > "$work/all.cu"
bash "$front_end" "$nvcc" "${flags[@]}" -I "$source/bench" -c "$work/all.cu" -o "$work/all.o"
[[ ${#files[@]} -gt 1 ]]
