#!/usr/bin/env bash
# The tests under sanitizers.
#   tests/sanitize.sh [BUILD_DIR]     GPU tests, shortened, under compute-sanitizer's memcheck, racecheck, initcheck and synccheck. BUILD_DIR
#                                     (default: build/test) holds them, as ./test.sh builds them on a machine with a GPU; if it does
#                                     not, they are built first. Under ten minutes on an H200 with 16 cores is meant without building.
#   tests/sanitize.sh cpu             CPU tests with AddressSanitizer and UndefinedBehaviorSanitizer, then with ThreadSanitizer; built in
#                                     build/sanitize-*. ./test.sh has a short form of it.
# KERNELS_SHORT=n: of the calls that a test makes in a loop, every nth is made (default: 40; 1 for all). TOOLS: some of the four tools.
# KERNELS_RANDOM_CALLS=n, KERNELS_SEED=s: how many calls each test of random calls makes, from which seed on (CONTRIBUTING.md).
# JOBS: how many tests run at once (default: one for each core, at most 16). SECONDS_EACH: how long one may take (default: 120); one
# that takes longer counts as a failure. The last line says how many were clean.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/tools.sh
find_cuda
jobs=${JOBS:-$(nproc)}
jobs=$((jobs < 16 ? jobs : 16))
export KERNELS_SHORT=${KERNELS_SHORT:-40}

if [[ ${1:-} == cpu ]]; then
  need_build_tools
  for sanitizers in address,undefined thread; do
    build=build/sanitize-${sanitizers%,*}
    options=(-DKERNELS_CUDA=OFF -DKERNELS_BUILD_EXAMPLES=ON -DKERNELS_BUILD_TESTS=ON
             "-DCMAKE_CXX_FLAGS=-fsanitize=$sanitizers -fno-sanitize-recover=all -g1")
    # ThreadSanitizer cannot follow what OpenMP's own library does.
    options+=(-DCMAKE_DISABLE_FIND_PACKAGE_OpenMP=ON)
    # GCC's AddressSanitizer takes very long to compile optimized code.
    if has clang++; then options+=(-DCMAKE_CXX_COMPILER=clang++); fi
    say "$sanitizers"
    configure "$build" "${options[@]}" > /dev/null
    build_all_that_can_be "$build"
    (cd "$build" && ctest -L 'cpu|example' -j "$jobs" --output-on-failure)
  done
  exit 0
fi

build=${1:-build/test}
sanitizer=$(PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer command -v compute-sanitizer) ||
  die "compute-sanitizer was not found; it is a part of the CUDA toolkit"
nvidia-smi -L > /dev/null 2>&1 || die "no NVIDIA GPU"
if ! compgen -G "$build/tests/test_gpu_*" > /dev/null; then
  need_build_tools
  configure "$build" -DKERNELS_BUILD_TESTS=ON -DCMAKE_CUDA_FLAGS=-lineinfo > /dev/null
  build_all_that_can_be "$build" > "$build/build.log" 2>&1 || { tail -n 40 "$build/build.log" >&2; die "the build failed"; }
fi

# One command a line, as ctest would run it, program and name of the test; programs that fill the GPU's memory are left out.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$build" && ctest -N -V -L gpu) | sed -n 's/^[0-9]*: Test command: //p' | grep '/test_gpu_' | grep -v '_large' > "$work/tests" || true
tests=$(wc -l < "$work/tests")
[[ $tests -gt 0 ]] || die "$build has no GPU tests"
# A sanitizer needs seconds to begin, so one process makes up to four tests of a program: COUNT PROGRAM "NAME,NAME".
awk '{
  program = $1; name = $0; sub(/^[^ ]* "/, "", name); sub(/"$/, "", name)
  if (program != last || count == 4) { if (count) print count, last, "\"" names "\""; names = name; count = 1 }
  else { names = names "," name; ++count }
  last = program
} END { if (count) print count, last, "\"" names "\"" }' "$work/tests" > "$work/processes"

# Errors of the runtime that a test provokes on purpose are no faults.
run_one() {  # run_one TOOL COUNT PROGRAM "NAMES"
  local log status=0 tool count command name options=()
  read -r tool count command <<< "$1"
  log=$(mktemp -p "$WORK")
  if [[ $tool == memcheck ]]; then options+=(--report-api-errors no); fi
  eval "timeout $((SECONDS_EACH * count)) $SANITIZER --tool $tool ${options[*]} --error-exitcode 99 $command" > "$log" 2>&1 || status=$?
  case $status in
    0 | 77) for ((; count > 0; --count)); do echo "$tool"; done >> "$WORK/clean" ;;
    *)
      # synccheck (CUDA 13.0) breaks every kernel in clusters of 16 blocks, and only those: it reports nothing, and the kernel faults.
      if [[ $tool == synccheck ]] && grep -q 'an illegal memory access was encountered' "$log" && grep -q 'ERROR SUMMARY: 0 errors' "$log"; then
        if [[ $count -eq 1 ]]; then
          echo "$command" >> "$WORK/unfollowed"
        else  # which of them
          while IFS= read -r name; do run_one "$tool 1 ${command%% *} \"$name\""; done <<< "$(sed 's/^[^"]*"//; s/"$//; s/\([^\\]\),/\1\n/g' <<< "$command")"
        fi
      else
        { printf '== %s, exit %s: %s\n' "$tool" "$status" "$command"; grep -v '^=*$' "$log" | tail -n 30; } >> "$WORK/failures"
        printf 'failed (%s): %s: %s\n' "$status" "$tool" "${command##*/}"
      fi ;;
  esac
  rm -f "$log"
}
export -f run_one
export WORK=$work SANITIZER=$sanitizer SECONDS_EACH=${SECONDS_EACH:-120} OMP_WAIT_POLICY=passive
touch "$work/clean" "$work/failures" "$work/unfollowed"
tools=(${TOOLS:-racecheck memcheck initcheck synccheck})
# One queue for all the tools, so that nothing waits for the last test of each.
for tool in "${tools[@]}"; do sed "s/^/$tool /" "$work/processes"; done | tr '\n' '\0' | xargs -0 -P "$jobs" -I{} bash -c 'run_one "$0"' {}
for tool in "${tools[@]}"; do say "$tool: $(grep -cx "$tool" "$work/clean" || true) of $tests clean"; done
total=$((tests * ${#tools[@]}))
clean=$(wc -l < "$work/clean")
cp "$work/failures" "$build/sanitize.log"
[[ ! -s $work/failures ]] || { head -n 200 "$work/failures"; say "all of it is in $build/sanitize.log"; }
unfollowed=$(wc -l < "$work/unfollowed")
if [[ $unfollowed -gt 0 ]]; then
  say "not followed by synccheck, as they have clusters of 16 blocks (the other tools do):"
  sed 's|.*/||; s/^/  /' "$work/unfollowed"
fi
say "$SECONDS seconds"
echo "$clean of $total clean, $unfollowed not followed by synccheck"
[[ $((clean + unfollowed)) -eq $total ]]
