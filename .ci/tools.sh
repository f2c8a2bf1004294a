# What the scripts share; sourced.

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
has() { command -v "$1" > /dev/null; }

has_header() { "${CXX:-g++}" -std=c++17 -E -x c++ -include "$1" /dev/null > /dev/null 2>&1; }

# need_packages PACKAGE...: installs packages of Debian and Ubuntu, as root or with sudo, or says what is missing.
need_packages() {
  [[ $# -gt 0 ]] || return 0
  say "missing, to be installed: $*"
  local sudo=()
  if [[ $(id -u) -ne 0 ]]; then sudo=(sudo -n); fi
  { has apt-get && "${sudo[@]}" true 2> /dev/null; } ||
    die "cannot install them here; please install: $* (Debian and Ubuntu names)"
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq || say "apt-get update failed; trying with the lists that are there"
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" ||
    die "apt-get could not install: $*"
}

# A C++ compiler, CMake and something that builds.
need_build_tools() {
  local missing=()
  has "${CXX:-g++}" || missing+=("${CXX:-g++}")
  has cmake || missing+=(cmake)
  has ninja || has make || missing+=(ninja-build)
  need_packages "${missing[@]}"
  local version
  version=$(cmake --version | sed -nE '1s/.* ([0-9]+)\.([0-9]+).*/\1 \2/p')
  [[ ${version% *} -gt 3 || (${version% *} -eq 3 && ${version#* } -ge 18) ]] ||
    die "CMake ${version/ /.} is too old; please install 3.18 or newer"
}

# What examples/llm is made with beside the library.
need_llm_libraries() {
  local missing=()
  has_header nlohmann/json.hpp || missing+=(nlohmann-json3-dev)
  has_header CLI/CLI.hpp || missing+=(libcli11-dev)
  echo '#include <pcre2.h>' | "${CXX:-g++}" -DPCRE2_CODE_UNIT_WIDTH=8 -E -x c++ - > /dev/null 2>&1 || missing+=(libpcre2-dev)
  has_header utf8proc.h || missing+=(libutf8proc-dev)
  need_packages "${missing[@]}"
}

find_cuda() {
  if ! has nvcc && [[ -x /usr/local/cuda/bin/nvcc ]]; then PATH=$PATH:/usr/local/cuda/bin; fi
}

# configure BUILD_DIR [cmake options]: with Ninja where there is one; a folder that is configured keeps its generator.
configure() {
  local build=$1 generator=()
  shift
  if has ninja && [[ ! -e $build/CMakeCache.txt ]]; then generator=(-G Ninja); fi
  cmake -S . -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release "$@"
}

# build_all_that_can_be BUILD_DIR [cmake options]: one target that fails does not stop the others.
build_all_that_can_be() {
  local build=$1 keep_going=-k
  shift
  if grep -q '^CMAKE_GENERATOR:INTERNAL=Ninja' "$build/CMakeCache.txt"; then keep_going=-k0; fi
  cmake --build "$build" -j "$(nproc)" "$@" -- "$keep_going"
}
