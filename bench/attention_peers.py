#!/usr/bin/env python3
"""PyTorch's attention kernels, FlashAttention-2 and cuDNN's, on the shapes of prefill.cu and decode.cu and in the same way: random numbers,
CUDA-graph replay, medians. Writes rows in Google Benchmark's JSON form.

    bench/attention_peers.py --out attention_peers.json [--quick]

Exit status 77: PyTorch or the GPU is missing.
"""
import sys

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(f"attention_peers.py: {error.name} is not installed", file=sys.stderr)
    sys.exit(77)
from torch_timing import arguments, row_of, save, time_us

TOKENS = 16384
WHO = {"flash_attention_2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def measure(dim, heads, kv_heads, length, causal, who):
    def random(count):
        return torch.randn(TOKENS // length, length, count, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    operations = 4.0 * TOKENS * length * heads * dim * (0.5 if causal else 1)
    sets = [(random(heads), random(kv_heads), random(kv_heads)) for _ in range(3)]
    attend = torch.nn.functional.scaled_dot_product_attention
    options = {"is_causal": causal, "enable_gqa": heads != kv_heads}
    with sdpa_kernel(WHO[who]):
        us = time_us([lambda i=i: attend(*sets[i], **options) for i in range(3)], 3 if operations > 1e12 else 9, replays=9)
    return us, operations / us * 1e-6


def measure_decode(dtype, batch, length, heads, kv_heads, who):
    def random(*shape):
        return torch.randn(*shape, 128, device="cuda", dtype=dtype).transpose(1, 2)

    count = max(1, -(-(240 << 20) // (4 * 128 * batch * length * kv_heads)))  # sets of keys and values, beyond the L2 cache in all
    sets = [(random(batch, length, kv_heads), random(batch, length, kv_heads)) for _ in range(count)]
    query = random(batch, 1, heads)
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(WHO[who]):
        return time_us([lambda i=i: attend(query, *sets[i], enable_gqa=heads != kv_heads) for i in range(count)], 8, replays=9)


def main():
    options = arguments(__doc__, "a few lengths only")
    rows = []

    def add(name, who, measured):
        rows.append(row_of(f"{name}/{who}", measured))

    def attention(*shape):
        us, rate = measure(*shape)
        return {"real_time": us, "TFLOP/s": rate}

    lengths = [512, 2048, 8192] if options.quick else [512, 1024, 2048, 4096, 8192, 16384]
    batches = [(1, 1024), (1, 4096), (1, 16384), (1, 65536), (1, 131072), (8, 4096), (16, 4096), (32, 4096), (16, 8192), (64, 4096), (128, 2048)]
    torch.manual_seed(0)
    with torch.no_grad():
        for dim, heads, kv_heads in [(64, 32, 32), (128, 16, 16), (256, 8, 8), (128, 32, 8)]:
            grouped = f"{heads}" if heads == kv_heads else f"{heads}/{kv_heads}"
            for causal in (False, True):
                for length in lengths:
                    for who in WHO:
                        add(f"attention/bf16/d{dim}x{grouped}x{length}/{'causal' if causal else 'full'}", who,
                            lambda: attention(dim, heads, kv_heads, length, causal, who))
        for dtype, name, kv_heads in [(torch.float16, "fp16", 8), (torch.bfloat16, "bf16", 8), (torch.float16, "fp16", 32)]:
            for batch, length in batches[1:5:3] if options.quick else batches:
                for who in WHO:
                    add(f"decode/{name}/{batch}x{length},32/{kv_heads},dense", who,
                        lambda: {"real_time": measure_decode(dtype, batch, length, 32, kv_heads, who)})
    save(options.out, rows, cudnn=torch.backends.cudnn.version())


if __name__ == "__main__":
    main()
