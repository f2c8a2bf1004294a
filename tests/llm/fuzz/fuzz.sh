#!/usr/bin/env bash
# fuzz.sh COMPILER INCLUDE_DIR EXAMPLE_DIR [SECONDS] [SEED]: what the loaders of examples/llm read, changed in all ways, with AddressSanitizer and
# UndefinedBehaviorSanitizer: whatever is wrong must be refused in one line. ./test.sh does this for 6 seconds; for longer:
#   tests/llm/fuzz/fuzz.sh clang++ include examples/llm 600       with libFuzzer, where the compiler has it and SECONDS are given
#   tests/llm/fuzz/fuzz.sh g++ include examples/llm 600 2         without, and with another seed
# MODELS=1: with whole models that are loaded and run. An input that fails is left in FAILURES (default: the temporary folder).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
compiler=$1 include_dir=$2 example=$(cd "$3" && pwd) seconds=${4:-} seed=${5:-1}
failures=${FAILURES:-${TMPDIR:-/tmp}}
export ASAN_OPTIONS=${ASAN_OPTIONS:-max_allocation_size_mb=1000}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
optimize=-Og  # which takes no longer to compile than -O0, and reads three times as much
if [[ -n $seconds ]]; then optimize=-O1; fi
build=("$compiler" -std=c++17 "$optimize" -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -pthread)
echo 'int main() {}' > "$work/empty.cpp"
"${build[@]}" "$work/empty.cpp" -lpcre2-8 -lutf8proc -o "$work/empty" && "$work/empty" || { echo "skipped: $compiler -fsanitize=address,undefined does not work here"; exit 77; }

libraries=(-lpcre2-8 -lutf8proc)
# In one translation unit, as most of the time goes into the headers.
sources=("$example"/{config,text,weights}.cpp "$example"/tokenizer/*.cpp "$here/target.cpp")
build+=(-I "$include_dir" -I "$example" -I "$here")
if [[ -n ${MODELS:-} ]]; then
  sources+=("$example"/{device/device,format,model,model_load,model_memory,session}.cpp "$example"/template/*.cpp)
  units="CALLS(RowCalls,fuzz_rows) CALLS(ProductCalls,fuzz_products) CALLS(AttendCalls,fuzz_attend)"
  build+=(-DFUZZ_MODELS=1 "-DLLM_GOLDEN=\"$example/golden\"" "-DLLM_UNITS=$units" -DUNIT=scalar)
  for part in fuzz_rows "fuzz_products -DWEIGHTS=f32" "fuzz_attend -DCACHE=f32"; do
    "${build[@]}" -DCALLS=$part -c "$example/device/cpu.cpp" -o "$work/${part%% *}.o"
    libraries+=("$work/${part%% *}.o")
  done
fi
printf '#include "%s"\n' "${sources[@]}" > "$work/all.cpp"
printf '#include "%s"\n' "$work/all.cpp" "$here/main.cpp" > "$work/own.cpp"
"${build[@]}" "$work/own.cpp" "${libraries[@]}" -o "$work/own"
mkdir "$work/seeds"
"$work/own" seeds "$work/seeds" "$example/golden"
if [[ -n $seconds ]] && "${build[@]}" -fsanitize=fuzzer "$work/empty.cpp" -Dmain=unused -c -o "$work/empty.o" 2> /dev/null; then
  "${build[@]}" -fsanitize=fuzzer -DFUZZ_LIBFUZZER=1 "$work/all.cpp" "${libraries[@]}" -o "$work/fuzzer"
  mkdir "$work/found"
  "$work/fuzzer" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4000 -max_len=65536 -verbosity=0 -print_final_stats=1 "-artifact_prefix=$failures/" "$work/found" "$here/corpus" "$work/seeds"
else
  FUZZ_FAILURE=$failures/fuzz_failure "$work/own" "${seconds:-6}" "$seed" "$here"/corpus/* "$work"/seeds/*
fi
