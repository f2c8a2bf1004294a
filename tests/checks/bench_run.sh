#!/usr/bin/env bash
# bench_run.sh SOURCE_DIR: bench/run.sh measures what it can when one benchmark does not build and another one fails, and says which.
# The GPU, the compiler and the benchmarks are stand-ins here.
set -euo pipefail
source=$1
command -v python3 > /dev/null || { echo "skipped: not found: python3"; exit 77; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$source/bench" "$source/.ci" "$work"
mkdir "$work/bin"
stand_in() { { echo '#!/usr/bin/env bash'; cat; } > "$work/bin/$1"; chmod +x "$work/bin/$1"; }
stand_in nvidia-smi <<< 'if [[ $* == *compute_cap* ]]; then echo 9.0; else echo "NVIDIA Stand-in"; fi'
stand_in nvcc <<< 'exit 0'
stand_in benchmark << 'end'
[[ $0 != *matmul ]] || exit 1
for option in "$@"; do
  if [[ $option == --benchmark_out=* ]]; then echo '{"context": {}, "benchmarks": []}' > "${option#*=}"; fi
done
end
stand_in cmake << 'end'
if [[ $1 == --version ]]; then echo "cmake version 3.18.0"; exit 0; fi
mkdir -p build/bench/bench
echo 'CMAKE_GENERATOR:INTERNAL=Unix Makefiles' > build/bench/CMakeCache.txt
if [[ $1 != --build ]]; then exit 0; fi
for target in bench_layernorm bench_rmsnorm bench_matmul; do cp "$(dirname "$0")/benchmark" "build/bench/bench/$target"; done
exit 1
end

status=0
PATH=$work/bin:$PATH CXX=true OUT_DIR=$work/out bash "$work/bench/run.sh" --quick softmax layernorm matmul rmsnorm &> "$work/log" || status=$?
cat "$work/log"
[[ $status -eq 1 ]]
[[ -e $work/out/layernorm.json && -e $work/out/rmsnorm.json && ! -e $work/out/softmax.json && ! -e $work/out/matmul.json ]]
tail -n 2 "$work/log" | head -n 1 | grep -q '^== left out: softmax, which does not build'
tail -n 1 "$work/log" | grep -q '^== left out: matmul, which fails'
