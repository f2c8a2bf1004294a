#!/usr/bin/env bash
# compile_memory.sh NVCC INCLUDE_DIR FILE MEGABYTES: compiling FILE for sm_90a takes no more memory than that in any one of nvcc's programs.
set -euo pipefail
if ! command -v python3 > /dev/null; then
  echo "skipped: not found: python3"
  exit 77
fi
exec python3 - "$@" <<'END'
import resource
import subprocess
import sys
import tempfile

nvcc, include, file, most = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    subprocess.run([nvcc, "-std=c++17", "-O3", "-I", include, "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-o", f"{folder}/call.cubin", file], check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
print(f"{file}: {used:.0f} MB, at most {most}")
sys.exit(used > float(most))
END
