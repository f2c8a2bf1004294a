"""What the scripts that measure PyTorch share: arguments, timing, rows in Google Benchmark's JSON form."""
import argparse
import json
import math
import os
import sys

import torch


def arguments(doc, quick, budget=None):
    """Those of the command line. Without a GPU the script ends with 77."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the JSON file to write")
    parser.add_argument("--quick", action="store_true", help=quick)
    if budget is not None:
        parser.add_argument("--budget", type=float, default=budget, help="seconds after which nothing more is compiled")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"{os.path.basename(sys.argv[0])}: PyTorch finds no GPU", file=sys.stderr)
        sys.exit(77)
    return options


def row_of(name, measure):
    """What measure() returns, as a row. A peer that fails must not end the others: its row says why."""
    row = {"name": name, "run_type": "iteration", "time_unit": "us"}
    try:
        row.update(measure())
        print("%-60s %8.2f us" % (name, row["real_time"]), flush=True)
    except Exception as error:
        row.update({"error_occurred": True, "error_message": " ".join(str(error).split())[:200]})
        print("%-60s %s" % (name, row["error_message"]), flush=True)
        torch.cuda.synchronize()
    return row


def save(path, rows, **context):
    context = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda, **context}
    with open(path, "w", encoding="utf-8") as out:
        json.dump({"context": context, "benchmarks": rows}, out, indent=1)


def time_us(calls, at_least, replays=15):
    """Median microseconds of a call: the calls, one for each set of buffers, as a graph that is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    results = [None] * len(calls)  # kept, so that every set has its own output
    rounds = math.ceil(at_least / len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            calls[0]()
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(rounds):
            for i, call in enumerate(calls):
                results[i] = call()
        graph.capture_end()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 3)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 / (rounds * len(calls)) for a, b in zip(events[2:], events[3:])]
    return sorted(times)[len(times) // 2]
