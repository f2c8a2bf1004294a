#!/usr/bin/env bash
# versions.sh NM COMPILER INCLUDE_DIR SOURCE OBJECT: an object, and one of the same source with another version of the headers, have nothing in
# common of which the linker keeps one for both. So two versions may meet in a program.
set -euo pipefail
nm=$1 compiler=$2 include_dir=$3 source=$4 object=$5

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$include_dir" "$work/include"
sed -i 's/v0_1_/v9_9_/' "$work/include/kernels/core/macros.h"
"$compiler" -std=c++17 -O3 -DNDEBUG -DCALL=other_version -I "$work/include" -c "$source" -o "$work/other.o"
"$nm" -C "$work/other.o" | grep 'kernels::v9_9_' > /dev/null || { echo "the other version is not in the names"; exit 1; }
bash "$(dirname "${BASH_SOURCE[0]}")/isa_symbols.sh" "$nm" "$object" "$work/other.o"
