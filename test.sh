#!/usr/bin/env bash
# Builds everything and runs every test. The last line is "N passed, N failed, N skipped".
#   ./test.sh [cmake options]       e.g. ./test.sh -DKERNELS_CUDA=OFF
# Missing tools are installed with apt-get where that is possible. CUDA never is: with nvcc every operation is compiled, with a GPU the
# GPU tests are compiled and run, and what cannot run is reported as skipped. KERNELS_REQUIRE_GPU=1 makes a missing GPU a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

source .ci/tools.sh

need_build_tools
has_header catch2/catch_test_macros.hpp || has_header catch2/catch.hpp || need_packages catch2
need_llm_libraries

find_cuda
if has nvcc; then
  say "CUDA: $(nvcc --version | grep -o 'release [0-9.]*')"
else
  say "no CUDA toolkit: CPU tests only (it is optional and not installed by this script)"
fi

build=build/test
jobs=$(nproc)

say "configure"
configure "$build" -DKERNELS_BUILD_TESTS=ON -DKERNELS_BUILD_EXAMPLES=ON -DKERNELS_LLM_QUICKLY=ON "$@" || die "configuring failed"

say "build"
cmake --build "$build" -j "$jobs" || die "the build failed; no test was run"

say "test"
log=$build/ctest.log
(cd "$build" && ctest --output-on-failure -j $((jobs < 8 ? jobs : 8))) 2>&1 | tee "$log" || true

# One line for each test: "12/34 Test #5: name .....   Passed    0.01 sec", or ***Failed, ***Skipped, ***Timeout ...
count() { grep -cE "^ *[0-9]+/[0-9]+ +Test +#[0-9]+: .*$1" "$log" || true; }
total=$(count '[0-9.]+ sec$')
passed=$(count ' Passed +[0-9.]+ sec$')
skipped=$(count '\*\*\*Skipped +[0-9.]+ sec$')
failed=$((total - passed - skipped))

if [[ $skipped -gt 0 ]]; then
  say "skipped for want of a GPU or a tool; the reasons are in $build/Testing/Temporary/LastTest.log"
fi
if [[ $((passed + failed)) -eq 0 ]]; then echo "error: no test ran" >&2; fi
echo "$passed passed, $failed failed, $skipped skipped"
[[ $failed -eq 0 && $passed -gt 0 ]]
