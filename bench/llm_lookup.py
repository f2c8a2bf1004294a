#!/usr/bin/env python3
"""What guesses from the text (`llm generate --lookup`) gain where a text repeats itself, and cost where it does not.

    bench/llm_lookup.py --llm build/examples/llm/llm [--device gpu|cpu] [--models DIRECTORY] [--out FILE] [MODEL ...]

Of models with random weights whose layers add nothing (examples/llm/random_model.py), the most likely tokens soon go around in a
circle, so that nearly all guesses are right; drawn tokens do not repeat themselves, and there is nothing to guess. The bundled model's
story about what the prompt says lies between. Writes llm_lookup.json to bench/results/<gpu>.
"""
import argparse
import datetime
import json
import os
import subprocess
import sys

from llm import HERE, finish, model_directory

PROMPT = "Once upon a time there was a little girl who lived near a forest with her mother. "
TEXTS = {"most likely tokens": ["--temperature", "0"], "drawn tokens": ["--temperature", "1", "--top-k", "0", "--top-p", "1"]}
GUESSES, TOKENS = (0, 3, 7, 15), 256


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", required=True, help="the program")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--models", default="/tmp/models", help="where models are, or are made")
    parser.add_argument("--out", help="the JSON file")
    parser.add_argument("cases", nargs="*", default=["mistral-7b-repeating", "llama-3.2-1b-repeating", "bundled"], metavar="MODEL")
    given = parser.parse_args()

    results, failed, device = [], [], given.device
    print(f"{'model':22} {'text':20} {'guesses':>7} {'tokens/s':>9} {'a step':>7} {'us a step':>10}  same text")
    for model in given.cases:
        for text, options in TEXTS.items():
            alone = None
            for guesses in GUESSES:
                run = subprocess.run([given.llm, "generate", "--model", model_directory(model, given.models), "--device", given.device,
                                      "--context", "1024", "-p", PROMPT, "-n", str(TOKENS), "--ignore-eos", "--seed", "1", "--lookup", str(guesses),
                                      "--json", *options], capture_output=True, text=True)
                if run.returncode != 0:
                    failed.append(f"{model}: {run.stderr.strip().splitlines()[-1] if run.stderr.strip() else run.returncode}")
                    continue
                out = json.loads(run.stdout)
                device, ids, steps, seconds = out["device"], out["texts"][0]["ids"], out["steps"], out["decode_seconds"]
                alone = alone or ids
                one = {"model": model, "text": text, "guesses": guesses, "tokens": len(ids), "steps": steps, "seconds": seconds,
                       "same_text": ids == alone}
                results.append(one)
                print(f"{model:22} {text:20} {guesses:7} {(len(ids) - 1) / seconds:9.1f} {(len(ids) - 1) / steps:7.2f} "
                      f"{1e6 * seconds / steps:10.1f}  {one['same_text']}", flush=True)

    slug = device.split(",")[0].replace("NVIDIA ", "").lower().replace(" ", "-") if given.device == "gpu" else "cpu"
    out = given.out or os.path.join(HERE, "results", slug, "llm_lookup.json")
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    finish(out, {"context": {"date": date, "device": device, "command": "bench/llm_lookup.py " + " ".join(sys.argv[1:])}, "results": results}, failed)


if __name__ == "__main__":
    main()
