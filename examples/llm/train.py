#!/usr/bin/env python3
"""Trains the bundled model: a Llama of 3.7 million parameters that writes stories for small children.

    python3 examples/llm/train.py --train tinystories_train.txt --valid tinystories_valid.txt --out examples/llm/model

The files hold stories, each closed by a line <|endoftext|>. What comes out is a Hugging Face directory: a byte-level BPE tokenizer,
the weights in fp16 and a model card. Training stops when the validation loss no longer falls; the weights with the lowest are
saved. Needs torch, tokenizers and safetensors; one H200 takes about a minute.
"""
import argparse
import copy
import json
import math
import os
import random
import time

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

END = "<|endoftext|>"  # ends each story, and precedes the first one


def read_stories(path):
    with open(path, encoding="utf-8") as file:
        return [story.strip() for story in file.read().split(END) if story.strip()]


def train_tokenizer(stories, pieces):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=pieces, special_tokens=[END], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(stories, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, tokenizer.token_to_id(END))])
    return tokenizer


# ---- the model, with the parameter names of Hugging Face's Llama ----------------------------------------------------

class Norm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config["hidden_size"]))
        self.eps = config["rms_norm_eps"]

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim, hidden = config["head_dim"], config["hidden_size"]
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)

    def forward(self, x, cos, sin):
        def heads(y):
            return y.unflatten(-1, (-1, self.dim)).transpose(1, 2)

        def rope(y):
            first, second = y.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(y.dtype)

        q, k, v = rope(heads(self.q_proj(x))), rope(heads(self.k_proj(x))), heads(self.v_proj(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config, dropout):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(config), Norm(config)
        self.self_attn, self.mlp, self.dropout = Attention(config), Mlp(config), nn.Dropout(dropout)

    def forward(self, x, cos, sin):
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Llama(nn.Module):
    def __init__(self, config, dropout=0.0):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config["vocab_size"], config["hidden_size"]),
            "layers": nn.ModuleList(Layer(config, dropout) for _ in range(config["num_hidden_layers"])),
            "norm": Norm(config)})
        self.dropout = nn.Dropout(dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config["num_hidden_layers"]) if last else 0.02)

    def forward(self, tokens):
        dim, device = self.config["head_dim"], tokens.device
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, dim, 2, device=device) / dim)
        angles = torch.arange(tokens.shape[1], device=device)[:, None] * frequencies
        x = self.dropout(self.model["embed_tokens"](tokens))
        for layer in self.model["layers"]:
            x = layer(x, angles.cos(), angles.sin())
        return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)  # tied


# ---- training -------------------------------------------------------------------------------------------------------

def autocast(device, fast=True):
    return torch.autocast(device.type, torch.bfloat16, enabled=fast and device.type == "cuda")


def loss_of(model, rows, **how):
    """rows: tokens, -1 where there are none."""
    logits = model(rows[:, :-1].clamp(min=0))
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), ignore_index=-1, **how)


@torch.no_grad()
def validate(model, rows, batch, fast=True):
    """The loss, in nats, over all tokens of all rows."""
    model.eval()
    with autocast(rows.device, fast):
        return sum(loss_of(model, part, reduction="sum").item() for part in rows.split(batch))


class Batches:
    """Rows of `length` tokens, each from the beginning of a story on; the stories are shuffled anew for each pass."""

    def __init__(self, stories, length, batch, device, seed):
        self.stories, self.length, self.batch, self.device, self.random = stories, length, batch, device, random.Random(seed)
        self.steps = sum(map(len, stories)) // (length * batch)

    def __iter__(self):
        order = self.random.sample(self.stories, len(self.stories))
        stream = torch.tensor([token for story in order for token in story], device=self.device)
        starts, at = [], 0
        for story in order:
            if at + self.length < len(stream):
                starts.append(at)
            at += len(story)
        for _ in range(self.steps):
            first = torch.tensor(self.random.choices(starts, k=self.batch), device=self.device)
            yield stream[first[:, None] + torch.arange(self.length + 1, device=self.device)]


def train(model, batches, valid, args):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": args.decay}, {"params": vectors, "weight_decay": 0}],
                                  lr=args.lr, betas=(0.9, 0.98))
    steps = args.steps or args.epochs * batches.steps
    average = copy.deepcopy(model)  # of the weights over the last steps; this is what is validated and saved
    fast = torch.compile(model) if args.compile else model
    best, waited, kept, begin = math.inf, 0, None, time.time()
    step = 0
    while step < steps:
        for rows in batches:
            rate = min(1, (step + 1) / args.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
            for group in optimizer.param_groups:
                group["lr"] = args.lr * rate
            model.train()
            with autocast(rows.device):
                loss = loss_of(fast, rows)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            with torch.no_grad():
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - min(0.99, step / (step + 10)))
            if step % args.every == 0 or step == steps:
                now = validate(average, valid, args.batch) / (valid[:, 1:] >= 0).sum().item()
                print(f"step {step}/{steps}, {time.time() - begin:.0f} s: training loss {loss.item():.4f}, validation loss {now:.4f}", flush=True)
                waited = 0 if now < best else waited + 1
                if now < best:
                    best, kept = now, copy.deepcopy(average.state_dict())
            if step == steps or waited == args.patience:
                model.load_state_dict(kept)
                return step
    return step


@torch.no_grad()
def tell(model, tokenizer, prompt, device):
    model.eval()
    tokens = tokenizer.encode(prompt).ids
    while len(tokens) < model.config["max_position_embeddings"]:
        logits = model(torch.tensor([tokens], device=device))[0, -1].float() / 0.7
        tokens.append(torch.multinomial(logits.softmax(-1), 1).item())
        if tokens[-1] == tokens[0]:
            break
    return tokenizer.decode(tokens)


# ---- the directory --------------------------------------------------------------------------------------------------

CARD = """---
license: cdla-sharing-1.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# A small storyteller

A Llama of {million:.2f} million parameters that writes stories for small children, and nothing else: {layers} layers of {hidden} columns, {heads} query heads
and {kv_heads} key/value heads, a byte-level BPE vocabulary of {pieces:,} tokens, a context of {context} tokens. With it `examples/llm` has something to run on
any machine. It knows no facts, and repeats whatever prejudice its stories have.

**Data.** {stories:,} stories ({megabytes:.1f} MB) from TinyStories (Eldan and Li, [arXiv:2305.07759](https://arxiv.org/abs/2305.07759)), which GPT-3.5 and
GPT-4 wrote; about 2,000 of them were re-cased. The data is under CDLA-Sharing-1.0; these weights are results of its use.

**Training.** `examples/llm/train.py`: AdamW (learning rate {lr}, cosine schedule; weight decay {decay}), dropout {dropout}, batches of {batch} rows of
{context} tokens, {steps:,} steps in {seconds:.0f} seconds on {device}. The weights are an average over training steps, taken where the loss on held-out
stories was lowest, and are stored in fp16.

**Loss** on {valid} held-out stories, each on its own, with the stored weights in fp32: {loss:.4f} nats per token, {bits:.4f} bits per byte of text.
"""


def write(path, model, tokenizer, facts):
    os.makedirs(path, exist_ok=True)
    config = {**model.config, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
              "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "torch_dtype": "float16",
              "bos_token_id": 0, "eos_token_id": 0}

    def write_json(name, value):
        with open(os.path.join(path, name), "w") as file:
            json.dump(value, file, indent=2)
            file.write("\n")

    write_json("config.json", config)
    write_json("generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "do_sample": True, "temperature": 0.7, "top_p": 0.95})
    write_json("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "clean_up_tokenization_spaces": False,
        "model_max_length": model.config["max_position_embeddings"]})
    tokenizer.save(os.path.join(path, "tokenizer.json"))
    weights = os.path.join(path, "model.safetensors")
    save_file({name: value.half().contiguous() for name, value in model.state_dict().items()}, weights, metadata={"format": "pt"})
    os.chmod(weights, 0o644)
    with open(os.path.join(path, "README.md"), "w") as file:
        file.write(CARD.format(**facts))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--train", required=True, help="file of the training stories")
    parser.add_argument("--valid", required=True, help="file of the validation stories")
    parser.add_argument("--out", required=True, help="directory of the model")
    parser.add_argument("--pieces", type=int, default=2048, help="size of the vocabulary")
    parser.add_argument("--epochs", type=int, default=24, help="passes over the training stories, over which the learning rate decays")
    parser.add_argument("--steps", type=int, help="training steps, in place of --epochs")
    parser.add_argument("--batch", type=int, default=32, help="rows per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay")
    parser.add_argument("--dropout", type=float, default=0.2, help="dropout probability")
    parser.add_argument("--warmup", type=int, default=100, help="steps over which the learning rate rises")
    parser.add_argument("--every", type=int, default=50, help="steps between two validations")
    parser.add_argument("--patience", type=int, default=8, help="validations without a lower loss before training stops")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    args = parser.parse_args()

    begin = time.time()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    config = {"vocab_size": args.pieces, "hidden_size": 256, "intermediate_size": 576, "num_hidden_layers": 5, "num_attention_heads": 8,
              "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    length = config["max_position_embeddings"]

    stories, held_out = read_stories(args.train), read_stories(args.valid)
    tokenizer = train_tokenizer(stories, args.pieces)
    end = tokenizer.token_to_id(END)
    assert end == 0, "config.json says so"
    encode = lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(texts)]  # each begins with END
    batches = Batches(encode(stories), length, args.batch, device, args.seed)
    # One held-out story in each row, followed by END.
    valid = torch.full((len(held_out), length + 1), -1)
    text_bytes = 0
    for row, ids, text in zip(valid, encode(held_out), held_out):
        ids = (ids + [end])[:length + 1]
        row[:len(ids)] = torch.tensor(ids)
        text_bytes += len(tokenizer.decode(ids).encode())
    valid = valid.to(device)
    model = Llama(config, args.dropout).to(device)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters, {sum(map(len, batches.stories))} training tokens, prepared in {time.time() - begin:.1f} s", flush=True)

    steps = train(model, batches, valid, args)
    seconds = time.time() - begin
    model.half().float()  # rounded as they are stored
    torch.set_float32_matmul_precision("highest")
    total = validate(model, valid, args.batch, fast=False)
    loss, bits = total / (valid[:, 1:] >= 0).sum().item(), total / math.log(2) / text_bytes
    write(args.out, model, tokenizer, dict(
        million=count / 1e6, layers=config["num_hidden_layers"], hidden=config["hidden_size"], heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"], pieces=args.pieces, context=length, stories=len(stories),
        megabytes=os.path.getsize(args.train) / 1e6, lr=args.lr, decay=args.decay, dropout=args.dropout, batch=args.batch, steps=steps,
        seconds=seconds, device="an " + torch.cuda.get_device_name() if device.type == "cuda" else "a CPU", valid=len(held_out), loss=loss,
        bits=bits))
    print(f"loss {loss:.4f} nats per token, {bits:.4f} bits per byte; {seconds:.0f} s", flush=True)
    for prompt in ("Once upon a time", "One day, a little girl named Sue"):
        print("\n" + tell(model, tokenizer, prompt, device))


if __name__ == "__main__":
    main()
