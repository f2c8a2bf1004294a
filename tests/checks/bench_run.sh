#!/usr/bin/env bash
# bench_run.sh SOURCE_DIR: what bench/run.sh does around the benchmarks, and what bench/report.py makes of results. The GPU, the compiler
# and the benchmarks are stand-ins here.
set -euo pipefail
source=$1
command -v python3 > /dev/null || { echo "skipped: not found: python3"; exit 77; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$source/bench" "$source/.ci" "$work"
mkdir "$work/bin"
stand_in() { cat > "$work/bin/$1"; chmod +x "$work/bin/$1"; }
stand_in nvidia-smi << 'end'
#!/usr/bin/env bash
case $* in
  *compute_cap*) echo 9.0 ;;
  *compute-apps*) if [[ -e $WORK/busy ]]; then echo "4711, somebody, 9000"; fi ;;
  *utilization*) echo 0 ;;
  *clocks.sm*) echo "1980, 3201, 500.5, 40, 0x0000000000000000"; echo "1500, 3201, 690.0, 51, 0x0000000000000004"; exec sleep 60 ;;
  *) echo "NVIDIA Stand-in" ;;
esac
end
# "Compiles" a benchmark that takes as long as kBytesInFlight of its headers is far from 32; 64 does not compile.
stand_in nvcc << 'end'
#!/usr/bin/env bash
[[ $* == *" -o "* ]] || exit 0
all=$* include=${all#*-I } include=${include%% *} to=${all#* -o } to=${to%% *}
value=$(grep -ohE 'kBytesInFlight = [0-9]+' "$include/kernels/tuning/elementwise.h" | grep -oE '[0-9]+')
[[ $value -ne 64 ]] || exit 1
cat > "$to" << program
#!/usr/bin/env bash
for option in "\$@"; do if [[ \$option == --benchmark_out=* ]]; then out=\${option#*=}; fi; done
echo '{"benchmarks": [{"name": "gelu", "real_time": $(((value - 32) * (value - 32) + 1))}]}' > "\$out"
program
chmod +x "$to"
end
# Lists four cases, measures those of the filter, and does what the files in $WORK say: ends at a case, is interrupted at one, or spreads.
stand_in benchmark << 'end'
#!/usr/bin/env python3
import json, os, re, signal, sys, time
name = os.path.basename(sys.argv[0])[6:]
said = dict(option[2:].partition("=")[::2] for option in sys.argv[1:])
names = [f"{name}/fp16/49152x{cols}/{who}/iterations:1/manual_time" for cols in (1024, 4096) for who in ("copy", "kernels", "cudnn")]
if "benchmark_list_tests" in said:
    sys.exit(print("\n".join(names)))
asked = lambda what: os.path.exists(os.path.join(os.environ["WORK"], f"{what}.{name}"))
with open(os.path.join(os.environ["WORK"], "starts"), "a") as file:
    file.write(name + "\n")
out = open(said["benchmark_out"], "w")
out.write('{\n  "context": {"gpu": "NVIDIA Stand-in"},\n  "benchmarks": [')
begun = False
for i, case in enumerate(names):
    if not re.search(said.get("benchmark_filter", ""), case):
        continue
    if asked("ends") and case.split("/")[2:4] == ["49152x1024", "cudnn"]:
        sys.exit("out of luck")
    if asked("interrupted") and i == 4:
        out.flush()
        os.remove(os.path.join(os.environ["WORK"], f"interrupted.{name}"))
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(30)
    row = {"name": case, "run_type": "iteration", "real_time": 10.0 + i, "time_unit": "us", "GB/s": 4000.0, "share_of_copy": 0.9}
    row["spread"] = 0.2 if asked("spreads") and i == 1 else 0.001
    out.write(("," if begun else "") + "\n    " + json.dumps(row, indent=6)[:-1] + "    }")
    begun = True
    print(case, flush=True)
out.write("\n  ]\n}\n")
end
stand_in cmake << 'end'
#!/usr/bin/env bash
if [[ $1 == --version ]]; then echo "cmake version 3.18.0"; exit 0; fi
mkdir -p build/bench/bench
echo 'CMAKE_GENERATOR:INTERNAL=Unix Makefiles' > build/bench/CMakeCache.txt
if [[ $1 != --build ]]; then exit 0; fi
for target in bench_ceilings bench_layernorm bench_rmsnorm; do cp "$WORK/bin/benchmark" "build/bench/bench/$target"; done
exit 1
end
cat > "$work/bench/peers.py" << 'end'
import sys
print("peers.py: quack is not installed")
open(sys.argv[sys.argv.index("--out") + 1], "w").write('{"context": {}, "benchmarks": [{"name": "rmsnorm/fp16/49152x1024/triton", "real_time": 12.0}]}')
sys.exit("a peer that fails")
end
printf 'import sys\nsys.exit(77)\n' > "$work/bench/sampling_peers.py"

export WORK=$work PATH=$work/bin:$PATH CXX=true OUT_DIR=$work/out
run() {  # run STATUS OPTIONS...
  local expected=$1 status=0
  shift
  : > "$work/starts"
  bash "$work/bench/run.sh" "$@" &> "$work/log" || status=$?
  if [[ $status -ne $expected ]]; then cat "$work/log"; echo "exit status $status, not $expected: $*"; exit 1; fi
}
must() { grep -q -- "$1" "$work/log" || { cat "$work/log"; echo "not said: $1"; exit 1; }; }
holds() {  # holds FILE EXPRESSION: of the JSON file as `data`, and its rows by name as `rows`
  python3 -c 'import json, sys
data = json.load(open(sys.argv[1]))
rows = {row["name"].partition("/iterations")[0]: row for row in data["benchmarks"]}
assert eval(sys.argv[2]), (sys.argv[2], data)' "$work/out/$1.json" "$2"
}

# What does not build, a case that ends its program, a peer that fails and one that is not there do not stop the rest.
touch "$work/ends.rmsnorm"
run 1 softmax layernorm rmsnorm peers sampling_peers
must '^== left out: softmax, which does not build'
must '^== left out: rmsnorm: 1 of 6 cases, which fail (build/bench/rmsnorm.log): rmsnorm/fp16/49152x1024/cudnn'
must '^== left out: peers, which fails.*a peer that fails'
must '^== without: peers.py: quack is not installed'
must '\[2/6\] softmax; 0:0. gone, about [0-9]*:[0-9]* left'
holds ceilings 'len(rows) == 6'
holds layernorm 'len(rows) == 6 and "1740 (1500 to 1980) MHz" in data["context"]["clocks_during"] and "held back by power cap" in data["context"]["clocks_during"]'
holds rmsnorm 'len(rows) == 6 and "out of luck" in rows["rmsnorm/fp16/49152x1024/cudnn"]["error_message"] and rows["rmsnorm/fp16/49152x4096/kernels"]["real_time"] == 14'
holds peers 'len(rows) == 1'
[[ -s $work/out/report.html && ! -e $work/out/softmax.json && ! -e $work/out/.unfinished.json ]]
rm "$work/ends.rmsnorm"

# An interrupted run goes on with the cases that it lacks, and a fresh one does not.
rm -r "$work/out"
touch "$work/interrupted.rmsnorm"
run 130 layernorm rmsnorm
must 'interrupted'
run 0 layernorm rmsnorm
must 'rmsnorm goes on after 4 of 6 cases'
[[ $(cat "$work/starts") == rmsnorm ]]
holds rmsnorm 'len(rows) == 6 and not any("error_occurred" in row for row in rows.values())'
touch "$work/interrupted.rmsnorm"
run 130 layernorm rmsnorm
run 0 --fresh layernorm rmsnorm
[[ $(grep -c layernorm "$work/starts") -eq 1 ]]

# Filters take what they find.
run 0 --filter 'x4096/(copy|kernels)/' rmsnorm
holds rmsnorm 'sorted(rows) == ["rmsnorm/fp16/49152x4096/copy", "rmsnorm/fp16/49152x4096/kernels"]'

# What spreads is measured again, and then said and not shown.
touch "$work/spreads.layernorm"
run 1 layernorm
must '^== left out: layernorm: 1 of 6 cases, still unsteady: layernorm/fp16/49152x1024/kernels'
[[ $(grep -c layernorm "$work/starts") -eq 2 ]]
grep -q 'layernorm/fp16/49152x1024/kernels: spread 20%' "$work/out/report.html"
rm "$work/spreads.layernorm"

# A GPU that others use is refused, and measured later.
touch "$work/busy"
sed -i 's/must_be_idle(self.given.patience)/must_be_idle(0.1)/' "$work/bench/suite.py"
run 3 layernorm
must 'refused: the GPU is not idle: process 4711, somebody'
rm "$work/busy"
run 0 layernorm

# What is over the budget is left out.
run 1 --budget 0.001 layernorm
must 'seconds are over'
run 0 --dry-run --quick
must 'FlashInfer: '

# Tuning finds the value that is fastest, and the table of rows that came from the sweep that is there.
mkdir -p "$work/include/kernels"
cp -r "$source/include/kernels/tuning" "$work/include/kernels"
python3 "$work/bench/tune.py" kBytesInFlight &> "$work/log"
must '^constexpr int kBytesInFlight = 32;'
must '16 257.00, 32 1.00, 64 fails, 128 9217.00'
cmp "$source/include/kernels/tuning/elementwise.h" "$work/include/kernels/tuning/elementwise.h"
python3 "$work/bench/tune.py" rows --sweep "$source/bench/results/h200/row_sweep.txt" &> "$work/log"
must '^    {64, Residency::group, 2, 2, 1},$'
must '^    {1024, Residency::registers, 4, 4, 1},$'
must '^    {1536, Residency::streamed, 8, 6, 1},$'

python3 "$source/tests/checks/bench_report.py" "$source"
