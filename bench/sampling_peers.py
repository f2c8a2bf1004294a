#!/usr/bin/env python3
"""PyTorch's and FlashInfer's sampling on the shapes of sampling.cu and in the same way: random logits, CUDA-graph replay, medians. Writes
rows in Google Benchmark's JSON form.

    bench/sampling_peers.py --out sampling_peers.json [--quick]

torch: topk, softmax, a cumulative sum and multinomial; torch_plain: softmax and multinomial; torch_argmax: argmax. Where FlashInfer is
installed, flashinfer: its top-k and top-p sampling from logits, in the order of ours; flashinfer_joint: with both at a time;
flashinfer_top_p: softmax and top-p sampling; flashinfer_plain: sampling from logits. Exit status 77: PyTorch or the GPU is missing.
"""
import sys

try:
    import torch
except ImportError as error:
    print(f"sampling_peers.py: {error.name} is not installed", file=sys.stderr)
    sys.exit(77)
from torch_timing import arguments, found, row_of, save, time_us


def top_k_top_p(logits):
    values, ids = torch.topk(logits / 0.8, 50)
    probabilities = torch.softmax(values, -1)
    probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities >= 0.9, 0.0)
    # multinomial() itself, without its checks, which wait for the GPU.
    return ids.gather(-1, torch.argmax(probabilities / torch.empty_like(probabilities).exponential_(1.0), -1, keepdim=True))


def plain(logits):
    probabilities = torch.softmax(logits, -1)
    return torch.argmax(probabilities / torch.empty_like(probabilities).exponential_(1.0), -1)


def main():
    options = arguments(__doc__, "a few shapes only")
    calls = {"torch": top_k_top_p, "torch_plain": plain, "torch_argmax": lambda logits: torch.argmax(logits, -1)}
    flashinfer = found("flashinfer")
    if flashinfer:
        # With numbers for the seed, as a generator's state cannot be read while a graph is captured.
        seed = {"seed": 1, "offset": 0}
        sampling = flashinfer.sampling
        both = sampling.top_k_top_p_sampling_from_logits
        calls["flashinfer"] = lambda logits: both(logits / 0.8, 50, 0.9, **seed)
        calls["flashinfer_joint"] = lambda logits: both(logits / 0.8, 50, 0.9, filter_apply_order="joint", **seed)
        calls["flashinfer_top_p"] = lambda logits: sampling.top_p_sampling_from_probs(torch.softmax(logits / 0.33, -1), 0.9, **seed)
        calls["flashinfer_plain"] = lambda logits: sampling.sampling_from_logits(logits, **seed)
    rows = []
    for count in (1, 64) if options.quick else (1, 8, 64, 256):
        sets = max(1, -(-(240 << 20) // (4 * count * 128256)))
        logits = [torch.randn(count, 128256, device="cuda") for _ in range(sets)]
        for who, call in calls.items():
            rows.append(row_of(f"sampling/fp32/{count}x128256/{who}",
                               lambda: {"real_time": time_us([lambda x=x: call(x) for x in logits], 8, replays=9)}))
        save(options.out, rows)


if __name__ == "__main__":
    main()
