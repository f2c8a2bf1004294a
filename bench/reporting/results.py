"""Reads the JSON files that bench/run.sh writes to one directory, as one list of measurements."""
import collections
import json
import os
import re

SPREAD = 0.05  # the median distance of the replays from their median, over that: cases beyond are left out
NOISE = 0.01   # differences below this are noise, between files of different runs OTHER_RUN
OTHER_RUN = 0.03

# What is measured beside the library is a yardstick, the library in another way, or a peer.
YARDSTICKS = {"copy", "read", "empty"}
PEERS = {"cudnn": "cuDNN", "cub": "CUB", "pytorch": "PyTorch", "torch.compile": "torch.compile", "torch.compile tuned": "torch.compile, tuned",
         "triton": "Triton", "liger": "Liger", "quack": "quack", "flashinfer": "FlashInfer", "oneflow": "OneFlow", "apex": "Apex",
         "cublas": "cuBLAS", "cublaslt": "cuBLASLt", "flash_attention_2": "FlashAttention-2 of PyTorch", "flash_attn": "flash-attn",
         "flash_attention_3": "FlashAttention-3", "torch": "PyTorch",
         "torch_plain": "PyTorch", "torch_argmax": "PyTorch", "flashinfer_top_p": "FlashInfer", "flashinfer_plain": "FlashInfer"}
# Which of the library's ways a peer is held against, where it is not `kernels`.
OURS = {"decode": "precise"}
SAMPLING = {"torch": "top_k_top_p", "flashinfer": "top_k_top_p", "torch_plain": "plain", "flashinfer_plain": "plain", "torch_argmax": "greedy",
            "flashinfer_top_p": "top_p"}
# Files in the order of a report, and what they hold. What is missing is said.
FILES = {"ceilings": "ceilings of the machine", "softmax": "softmax", "layernorm": "LayerNorm", "rmsnorm": "RMSNorm",
         "elementwise": "elementwise operations", "peers": "PyTorch, torch.compile, Triton and others on rows",
         "elementwise_peers": "PyTorch, torch.compile and Triton, elementwise", "matmul": "products", "matmul_in_eight": "products of 8 bits",
         "decode": "decoding", "attention_peers": "attention in turns with its peers", "prefill": "attention of many queries", "step": "layers of a model", "sampling": "sampling",
         "sampling_peers": "peers of sampling", "router": "routing", "norm_heads": "norms of heads", "host_cost": "time of the host",
         "reference": "peers measured in another run", "llm": "examples/llm on the GPU", "llm_cpu": "examples/llm on the CPU",
         "llm_peers": "transformers with torch.compile", "llm_lookup": "guesses of examples/llm"}

Row = collections.namedtuple("Row", "file op case who us spread label figures error")


def load(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


class Results:
    def __init__(self, directory):
        self.directory = directory
        self.contexts, self.rows, self.unsteady, self.llm, self.missing = {}, [], [], {}, []
        for name in FILES:
            path = os.path.join(directory, name + ".json")
            if not os.path.exists(path):
                self.missing.append(name)
                continue
            data = load(path)
            self.contexts[name] = data.get("context", {})
            if "benchmarks" not in data:
                self.llm[name] = data
                continue
            for row in data["benchmarks"]:
                self.add(name, row)
        # The first file that has a case counts; the others repeat it on another day, or not in turns with peers.
        self.cases, self.in_file = {}, {}
        for row in self.rows:
            people = self.cases.setdefault((row.op, row.case), {})
            if row.who not in people or people[row.who].us is None:
                people[row.who] = row
            self.in_file[row.file, row.op, row.case, row.who] = row

    def add(self, file, row):
        op, _, rest = row["name"].partition("/iterations:")[0].partition("/")
        case, _, who = rest.rpartition("/")
        figures = {key: value for key, value in row.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
        error = row.get("error_message", "failed") if row.get("error_occurred") else None
        one = Row(file, op, case, who, None if error else row["real_time"], row.get("spread", 0.0), row.get("label", ""), figures, error)
        if one.spread > SPREAD:
            self.unsteady.append(one)
        else:
            self.rows.append(one)

    def of(self, op, pattern=""):
        """[(match, {who: row})] of an op's cases that the pattern matches as a whole."""
        found = ((re.fullmatch(pattern, case), people) for (name, case), people in self.cases.items() if name == op)
        return [(match, people) for match, people in found if match]

    def failures(self):
        return [row for row in self.rows if row.error]

    def gpu(self):
        return next((context["gpu"] for context in self.contexts.values() if "gpu" in context), "a machine that the files do not name")


def us(people, who):
    row = people.get(who)
    return None if row is None else row.us


Pair = collections.namedtuple("Pair", "ratio op case peer ours theirs other_run")


def other_run(results, a, b):
    """Whether two files may come from different runs: one names where it is from, or the commands that made them differ."""
    if a == b:
        return False
    contexts = [results.contexts[file] for file in (a, b)]
    commands = {str(context.get("command")).partition(": ")[0] for context in contexts}
    return len(commands) > 1 or any(context.get("provenance") is not None for context in contexts)


def comparisons(results):
    """Every peer beside the library: ratio is its time over ours, so that below 1 it is ahead; worst first."""
    pairs = []
    for (op, case), people in results.cases.items():
        for who, row in people.items():
            if who not in PEERS or row.us is None:
                continue
            own = SAMPLING.get(who, "") if op == "sampling" else OURS.get(op, "kernels")
            beside = results.in_file.get((row.file, op, case, own))
            ours = beside if beside is not None and beside.us else people.get(own)
            if ours is not None and ours.us:
                pairs.append(Pair(row.us / ours.us, op, case, who, ours, row, other_run(results, ours.file, row.file)))
    return sorted(pairs)


def noise_of(pair):
    return max(OTHER_RUN if pair.other_run else NOISE, 2 * (pair.ours.spread + pair.theirs.spread))


def standing(pair):
    return "ahead" if pair.ratio > 1 + noise_of(pair) else "behind" if pair.ratio < 1 - noise_of(pair) else "level"


def roofs(results):
    """The machine's measured ceilings: GB/s of copies and reads, TFLOP/s of products, microseconds of a launch, each with its source."""
    found = {}

    def offer(what, value, source, better=max):
        if value and (what not in found or better(value, found[what][0]) == value and source == found[what][1]):
            found[what] = (value, source)

    if "ceilings" in results.contexts:
        for (op, case), people in results.cases.items():
            for who, row in people.items():
                if op == "ceiling" and row.us:
                    offer(case.partition("/")[0], row.figures.get("GB/s") or row.figures.get("TFLOP/s") or row.us, "ceilings.json", min if case.startswith("launch") else max)
        return found
    for row in results.rows:
        if row.who == "copy" and row.file in ("softmax", "layernorm", "rmsnorm"):
            offer("copy", row.figures.get("GB/s"), "the fastest copy in softmax.json, layernorm.json and rmsnorm.json")
        if row.who == "read" and row.file == "matmul":
            offer("read", row.figures.get("GB/s"), "the fastest read in matmul.json")
        if row.op == "gemm" and row.case.startswith("bf16/") and row.who not in YARDSTICKS:
            offer("matrix", row.figures.get("TFLOP/s"), "the fastest bfloat16 product in matmul.json")
        if row.op == "router" and row.who == "empty":
            offer("launch", row.us, "an empty kernel in a graph, router.json", min)
    return found
