#!/usr/bin/env bash
# scripts.sh SOURCE_DIR: every shell script parses, and every Python program compiles where there is a Python.
set -euo pipefail
cd "$1"

files=0 failures=0
while read -r file; do
  files=$((files + 1))
  if [[ $file == *.py ]]; then
    ! command -v python3 > /dev/null || python3 -c 'import sys; compile(open(sys.argv[1]).read(), sys.argv[1], "exec")' "$file"
  else
    bash -n "$file"
  fi || failures=$((failures + 1))
done < <(find . \( -path ./build -o -path './.git*' \) -prune -o \( -name '*.sh' -o -name '*.py' -o -path './.ci/run' \) -print)

echo "$files scripts, $failures do not parse"
[[ $files -gt 0 && $failures -eq 0 ]]
