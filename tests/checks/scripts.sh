#!/usr/bin/env bash
# scripts.sh SOURCE_DIR: every shell script parses, and every Python program compiles where there is a Python.
set -euo pipefail
cd "$1"

files=0 failures=0 programs=()
while read -r file; do
  files=$((files + 1))
  if [[ $file == *.py ]]; then programs+=("$file")
  else bash -n "$file" || failures=$((failures + 1))
  fi
done < <(find . \( -path ./build -o -path './.git*' \) -prune -o \( -name '*.sh' -o -name '*.py' -o -path './.ci/run' \) -print)
if command -v python3 > /dev/null; then
  python3 -c 'import sys; [compile(open(name).read(), name, "exec") for name in sys.argv[1:]]' "${programs[@]}" || failures=$((failures + 1))
fi

echo "$files scripts, $failures do not parse"
[[ $files -gt 0 && $failures -eq 0 ]]
