#!/usr/bin/env bash
# isa_symbols.sh NM OBJECT...: objects of one source for different instruction sets have no function or variable in common of which the
# linker keeps one for all of them: it may be one that the machine has no instructions for.
set -euo pipefail
nm=$1
shift

count=0
shared=$(for object in "$@"; do
  "$nm" -C "$object" | sed -n 's/^[0-9a-f]* *[WVu] //p' | sort -u
done | sort | uniq -d)
count=$(for object in "$@"; do "$nm" "$object"; done | grep -c ' [WVu] ')
# Of the exceptions' runtime, a destructor of libstdc++ that frees one pointer, and what is data: the room for a Status's text, the threads.
shared=$(grep -v -e '^DW\.ref\.' -e '^std::unique_ptr<std::thread::_State' -e '::Status::named() const::text$' -e '::host_threads::pool$' <<< "$shared" || true)
echo "$count weak symbols"
[[ -z $shared ]] || { echo "shared:"; echo "$shared"; exit 1; }
[[ $count -gt 0 ]]
