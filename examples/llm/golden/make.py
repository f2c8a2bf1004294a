#!/usr/bin/env python3
"""Makes the golden files: what Hugging Face transformers computes for a tiny model of each architecture.

    python3 examples/llm/golden/make.py examples/llm/golden

A model's weights are not kept: each element is a small whole number times a power of two, a hash of its place and of its tensor's
name, which the tests make again (tests/llm/golden.h). fp32, fp16 and bf16 hold them exactly. A file has the configuration, the tensors
with their shapes, a text, the logits behind some of its tokens in fp32, and the tokens that follow greedily; how far transformers is off
in bf16 and fp16, against fp64, relative to the largest logit; and, where angles change with the length of the text, what follows over that length.
"""
import json
import os
import sys

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

TINY = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False)


def rope(**fields):
    return {"rope_parameters": {"rope_theta": 10000.0, **fields}}


pairs4 = [1.0, 1.1, 1.3, 1.7]
MODELS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", dict(tie_word_embeddings=True, num_key_value_heads=4, rms_norm_eps=1e-5)),
    "llama_bias": ("llama", dict(attention_bias=True)),
    "llama_linear": ("llama", rope(rope_type="linear", factor=4.0)),
    "llama_dynamic": ("llama", dict(max_position_embeddings=64, **rope(rope_type="dynamic", factor=4.0))),
    "llama_llama3": ("llama", rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)),
    "llama_yarn": ("llama", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama_yarn_plain": ("llama", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, truncate=False, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25)),
    "mistral": ("mistral", dict(sliding_window=8)),
    "mistral_nemo": ("mistral", dict(sliding_window=None, head_dim=16)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2_window": ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "phi3": ("phi3", dict(sliding_window=16)),
    "phi3_long": ("phi3", dict(num_attention_heads=2, num_key_value_heads=1, original_max_position_embeddings=64, sliding_window=None,
                               **rope(rope_type="longrope", partial_rotary_factor=0.5, short_factor=pairs4, long_factor=[2 * x for x in pairs4]))),
    "gemma": ("gemma", dict(head_dim=16, tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh")),
    "gemma2": ("gemma2", dict(head_dim=16, tie_word_embeddings=True, query_pre_attn_scalar=24, sliding_window=8, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)),
    "gemma3": ("gemma3_text", dict(head_dim=16, tie_word_embeddings=True, num_hidden_layers=3, query_pre_attn_scalar=24, sliding_window=8,
                                   layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                                   rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                                                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}})),
    "gpt2": ("gpt2", dict(n_embd=32, n_layer=2, n_head=4, n_positions=256, n_inner=None, tie_word_embeddings=True)),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen2_moe": ("qwen2_moe", dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40, norm_topk_prob=False,
                                    mlp_only_layers=[0])),
    "qwen3_moe": ("qwen3_moe", dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True, head_dim=16)),
}
FIELDS_OF_GPT2 = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def elements(name, shape, scale, offset):
    """offset + scale * n / 128 for whole numbers n from -128 to 127."""
    seed = 14695981039346656037
    for byte in name.encode():
        seed = (seed ^ byte) * 1099511628211 % 2**64
    with np.errstate(over="ignore"):
        x = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xbf58476d1ce4e5b9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94d049bb133111eb)
        x ^= x >> np.uint64(31)
    n = (x >> np.uint64(56)).astype(np.int64) - 128
    return torch.from_numpy((offset + scale * n.astype(np.float64) / 128).astype(np.float32).reshape(shape))


def fill(model, plus_one):
    """Gives every tensor its elements, and returns a list of them with what they are made by."""
    tensors = []
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if value.dim() == 1:
            norm = name.endswith("weight")
            scale, offset = ((0.5, 0.0) if plus_one else (1.0, 1.0)) if norm else (0.5, 0.0)  # bf16 also holds 1 + n / 128
        elif "embed_tokens" in name or "wte" in name:
            scale, offset = (0.125 if model.config.tie_word_embeddings else 1.0), 0.0  # otherwise each token would predict itself
        else:
            cols = value.shape[0 if "c_" in name else -1]
            scale, offset = 2.0 ** round(np.log2(1.5 / np.sqrt(cols))), 0.0
        value.copy_(elements(name, tuple(value.shape), scale, offset))
        tensors.append([name, list(value.shape), scale, offset])
    return tensors


def old_config(config):
    """As transformers 4 wrote it, with rope_theta outside of rope_scaling."""
    out = dict(config)
    parameters = out.pop("rope_parameters", None)
    if parameters is None or "full_attention" in parameters:
        return None
    parameters = dict(parameters)
    out["rope_theta"] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        out["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    kind = parameters.get("rope_type", "default")
    out["rope_scaling"] = None if kind == "default" else parameters
    out["torch_dtype"] = out.pop("dtype", None)
    out.pop("layer_types", None)
    return out


def make_model(kind, config, dtype):
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        tensors = fill(model, kind.startswith("gemma"))
    model.tie_weights()
    return model, tensors


def greedy(model, ids, count):
    out = list(ids)
    for _ in range(count):
        out.append(int(model(torch.tensor([out])).logits[0, -1].argmax()))
    return out[len(ids):]


@torch.no_grad()
def make(name, kind, fields):
    torch.manual_seed(0)
    known = {key: TINY[key] for key in FIELDS_OF_GPT2} if kind == "gpt2" else dict(TINY)
    config = AutoConfig.for_model(kind, **{**known, **fields})
    config._attn_implementation = config._experts_implementation = "eager"
    model, tensors = make_model(kind, config, torch.float32)
    length = 150 if "rope_scaling" in str(fields) or "rope_type" in str(fields) else 40
    ids = [1] + [int(n) for n in (np.arange(length - 1) * 37 + np.arange(length - 1) ** 2 * 11) % 90 + 4]
    # Lengths from one less to two more than a window or the first set of angles.
    edge = fields.get("sliding_window") or fields.get("original_max_position_embeddings")
    marks = sorted({9, length // 2, length - 1} | ({edge - 2, edge - 1, edge, edge + 1} if edge else set()))
    logits_of = lambda model: {mark: model(torch.tensor([ids[:mark + 1]])).logits[0, -1] for mark in marks}
    logits, exact = logits_of(model), logits_of(make_model(kind, config, torch.float64)[0])
    errors = {}
    for dtype in (torch.bfloat16, torch.float16):
        there = logits_of(make_model(kind, config, dtype)[0])
        errors[str(dtype).split(".")[1]] = float(f"{max(float((there[mark].double() - exact[mark]).abs().max() / exact[mark].abs().max()) for mark in marks):.3g}")
    extra = {"over": {"from": edge - 4, "greedy": greedy(model, ids[:edge - 4], 10)}} if "longrope" in str(fields) else {}
    config_json = json.loads(model.config.to_json_string(use_diff=False))
    for field in ("transformers_version", "_name_or_path", "id2label", "label2id", "task_specific_params"):
        config_json.pop(field, None)
    return {
        "made_with": "transformers " + transformers.__version__, "config": config_json, "old_config": old_config(config_json), "tensors": tensors, "ids": ids,
        "logits": [{"at": mark, "values": [float(f"{x:.7g}") for x in values.tolist()]} for mark, values in logits.items()],
        "greedy": greedy(model, ids, 20), "errors": errors, **extra}


def main():
    folder = sys.argv[1]
    for name, (kind, fields) in MODELS.items():
        golden = make(name, kind, fields)
        with open(os.path.join(folder, name + ".json"), "w") as file:
            json.dump(golden, file, separators=(",", ":"))
            file.write("\n")
        spread = max(golden["logits"][-1]["values"]) - min(golden["logits"][-1]["values"])
        print(f"{name}: {len(golden['tensors'])} tensors, logits over a range of {spread:.2f}, errors {golden['errors']}, then {golden['greedy'][:8]} ...", flush=True)


if __name__ == "__main__":
    main()
