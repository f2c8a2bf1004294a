#!/usr/bin/env bash
# math_names.sh COMPILER INCLUDE_DIR: the name of the inline namespace tells apart files for which the compiler calculates more or less freely,
# wherever its macros tell them apart.
set -euo pipefail
compiler=$1 include_dir=$2

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf '#include <kernels/core/macros.h>\n#define TEXT_(x) #x\n#define TEXT(x) TEXT_(x)\nname TEXT(KERNELS_ISA)\n' > "$work/name.cpp"
: > "$work/empty.cpp"
flag_sets=("" -ffast-math -ffinite-math-only -fno-signed-zeros -freciprocal-math -frounding-math -funsafe-math-optimizations
  "-fassociative-math -fno-signed-zeros -fno-trapping-math" "-ffast-math -fno-finite-math-only" "-ffast-math -fno-associative-math"
  "-ffast-math -fno-reciprocal-math" "-ffast-math -fsigned-zeros -fno-associative-math" "-ffinite-math-only -fno-signed-zeros" "-ffinite-math-only -freciprocal-math")

declare -A told_of  # what the macros tell of the files of each name
for flags in "${flag_sets[@]}"; do
  # shellcheck disable=SC2086  # several flags in one word
  name=$("$compiler" -std=c++17 $flags -I "$include_dir" -E "$work/name.cpp" | sed -n 's/^name "\(.*\)"$/\1/p')
  # shellcheck disable=SC2086
  told=$("$compiler" $flags -dM -E "$work/empty.cpp" |
    grep -E ' __(FAST_MATH|FINITE_MATH_ONLY|ASSOCIATIVE_MATH|RECIPROCAL_MATH|NO_SIGNED_ZEROS|ROUNDING_MATH|GCC_IEC_559)(__)? ' | sort || true)
  [[ -n $name ]] || { echo "no name: $flags"; exit 1; }
  echo "$name: $flags"
  [[ ${told_of[$name]-$told} == "$told" ]] || { echo "the name of other flags, too, which the compiler tells apart"; exit 1; }
  told_of[$name]=$told
done
[[ ${#told_of[@]} -gt 1 ]]
