#!/usr/bin/env bash
# compile_fail.sh COMPILER INCLUDE_DIR FILE: code that must not compile, and must say why. The file compiles as it stands;
# for each line in it of the form
#   // FAILS NAME: text
# it must not compile with -DNAME, and the compiler's message must contain the text: one error, in a few lines beside those that it quotes,
# as g++ 14 does for each template on the way. Most of the time goes into the headers: so cases are compiled together, each in a namespace of
# its own, and those that the compiler says nothing of, as it has instantiated the same before, once more without the others. What is not
# right there is compiled for itself, and judged by that.
set -euo pipefail
compiler=$1 include_dir=$2 file=$3

if [[ $file == *.cu ]]; then
  flags=(-std=c++17 -arch=sm_80 -Werror all-warnings -ptx)
else
  flags=(-std=c++17 -Wall -Wextra)
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
front_end=$(dirname "${BASH_SOURCE[0]}")/front_end.sh
compile() { bash "$front_end" "$compiler" "${flags[@]}" -I "$include_dir" "$@" 2>&1; }
compile "$file" || { echo "the file itself does not compile"; exit 1; }

# wrong OUTPUT TEXT: what is wrong with what the compiler says, if anything.
wrong() {
  if ! grep -qF -- "$2" <<< "$1"; then
    printf 'fails without saying "%s"' "$2"
  elif [[ $(grep -c 'error:' <<< "$1") -gt 1 || $(grep -cvE '^ *[0-9]* \|' <<< "$1") -gt 25 ]]; then
    echo "says more than one thing"
  fi
}

# together NAME...: what the compiler says of each, in a file of that name, if that is one error: the lines with the error and those around it
# that say where it comes from. g++ says so before the error, nvcc behind it.
together() {
  local all=$work/all.${file##*.} name
  grep '^#include' "$file" > "$all"
  for name in "$@"; do
    printf '#define %s 1\nnamespace case_%s {\n#line 1 "case_%s"\n' "$name" "$name" "$name"
    sed 's/^#include.*//' "$file"
    printf '}\n#undef %s\n' "$name"
  done >> "$all"
  compile "$all" > "$work/said" || true
  awk -v to="$work" '
    function give() {
      if (seen && cases == 1) { print text > (to "/" one) } else if (seen) { unclear = 1 }
      text = ""; seen = cases = 0; one = ""
    }
    / error: / || /^In file included from|: In |: +(recursively )?required (from|by)/ { if (seen) give() }
    / error: / { seen = 1 }
    {
      for (rest = $0; match(rest, /case_[A-Z0-9_]+/); rest = substr(rest, RSTART + RLENGTH)) {
        name = substr(rest, RSTART, RLENGTH)
        if (name != one) { ++cases; one = name }
      }
      text = text $0 "\n"
    }
    END { give(); exit unclear }' "$work/said" || rm -f "${@/#/$work/case_}"
}

if grep -q '[^ /].* FAILS [A-Z_0-9]*:' "$file"; then
  echo "$file: a case that does not begin its line would not be looked at" >&2
  exit 1
fi
names=() texts=()
while IFS=: read -r name text; do names+=("$name") texts+=("${text# }"); done < <(sed -n 's:^ *// FAILS ::p' "$file")
left=("${!names[@]}") before=0
while [[ ${#left[@]} -gt 1 && ${#left[@]} -ne $before ]]; do
  before=${#left[@]} asked=()
  for i in "${left[@]}"; do asked+=("${names[i]}"); done
  together "${asked[@]}"
  still=()
  for i in "${left[@]}"; do
    said=$work/case_${names[i]}
    [[ -s $said && -z $(wrong "$(cat "$said")" "${texts[i]}") ]] || still+=("$i")
  done
  left=("${still[@]}")
done

failures=0
for i in "${left[@]}"; do
  name=${names[i]}
  if output=$(compile "-D$name" "$file"); then
    echo "$name: compiles, and must not"
    failures=$((failures + 1))
  else
    problem=$(wrong "$output" "${texts[i]}")
    [[ -z $problem ]] || { printf '%s: %s:\n%s\n' "$name" "$problem" "$output"; failures=$((failures + 1)); }
  fi
done

echo "${#names[@]} cases, of which ${#left[@]} were compiled alone, $failures wrong"
[[ ${#names[@]} -gt 0 && $failures -eq 0 ]]
