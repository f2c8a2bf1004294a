#!/usr/bin/env python3
"""Draws when the launches of one layer of examples/llm begin and end while it decodes, as measured, and prints the microseconds.

    bench/timeline.py --llm build/examples/llm/llm [--models DIRECTORY] [--context 120] [--kernels DIRECTORY] [--out FILE.svg] [MODEL ...]

Each model decodes under CUPTI (support/trace_kernels.cpp, which is built by the way; CUDA says where CUDA is), and what CUPTI wrote stays in
--kernels as MODEL.csv; a file that is there is drawn as it is, without a GPU. Models are those of bench/llm.py.
"""
import argparse
import collections
import csv
import os
import statistics
import subprocess
import sys

import llm

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = {5: ["qkv", "attend", "residual", "up", "residual"], 7: ["norm", "qkv", "attend", "residual", "norm", "up", "residual"]}


def trace(program, model, models, context, path):
    """Lets the model decode, and writes begin and end of all kernels."""
    cuda = os.environ.get("CUDA", "/usr/local/cuda")
    library = os.path.join(os.path.dirname(os.path.abspath(path)), "trace_kernels.so")
    if not os.path.exists(library):
        source = os.path.join(HERE, "support", "trace_kernels.cpp")
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", f"-I{cuda}/include", f"-I{cuda}/extras/CUPTI/include", source, f"-L{cuda}/lib64",
                        f"-L{cuda}/extras/CUPTI/lib64", "-lcupti", "-o", library], check=True)
    command = [program, "bench", "--model", llm.model_directory(model, models), "--device", "gpu", "--context", str(context + 200), "--contexts", str(context), "--steps", "32",
               "--prompt-tokens", "0"]
    subprocess.run(command, check=True, env=dict(os.environ, CUDA_INJECTION64_PATH=library, TRACE_KERNELS=path), stdout=sys.stderr)


def layer_of(path):
    """[(name, begin, end)] of a layer's launches: medians over all layers of all steps, from the end of the layer before on."""
    with open(path) as file:
        kernels = sorted((int(row["begin"]), int(row["end"]), row["name"]) for row in csv.DictReader(file))
    attends = [i for i, (_, _, name) in enumerate(kernels) if "DecodeBody" in name]
    apart = collections.Counter(b - a for a, b in zip(attends, attends[1:])).most_common(1)[0][0]
    names = STEPS[apart]
    before = names.index("attend")
    times = [[] for _ in names]
    # The first half warms up. The layer behind must be one of the same step.
    for a, b in list(zip(attends, attends[1:]))[len(attends) // 2:]:
        if b - a != apart or a - before - 1 < 0 or a - apart not in attends:
            continue
        zero = kernels[a - before - 1][1]
        for j in range(apart):
            begin, end, _ = kernels[a - before + j]
            times[j].append(((begin - zero) / 1e3, (end - zero) / 1e3))
    return [(name, statistics.median(t[0] for t in some), statistics.median(t[1] for t in some)) for name, some in zip(names, times)]


def draw(layers):
    """An SVG: a panel for each model, a bar for each launch; light until the launch ahead has ended."""
    width, left, row, top = 760, 90, 20, 34
    parts, y = [], 0
    for title, launches in layers:
        whole = launches[-1][2]
        first = min(begin for _, begin, _ in launches)
        scale = (width - left - 80) / (whole - first)
        at = lambda us: left + (us - first) * scale
        parts.append(f'<text x="4" y="{y + 18}" font-weight="bold">{title}: {whole:.1f} us a layer</text>')
        done = 0.0
        for i, (name, begin, end) in enumerate(launches):
            line = y + top + i * row
            ready = min(max(done, begin), end)
            parts.append(f'<text x="4" y="{line + 13}">{name}</text>')
            parts.append(f'<rect x="{at(begin):.1f}" y="{line + 2}" width="{(ready - begin) * scale:.1f}" height="{row - 5}" fill="#b8cfe6"/>')
            parts.append(f'<rect x="{at(ready):.1f}" y="{line + 2}" width="{(end - ready) * scale:.1f}" height="{row - 5}" fill="#2f6ea5"/>')
            parts.append(f'<text x="{at(end) + 4:.1f}" y="{line + 13}">{end - done:.1f} us, {100 * (end - done) / whole:.0f} %</text>')
            done = max(done, end)
        y += top + len(launches) * row + 6
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}" font-family="sans-serif" font-size="12">\n'
            f'<rect width="{width}" height="{y}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", default="build/examples/llm/llm", help="the program")
    parser.add_argument("--models", default="/tmp/models", help="where models are, or are made")
    parser.add_argument("--context", type=int, default=120, help="tokens before those that are decoded")
    parser.add_argument("--kernels", default="/tmp", help="where what CUPTI writes is, or goes")
    parser.add_argument("--out", default=os.path.join(HERE, "..", "docs", "llm_layer.svg"))
    parser.add_argument("names", nargs="*", metavar="MODEL", default=["llama-3.2-1b", "mistral-7b"])
    given = parser.parse_args()
    layers = []
    for model in given.names:
        path = os.path.join(given.kernels, model + ".csv")
        if not os.path.exists(path):
            trace(given.llm, model, given.models, given.context, path)
        launches = layer_of(path)
        layers.append((f"{model}, one text of {given.context} tokens", launches))
        print(f"{model}: {launches[-1][2]:.1f} us a layer")
        done = 0.0
        for name, begin, end in launches:
            print(f"  {name:10} begins {begin:7.1f}, ends {end:7.1f}: {end - done:6.1f} us of the layer, {100 * (end - done) / launches[-1][2]:4.1f} %")
            done = max(done, end)
    with open(given.out, "w") as file:
        file.write(draw(layers))


if __name__ == "__main__":
    main()
