#!/usr/bin/env bash
# compile_memory.sh FILE MEGABYTES: compiling took no more memory in any one of the compiler's programs; FILE says how much (peak_memory.py).
set -euo pipefail
[[ -s $1 ]] || { echo "skipped: it was not measured as it was compiled"; exit 77; }
used=$(cat "$1")
echo "$used MB, at most $2"
[[ $used -le $2 ]]
