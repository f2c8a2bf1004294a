"""What the scripts that measure PyTorch share: arguments, the peers that are installed, timing, rows in Google Benchmark's JSON form."""
import argparse
import ctypes
import importlib
import json
import math
import os
import statistics
import sys

import torch

HELD_BACK = 0.97  # replays with a lower clock than this share of their median do not count
TITLES = {"flashinfer": "FlashInfer", "flash_attn": "flash-attn", "liger_kernel": "Liger", "quack": "quack"}
_versions, _absent = {}, []


def found(package, module=None):
    """A peer, or None; that it is not installed is said, and stands in the file."""
    try:
        found = importlib.import_module(module or package)
        _versions[package.partition("_kernel")[0]] = str(getattr(importlib.import_module(package), "__version__", "unknown"))
        return found
    except Exception as error:
        why = "is not installed" if isinstance(error, ModuleNotFoundError) and error.name == package else f"is not installed so that it works: {error}"[:200]
        print(f"{os.path.basename(sys.argv[0])}: {TITLES[package]} {why}", flush=True)
        _absent.append(TITLES[package])
        return None


class Clock:
    """The clock of the multiprocessors in MHz, from the driver's management library; 0 where it does not say."""

    def __init__(self):
        self.device, self.library = ctypes.c_void_p(), None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            uuid = str(torch.cuda.get_device_properties(0).uuid)
            uuid = uuid if uuid.startswith("GPU-") else "GPU-" + uuid
            if library.nvmlInit_v2() == 0 and library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self.device)) == 0:
                self.library = library
        except (OSError, AttributeError):
            pass

    def mhz(self):
        value = ctypes.c_uint()
        works = self.library is not None and self.library.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(value)) == 0
        return value.value if works else 0


_clock = None
_last = {}  # spread, sm_mhz and dropped of what time_us() timed last


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
        _last.clear()
        row.update(measure())
        row.update(_last)
        print("%-60s %8.2f us" % (name, row["real_time"]), flush=True)
    except Exception as error:
        row.update({"error_occurred": True, "error_message": " ".join(str(error).split())[:200]})
        print("%-60s %s" % (name, row["error_message"]), flush=True)
        torch.cuda.synchronize()
    return row


def save(path, rows, **context):
    context = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda, **_versions, "not_installed": _absent, **context}
    with open(path + ".new", "w", encoding="utf-8") as out:
        json.dump({"context": context, "benchmarks": rows}, out, indent=1)
    os.replace(path + ".new", path)


def time_us(calls, at_least, replays=15):
    """Median microseconds of a call: the calls, one for each set of buffers, as a graph that is replayed. Replays whose clock was held back
    do not count."""
    global _clock
    if _clock is None:
        _clock = Clock()
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
        clocks = []
        for event in events[2:-1]:  # while the next replay runs
            event.synchronize()
            clocks.append(_clock.mhz())
        torch.cuda.synchronize()
    least = HELD_BACK * statistics.median(clocks)
    times = [a.elapsed_time(b) * 1e3 / (rounds * len(calls)) for a, b, mhz in zip(events[2:], events[3:], clocks) if mhz >= least]
    middle = statistics.median(times)
    _last.update(spread=statistics.median(abs(t - middle) for t in times) / middle)
    if least:
        _last.update(sm_mhz=statistics.median(clocks), dropped=len(clocks) - len(times))
    return middle
