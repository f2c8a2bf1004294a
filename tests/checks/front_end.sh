#!/usr/bin/env bash
# front_end.sh COMPILER ARGUMENTS... -o OUTPUT...: a compile command without its code: everything is parsed and every template is
# instantiated, a warning is an error, and OUTPUT is left empty. For the compilers' launcher in CMake, and for checks. nvcc reads a file
# once, for the device, where it would read it again for the host.
set -euo pipefail
compiler=$1
shift

output=
arguments=("$@")
for ((i = 0; i < $#; ++i)); do
  if [[ ${arguments[i]} == -o ]]; then output=${arguments[i + 1]}; fi
done

if [[ $(basename "$compiler") == nvcc* ]]; then
  # Without code the device compiler exits with 1 whatever it found: its verdict is whether it says anything.
  for ((i = 0; i < $#; ++i)); do
    if [[ ${arguments[i]} == -c ]]; then arguments[i]=-ptx; fi
  done
  said=$("$compiler" "${arguments[@]}" -Xcicc --no_code_gen 2>&1) || true
  printf '%s' "$said" >&2
  [[ -z $said ]] || exit 1
else
  "$compiler" "$@" -Werror -fsyntax-only
fi
if [[ -n $output ]]; then : > "$output"; fi
