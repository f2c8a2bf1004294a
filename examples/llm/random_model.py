#!/usr/bin/env python3
"""Makes a Hugging Face directory of a known shape with random weights, to measure with: `llm bench`.

    python3 examples/llm/random_model.py mistral-7b DIRECTORY
    python3 examples/llm/random_model.py mistral-7b-repeating DIRECTORY

The layers of a repeating model add nothing: the next token depends on the last one alone, so that the output soon repeats itself.
Needs torch. The tokenizer has a token for each byte.
"""
import json
import math
import os
import struct
import sys

import torch

LLAMA = dict(model_type="llama", hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, max_position_embeddings=32768)
SHAPES = {
    "stories-15m": dict(LLAMA, vocab_size=32000, hidden_size=288, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=6, tie_word_embeddings=True, dtype="float16"),
    "gpt2": dict(model_type="gpt2", vocab_size=50257, n_embd=768, n_layer=12, n_head=12, n_positions=1024, dtype="float16"),
    "tinyllama-1.1b": dict(LLAMA, vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, dtype="float16"),
    "llama-3.2-1b": dict(LLAMA, vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64, rope_theta=500000.0,
                         tie_word_embeddings=True, dtype="bfloat16"),
    "qwen3-0.6b": dict(LLAMA, model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
                       rope_theta=1000000.0, tie_word_embeddings=True, dtype="bfloat16"),
    "mistral-7b": dict(LLAMA, model_type="mistral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, sliding_window=None,
                       rope_theta=1000000.0, dtype="float16"),
}


def tensors(c):
    """Names and shapes."""
    if c["model_type"] == "gpt2":
        d = c["n_embd"]
        yield "transformer.wte.weight", (c["vocab_size"], d)
        yield "transformer.wpe.weight", (c["n_positions"], d)
        for i in range(c["n_layer"]):
            at = f"transformer.h.{i}."
            for name, shape in (("attn.c_attn", (d, 3 * d)), ("attn.c_proj", (d, d)), ("mlp.c_fc", (d, 4 * d)), ("mlp.c_proj", (4 * d, d))):
                yield at + name + ".weight", shape
                yield at + name + ".bias", shape[1:]
            for name in ("ln_1", "ln_2"):
                yield at + name + ".weight", (d,)
                yield at + name + ".bias", (d,)
        yield "transformer.ln_f.weight", (d,)
        yield "transformer.ln_f.bias", (d,)
        return
    d, inner, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    dim = c.get("head_dim", d // heads)
    nq, nk = heads * dim, c["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (c["vocab_size"], d)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, shape in (("self_attn.q_proj", (nq, d)), ("self_attn.k_proj", (nk, d)), ("self_attn.v_proj", (nk, d)), ("self_attn.o_proj", (d, nq)), ("mlp.gate_proj", (inner, d)),
                            ("mlp.up_proj", (inner, d)), ("mlp.down_proj", (d, inner)), ("input_layernorm", (d,)), ("post_attention_layernorm", (d,))):
            yield at + name + ".weight", shape
        if c["model_type"] == "qwen3":
            yield at + "self_attn.q_norm.weight", (dim,)
            yield at + "self_attn.k_norm.weight", (dim,)
    yield "model.norm.weight", (d,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], d)


def main():
    shape, folder = sys.argv[1], sys.argv[2]
    repeating = shape.endswith("-repeating")
    config = SHAPES[shape[:-len("-repeating")] if repeating else shape]
    if repeating and config["model_type"] == "gpt2":
        sys.exit("error: gpt2-repeating is not supported")
    os.makedirs(folder, exist_ok=True)
    itself = [*range(ord("!"), ord("~") + 1), *range(0xa1, 0xad), *range(0xae, 0x100)]  # bytes that are their own characters in GPT-2's files
    others = [byte for byte in range(256) if byte not in itself]
    vocabulary = {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}
    files = {"config.json": config, "tokenizer.json": {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}}
    for name, value in files.items():
        with open(os.path.join(folder, name), "w") as file:
            json.dump(value, file)

    header, at = {}, 0
    for name, size in tensors(config):
        bytes_ = math.prod(size) * 2
        header[name] = {"dtype": {"float16": "F16", "bfloat16": "BF16"}[config["dtype"]], "shape": size, "data_offsets": [at, at + bytes_]}
        at += bytes_
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, size in tensors(config):
            norm, nothing = len(size) == 1 and name.endswith("weight"), repeating and ("o_proj" in name or "down_proj" in name)
            values = torch.ones(size, device=device) if norm else torch.randn(size, device=device) * (0 if nothing else 0.02)
            file.write(values.to(getattr(torch, config["dtype"])).view(torch.uint8).cpu().numpy().tobytes())
    print(f"{folder}: {at / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
