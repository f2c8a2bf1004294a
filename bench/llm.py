#!/usr/bin/env python3
"""Measures examples/llm on models of known shapes with random weights, and prints a table.

    bench/llm.py --llm build/examples/llm/llm [--device gpu|cpu] [--models DIRECTORY] [--out FILE] [CASE ...]

Each case is one call of `llm bench`, which measures the memory bandwidth in the same process. Models are made in
--models by examples/llm/random_model.py where they are missing (Mistral-7B takes 14.5 GB). Writes llm.json to bench/results/<gpu>.
"""
import argparse
import datetime
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

# Name: the model, and what `llm bench` is told.
GPU = {
    "mistral-7b": ("mistral-7b", ["--context", "20000", "--contexts", "120,4000,16000", "--prompt-tokens", "2048"]),
    "mistral-7b prompt of 16384": ("mistral-7b", ["--context", "20000", "--contexts", "0", "--steps", "8", "--prompt-tokens", "16384"]),
    "mistral-7b fp8": ("mistral-7b", ["--weights", "fp8", "--context", "5000", "--contexts", "120", "--prompt-tokens", "2048"]),
    "mistral-7b int8": ("mistral-7b", ["--weights", "int8", "--context", "5000", "--contexts", "120", "--prompt-tokens", "2048"]),
    "mistral-7b fp8, inputs too": ("mistral-7b", ["--weights", "fp8", "--inputs", "fp8", "--context", "5000", "--contexts", "120", "--prompt-tokens", "2048"]),
    "mistral-7b int8, inputs too": ("mistral-7b", ["--weights", "int8", "--inputs", "int8", "--context", "5000", "--contexts", "120", "--prompt-tokens", "2048"]),
    "mistral-7b int4": ("mistral-7b", ["--weights", "int4", "--context", "5000", "--contexts", "120", "--prompt-tokens", "2048"]),
    "mistral-7b, 8 texts": ("mistral-7b", ["--texts", "8", "--context", "2000", "--contexts", "1000"]),
    "mistral-7b, 32 texts": ("mistral-7b", ["--texts", "32", "--context", "2000", "--contexts", "1000"]),
    "mistral-7b int8, 8 texts": ("mistral-7b", ["--weights", "int8", "--texts", "8", "--context", "2000", "--contexts", "1000"]),
    "mistral-7b int8, 32 texts": ("mistral-7b", ["--weights", "int8", "--texts", "32", "--context", "2000", "--contexts", "1000"]),
    "mistral-7b int4, 8 texts": ("mistral-7b", ["--weights", "int4", "--texts", "8", "--context", "2000", "--contexts", "1000"]),
    "mistral-7b int4, 32 texts": ("mistral-7b", ["--weights", "int4", "--texts", "32", "--context", "2000", "--contexts", "1000"]),
    "llama-3.2-1b": ("llama-3.2-1b", ["--context", "20000", "--contexts", "120,4000,16000", "--prompt-tokens", "2048"]),
    "tinyllama-1.1b": ("tinyllama-1.1b", ["--context", "2048", "--contexts", "120", "--prompt-tokens", "1024"]),
    "qwen3-0.6b": ("qwen3-0.6b", ["--context", "5000", "--contexts", "120", "--prompt-tokens", "1024"]),
    "gpt2": ("gpt2", ["--contexts", "120", "--prompt-tokens", "512"]),
    "bundled": ("bundled", ["--contexts", "0"]),
}
CPU = {
    "tinyllama-1.1b": ("tinyllama-1.1b", ["--context", "512", "--contexts", "64", "--steps", "16"]),
    "tinyllama-1.1b int8": ("tinyllama-1.1b", ["--weights", "int8", "--context", "512", "--contexts", "64", "--steps", "24"]),
    "tinyllama-1.1b int4": ("tinyllama-1.1b", ["--weights", "int4", "--context", "512", "--contexts", "64", "--steps", "32"]),
    "stories-15m": ("stories-15m", ["--contexts", "64", "--steps", "400"]),
    "bundled": ("bundled", ["--contexts", "0", "--steps", "400"]),
}


def model_directory(name, models):
    if name == "bundled":
        return os.path.join(HERE, "..", "examples", "llm", "model")
    path = os.path.join(models, name)
    if not os.path.exists(os.path.join(path, "model.safetensors")):
        script = os.path.join(HERE, "..", "examples", "llm", "random_model.py")
        subprocess.run([sys.executable, script, name, path], check=True, stdout=sys.stderr)
    return path


def finish(out, content, failed):
    """Writes the results, and ends the script: what failed is said, and the exit status is 1."""
    if out:
        os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
        with open(out, "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    sys.exit(1 if failed else 0)


def arguments(about):
    """What scripts that run the program are told."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", required=True, help="the program")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--models", default="/tmp/models", help="where models are, or are made")
    parser.add_argument("--out", help="the JSON file")
    return parser


def run(given, name, command, failed):
    """What the program prints as JSON, or nothing, and why in `failed`."""
    ran = subprocess.run([given.llm, *command], capture_output=True, text=True)
    if ran.returncode == 0:
        return json.loads(ran.stdout)
    failed.append(f"{name}: {ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else ran.returncode}")
    return None


def save(given, script, device, results, failed):
    """Writes the results of a script, and ends it. device: as the program named it, if it ever ran."""
    device = device or given.device
    slug = device.split(",")[0].replace("NVIDIA ", "").lower().replace(" ", "-") if given.device == "gpu" else "cpu"
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    context = {"date": date, "device": device, "command": f"bench/{script}.py " + " ".join(sys.argv[1:])}
    finish(given.out or os.path.join(HERE, "results", slug, script + ".json"), {"context": context, "results": results}, failed)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("cases", nargs="*", help="names of cases; by default all")
    given = parser.parse_args()
    cases = GPU if given.device == "gpu" else CPU
    unknown = [name for name in given.cases if name not in cases]
    if unknown:
        sys.exit(f"error: no case {unknown[0]!r}; there are: {', '.join(cases)}")

    results, failed = [], []
    print(f"{'case':28} {'at':>6} {'tokens/s':>10} {'us/step':>10} {'GB/s':>7} {'bandwidth':>10}")
    for name in given.cases or cases:
        model, options = cases[name]
        command = ["bench", "--model", model_directory(model, given.models), "--device", given.device, "--json", *options]
        if given.device == "cpu":
            command += ["--threads", str(given.threads)]
        one = run(given, name, command, failed)
        if one is None:
            continue
        shown = [part if not part.startswith(given.models) else model for part in command]
        results.append({"case": name, "command": " ".join(["llm", *shown]).replace(os.path.join(HERE, "..", ""), ""), **one})
        if "prompt" in one:
            print(f"{name:28} prompt {one['prompt']['tokens_per_s']:10.0f}   ({one['prompt']['tokens']} tokens, {one['prompt']['tflops']:.1f} TFLOP/s)")
        for at in one["decode"]:
            print(f"{name:28} {at['context']:6} {at['tokens_per_s']:10.1f} {at['microseconds']:10.1f} {at['gb_per_s']:7.0f} {100 * at['share_of_reading']:9.1f}%", flush=True)

    save(given, "llm", results[0]["device"] if results else None, results, failed)


if __name__ == "__main__":
    main()
