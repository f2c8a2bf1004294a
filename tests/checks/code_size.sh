#!/usr/bin/env bash
# code_size.sh CUBIN: how many functions, and how many bytes of machine code.
set -euo pipefail
LC_ALL=C readelf -SW "$1" 2> /dev/null | sed -nE 's/.* \.text\.[^ ]+ +PROGBITS +[0-9a-f]+ +[0-9a-f]+ +([0-9a-f]+) .*/0x\1/p' | {
  functions=0 bytes=0
  while read -r size; do functions=$((functions + 1)) bytes=$((bytes + size)); done
  echo "$functions $bytes"
}
