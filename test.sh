#!/usr/bin/env bash
# Builds everything and runs every test. The last line is "N passed, N failed, N skipped".
#   ./test.sh [cmake options]       e.g. ./test.sh -DKERNELS_CUDA=OFF
# Missing tools are installed with apt-get where that is possible. CUDA never is: with nvcc every operation is compiled, with a GPU the
# GPU tests are compiled and run, and what cannot run is reported as skipped. KERNELS_REQUIRE_GPU=1 makes a missing GPU a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
has() { command -v "$1" > /dev/null; }

has_catch2() {
  local header
  for header in catch2/catch.hpp catch2/catch_test_macros.hpp; do
    if g++ -E -x c++ -include "$header" /dev/null > /dev/null 2>&1; then return 0; fi
  done
  return 1
}

packages=()
has g++ || packages+=(g++)
has cmake || packages+=(cmake)
has ninja || has make || packages+=(ninja-build)
has g++ && has_catch2 || packages+=(catch2)
if [[ ${#packages[@]} -gt 0 ]]; then
  say "missing, to be installed: ${packages[*]}"
  sudo=()
  if [[ $(id -u) -ne 0 ]]; then sudo=(sudo -n); fi
  { has apt-get && "${sudo[@]}" true 2> /dev/null; } ||
    die "cannot install them here; please install: ${packages[*]} (Debian and Ubuntu names)"
  export DEBIAN_FRONTEND=noninteractive
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}" || die "apt-get install failed"
fi

if ! has nvcc && [[ -x /usr/local/cuda/bin/nvcc ]]; then PATH=$PATH:/usr/local/cuda/bin; fi
if has nvcc; then
  say "CUDA: $(nvcc --version | grep -o 'release [0-9.]*')"
else
  say "no CUDA toolkit: CPU tests only (it is optional and not installed by this script)"
fi

build=build/test
jobs=$(nproc)
generator=()
if has ninja && [[ ! -e $build/CMakeCache.txt ]]; then generator=(-G Ninja); fi

say "configure"
cmake -S . -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
  -DKERNELS_BUILD_TESTS=ON -DKERNELS_BUILD_EXAMPLES=ON "$@" || die "configuring failed"

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
