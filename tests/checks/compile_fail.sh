#!/usr/bin/env bash
# compile_fail.sh COMPILER INCLUDE_DIR FILE: code that must not compile, and must say why. The file compiles as it stands;
# for each line in it of the form
#   // FAILS NAME: text
# it must not compile with -DNAME, and the compiler's message must contain the text: one error, in a few lines beside those that it quotes,
# as g++ 14 does for each template on the way.
set -euo pipefail
compiler=$1 include_dir=$2 file=$3

if [[ $file == *.cu ]]; then
  flags=(-std=c++17 -arch=sm_80 -Werror all-warnings -ptx)
else
  flags=(-std=c++17 -Wall -Wextra)
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [[ $file == *.cpp ]]; then  # what all of the cases include is read once
  grep '^#include' "$file" > "$work/includes.h"
  if "$compiler" "${flags[@]}" -I "$include_dir" -x c++-header "$work/includes.h" -o "$work/includes.h.gch"; then flags+=(-include "$work/includes.h"); fi
fi
front_end=$(dirname "${BASH_SOURCE[0]}")/front_end.sh
compile() { bash "$front_end" "$compiler" "${flags[@]}" -I "$include_dir" "$@" "$file" 2>&1; }

compile || { echo "the file itself does not compile"; exit 1; }

cases=0 failures=0
while IFS=: read -r name text; do
  cases=$((cases + 1)) text=${text# }
  if output=$(compile "-D$name"); then
    echo "$name: compiles, and must not"
    failures=$((failures + 1))
  elif ! grep -qF -- "$text" <<< "$output"; then
    printf '%s: fails without saying "%s":\n%s\n' "$name" "$text" "$output"
    failures=$((failures + 1))
  elif [[ $(grep -c 'error:' <<< "$output") -gt 1 || $(grep -cvE '^ *[0-9]* \|' <<< "$output") -gt 25 ]]; then
    printf '%s: says more than one thing:\n%s\n' "$name" "$output"
    failures=$((failures + 1))
  fi
done < <(sed -n 's:^ *// FAILS ::p' "$file")

echo "$cases cases, $failures wrong"
[[ $cases -gt 0 && $failures -eq 0 ]]
