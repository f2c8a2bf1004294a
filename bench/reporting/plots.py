"""Which plots a report has, from what the files hold: a plot without data is left out."""
from .results import PEERS, roofs, us
from .svg import Series, bars, plot

ROW_OPS = {"softmax": "softmax", "layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "layernorm_residual": "LayerNorm with bias and residual"}
DTYPES = {"fp16": "half", "bf16": "bfloat16", "fp32": "float", "fp8": "e4m3", "int4": "int4"}
# A peer keeps its colour on all plots; 0 is the library's.
SLOT = {"cudnn": 1, "cublas": 1, "flash_attention_2": 2, "cublaslt": 2, "cub": 2, "pytorch": 3, "torch.compile": 4, "triton": 5, "oneflow": 6, "apex": 7,
        "flash_attn": 3, "flash_attention_3": 4, "flashinfer": 5, "liger": 6, "quack": 7}


def measured(people, who, figure):
    """A figure of one row: that of its file, or bandwidth from the bytes that our row says."""
    row = people.get(who)
    if row is None or row.us is None:
        return None
    if figure in row.figures:
        return row.figures[figure]
    ours = next((p for p in people.values() if p.us and "GB/s" in p.figures), None)
    return ours.figures["GB/s"] * ours.us / row.us if ours and figure == "GB/s" else None


def lines(cases, names, figure, unit):
    """cases: [(x, what x is called, people)]; names: {who: (name, slot)}."""
    series = []
    for who, (name, slot) in names.items():
        points = [(x, measured(people, who, figure), said) for x, said, people in cases]
        series.append(Series(name, [(x, y, f"{said}: {y:,.4g} {unit}") for x, y, said in points if y], slot))
    return series


def peers(*also):
    return {who: (PEERS[who], SLOT[who]) for who in also}


def rows(results):
    for op, title in ROW_OPS.items():
        cases = [(int(m[1]), f"{m[1]} columns", people) for m, people in results.of(op, r"fp16/49152x(\d+)")]
        if len(cases) < 3:
            continue
        names = {"kernels": ("kernels", 0), "copy": ("copy", None), **peers("cudnn", "cub", "pytorch", "torch.compile", "triton", "liger", "quack", "flashinfer")}
        if op == "layernorm_residual":
            names.update(peers("oneflow"))
        yield f"rows_{op}", "Rows", plot(f"{title} of halves, 49,152 rows", "columns", "GB/s of what must move", lines(cases, names, "GB/s", "GB/s"))


def attention(results):
    shapes = dict.fromkeys((m[1], m[3]) for m, _ in results.of("attention", r"bf16/(d\d+x[\d/]+)x(\d+)/(full|causal)"))
    matrix = roofs(results).get("matrix")
    for shape, mask in shapes:
        cases = [(int(m[1]), f"{m[1]} keys", people) for m, people in results.of("attention", rf"bf16/{shape}x(\d+)/{mask}")]
        if len(cases) < 3:
            continue
        dim, heads = shape[1:].split("x")
        heads = heads.replace("/", " on ")
        series = lines(cases, {"kernels": ("kernels", 0), **peers("flash_attention_2", "flash_attention_3", "cudnn", "flash_attn", "flashinfer")}, "TFLOP/s", "TFLOP/s")
        if matrix:
            series.append(Series("fastest product", [(x, matrix[0], "") for x, _, _ in cases]))
        title = f"Attention of bfloat16, {heads} heads of {dim}, {'causal' if mask == 'causal' else 'all keys'}"
        yield f"attention_d{dim}x{heads.replace(' on ', '_')}_{mask}", "Attention of many queries", plot(title, "keys", "TFLOP/s", series)


def decode(results):
    kinds = dict.fromkeys((m[1], m[4], m[5]) for m, _ in results.of("decode", r"(\w+)/(\d+)x(\d+),([\d/]+),(\w+)"))
    for dtype, heads, layout in kinds:
        cases = [(int(m[1]), int(m[2]), people) for m, people in results.of("decode", rf"{dtype}/(\d+)x(\d+),{heads},{layout}") if us(people, "read")]
        if len(cases) < 5:
            continue
        ours = "precise" if any("precise" in people for _, _, people in cases) else "plain"
        moved = lambda people: people["read"].figures["GB/s"] * people["read"].us * 1e3 / 2 ** 20
        alone = [(moved(people), f"{batch} x {keys} keys", people) for batch, keys, people in cases if batch == 1]
        many = [(moved(people), f"{batch} x {keys} keys", people) for batch, keys, people in cases if batch > 1]
        series = lines(alone, {ours: ("kernels", 0), "read": ("read", None), **peers("cudnn", "flash_attention_2", "flash_attention_3", "flash_attn", "flashinfer")}, "GB/s", "GB/s")
        for batched in lines(many, {ours: ("several sequences", 0), **peers("cudnn", "flash_attention_2")}, "GB/s", "GB/s"):
            batched.joined = False
            if batched.slot:
                batched.name += ", several"
            series.append(batched)
        queries, keys = heads.split("/")
        title = f"Decoding of {DTYPES.get(dtype, dtype)}, {queries} heads on {keys}" + ("" if layout == "dense" else ", pages of " + layout[5:])
        yield f"decode_{dtype}_{heads.replace('/', '_')}_{layout}", "Decoding", plot(title, "MiB of keys and values", "GB/s", series)


def products(results):
    matrix = roofs(results).get("matrix")
    # One token is `gemv`, more are `skinny`, and square products `gemm`.
    tokens = lambda dtype, shape: sorted([(int(m[1]), f"{m[1]} tokens", people) for op in ("gemv", "skinny") for m, people in results.of(op, rf"{dtype}/(\d+)x{shape}")], key=lambda c: c[0])
    for shape in dict.fromkeys(m[1] for m, _ in results.of("skinny", r"bf16/\d+x(\d+x\d+)")):
        cases = tokens("bf16", shape)
        names = {"kernels": ("kernels", 0), "kernels_early": ("kernels, weights early", 5), **peers("cublas", "cublaslt")}
        series = [Series(name, [(x, us(people, who), f"{said}: {us(people, who):.4g} us") for x, said, people in cases if us(people, who)], slot)
                  for who, (name, slot) in names.items()]
        n, k = map(int, shape.split("x"))
        floor = [(x, max(us(people, "read"), 2e-6 * x * n * k / matrix[0] if matrix else 0), "") for x, _, people in cases if us(people, "read")]
        yield f"products_{shape}", "Products", plot(f"Products of bfloat16, weights of {shape.replace('x', ' x ')}", "tokens", "us", series + [Series("read or multiply", floor)], log_y=True)
    coded = [dtype for dtype in dict.fromkeys(m[1] for m, _ in results.of("skinny", r"(\w+)/\d+x14336x4096")) if dtype != "bf16"]
    series = [Series("bf16" if i == 0 else dtype, [(x, us(people, "kernels"), f"{said}: {us(people, 'kernels'):.4g} us") for x, said, people in tokens(dtype, "14336x4096") if us(people, "kernels")], i)
              for i, dtype in enumerate(["bf16", *[d for d in coded if d in ("e4m3_row", "e4m3_block128", "int8_row", "int8_group64", "int4_group128", "int4_group32", "gf4")]])]
    if len([s for s in series if s.points]) > 1:
        yield "products_coded", "Products", plot("Products of coded weights, 14336 x 4096", "tokens", "us", series, log_y=True)


def llm(results):
    transformers = results.llm.get("llm_peers", {}).get("tokens_per_s", {})
    for file, title in (("llm", "examples/llm"), ("llm_cpu", "examples/llm on a CPU")):
        found = []
        for one in results.llm.get(file, {}).get("results", []):
            for at in one["decode"]:
                roof = at["tokens_per_s"] / at["share_of_reading"] if at.get("share_of_reading") else None
                beside = [("transformers with torch.compile", transformers[one["case"]])] if one["case"] in transformers and at["context"] == 120 and file == "llm" else []
                found.append((one["case"] + (f" at {at['context']:,}" if at["context"] else ""), at["tokens_per_s"], roof, beside))
        if found:
            yield file, "A transformer of them", bars(f"{title}: tokens a second", found, "tokens a second")


def all_plots(results):
    """[(name of the file, section, svg)]"""
    return [one for make in (rows, attention, decode, products, llm) for one in make(results)]
