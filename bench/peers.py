#!/usr/bin/env python3
"""PyTorch, torch.compile, Triton and what is installed of Liger, quack and FlashInfer on the shapes of the row and elementwise benchmarks, in the same way: random data, buffers rotated
beyond the L2 cache, CUDA-graph replay, medians. Writes rows in Google Benchmark's JSON form.

    bench/peers.py --out peers.json [--quick] [--budget SECONDS]

torch.compile runs in its default mode, which is what its users get; "torch.compile tuned" lets Inductor try several
tilings for its kernels (max_autotune_pointwise) on the shapes of --quick. The mode max-autotune-no-cudagraphs would
add a search that takes many seconds for each shape. Nothing is compiled once the budget is spent: what is then
missing is said.
Exit status 77: PyTorch, Triton or the GPU is missing.
"""
import datetime
import math
import os
import sys
import time

BEGIN = time.monotonic()
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(os.cpu_count()))
try:
    import torch
    import triton
    import triton.language as tl
except ImportError as error:
    print(f"peers.py: {error.name} is not installed", file=sys.stderr)
    sys.exit(77)
import torch_timing
from torch_timing import found, time_us

ROWS = 49152
COLS = [32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768]
QUICK = [1024, 4096, 8192, 32768]
ELEMENTWISE = ["gelu", "swiglu"]  # of 16,384 x 16,384
CHANGE_THEIR_INPUT = ["layernorm_residual", "rmsnorm_block_int8"]
SQUARE = 16384
EPS = 1e-5
ROTATION = 4
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


# ---- Triton: one pass, ROWS rows in a program, a row in the registers of its warps ----------------------------------


@triton.jit
def softmax_kernel(x, y, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    at = row * cols + col
    inside = (row < rows) & (col < cols)
    v = tl.load(x + at, inside, other=-float("inf")).to(tl.float32)
    v = tl.exp(v - tl.max(v, axis=1, keep_dims=True))
    v = v / tl.sum(v, axis=1, keep_dims=True)
    tl.store(y + at, v.to(y.dtype.element_ty), inside)


@triton.jit
def layernorm_kernel(x, y, gamma, beta, mean, rstd, rows, cols, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    at = row * cols + col
    inside = (row < rows) & (col < cols)
    v = tl.load(x + at, inside, other=0.0).to(tl.float32)
    m = tl.sum(v, axis=1, keep_dims=True) / cols
    v = tl.where(col < cols, v - m, 0.0)
    r = tl.rsqrt(tl.sum(v * v, axis=1, keep_dims=True) / cols + eps)
    tl.store(mean + row, m, row < rows)
    tl.store(rstd + row, r, row < rows)
    g = tl.load(gamma + col, col < cols, other=0.0).to(tl.float32)
    b = tl.load(beta + col, col < cols, other=0.0).to(tl.float32)
    tl.store(y + at, (v * r * g + b).to(y.dtype.element_ty), inside)


@triton.jit
def rmsnorm_kernel(x, y, gamma, rows, cols, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    at = row * cols + col
    inside = (row < rows) & (col < cols)
    v = tl.load(x + at, inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(v * v, axis=1, keep_dims=True) / cols + eps)
    g = tl.load(gamma + col, col < cols, other=0.0).to(tl.float32)
    tl.store(y + at, (v * r * g).to(y.dtype.element_ty), inside)


@triton.jit
def copy_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n, eviction_policy="evict_first"), at < n, cache_modifier=".cs")


@triton.jit
def gelu_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n).to(tl.float32)
    v = v * tl.sigmoid(1.5957691216 * (v + 0.044715 * v * v * v))
    tl.store(y + at, v.to(y.dtype.element_ty), at < n)


@triton.jit
def swiglu_kernel(x, up, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n).to(tl.float32)
    v = v * tl.sigmoid(v) * tl.load(up + at, at < n).to(tl.float32)
    tl.store(y + at, v.to(y.dtype.element_ty), at < n)


def tilings(op, cols):
    """(rows in a program, block, warps): 8 to 64 elements for each thread."""
    if op in ELEMENTWISE:
        return [(1, block, warps) for block in (1024, 2048, 4096) for warps in (4, 8)]
    block = 1 << (cols - 1).bit_length()
    rows = max(1, 2048 // block)
    warps = [w for w in (1, 2, 4, 8, 16, 32) if 8 <= rows * block / (32 * w) <= 64]
    return [(rows, block, w) for w in warps[-3:]]


class Case:
    def __init__(self, op, dtype, rows, cols):
        self.op, self.dtype, self.rows, self.cols = op, dtype, rows, cols
        self.name = f"{op}/{NAMES[dtype]}/{rows}x{cols}/"
        matrices = {"layernorm_residual": 4, "swiglu": 3, "rmsnorm_block_int8": 3.5}.get(op, 2)
        self.bytes = int(matrices * rows * cols * dtype.itemsize)
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.sets = min(1024, max(1, math.ceil(ROTATION * l2 / self.bytes)))
        self.calls = int(min(20, max(4, 8e9 / self.bytes)))
        torch.cuda.empty_cache()

        def random(*shape):
            return torch.randn(*shape, device="cuda", dtype=dtype)

        # As the C++ programs do, the copy kernel has room for half of the bytes in x and in y.
        self.x_room = [random(int(matrices * rows / 2), cols) for _ in range(self.sets)]
        self.y_room = [random(int(matrices * rows / 2), cols) for _ in range(self.sets)]
        self.x = [t[:rows] for t in self.x_room]
        self.y = [t[:rows] for t in self.y_room]
        self.residual = [random(rows, cols) if matrices > 2 else None for _ in range(self.sets)]  # or the gate's other operand
        self.gamma, self.beta, self.bias = random(cols), random(cols), random(cols)
        self.mean, self.rstd = torch.empty(rows, device="cuda"), torch.empty(rows, device="cuda")
        self.expected = self.reference()

    def each_set(self, call):
        return [lambda i=i: call(i) for i in range(self.sets)]

    def time(self, call, replays=15):
        return time_us(self.each_set(call), self.calls, replays)

    # The op as PyTorch writes it. Also what torch.compile is given.
    def function(self):
        shape = (self.cols,)

        def softmax(x):
            return torch.softmax(x, -1)

        def layernorm(x, gamma, beta):
            return torch.native_layer_norm(x, shape, gamma, beta, EPS)  # y, mean, rstd

        def rmsnorm(x, gamma):
            return torch.nn.functional.rms_norm(x, shape, gamma, EPS)

        def layernorm_residual(x, residual, bias, gamma, beta):
            residual.add_(x + bias)
            return torch.nn.functional.layer_norm(residual, shape, gamma, beta, EPS)

        def rmsnorm_block_int8(x, residual, gamma):
            residual.add_(x)
            y = torch.nn.functional.rms_norm(residual.float(), shape, gamma.float(), EPS)
            y = y * torch.sigmoid(1.702 * y)
            scale = y.abs().amax(-1, keepdim=True) / 127
            return (y / scale).round().to(torch.int8), scale

        def gelu(x):
            return torch.nn.functional.gelu(x, approximate="tanh")

        def swiglu(x, up):
            return torch.nn.functional.silu(x) * up

        return locals()[self.op]

    def arguments(self, i):
        return {"gelu": (self.x[i],),
                "swiglu": (self.x[i], self.residual[i]),
                "softmax": (self.x[i],),
                "layernorm": (self.x[i], self.gamma, self.beta),
                "rmsnorm": (self.x[i], self.gamma),
                "rmsnorm_block_int8": (self.x[i], self.residual[i], self.gamma),
                "layernorm_residual": (self.x[i], self.residual[i], self.bias, self.gamma, self.beta)}[self.op]

    def triton_call(self, tiling):
        rows_each, block, warps = tiling
        grid = (triton.cdiv(self.rows, rows_each),)
        shape = (self.rows, self.cols)
        if self.op in ELEMENTWISE:
            n = self.rows * self.cols
            grid, how = (triton.cdiv(n, block),), dict(BLOCK=block, num_warps=warps)
            if self.op == "gelu":
                return lambda i: gelu_kernel[grid](self.x[i], self.y[i], n, **how)
            return lambda i: swiglu_kernel[grid](self.x[i], self.residual[i], self.y[i], n, **how)
        how = dict(ROWS=rows_each, BLOCK=block, num_warps=warps)
        if self.op == "softmax":
            return lambda i: softmax_kernel[grid](self.x[i], self.y[i], *shape, **how)
        if self.op == "layernorm":
            return lambda i: layernorm_kernel[grid](self.x[i], self.y[i], self.gamma, self.beta, self.mean, self.rstd,
                                                    *shape, EPS, **how)
        if self.op == "rmsnorm":
            return lambda i: rmsnorm_kernel[grid](self.x[i], self.y[i], self.gamma, *shape, EPS, **how)
        return None

    def reference(self):
        """The first rows, in float32."""
        arguments = [None if a is None else (a[:8] if a.dim() == 2 else a).float() for a in self.arguments(0)]
        result = self.function()(*arguments)
        return result[0] if isinstance(result, tuple) else result

    def check(self, result):
        result = result[0] if isinstance(result, tuple) else result
        typical = self.expected.square().mean().sqrt()
        right = (result[:8].float() - self.expected).abs() <= 0.02 * (self.expected.abs() + typical)
        if not right.all():
            raise RuntimeError("its result is wrong")


# ---- What is timed --------------------------------------------------------------------------------------------------


def time_copy(case):
    n = case.x_room[0].numel()

    def call(block):
        kernel = copy_kernel[(triton.cdiv(n, block),)]
        return lambda i: kernel(case.x_room[i], case.y_room[i], n, BLOCK=block, num_warps=block // 1024)

    return min(case.time(call(block)) for block in (2048, 4096, 8192)), ""


def time_eager(case):
    function = case.function()
    return case.time(lambda i: function(*case.arguments(i))), ""


def time_compiled(case, options):
    torch._dynamo.reset()  # else the ninth shape would run uncompiled
    function = torch.compile(case.function(), dynamic=False, fullgraph=True, options=options)
    if case.op not in CHANGE_THEIR_INPUT:
        case.check(function(*case.arguments(0)))
    return case.time(lambda i: function(*case.arguments(i))), ""


def time_triton(case):
    best, best_tiling = math.inf, None
    for tiling in tilings(case.op, case.cols):
        call = case.triton_call(tiling)
        case.y[0].fill_(math.nan)
        call(0)
        case.check(case.y[0])
        us = case.time(call, replays=5)
        if us < best:
            best, best_tiling = us, tiling
    return case.time(case.triton_call(best_tiling)), "rows %d block %d warps %d" % best_tiling


def packages():
    """{who: {op: a call on a set of buffers}}, of those that are installed."""
    made = {}
    if found("liger_kernel", "liger_kernel.ops.rms_norm"):
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.softmax import LigerSoftmaxFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
        made["liger"] = {"softmax": lambda c, i: LigerSoftmaxFunction.apply(c.x[i]),
                         "layernorm": lambda c, i: LigerLayerNormFunction.apply(c.x[i], c.gamma, c.beta, EPS),
                         "rmsnorm": lambda c, i: LigerRMSNormFunction.apply(c.x[i], c.gamma, EPS),
                         "swiglu": lambda c, i: LigerSiLUMulFunction.apply(c.x[i], c.residual[i])}
    quack = found("quack")
    if quack:
        made["quack"] = {"softmax": lambda c, i: quack.softmax(c.x[i]), "rmsnorm": lambda c, i: quack.rmsnorm(c.x[i], c.gamma, eps=EPS)}
    flashinfer = found("flashinfer")
    if flashinfer:
        made["flashinfer"] = {"rmsnorm": lambda c, i: flashinfer.norm.rmsnorm(c.x[i], c.gamma, EPS, out=c.y[i])}
    return made


def time_package(case, call):
    case.check(call(case, 0))
    return case.time(lambda i: call(case, i)), ""


def measure(case, who, how, results):
    copy = results.get(case.name + "copy", {}).get("real_time")

    def measured():
        us, label = how(case)
        return {"label": label, "real_time": us, "GB/s": case.bytes / us * 1e-3, "share_of_copy": copy / us if copy else 1.0}

    results[case.name + who] = torch_timing.row_of(case.name + who, measured)


def main():
    options = torch_timing.arguments(__doc__, "a few shapes only", budget=170)

    # The most telling shapes first, should the budget end the run early.
    ops = ["softmax", "layernorm", "rmsnorm"]
    shapes = [(op, torch.float16, SQUARE, SQUARE) for op in ELEMENTWISE]
    shapes += [(op, torch.float16, ROWS, cols) for cols in QUICK for op in ops + ["layernorm_residual"]]
    if not options.quick:
        shapes += [(op, torch.float16, ROWS, cols) for cols in COLS if cols not in QUICK for op in ops]
    shapes += [(op, torch.bfloat16, ROWS, cols) for cols in QUICK for op in ops]
    shapes += [("rmsnorm_block_int8", torch.bfloat16, 8192, cols) for cols in (1024, 4096, 16384)]

    context = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(["bench/peers.py", *sys.argv[1:]]),
        "triton": triton.__version__,
    }
    results, skipped, installed = {}, [], packages()

    def save():
        torch_timing.save(options.out, list(results.values()), **context)

    torch.manual_seed(0)
    with torch.no_grad():
        for op, dtype, rows, cols in shapes:
            case = None  # lets go of the last one's memory first
            case = Case(op, dtype, rows, cols)
            todo = [("copy", time_copy, False), ("pytorch", time_eager, False)]
            if op not in CHANGE_THEIR_INPUT:
                todo.append(("triton", time_triton, True))
            todo.append(("torch.compile", lambda case: time_compiled(case, {}), True))
            if (cols in QUICK or op in ELEMENTWISE) and dtype == torch.float16:
                tuned = {"max_autotune_pointwise": True}
                todo.append(("torch.compile tuned", lambda case: time_compiled(case, tuned), True))
            for who, calls in installed.items():
                if op in calls:
                    todo.append((who, lambda case, call=calls[op]: time_package(case, call), True))
            for who, how, compiles in todo:
                if compiles and time.monotonic() - BEGIN > options.budget:
                    skipped.append(case.name + who)
                else:
                    measure(case, who, how, results)
            save()
    context["seconds"] = round(time.monotonic() - BEGIN)
    context["skipped_for_time"] = len(skipped)
    save()
    if skipped:
        print(f"peers.py: the budget of {options.budget:.0f} s ended before {len(skipped)}: {', '.join(skipped)}")


if __name__ == "__main__":
    main()
