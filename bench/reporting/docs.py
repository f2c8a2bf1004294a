"""Fills in the generated tables of docs/performance.md and draws the plots of docs and README from the JSON files."""
import os
import re
import statistics

from . import plots, svg, text
from .results import PEERS, Results, comparisons, load, standing, us

PLOTS = ("rows_softmax", "rows_layernorm", "rows_rmsnorm", "attention_d128x16_full", "attention_d128x16_causal", "decode_fp16_32_8_dense",
         "products_14336x4096", "products_coded", "llm")


def markdown(head, lines):
    rows = [head, ["---"] * len(head)] + lines
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def rows(results):
    tables, short, long = [], [32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096], [6144, 8192, 12288, 16384, 24576, 32768, 65536, 131072, 262144]
    for columns in (short, long):
        lines = []
        for op, title in (("softmax", "softmax"), ("rmsnorm", "RMSNorm, weights"), ("layernorm", "LayerNorm, weights, mean and rstd written")):
            shares = {int(m[1]): people["kernels"].figures["share_of_copy"] for m, people in results.of(op, r"fp16/(?!4096x)\d+x(\d+)") if us(people, "kernels")}
            lines.append([title] + [f"{100 * shares[c]:.0f}" if c in shares else "" for c in columns])
        tables.append(markdown(["columns"] + [f"{c:,}" for c in columns], lines))
    return "\n\n".join(tables)


def coded_rows(results):
    """RMSNorm to int8 codes with a scale for each row."""
    columns = [1024, 4096, 16384]
    lines = []
    for op, case, title in (("rmsnorm_int8", r"fp16/49152x(\d+)", "RMSNorm, weights, codes"),
                            ("rmsnorm_block_int8", r"bf16/8192x(\d+)", "residual added and written, RMSNorm, weights, a map of one's own, codes")):
        shares = {int(m[1]): people["kernels"].figures["share_of_copy"] for m, people in results.of(op, case) if us(people, "kernels")}
        lines.append([title] + [f"{100 * shares[c]:.0f}" if c in shares else "" for c in columns])
    return markdown(["columns"] + [f"{c:,}" for c in columns], lines)


def odd_rows(results):
    """Halves, 4,096 rows."""
    shares = {op: {int(m[1]): people["kernels"].figures["share_of_copy"] for m, people in results.of(op, r"fp16/4096x(\d+)") if us(people, "kernels")}
              for op in ("softmax", "rmsnorm", "layernorm")}
    columns = sorted(set.intersection(*map(set, shares.values())))
    return markdown(["columns"] + [f"{c:,}" for c in columns],
                    [[title] + [f"{100 * shares[op][c]:.0f}" for c in columns]
                     for op, title in (("softmax", "softmax"), ("rmsnorm", "RMSNorm"), ("layernorm", "LayerNorm"))])


def standings(results):
    """For each op and peer: in how many cases we are ahead, level or behind, and the ratios."""
    groups = {}
    for pair in comparisons(results):
        groups.setdefault((pair.op, PEERS[pair.peer] + (" *" if pair.other_run else "")), []).append(pair)
    lines = []
    for (op, peer), pairs in sorted(groups.items(), key=lambda item: item[1][0].ratio):
        count = {name: sum(standing(pair) == name for pair in pairs) for name in ("ahead", "level", "behind")}
        lines.append([op, peer, str(count["ahead"]), str(count["level"]), str(count["behind"]), f"{pairs[0].ratio:.2f}", pairs[0].case,
                      f"{statistics.median(pair.ratio for pair in pairs):.2f}", f"{pairs[-1].ratio:.2f}"])
    return ["op", "peer", "ahead", "level", "behind", "worst", "at", "median", "best"], lines


def one_token(results):
    cases = {m[1]: people for m, people in results.of("gemv", r"fp16/1x(\d+x\d+)")}
    share = lambda people, who: f"{100 * us(people, 'read') / us(people, who):.0f}" if us(people, "read") and us(people, who) else ""
    best = lambda people: min(us(people, who) for who in ("cublas", "cublaslt") if us(people, who))
    return markdown(["N x K"] + [shape.replace("x", " x ") for shape in cases], [
        ["launches"] + [share(people, "kernels") for people in cases.values()],
        ["weights early"] + [share(people, "kernels_early") for people in cases.values()],
        ["cuBLAS / ours"] + [f"{best(people) / us(people, 'kernels'):.2f}" for people in cases.values()]])


def coded(results):
    lines = []
    shapes = ["14336x4096", "28672x4096", "4096x14336"]
    found = {(m[1], m[2]): people for m, people in results.of("gemv", r"(\w+)/1x(\d+x\d+)")}
    for dtype in dict.fromkeys(dtype for dtype, _ in found if dtype not in ("fp16", "bf16")):
        share = lambda shape, who: f"{100 * us(found[dtype, shape], 'read') / us(found[dtype, shape], who):.0f}" if (dtype, shape) in found and us(found[dtype, shape], who) else ""
        lines.append([dtype] + [f"{share(shape, 'kernels')} ({share(shape, 'kernels_early')})" for shape in shapes])
    return markdown(["weights"] + [shape.replace("x", " x ") for shape in shapes], lines)


def coded_tokens(results):
    """Many tokens: how many times as fast as the faster of cuBLAS and cuBLASLt with weights of 16 bits."""
    shape = "14336x4096"
    found = {(m[1], int(m[2])): people for m, people in results.of("skinny", rf"(\w+)/(\d+)x{shape}") if us(people, "kernels")}
    best = {m: min(us(people, who) for who in ("cublas", "cublaslt") if us(people, who)) for (dtype, m), people in found.items() if dtype == "bf16"}
    columns = sorted({m for dtype, m in found if dtype != "bf16"} & set(best))
    lines = [[dtype] + [f"{best[m] / us(found[dtype, m], 'kernels'):.2f}" if (dtype, m) in found else "" for m in columns]
             for dtype in dict.fromkeys(dtype for dtype, _ in found if dtype != "bf16")]
    return markdown(["tokens"] + [f"{m:,}" for m in columns], lines)


def rounded_inputs(results):
    """Inputs that tensor cores cannot take as they lie in memory: times, with a workspace and without, and in pieces."""
    cases = {(m[1], int(m[2])): people for m, people in results.of("inputs", r"(\w+)/(\d+)x\d+x\d+") if us(people, "kernels")}
    columns = sorted({m for _, m in cases})
    kinds = {"float": "float", "mapped": "half, times factors", "normed": "float, normalized, times factors"}
    ways = {"kernels": "with a workspace", "without_workspace": "without", "pieces": "in pieces"}
    cell = lambda people, who: f"{us(people, who):,.0f}" if us(people, who) else ""
    lines = [[f"{kinds[kind]}, {ways[who]}"] + [cell(cases.get((kind, m), {}), who) for m in columns] for kind in kinds for who in ways]
    return markdown(["tokens"] + [f"{m:,}" for m in columns], lines)


def tokens(results):
    lines = []
    for shape in ("4096x4096", "14336x4096", "4096x14336"):
        cases = {int(m[1]): people for m, people in results.of("skinny", rf"bf16/(\d+)x{shape}") if us(people, "kernels")}
        ratios = {m: min(us(people, who) for who in ("cublas", "cublaslt") if us(people, who)) / us(people, "kernels") for m, people in cases.items()}
        reads = {m: us(people, "read") / us(people, "kernels") for m, people in cases.items()}
        if not lines:
            columns = [m for m in sorted(cases) if m in (2, 4, 8, 16, 17, 32, 33, 64, 65, 128, 256, 512)]
        lines.append([shape.replace("x", " x ") + ", share of the read, %"] + [f"{100 * reads[m]:.0f}" if m <= 64 else "" for m in columns])
        lines.append(["cuBLAS / ours"] + [f"{ratios[m]:.2f}" for m in columns])
    squares = [(int(m[1]), people) for m, people in results.of("gemm", r"bf16/(\d+)x\1x\1")]
    rates = lambda people, *who: [people[w].figures["TFLOP/s"] for w in who if us(people, w)]
    rate = lambda people, *who: f"{max(rates(people, *who)):.0f}" if rates(people, *who) else ""  # unsteady ones are left out
    return (markdown(["tokens"] + [str(m) for m in columns], lines) + "\n\n"
            + markdown(["square products of bfloat16, TFLOP/s"] + [str(n) for n, _ in squares], [
                ["kernels"] + [rate(people, "kernels") for _, people in squares],
                ["the faster of cuBLAS and cuBLASLt"] + [rate(people, "cublas", "cublaslt") for _, people in squares]]))


def in_eight(results):
    """Products of codes of 8 bits: TFLOP/s, and the time of cuBLASLt over ours."""
    kinds = {"bf16": "bfloat16", "int8": "int8", "int8_row": "int8, scales of tokens and outputs", "e4m3": "e4m3", "e4m3_fast": "e4m3, fast sums",
             "e4m3_row": "e4m3, scales of tokens and outputs", "e4m3_block128": "e4m3, scales of 128 columns and 128 x 128 weights"}
    cases = {(m[1], m[2]): people for m, people in results.of("in_eight", r"(\w+)/(\d+x\d+x\d+)") if us(people, "kernels")}
    shapes = [shape for shape in dict.fromkeys(shape for _, shape in cases) if "x14336x4096" in shape or shape == "8192x8192x8192"]

    def cell(people):
        if not us(people, "kernels"):
            return ""
        ratio = f" ({us(people, 'cublaslt') / us(people, 'kernels'):.2f})" if us(people, "cublaslt") else ""
        return f"{people['kernels'].figures['TFLOP/s']:,.0f}" + ratio
    return markdown([""] + [shape.replace("x", " x ") for shape in shapes], [[title] + [cell(cases.get((kind, shape), {})) for shape in shapes] for kind, title in kinds.items()])


ATTENTION_PEERS = ("flash_attention_2", "flash_attention_3", "cudnn")


def attention(results):
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    lines = []
    for dtype, shape, mask in dict.fromkeys((m[1], m[2], m[3]) for m, people in results.of("attention", r"(bf16|fp8-products)/(d[\d-]+x[\d/]+)x\d+/(full|causal)") if any(us(people, who) for who in ATTENTION_PEERS)):
        cells = []
        for length in lengths:
            people = results.cases.get(("attention", f"{dtype}/{shape}x{length}/{mask}"), {})
            rate = lambda who: f"{people[who].figures['TFLOP/s']:.0f}" if us(people, who) else "-"
            cells.append(f"{rate('kernels')} ({', '.join(map(rate, ATTENTION_PEERS))})" if us(people, "kernels") else "")
        dim, heads = shape[1:].split("x")
        count, _, of_keys = heads.partition("/")
        lines.append([f"{count}{f' ({of_keys} of keys)' if of_keys else ''} x {dim}{'' if dtype == 'bf16' else ', in 8 bits'}, {'causal' if mask == 'causal' else 'all'}"] + cells)
    return markdown(["heads x columns, keys"] + [f"{length:,}" for length in lengths], lines)


def other_attention(results):
    cells = {}
    for m, people in results.of("attention", r"([\w-]+)/(d[\d-]+x[\d/]+)x(\d+)(?:,(pages\d+))?/(full|causal)"):
        if us(people, "kernels") and not any(us(people, who) for who in ATTENTION_PEERS):
            cells.setdefault((m[1], m[2], m[4] or ""), {})[int(m[3]), m[5]] = people["kernels"].figures["TFLOP/s"]
    columns = sorted({key for found in cells.values() for key in found}, key=lambda key: (key[1] != "full", key[0]))
    return markdown(["type, head x heads"] + [f"{length:,} keys, {'causal' if mask == 'causal' else 'all'}" for length, mask in columns],
                    [[f"{dtype}, {shape[1:].replace('x', ' x ')}{', ' + layout.replace('pages', 'pages of ') if layout else ''}"] + [f"{found[c]:.0f}" if c in found else "" for c in columns]
                     for (dtype, shape, layout), found in cells.items()])


def batches(results):
    """Calls of attention() with and without offsets and a workspace: TFLOP/s."""
    kinds = [(r"(\d+)x(\d+)", "{} prompts of {}", ("even", "even_split", "ragged", "ragged_split")),
             (r"(\d+)on(\d+)", "{} queries on {} keys", ("whole", "split", "", "")),
             (r"2x(\d+)\+(\d+)", "2 prompts of {} and {} single queries", ("", "", "together", "split"))]
    lines = []
    for pattern, title, whos in kinds:
        for m, people in results.of("attention", rf"bf16/d128x32/8x{pattern}/causal"):
            if any(us(people, who) for who in whos):
                lines.append([title.format(*(f"{int(x):,}" for x in m.groups()))] + [f"{people[who].figures['TFLOP/s']:.0f}" if us(people, who) else "" for who in whos])
    return markdown(["", "one shape", "with a workspace", "ragged", "ragged, with a workspace"], lines)


def decode(results):
    shapes = list(dict.fromkeys(m[1] for m, _ in results.of("decode", r"fp16/(\d+x\d+),32/8,dense")))
    lines = []
    for title, dtype, layout, who in (("half", "fp16", "dense", "precise"), ("half, with `most_keys`", "fp16", "dense", "most_keys"), ("half, early, with `new_keys`", "fp16", "dense", "early"), ("share of the read, %", "fp16", "dense", None), ("cuDNN", "fp16", "dense", "cudnn"),
                                      ("FlashAttention-2", "fp16", "dense", "flash_attention_2"), ("half, pages of 16", "fp16", "pages16", "precise"),
                                      ("e4m3", "fp8", "dense", "precise"), ("e4m3, pages of 16", "fp8", "pages16", "precise"),
                                      ("int4, a scale for each head and key", "int4", "dense", "precise"), ("int4, pages of 16", "int4", "pages16", "precise")):
        cells = []
        for shape in shapes:
            people = results.cases.get(("decode", f"{dtype}/{shape},32/8,{layout}"), {})
            value = us(people, who or "precise")
            cells.append("" if not value else f"{100 * us(people, 'read') / value:.0f}" if who is None else f"{value:.1f}")
        lines.append([title] + cells)
    return markdown(["sequences x keys"] + [shape.replace("x", " x ") for shape in shapes], lines)


def several_queries(results):
    shapes = list(dict.fromkeys((m[1], m[2]) for m, _ in results.of("decode", r"fp16/(\d+x)4x(\d+),32/8,dense")))
    lines = []
    for queries in (1, 4, 8):
        for title, who in (("", "precise"), (", with `most_keys`", "most_keys")):
            cells = []
            for batch, length in shapes:
                shape = f"{batch}{length}" if queries == 1 else f"{batch}{queries}x{length}"
                value = us(results.cases.get(("decode", f"fp16/{shape},32/8,dense"), {}), who)
                cells.append(f"{value:.1f}" if value else "")
            lines.append([("1 query" if queries == 1 else f"{queries} queries") + title] + cells)
    return markdown(["sequences x keys"] + [f"{batch[:-1]} x {length}" for batch, length in shapes], lines)


def latents(results):
    shapes = list(dict.fromkeys(m[1] for m, _ in results.of("decode", r"bf16-latents/(\d+x\d+),\d+/1,pages64")))
    lines = []
    for heads in (16, 128):
        people = [results.cases.get(("decode", f"bf16-latents/{shape},{heads}/1,pages64"), {}) for shape in shapes]
        time = lambda one, who: f"{us(one, who):.1f}" if us(one, who) else ""
        lines.append([f"{heads} heads"] + [time(one, "tensor") for one in people])
        lines.append([f"{heads} heads, precise"] + [time(one, "precise") for one in people])
    lines.append(["a read"] + [time(one, "read") for one in people])
    return markdown(["sequences x keys"] + [shape.replace("x", " x ") for shape in shapes], lines)


def sampling(results):
    lines = []
    for m, people in results.of("sampling", r"fp32/(\d+)x128256"):
        cell = lambda ours, *who: (f"{us(people, ours):.1f}" if us(people, ours) else "-") + " (" + ", ".join(f"{us(people, w):.1f}" if us(people, w) else "-" for w in who) + ")"
        lines.append([m[1], f"{us(people, 'read'):.1f}", cell("greedy", "torch_argmax"), cell("top_k_top_p", "torch", "flashinfer"), cell("plain", "torch_plain", "flashinfer_plain"),
                      cell("top_p", "flashinfer_top_p").replace("()", "")])
    return markdown(["rows", "a read", "the largest (PyTorch's argmax)", "top-k 50, top-p 0.9 (PyTorch, FlashInfer)", "a draw without a filter (PyTorch, FlashInfer)", "top-p 0.9 (FlashInfer)"], lines)


def elementwise(results):
    lines = []
    for op in ("gelu", "swiglu"):
        people = results.cases.get((op, "fp16/16384x16384"), {})
        cell = lambda who: f"{us(people, who):.0f}" if us(people, who) else "-"
        lines.append([op, cell("copy"), cell("kernels"), *(cell(who) for who in ("triton", "pytorch", "torch.compile"))])
    table = markdown(["16,384 x 16,384 halves, us", "a copy of as many bytes", "kernels", "Triton", "PyTorch", "torch.compile"], lines)
    lines = []
    for m, people in results.of("embed_rmsnorm", r"fp16/(\d+)x(\d+)"):
        lines.append([f"{m[1]} x {m[2]}"] + [f"{us(people, who):.2f}" for who in ("kernels", "norm alone", "two launches")])
    return table + "\n\n" + markdown(["an embedding and its norm, us", "one launch", "the norm alone", "two launches"], lines)


def llm(results):
    lines = []
    transformers = results.llm.get("llm_peers", {}).get("tokens_per_s", {})
    for one in [one for file in ("llm", "llm_cpu") for one in results.llm.get(file, {}).get("results", [])]:
        cells = {at["context"]: f"{at['tokens_per_s']:,.0f} ({100 * at['share_of_reading']:.0f} %)" for at in one["decode"]}
        where = "" if one["device"].startswith("NVIDIA") else ", CPU"
        prompt = one.get("prompt")
        lines.append([one["case"] + where, ", ".join(f"{cell} at {at:,}" for at, cell in cells.items()),
                      f"{prompt['tokens_per_s']:,.0f} ({prompt['tokens']:,} tokens)" if prompt else "",
                      f"{transformers[one['case']]:,.0f}" if one["case"] in transformers and not where else ""])
    return markdown(["model", "decoding (share of a read), at how many tokens", "prompt", "transformers with torch.compile"], lines)


def drafts(results):
    cells, counts = {}, []
    for one in results.llm.get("llm_lookup", {}).get("results", []):
        more = f" ({(one['tokens'] - 1) / one['steps']:.1f})" if one["guesses"] else ""
        cells.setdefault((one["model"], one["text"]), {})[one["guesses"]] = f"{(one['tokens'] - 1) / one['seconds']:,.0f}{more}"
        counts = list(dict.fromkeys(counts + [one["guesses"]]))
    return markdown(["model", "text"] + [f"{n} draft tokens" if n else "none" for n in counts],
                    [[model, text] + [row.get(n, "") for n in counts] for (model, text), row in cells.items()])


def cpu_rows(directory):
    cases, _ = text.read(os.path.join(directory, "cpu_row.json"))
    columns = [1024, 4096, 16384, 65536]
    lines, onednn = [], []
    for op, title in (("rmsnorm", "RMSNorm"), ("layernorm", "LayerNorm"), ("softmax", "softmax")):
        for dtype, name in (("fp32", "float"), ("fp16", "half")):
            found = {key[3]: case for key, case in cases.items() if key[:2] == (op, dtype)}
            lines.append([f"{title}, {name}"] + [f"{100 * found[c]['kernels']['share_of_copy']:.0f} ({found[c]['copy']['GB/s']:.0f})" for c in columns])
            if all("onednn" in found[c] and text.time_of(found[c]["onednn"]) for c in columns):
                onednn.append([f"time of oneDNN / ours: {title}, {name}"] + [f"{found[c]['onednn']['over_kernels']:.2f}" for c in columns])
    return markdown(["columns"] + [f"{c:,}" for c in columns], lines + onednn)


def cpu_products(directory):
    gemv, _ = text.read(os.path.join(directory, "cpu_gemv.json"))
    lines = [[key[1], f"{100 * case['kernels']['share_of_read']:.0f}", f"{case['kernels']['GB/s']:.1f}"] for key, case in gemv.items() if key[2:] == (1, 4096, 14336)]
    gemm, _ = text.read(os.path.join(directory, "cpu_gemm.json"))
    rate = lambda case, who: f"{case[who]['GFLOP/s']:.0f}" if text.time_of(case.get(who)) else "-"
    return (markdown(["one token, weights of 4096 x 14336", "share of a read, %", "GB/s"], lines) + "\n\n"
            + markdown(["GFLOP/s", "kernels", "OpenBLAS", "oneDNN"], [[f"{key[1]}, {' x '.join(map(str, key[2:]))}", *(rate(case, who) for who in ("kernels", "openblas", "onednn"))] for key, case in gemm.items()]))


def cpu_attention(directory):
    found = {}
    for row in load(os.path.join(directory, "cpu_attention.json"))["benchmarks"]:
        case, _, who = row["name"].partition("/iterations:")[0].rpartition("/")
        found.setdefault(case, {})[who] = row
    lines = []
    for case, people in found.items():
        ours, other = text.time_of(people.get("kernels")), people.get("unfused") or people.get("read")
        lines.append([case, f"{ours:,.0f}", f"{text.time_of(other) / ours:.2f}", "OpenBLAS's products, softmax between" if "unfused" in people else "a read of keys and values"])
    return markdown(["case", "us", "time of what is beside / ours", "beside"], lines)


def tables(directory):
    results = Results(directory)
    on_cpu = os.path.join(os.path.dirname(os.path.abspath(directory)), "amd-epyc-avx512-2t")
    head, lines = standings(results)
    return {"rows": rows(results), "odd_rows": odd_rows(results), "coded_rows": coded_rows(results),
            "standings": markdown(head, lines), "one_token": one_token(results), "coded": coded(results), "coded_tokens": coded_tokens(results), "rounded_inputs": rounded_inputs(results),
            "tokens": tokens(results), "in_eight": in_eight(results), "attention": attention(results), "other_attention": other_attention(results), "batches": batches(results), "decode": decode(results), "several_queries": several_queries(results), "latents": latents(results),
            "sampling": sampling(results), "elementwise": elementwise(results), "llm": llm(results), "drafts": drafts(results), "cpu_rows": cpu_rows(on_cpu), "cpu_products": cpu_products(on_cpu),
            "cpu_attention": cpu_attention(on_cpu)}


def filled(content, made):
    """The text with each generated table in its place, between two comments."""
    def put(match):
        return f"<!-- table: {match[1]} -->\n{made[match[1]]}\n<!-- end -->"
    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", put, content, flags=re.S)


def update(directory, folder, checks=False):
    """Writes what differs, or with `checks` only says it and returns 1."""
    path = os.path.join(folder, "performance.md")
    with open(path, encoding="utf-8") as file:
        wanted = {path: filled(file.read(), tables(directory))}
    drawn = {name: element for name, _, element in plots.all_plots(Results(directory))}
    wanted.update({os.path.join(folder, "plots", name + ".svg"): svg.standalone(drawn[name]) for name in PLOTS if name in drawn})
    old = []
    for path, content in wanted.items():
        there = None
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                there = file.read()
        if there == content:
            continue
        old.append(path)
        if not checks:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(content)
    for path in old:
        print(("not that of the JSON files; bench/report.py docs makes it: " if checks else "made: ") + os.path.relpath(path))
    return 1 if checks and old else 0
