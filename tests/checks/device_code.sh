#!/usr/bin/env bash
# device_code.sh COMPILER ARGUMENTS...: a compile command of CMake without the host's half of it, for what is measured and not linked. A
# launcher of the compiler.
set -euo pipefail
arguments=("$@")
for ((i = 0; i < $#; ++i)); do
  if [[ ${arguments[i]} == -c ]]; then arguments[i]=-fatbin; fi
done
exec "${arguments[@]}"
