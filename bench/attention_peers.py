#!/usr/bin/env python3
"""Attention of this library, in turns with PyTorch's kernels, FlashAttention-2 and cuDNN's, and with what is installed of flash-attn,
FlashAttention-3 and FlashInfer, on the shapes of prefill.cu and decode.cu: random numbers, CUDA-graph replay, medians. Writes rows in
Google Benchmark's JSON form.

    bench/attention_peers.py --library build/bench/bench/libattention_calls.so --out attention_peers.json [--quick]

Exit status 77: PyTorch or the GPU is missing.
"""
import ctypes
import importlib.util
import sys

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(f"attention_peers.py: {error.name} is not installed", file=sys.stderr)
    sys.exit(77)
from torch_timing import Graph, arguments, found, in_turns, row_of, save

TOKENS = 16384
E4M3 = torch.float8_e4m3fn
FLASH_ATTENTION_3 = ("flash_attn_interface", "fa3_fwd_interface")  # its own package, and one of its forward calls alone
WHO = {"flash_attention_2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
WITHOUT_E4M3 = (*WHO, "flash_attn")


class OwnCalls:
    """Those of support/attention_calls.cu."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        for name in ("kernels_attention", "kernels_attention_in_8_bits", "kernels_decode"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.kernels_decode_bytes.restype = ctypes.c_int64

    def __call__(self, queries, keys, values, causal):
        batch, count, heads, dim = queries[0].shape
        length, kv_heads, v_dim = values[0].shape[1:]
        in_8_bits = queries[0].dtype == E4M3
        outs = [q.new_empty(batch, count, heads, v_dim, dtype=torch.bfloat16 if in_8_bits else q.dtype) for q in queries]
        if count == 1:
            sizes = (batch, length, heads, kv_heads)
            room = torch.empty(self.library.kernels_decode_bytes(*map(ctypes.c_int64, (batch, heads, kv_heads))), dtype=torch.uint8, device="cuda")
            function, memory, last = self.library.kernels_decode, [room], int(queries[0].dtype == torch.float16)
        elif in_8_bits:
            sizes, function, memory, last = (batch, length, heads, kv_heads), self.library.kernels_attention_in_8_bits, [], int(causal)
        else:
            sizes, function, memory, last = (batch, length, heads, kv_heads, dim, v_dim), self.library.kernels_attention, [], int(causal)

        def call(i):
            pointers = [queries[i], keys[i], values[i], outs[i], *memory]
            wrong = function(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), *(ctypes.c_void_p(x.data_ptr()) for x in pointers),
                             *(ctypes.c_int64(x.numel()) for x in memory), *map(ctypes.c_int64, sizes), ctypes.c_int(last))
            if wrong:
                raise RuntimeError(wrong.decode())
            return outs[i]

        return call


def of_pytorch(who, queries, keys, values, causal):
    """The sets of buffers lie as (batch, positions, heads, columns)."""
    swapped = [[x.transpose(1, 2) for x in tensors] for tensors in (queries, keys, values)]
    attend = torch.nn.functional.scaled_dot_product_attention
    options = {"is_causal": causal, "enable_gqa": queries[0].shape[2] != keys[0].shape[2]}
    return lambda i: attend(*(tensors[i] for tensors in swapped), **options)


def of_flash_attn(module, queries, keys, values, causal):
    if queries[0].shape[1] == 1:
        return lambda i: module.flash_attn_with_kvcache(queries[i], keys[i], values[i], cache_seqlens=keys[i].shape[1])
    scales = {}
    if queries[0].dtype == E4M3:
        one = torch.ones(queries[0].shape[0], keys[0].shape[2], device="cuda")
        scales = {"q_descale": one, "k_descale": one, "v_descale": one}
    return lambda i: module.flash_attn_func(queries[i], keys[i], values[i], causal=causal, **scales)


def of_flashinfer(module, queries, keys, values, causal):
    batch, count, heads, dim = queries[0].shape
    length, kv_heads, dtype = keys[0].shape[1], keys[0].shape[2], queries[0].dtype
    room = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    steps = lambda each: torch.arange(0, batch * each + 1, each, dtype=torch.int32, device="cuda")
    if count == 1:  # its decoding wants pages: a sequence has them one after the other
        page, each = 16, length // 16
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=heads != kv_heads)
        last = torch.full((batch,), page, dtype=torch.int32, device="cuda")
        wrapper.plan(steps(each), torch.arange(batch * each, dtype=torch.int32, device="cuda"), last, heads, kv_heads, dim, page, q_data_type=dtype, kv_data_type=dtype)
        paged = [[x.reshape(batch * each, page, kv_heads, dim) for x in tensors] for tensors in (keys, values)]
        return lambda i: wrapper.run(queries[i].view(batch, heads, dim), (paged[0][i], paged[1][i]))
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(room, "NHD")
    wrapper.plan(steps(count), steps(length), heads, kv_heads, dim, head_dim_vo=values[0].shape[3], causal=causal, q_data_type=dtype, kv_data_type=dtype)
    flat = [[x.reshape(-1, *x.shape[2:]) for x in tensors] for tensors in (queries, keys, values)]
    return lambda i: wrapper.run(*(tensors[i] for tensors in flat))


def people(library):
    """{who: a function that makes a call of a set of buffers}, of those that are there."""
    made = {who: lambda *given, who=who: of_pytorch(who, *given) for who in WHO}
    if library:
        made["kernels"] = OwnCalls(library)
    flash = found("flash_attn")
    if flash:
        made["flash_attn"] = lambda *given: of_flash_attn(flash, *given)
    third = found(next((name for name in FLASH_ATTENTION_3 if importlib.util.find_spec(name)), FLASH_ATTENTION_3[0]))
    if third:
        made["flash_attention_3"] = lambda *given: of_flash_attn(third, *given)
    flashinfer = found("flashinfer")
    if flashinfer:
        made["flashinfer"] = lambda *given: of_flashinfer(flashinfer, *given)
    return made


def prepared(who, make, queries, keys, values, causal, calls):
    """The calls as a graph; what they give must be what PyTorch's own formula gives, for the first sequence and head."""
    with sdpa_kernel(WHO[who] if who in WHO else SDPBackend.MATH):
        call = make(queries, keys, values, causal)
        if who not in WHO:
            got = call(0)
            got = (got[0] if isinstance(got, tuple) else got).reshape(*queries[0].shape[:3], -1)[0, :64, 0].float()
            q, k, v = queries[0][0, :64, 0].float(), keys[0][0, :, 0].float(), values[0][0, :, 0].float()
            logits = q @ k.T * q.shape[-1] ** -0.5
            if causal:
                logits = logits.masked_fill(torch.arange(k.shape[0], device="cuda") > torch.arange(q.shape[0], device="cuda")[:, None], -torch.inf)
            expected = torch.softmax(logits, -1) @ v
            if not (got - expected).abs().max() <= (0.1 if queries[0].dtype == E4M3 else 0.02) * expected.abs().max():
                raise RuntimeError("its result is wrong")
        return Graph([lambda i=i: call(i) for i in range(len(queries))], calls)


def timed(made, queries, keys, values, causal, calls):
    """{who: figures, or why there are none}."""
    graphs, figures = {}, {}
    for who, make in made.items():
        if who in WITHOUT_E4M3 and queries[0].dtype == E4M3:
            continue
        if who == "flash_attention_2" and keys[0].shape[3] != values[0].shape[3]:  # that of PyTorch does not take these
            continue
        try:
            graphs[who] = prepared(who, make, queries, keys, values, causal, calls)
        except Exception as error:
            torch.cuda.synchronize()
            if who != "kernels" and "build does not support" in str(error):  # without this type it is no peer here
                print(f"{who} is left out: {' '.join(str(error).split())[:200]}", flush=True)
                continue
            figures[who] = error.with_traceback(None)  # which would keep all tensors
    return {**figures, **in_turns(graphs, 9)}


def measure(dim, v_dim, heads, kv_heads, length, causal, made, dtype=torch.bfloat16):
    def random(count, dim):
        return torch.randn(TOKENS // length, length, count, dim, device="cuda", dtype=torch.bfloat16).to(dtype)

    operations = 2.0 * TOKENS * length * heads * (dim + v_dim) * (0.5 if causal else 1)
    sets = [(random(heads, dim), random(kv_heads, dim), random(kv_heads, v_dim)) for _ in range(3)]
    figures = timed(made, *map(list, zip(*sets)), causal, 3 if operations > 1e12 else 9)
    for of_one in figures.values():
        if isinstance(of_one, dict):
            of_one["TFLOP/s"] = operations / of_one["real_time"] * 1e-6
    return figures


def measure_decode(dtype, batch, length, heads, kv_heads, made):
    def random(*shape):
        return torch.randn(*shape, 128, device="cuda", dtype=dtype)

    count = max(1, -(-(240 << 20) // (4 * 128 * batch * length * kv_heads)))  # sets of keys and values, beyond the L2 cache in all
    keys, values = ([random(batch, length, kv_heads) for _ in range(count)] for _ in range(2))
    return timed(made, [random(batch, 1, heads)] * count, keys, values, False, 8)


def main():
    options = arguments(__doc__, "a few lengths only", library=True)
    rows, made = [], people(options.library)

    def add(name, measured, own="kernels"):
        def of_one(result):
            if isinstance(result, Exception):
                raise result
            return result

        try:
            figures = measured()
        except Exception as error:
            figures = dict.fromkeys(made, error.with_traceback(None))
        for who, result in figures.items():
            rows.append(row_of(f"{name}/{own if who == 'kernels' else who}", lambda: of_one(result)))
        save(options.out, rows, cudnn=torch.backends.cudnn.version())

    lengths = [512, 2048, 8192] if options.quick else [512, 1024, 2048, 4096, 8192, 16384]
    batches = [(1, 1024), (1, 4096), (1, 16384), (1, 65536), (1, 131072), (8, 4096), (16, 4096), (32, 4096), (16, 8192), (64, 4096), (128, 2048)]
    shapes = [(128, 128, 16, 16)] if options.quick else [(64, 64, 32, 32), (128, 128, 16, 16), (192, 128, 16, 16), (256, 256, 8, 8), (128, 128, 32, 8)]
    kinds = [(torch.float16, "fp16", 8), (torch.bfloat16, "bf16", 8), (torch.float16, "fp16", 32)]
    torch.manual_seed(0)
    with torch.no_grad():
        for dim, v_dim, heads, kv_heads in shapes:
            columns = f"{dim}" if dim == v_dim else f"{dim}-{v_dim}"
            grouped = f"{heads}" if heads == kv_heads else f"{heads}/{kv_heads}"
            for causal in (False, True):
                for length in lengths:
                    add(f"attention/bf16/d{columns}x{grouped}x{length}/{'causal' if causal else 'full'}",
                        lambda: measure(dim, v_dim, heads, kv_heads, length, causal, made))
        for causal in (False, True):
            for length in lengths:
                add(f"attention/fp8-products/d128x16x{length}/{'causal' if causal else 'full'}",
                    lambda: measure(128, 128, 16, 16, length, causal, made, E4M3))
        for dtype, name, kv_heads in kinds[:1] if options.quick else kinds:
            for batch, length in batches[1:5:3] if options.quick else batches:
                add(f"decode/{name}/{batch}x{length},32/{kv_heads},dense",
                    lambda: measure_decode(dtype, batch, length, 32, kv_heads, made), "precise")


if __name__ == "__main__":
    main()
