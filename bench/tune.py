#!/usr/bin/env python3
"""Tunes the library for this machine's first GPU: measures, and prints rows for include/kernels/tuning/ with where they come from.

    bench/tune.py                       the rows of row.h, then every constant below
    bench/tune.py rows                  the rows of row.h, from a sweep of all policies (bench/row_sweep.cu)
    bench/tune.py rows --sweep FILE     the same, from a sweep that is there already
    bench/tune.py NAME ...              these constants: each value is compiled into the benchmark that it matters to
    bench/tune.py --list                what there is

Nothing is changed: what it prints is pasted by hand, and bench/run.sh and bench/report.py compare then say what it brought. Needs nvcc,
Google Benchmark and a GPU that nobody else uses; writes to build/tune.
"""
import argparse
import datetime
import json
import math
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORK = os.path.join("build", "tune")
LEVEL = 0.985  # a row of the table goes on to longer rows while it is as fast as this share of the best

# Name: its file, the values to try, the benchmark and the cases that it matters to.
CONSTANTS = {
    "kBytesInFlight": ("elementwise.h", [16, 32, 64, 128], "elementwise", "(gelu|swiglu)/fp16/16384x16384/kernels/"),
    "kBlocksEach": ("elementwise.h", [4, 8, 16], "elementwise", "(gelu|swiglu)/fp16/(16|128|1024)x.*/kernels/"),
    "kGemvRows": ("matmul.h", [1, 2, 4], "matmul", "gemv/fp16/1x(4096x4096|14336x4096|4096x14336)/kernels/"),
    "kGemvThreads": ("matmul.h", [128, 256, 512], "matmul", "gemv/fp16/1x(4096x4096|14336x4096|4096x14336)/kernels/"),
    "kGemvThreadsAtOnce": ("matmul.h", [256, 512], "matmul", "gemv/fp16/1x(4096x4096|14336x4096|4096x14336)/kernels/"),
    "kGemvRowsNormed": ("matmul.h", [2, 4, 8], "matmul", "(rmsnorm|layernorm)/fp16/.*/kernels/"),
    "kSkinnyRows": ("matmul.h", [2, 4, 8], "matmul", "gemv/(e4m3_row|int8_row|int4_group128)/.*/kernels/"),
    "kSkinnyThreads": ("matmul.h", [64, 128, 256], "matmul", "gemv/(e4m3_row|int8_row|int4_group128)/.*/kernels/"),
    "kFineThreads": ("matmul.h", [128, 256, 448], "matmul", "gemv/int4_group32/.*/kernels/"),
    "kGemvTokens": ("matmul.h", [2, 4, 8], "matmul", "skinny/.*/[2-8]x14336x4096/kernels/"),
    "kShortTilesOfCluster": ("attention.h", [4, 8, 16], "decode", "decode/fp16/1x(1024|4096|16384),32/8,dense/most_keys/"),
    "kShortTiles": ("attention.h", [2, 4, 8], "decode", "decode/fp16/1x(1024|4096),32/32,dense/most_keys/"),
    "kSampleBlocksPerMultiprocessor": ("sampling.h", [1, 2, 4], "sampling", "sampling/fp32/.*/(greedy|top_k_top_p|top_p|plain)/"),
    "kSampleTokensPerBlock": ("sampling.h", [2048, 4096, 8192], "sampling", "sampling/fp32/.*/(greedy|top_k_top_p|top_p|plain)/"),
}


def ask_gpu(fact):
    result = subprocess.run(["nvidia-smi", "-i", "0", f"--query-gpu={fact}", "--format=csv,noheader"], capture_output=True, text=True)
    return (result.stdout.splitlines() or ["an unknown GPU"])[0].strip()


def provenance(command):
    cuda = re.search(r"release ([\d.]+)", subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout)
    return f"Measured on {ask_gpu('name')} (CUDA {cuda[1] if cuda else '?'}, {datetime.date.today():%Y-%m-%d}) by `{command}`"


def build(program, include, to):
    """Whether the benchmark compiles with the library in this folder."""
    arch = ask_gpu("compute_cap").replace(".", "")
    arch += "a" if arch >= "90" else ""
    command = ["nvcc", "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-I", include, "-I", "bench", f"bench/{program}.cu", "-o", to, "-lbenchmark", "-lpthread", "-ldl"]
    command += ["-lcublas", "-lcublasLt"] if program == "matmul" else []
    os.makedirs(os.path.dirname(to), exist_ok=True)
    with open(to + ".log", "w", encoding="utf-8") as log:
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode == 0


# ---- rows ----

def sweep():
    program, path = os.path.join(WORK, "row_sweep"), os.path.join(WORK, "row_sweep.txt")
    if not build("row_sweep", "include", program):
        sys.exit(f"error: bench/row_sweep.cu does not compile: {program}.log")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"# {provenance('bench/tune.py rows')}. Rows of halves.\n")
        for op in ("softmax", "layernorm", "rmsnorm"):
            print(f"== {op}, some minutes", file=sys.stderr, flush=True)
            file.write(subprocess.run([program, op], stdout=subprocess.PIPE, text=True, check=True).stdout)
    return path


def read_sweep(path):
    """{packs of 16 bytes in a row: {op: (share of the automatic choice, {(residency, cluster, packs of a thread): share})}} and the first line."""
    rows, first = {}, ""
    with open(path, encoding="utf-8") as file:
        for line in file:
            first = first or line.lstrip("# ").strip()
            head = re.match(r"(\w+) (\d+) x (\d+): copy .*; auto [\d.]+ us ([\d.]+)%;", line)
            if not head or int(head[2]) < 200:
                continue
            units, shares = int(head[3]) * 2 // 16, {}
            for residency, threads, cluster, group, share in re.findall(r"\[(\w+) t(\d+) c(\d+) r(\d+) ([\d.]+)%\]", line):
                packs = -(-units // (int(threads) * int(cluster)))
                # The engine itself finds the threads of a group, and those that all hold as many packs, 2 to 4.
                key = (residency, int(cluster), 2 if residency == "group" else 4 if residency == "registers" and 2 <= packs <= 4 else packs)
                if group == "1" and residency != "split":
                    shares[key] = max(shares.get(key, 0), float(share))
            rows.setdefault(units, {})[head[1]] = (float(head[4]), shares)
    return rows, first


TWICE, ONCE = ("softmax",), ("layernorm", "rmsnorm")  # ops that look at a value twice before they know the row, and once


def best(ops, residency, cluster, among):
    """The packs of a thread with the best mean share of these ops, and that share. What a line does not list is no better than its last."""
    found = {}
    for packs in sorted({key[2] for op in among if op in ops for key in ops[op][1] if key[:2] == (residency, cluster)}):
        shares = [ops[op][1].get((residency, cluster, packs), 0.9 * min(ops[op][1].values())) for op in among if op in ops and ops[op][1]]
        found[packs] = math.exp(sum(map(math.log, shares)) / len(shares))
    return max(found.items(), key=lambda item: item[1]) if found else None


def choices(ops):
    """[(mean share of all ops, (residency, packs, packs_once, cluster))], best first."""
    all_of = []
    for residency, cluster in {key[:2] for _, shares in ops.values() for key in shares}:
        twice, once = best(ops, residency, cluster, TWICE), best(ops, residency, cluster, ONCE)
        if twice and once:
            weight = sum(op in ops for op in TWICE), sum(op in ops for op in ONCE)
            share = math.exp((weight[0] * math.log(twice[1]) + weight[1] * math.log(once[1])) / sum(weight))
            all_of.append((share, (residency, twice[0], once[0], cluster)))
    return sorted(all_of, reverse=True)


def table(rows):
    """[(packs in a row at most, (residency, packs, packs_once, cluster), what it is worth)]"""
    made = []
    for units in sorted(rows):
        found = choices(rows[units])
        if not found:
            continue
        share, chosen = found[0]
        before = dict((how, s) for s, how in found).get(made[-1][1]) if made else None
        if before and before >= LEVEL * share:
            share, chosen = before, made[-1][1]
        automatic = math.exp(sum(math.log(ops[0]) for ops in rows[units].values()) / len(rows[units]))
        worth = f"{8 * units} columns: {share:.1f} % of a copy, the table there is {automatic:.1f}"
        if made and made[-1][1] == chosen:
            made[-1] = (units, chosen, made[-1][2] + [worth])
        else:
            made.append((units, chosen, [worth]))
    return made


def print_rows(path):
    rows, first = read_sweep(path)
    made = table(rows)
    if not made:
        sys.exit(f"error: {path} has no lines of bench/row_sweep.cu")
    print(f"// {first}\n// The mean of softmax, LayerNorm and RMSNorm, and of what include/kernels/tuning/row.h chose there.\nconstexpr RowTuning kRows[] = {{")
    for i, (units, (residency, packs, packs_once, cluster), worth) in enumerate(made):
        print("".join(f"    // {line}\n" for line in worth) + f"    {{{'kAnyLength' if i == len(made) - 1 else units}, Residency::{residency}, {packs}, {packs_once}, {cluster}}},")
    if made[-1][1][3] > 1:
        print("    {kAnyLength, Residency::streamed, 16, 16, 1},  // without clusters")
    print("};")


# ---- constants ----

def measure(name, value):
    """Geometric mean of microseconds and how many cases it is of, or None where the value does not compile or its benchmark fails."""
    file, _, program, cases = CONSTANTS[name]
    folder = os.path.join(WORK, f"{name}_{value}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree("include", os.path.join(folder, "include"))
    header = os.path.join(folder, "include", "kernels", "tuning", file)
    with open(header, encoding="utf-8") as source:
        content, count = re.subn(rf"\b{name} = [^,;]+", f"{name} = {value}", source.read())
    if count != 1:
        sys.exit(f"error: {file} does not say {name} once")
    with open(header, "w", encoding="utf-8") as source:
        source.write(content)
    bench, out = os.path.join(folder, "bench"), os.path.join(folder, "out.json")
    if not build(program, os.path.join(folder, "include"), bench):
        return None
    with open(os.path.join(folder, "run.log"), "w", encoding="utf-8") as log:
        if subprocess.run([bench, f"--benchmark_filter={cases}", f"--benchmark_out={out}", "--benchmark_out_format=json"], stdout=log, stderr=subprocess.STDOUT).returncode != 0:
            return None
    with open(out, encoding="utf-8") as file:
        times = [row["real_time"] for row in json.load(file)["benchmarks"] if not row.get("error_occurred")]
    return (math.exp(sum(map(math.log, times)) / len(times)), len(times)) if times else None


def print_constant(name):
    file, values, program, cases = CONSTANTS[name]
    found = {}
    for value in values:
        print(f"== {name} = {value}", file=sys.stderr, flush=True)
        found[value] = measure(name, value)
    working = {value: result for value, result in found.items() if result}
    if not working:
        print(f"// {name}: no value compiles and runs; {WORK}/{name}_*/ says why")
        return
    fastest = min(working, key=lambda value: working[value][0])
    told = ", ".join(f"{value} {working[value][0]:.2f}" if value in working else f"{value} fails" for value in values)
    print(f"// {provenance(f'bench/tune.py {name}')}: bench_{program}, mean us of {working[fastest][1]} cases ({cases}): {told}.\n"
          f"constexpr int {name} = {fastest};  // in {file}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("what", nargs="*")
    given = parser.parse_args()
    what = given.what or ["rows", *CONSTANTS]
    unknown = [name for name in what if name != "rows" and name not in CONSTANTS]
    if unknown:
        parser.error(f"no constant {unknown[0]}; --list says what there is")
    if given.list:
        for name in what:
            print(f"{name}: {CONSTANTS[name][0]}, values {CONSTANTS[name][1]}, bench_{CONSTANTS[name][2]} {CONSTANTS[name][3]}" if name in CONSTANTS else "rows: row.h, bench_row_sweep")
        return
    sweep_file = os.path.abspath(given.sweep) if given.sweep else None
    os.chdir(ROOT)
    for name in what:
        print_rows(sweep_file or sweep()) if name == "rows" else print_constant(name)


if __name__ == "__main__":
    main()
