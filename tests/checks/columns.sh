#!/usr/bin/env bash
# columns.sh SOURCE_DIR: lines of code have at most 120 columns, but for text in quotes that is found more easily in one piece.
set -euo pipefail
cd "$1"
long=$(find include bench tests examples -type f \( -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' \) -exec grep -nHE '.{121,}' {} + |
  grep -vE '^[^:]+:[0-9]+: *(return )?"' || true)
[[ -z $long ]] || { echo "$long" | cut -c 1-160; exit 1; }
