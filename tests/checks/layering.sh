#!/usr/bin/env bash
# layering.sh G++ INCLUDE_DIR: who may include whom, and what stands in one place only.
#   core <- functor <- cpu;  core <- arch <- exec, detail <- the .cuh files at the top, which also see functor and tuning
set -euo pipefail
gxx=$1
cd "$2/kernels"

failures=0
fail() {
  echo "$1"
  failures=$((failures + 1))
}

# The folder a file belongs to; the headers at the top are layers of their own.
# arch/scalar.h is the one part of arch/ without CUDA's runtime: core/ and functor.h may see it.
layer_of() {
  case $1 in
    arch/scalar.h) echo scalar ;;
    */*) echo "${1%%/*}" ;;
    functor.h | weights.h | quantize.h | dropout.h | embed.h | repack.h | router.h | kv.h | score.h | rope.h | append.h | heads.h) echo functor ;;
    exec.cuh) echo exec ;;
    *) echo door ;;
  esac
}

may_see() {
  case $1 in
    scalar) echo core scalar ;;
    core) echo core scalar ;;
    functor) echo core scalar functor ;;
    tuning) echo core tuning ;;
    cpu) echo core scalar functor cpu ;;
    arch) echo core scalar arch ;;
    exec) echo core scalar arch exec ;;
    detail) echo core scalar arch exec functor tuning detail ;;
    door) echo core scalar arch exec functor tuning detail door ;;
    *) fail "unknown folder: $1" ;;
  esac
}

files=0
while read -r file; do
  file=${file#./}
  files=$((files + 1))
  layer=$(layer_of "$file")
  # The preprocessor takes out the comments and leaves the directives as they are.
  code=$("$gxx" -fpreprocessed -dD -E -P -w -x c++ "$file" 2> /dev/null)

  while read -r included; do
    case $included in
      \"*) target=$(realpath -m --relative-to=. "$(dirname "$file")/$(tr -d '"' <<< "$included")") ;;
      '<kernels/'*) target=$(sed 's:^<kernels/\(.*\)>$:\1:' <<< "$included") ;;
      *)
        case $included in
          *torch/* | *ATen/* | *c10/* | *cutlass/* | *cute/* | *raft/*) fail "$file: includes $included" ;;
          '<cub/'* | '<thrust/'* | '<cuda/'* | '<cooperative_groups'*) fail "$file: includes $included, and must do without" ;;
          '<cuda_fp16.h>' | '<cuda_bf16.h>' | '<cuda_fp8.h>') ;;
          '<cu'*) [[ $file == *.cuh ]] || fail "$file: includes $included, but must do without CUDA" ;;
        esac
        continue
        ;;
    esac
    [[ -e $target ]] || fail "$file: includes $included, which is not there"
    [[ $file == *.cuh || $target != *.cuh ]] || fail "$file: a .h includes a .cuh: $included"
    [[ " $(may_see "$layer") " == *" $(layer_of "$target") "* ]] || fail "$file: $layer must not include $included"
  done < <(sed -n 's/^ *# *include *//p' <<< "$code")

  forbid() {  # forbid PATTERN ALLOWED_FILES WHY
    # shellcheck disable=SC2053  # the right-hand side is a pattern
    [[ $file == $2 ]] || ! grep -qE "$1" <<< "$code" || fail "$file: $3"
  }
  forbid '\basm\b|\b__asm' 'arch/*' 'asm stands in arch/ only'
  forbid '__CUDA_ARCH__|__CUDA_ARCH_' '@(arch/arch.cuh|core/macros.h)' 'only arch/arch.cuh and core/macros.h look at __CUDA_ARCH__'
  forbid '__noinline__' core/macros.h 'functions of kernels that are called are KERNELS_CALLED: with -rdc=true they may not be'
  forbid '^using +namespace\b' '' 'a header must not open a namespace for its users'
  forbid '\bstd::(cout|cerr)\b|\bf?printf *\(|\babort *\(|\bthrow\b' '' 'the library neither prints, aborts nor throws'
  grep -q '^#pragma once$' "$file" || fail "$file: no #pragma once"
done < <(find . -name '*.h' -o -name '*.cuh' | sort)

echo "$files headers, $failures violations"
[[ $files -gt 0 && $failures -eq 0 ]]
