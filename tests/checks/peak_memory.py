#!/usr/bin/env python3
"""peak_memory.py FILE COMMAND...: runs a command, and writes to a file the most memory in MB that any one of its programs took."""
import resource
import subprocess
import sys

status = subprocess.run(sys.argv[2:]).returncode
with open(sys.argv[1], "w") as file:
    file.write(f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024}\n")
sys.exit(status)
