#!/usr/bin/env python3
"""Decoding by transformers with torch.compile, on the same directories that bench/llm.py measures.

    bench/llm_peers.py [--out FILE] DIRECTORY ...

A text of 120 random tokens goes on for 128, with a static cache, which transformers compiles with CUDA graphs. The time of the prompt is in
it, as generate() does both; the best of three. Needs torch and transformers.
"""
import argparse
import os
import sys
import time

import torch
import transformers

from llm import finish

PROMPT, STEPS = 120, 128


def measure(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").cuda().eval()
    ids = torch.randint(0, 256, (1, PROMPT), device="cuda")
    how = dict(max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, cache_implementation="static", pad_token_id=0)
    seconds = []
    for i in range(5):  # the first two compile
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        torch.cuda.synchronize()
        if out.shape[1] != PROMPT + STEPS:
            raise RuntimeError(f"{out.shape[1] - PROMPT} tokens instead of {STEPS}")
        if i >= 2:
            seconds.append(time.perf_counter() - begin)
    return STEPS / min(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="a JSON file")
    parser.add_argument("directories", nargs="+")
    given = parser.parse_args()
    results, failed = {}, []
    for path in given.directories:
        name = os.path.basename(os.path.normpath(path))
        try:
            results[name] = measure(path)
            print(f"{name:28} {results[name]:10.1f} tokens/s", flush=True)
        except Exception as error:  # one model that cannot be measured does not stop the others
            failed.append(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        torch.cuda.empty_cache()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__, "command": "bench/llm_peers.py " + " ".join(sys.argv[1:])}
    finish(given.out, {"context": about, "tokens_per_s": results, "failed": failed}, failed)


if __name__ == "__main__":
    main()
