"""The tables that bench/report.py prints: one for each op, of the GPU or of the CPU."""
import json
import os
import re
import statistics

from .results import NOISE as SAME_RUN, OTHER_RUN, Results, roofs

OPS = ["softmax", "softmax_scale_add", "softmax_scale_mask", "layernorm", "layernorm_residual", "rmsnorm",
       "rmsnorm_int8", "gelu", "gelu_flat", "gelu_erf", "silu", "tanh", "relu2", "swiglu", "swiglu_halves", "dropout", "cast_to_fp32",
       "cast_to_bf16", "cast_to_fp8", "quantize_groups", "dequantize_groups", "embed_rmsnorm"]
PEERS = ["simple", "two launches", "cudnn", "cub", "pytorch", "torch.compile", "torch.compile tuned", "triton", "liger", "quack", "flashinfer", "oneflow", "apex"]
PRODUCTS = ["cpu_gemv", "cpu_gemm", "cpu_gemm_avx2"]
PROGRAMS = ["softmax", "layernorm", "rmsnorm", "elementwise", "peers"]


def read(path):
    """{(op, dtype, rows, cols) or (op, dtype, M, N, K): {who: row}} and the context; nothing where there is no file."""
    if not os.path.exists(path):
        return {}, None
    with open(path) as file:
        data = json.load(file)
    cases = {}
    for row in data["benchmarks"]:
        op, dtype, shape, who = row["name"].split("/")[:4]
        cases.setdefault((op, dtype, *map(int, shape.split("x"))), {})[who] = row
    return cases, data["context"]


def stamp(path, pairs):
    with open(path) as file:
        data = json.load(file)
    for key in ("host_name", "load_avg"):
        data["context"].pop(key, None)
    data["context"].update(pair.split("=", 1) for pair in pairs)
    with open(path, "w") as file:
        json.dump(data, file, indent=1)
        file.write("\n")


def time_of(row):
    return None if row is None or row.get("error_occurred") else row["real_time"]


def aligned(lines):
    """The first three columns and the last to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        cells = [cell.ljust(width) if i < 3 or i == len(line) - 1 else cell.rjust(width)
                 for i, (cell, width) in enumerate(zip(line, widths))]
        yield "  ".join(cells).rstrip()


class Table:
    """One op. `others`: {name: (cases, from another run?)}, a column for each peer that has a figure."""

    def __init__(self, op, ours, others):
        self.op, self.wins, self.ties, self.compared, self.failures = op, [], 0, 0, []
        keys = [key for key in ours if key[0] == op]
        self.columns = []
        for peer in PEERS:
            for cases, other_run in others:
                if any(peer in cases.get(key, {}) for key in keys):
                    self.columns.append((peer, cases, other_run))
                    break
        lines = [["", "type", "rows x cols", "copy", "kernels", "GB/s", "share"]]
        lines[0] += [peer + ("*" if other_run else "") for peer, _, other_run in self.columns] + ["plan"]
        lines += [self.line(key, ours[key]) for key in keys]
        self.text = "\n".join(aligned(lines))
        for _, dtype, rows, cols in keys:
            alone, us = (time_of(ours[op, dtype, rows, cols].get(who)) for who in ("norm alone", "kernels"))
            if alone and us:
                self.text += f"\n{dtype} {rows} x {cols}: the norm alone {alone:.2f} us, with the embedding {us - alone:+.2f} us"

    def line(self, key, case):
        _, dtype, rows, cols = key
        us, row = time_of(case.get("kernels")), case.get("kernels", {})
        cells = [self.cell(key, us, *column) for column in self.columns]
        lost = any(cell.endswith("<") for cell in cells)
        figures = ["-", "-", "-"]
        if us:
            figures = [f"{us:.2f}", f"{row['GB/s']:.0f}", f"{100 * row['share_of_copy']:.1f}%"]
        if row.get("error_occurred"):
            self.failures.append(f"{'/'.join(map(str, key))} kernels: {row.get('error_message')}")
        copy = time_of(case.get("copy"))
        first = ["!" if lost else "", dtype, f"{rows} x {cols}", f"{copy:.2f}" if copy else "-"]
        return first + figures + cells + [row.get("label", "")]

    def cell(self, key, us, peer, cases, other_run):
        row = cases.get(key, {}).get(peer)
        theirs = time_of(row)
        if row is not None and row.get("error_occurred"):
            self.failures.append(f"{'/'.join(map(str, key))} {peer}: {row.get('error_message')}")
            return "failed"
        if not us or not theirs:
            return "-"
        ratio = theirs / us
        noise = OTHER_RUN if other_run else SAME_RUN
        mark = "<" if ratio < 1 - noise else "~" if ratio < 1 + noise else " "
        self.compared += 1
        self.ties += mark == "~"
        if mark == "<":
            self.wins.append(f"{key[1]} {key[2]} x {key[3]} {peer}{'*' if other_run else ''} {ratio:.2f}x")
        return f"{theirs:.2f} {ratio:.2f}x{mark}"

    def show(self):
        print(f"\n{self.op}\n{self.text}")
        if self.compared:
            print(f"A peer is faster in {len(self.wins)} of {self.compared} comparisons, level in {self.ties}."
                  + (" Faster: " + "; ".join(self.wins) if self.wins else ""))
        for failure in self.failures:
            print("failed: " + failure)


def report(directory):
    cpu, context = read(os.path.join(directory, "cpu_row.json"))
    if context is not None:
        report_cpu(cpu, context)
        for name in PRODUCTS:
            report_products(name, *read(os.path.join(directory, name + ".json")))
        return
    found = {name: read(os.path.join(directory, name + ".json")) for name in PROGRAMS}
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    reference, origin = read(os.path.join(directory, "reference.json"))
    if origin is None:
        reference, origin = read(os.path.join(here, "results", "h200", "reference.json"))

    ours = {}
    for name, (cases, context) in found.items():
        if context is None:
            print(f"{name}.json: missing" + (" (PyTorch, torch.compile, Triton)" if name == "peers" else ""))
            continue
        facts = ["gpu", "cuda", "cudnn", "cub", "torch", "triton", "date", "clocks_before", "clocks_after", "command"]
        print(f"{name}.json: " + "; ".join(f"{fact} {context[fact]}" for fact in facts if fact in context))
        if name != "peers":
            ours.update(cases)
            if name == "softmax" and "cudnn" not in context:
                print("cuDNN: not found when the benchmarks were built")
    peers = found["peers"][0]
    gpu = next((context["gpu"] for _, context in found.values() if context and "gpu" in context), "")
    others = [(ours, False), (peers, False)]
    if origin and origin["gpu"] == gpu:
        others.append((reference, True))

    for what, (value, source) in roofs(Results(directory)).items():
        print(f"The machine's ceiling, {what}: {value:,.4g} {'us' if what == 'launch' else 'TFLOP/s' if what.startswith('matrix') else 'GB/s'} ({source})")

    products, context = read(os.path.join(directory, "matmul.json"))
    if context is not None:
        report_matmul(products, context)
    in_eight, context = read(os.path.join(directory, "matmul_in_eight.json"))
    if in_eight:
        report_matmul(in_eight, context, "matmul_in_eight")
    report_attention(directory)
    report_sampling(directory)
    for name in ("step", "router", "norm_heads"):
        report_times(os.path.join(directory, name + ".json"))
    report_host(os.path.join(directory, "host_cost.json"))
    print("\nMicroseconds. share: copy kernel's time / kernels' time. For a peer: its time, and that as a multiple"
          "\nof the time of kernels; < the peer is faster (and ! before the line),"
          f" ~ level within {SAME_RUN:.0%} ({OTHER_RUN:.0%} for *).")
    if len(others) == 3:
        print("* from another run: " + re.sub(r"\s+", " ", origin["provenance"]))
        print("  " + origin["notes"])
    copies = [peers[key]["copy"]["real_time"] / ours[key]["copy"]["real_time"]
              for key in peers if time_of(peers[key].get("copy")) and time_of(ours.get(key, {}).get("copy"))]
    if copies:
        print(f"The copy kernel of peers.py takes {min(copies):.2f} to {max(copies):.2f} of the time of ours"
              f" (median {statistics.median(copies):.2f}).")
    for op in OPS:
        if any(key[0] == op for key in ours):
            Table(op, ours, others).show()


def slug(path):
    context = read(path)[1]
    name = re.sub(r"[^a-z0-9]+", "-", context["cpu"].lower()).strip("-")
    return f"{name}-{context['isa']}-{context['threads']}t"


def report_cpu(cases, context):
    facts = ["cpu", "isa", "threads", "compiler", "onednn", "date", "command"]
    print("cpu_row.json: " + "; ".join(f"{fact} {context[fact]}" for fact in facts if fact in context))
    print("\nMicroseconds. share: a copy's time / kernels' time. avx2: the same, compiled for AVX2. For oneDNN: its time, and that"
          "\nas a multiple of the time of kernels and of that for AVX2; < oneDNN is faster.")
    for op in OPS:
        keys = [key for key in cases if key[0] == op]
        lines = [["", "type", "rows x cols", "copy", "GB/s", "kernels", "share", "avx2", "share", "onednn", ""]]
        for key in keys:
            case = cases[key]
            ours, avx2, onednn = case["kernels"], case.get("kernels_avx2"), case.get("onednn")
            theirs = time_of(onednn)
            if time_of(ours) is None:
                print("failed: " + "/".join(map(str, key)) + ": " + ours["error_message"])
                continue
            line = ["", key[1], f"{key[2]} x {key[3]}", f"{time_of(case['copy']):.0f}", f"{case['copy']['GB/s']:.0f}",
                    f"{time_of(ours):.0f}", f"{ours['share_of_copy']:.0%}"]
            line += [f"{time_of(avx2):.0f}", f"{avx2['share_of_copy']:.0%}"] if avx2 else ["-", "-"]
            if theirs:
                ratios = [onednn["over_kernels"]] + ([onednn["over_kernels"] / avx2["over_kernels"]] if avx2 else [])
                line += [f"{theirs:.0f}", " ".join(f"{ratio:.2f}x{'<' if ratio < 1 else ' '}" for ratio in ratios)]
            else:
                line += ["-", ""]
            lines.append(line)
        if keys:
            print(f"\n{op}\n" + "\n".join(aligned(lines)))


def report_products(name, cases, context):
    if context is None:
        return print(f"\n{name}.json: missing")
    facts = ["gpu", "cuda", "cublas", "cpu", "isa", "threads", "compiler", "onednn", "openblas", "date", "command"]
    print(f"\n{name}.json: " + "; ".join(f"{fact} {context[fact]}" for fact in facts if fact in context))
    rate = "GB/s" if name == "cpu_gemv" else "GFLOP/s"
    people = [who for who in ("read", "kernels", "hot", "kernels_avx2", "openblas", "onednn")
              if any(who in case for case in cases.values())]
    print(f"{rate}; " + ("in brackets the share of a plain read of the same bytes." if rate == "GB/s" else
                         "in brackets a peer's time over that of kernels; < the peer is faster."))
    lines = [["", "type", "M x N x K"] + people + [""]]
    for (_, dtype, *shape), case in cases.items():
        cells = []
        for who in people:
            row = case.get(who)
            if time_of(row) is None:
                cells.append("-")
            elif rate == "GB/s":
                cells.append(f"{row[rate]:.1f}" + (f" ({row['share_of_read']:.2f})" if who != "read" else ""))
            else:
                ratio = row["over_kernels"]
                cells.append(f"{row[rate]:.0f}" + (f" ({ratio:.2f}{'<' if ratio < 1 else ' '})" if who != "kernels" else ""))
        lines.append(["", dtype, " x ".join(map(str, shape))] + cells + [""])
    print("\n".join(aligned(lines)))


def report_matmul(cases, context, name="matmul"):
    """What bench/matmul.cu or bench/matmul_in_eight.cu measured."""
    facts = ["gpu", "cuda", "cublas", "date", "clocks_before", "clocks_after", "command"]
    print(f"\n{name}.json: " + "; ".join(f"{fact} {context[fact]}" for fact in facts if fact in context))
    print("Microseconds. In brackets: for kernels the share of a plain read of the weights, for others their time over that of"
          "\nkernels; < they are faster. early: with programmatic launches and weights_ready.")
    people = [("kernels", "kernels"), ("kernels_early", "early"), ("cublas", "cublas"), ("cublaslt", "cublaslt"), ("pieces", "pieces")]
    lines = [["op", "weights", "M x N x K", "read"] + [title for _, title in people] + ["TFLOP/s"]]
    for (op, dtype, m, n, k), case in cases.items():
        read, ours = time_of(case.get("read")), time_of(case.get("kernels"))
        if not read or not ours:
            continue
        cells = []
        for who, _ in people:
            us = time_of(case.get(who))
            if us is None:
                cells.append("-")
            elif who.startswith("kernels"):
                cells.append(f"{us:.2f} ({read / us:.3f})")
            else:
                cells.append(f"{us:.2f} ({us / ours:.2f}{'<' if us < ours else ' '})")
        lines.append([op, dtype, f"{m} x {n} x {k}", f"{read:.2f}"] + cells + [f"{2e-6 * m * n * k / ours:.0f}"])
    print("\n".join(aligned(lines)))

    plain = {tuple(key): time_of(case["kernels"]) for (op, *key), case in cases.items() if op in ("gemv", "skinny", "gemm") and time_of(case.get("kernels"))}
    steps = [(plain[dtype, m + 1, n, k] / us, f"{dtype}, {n} x {k}, {m + 1} tokens after {m}")
             for (dtype, m, n, k), us in plain.items() if (dtype, m + 1, n, k) in plain]
    if steps:
        print("one token more takes at most {:.2f} times as long: {}".format(*max(steps)))


def report_attention(directory):
    """What bench/decode.cu, bench/prefill.cu and bench/attention_peers.py measured: {case: {who: row}} for each op."""
    ops = {"decode": {}, "attention": {}}
    for name in ("decode", "attention_peers", "prefill"):
        path = os.path.join(directory, name + ".json")
        if not os.path.exists(path):
            continue
        with open(path) as file:
            data = json.load(file)
        facts = ["gpu", "cuda", "torch", "cudnn", "date", "clocks_before", "clocks_after", "command"]
        print(f"\n{name}.json: " + "; ".join(f"{fact} {data['context'][fact]}" for fact in facts if fact in data["context"]))
        for row in data["benchmarks"]:
            case, _, who = row["name"].partition("/iterations:")[0].partition("/")[2].rpartition("/")
            people = ops[row["name"].partition("/")[0]].setdefault(case, {})
            if time_of(people.get(who)) is None:
                people[who] = row
            if name == "attention_peers" and who == "precise":
                people["in turns"] = row
    peers = [who for who in ("flash_attention_2", "flash_attention_3", "cudnn", "flash_attn", "flashinfer") if any(who in rows for cases in ops.values() for rows in cases.values())]

    def peer(row, ours, figure):
        us = time_of(row)
        return f"{figure(row)} ({us / ours:.2f}{'<' if us < ours else ' '})" if us else "-"

    if ops["decode"]:
        print("\ndecode: microseconds. In brackets: for the modes of decode() the share of a plain read of keys and values, and in units"
              "\nof 1e-4 the error; for peers their time over that of the precise mode in turns with them, where that was measured;"
              "\n< they are faster.")
        modes = ("precise", "tensor", "plain", "parts16")
        lines = [["", "type", "sequences x keys, heads", "read", *modes] + peers]
        for case, rows in ops["decode"].items():
            dtype, _, shape = case.partition("/")
            read, ours = time_of(rows.get("read")), time_of(rows.get("precise"))
            if not ours or not read:
                continue
            mode = lambda row: "-" if time_of(row) is None else (
                f"{time_of(row):.1f} ({read / time_of(row):.3f}" + (f", {1e4 * row['error']:.2f}" if "error" in row else "") + ")")
            lines.append(["", dtype, shape, f"{read:.1f}"] + [mode(rows.get(who)) for who in modes]
                         + [peer(rows.get(who), time_of(rows.get("in turns")) or ours, lambda row: f"{time_of(row):.1f}") for who in peers])
        print("\n".join(aligned(lines)))
        sizes = {(case.partition("/")[0], case.rpartition(",")[2].strip("0123456789"), who): row for case, rows in ops["decode"].items() for who, row in rows.items() if "registers" in row}
        print("\nkernels of decode: registers of a thread, KB of shared memory of a block")
        print("\n".join(aligned([["", "type", "layout", "mode", "registers", "KB"]] + [["", *key, f"{row['registers']:.0f}", f"{row['shared_kb']:.1f}"] for key, row in sizes.items() if key[2] in modes[:3]])))
    if ops["attention"]:
        print("\nattention: TFLOP/s, of causal attention those of half the products. For peers in brackets: their time over that of"
              "\nkernels; < they are faster.")
        lines = [["", "type", "head x heads x keys", "kernels"] + peers + [""]]
        for case, rows in ops["attention"].items():
            ours = time_of(rows.get("kernels"))
            if ours:
                dtype, _, shape = case.partition("/")
                lines.append(["", dtype, shape, f"{rows['kernels']['TFLOP/s']:.0f}"] + [peer(rows.get(who), ours, lambda row: f"{row['TFLOP/s']:.0f}") for who in peers] + [""])
        print("\n".join(aligned(lines)))


def report_sampling(directory):
    """What bench/sampling.cu and bench/sampling_peers.py measured."""
    cases = {}
    for name in ("sampling", "sampling_peers"):
        path = os.path.join(directory, name + ".json")
        if os.path.exists(path):
            with open(path) as file:
                for row in json.load(file)["benchmarks"]:
                    case, _, who = row["name"].partition("/iterations:")[0].partition("/")[2].rpartition("/")
                    cases.setdefault(case, {})[who] = row
    if not cases:
        return
    print("\nsampling: microseconds. In brackets: the time over that of a plain read of the logits.")
    ways = ("greedy", "top_k_top_p", "top_k_penalties", "top_p", "plain", "torch_argmax", "torch", "torch_plain",
            "flashinfer", "flashinfer_joint", "flashinfer_top_p", "flashinfer_plain")
    lines = [["", "type", "rows x vocabulary", "read", *ways]]
    for case, rows in cases.items():
        dtype, _, shape = case.partition("/")
        read = time_of(rows.get("read"))
        figure = lambda us: "-" if not us else f"{us:.1f} ({us / read:.2f})" if read else f"{us:.1f}"
        lines.append(["", dtype, shape, f"{read:.1f}" if read else "-"] + [figure(time_of(rows.get(who))) for who in ways])
    print("\n".join(aligned(lines)))


def report_times(path):
    """What bench/step.cu, bench/router.cu or bench/norm_heads.cu measured: a line for each shape, a column for each kernel."""
    if not os.path.exists(path):
        return
    with open(path) as file:
        rows = [(*row["name"].rsplit("/iterations", 1)[0].rsplit("/", 1), row["real_time"]) for row in json.load(file)["benchmarks"] if time_of(row)]
    ways = list(dict.fromkeys(who for _, who, _ in rows))
    print(f"\n{os.path.basename(path)[:-5]}: microseconds")
    lines = [["", "shape", "", *ways, ""]]
    for shape in dict.fromkeys(shape for shape, _, _ in rows):
        times = {who: us for name, who, us in rows if name == shape}
        lines.append(["", shape.split("/", 1)[1], ""] + [f"{times[who]:.2f}" if who in times else "-" for who in ways] + [""])
    print("\n".join(aligned(lines)))


def report_host(path):
    """What bench/host_cost.cu measured."""
    if not os.path.exists(path):
        return
    with open(path) as file:
        rows = [(*row["name"].split("/")[1:3], row["real_time"]) for row in json.load(file)["benchmarks"] if time_of(row)]
    ways = ("stream", "exec", "programmatic")
    print("\nhost_cost: microseconds of the host for a call, with a bare stream, with an Exec, and with one for programmatic launches")
    lines = [["", "call", "", *ways, ""]]
    for op in dict.fromkeys(op for op, _, _ in rows):
        times = {way: us for name, way, us in rows if name == op}
        lines.append(["", op, ""] + [f"{times[way]:.2f}" if way in times else "-" for way in ways] + [""])
    print("\n".join(aligned(lines)))
