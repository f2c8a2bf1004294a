"""What the scripts that measure PyTorch share: arguments, the peers that are installed, timing, rows in Google Benchmark's JSON form."""
import argparse
import ctypes
import importlib
import importlib.metadata
import json
import math
import os
import statistics
import sys

import torch

HELD_BACK = 0.97  # replays with a lower clock than this share of their median do not count
TITLES = {"flashinfer": "FlashInfer", "flash_attn": "flash-attn", "flash_attn_interface": "FlashAttention-3", "fa3_fwd_interface": "FlashAttention-3", "liger_kernel": "Liger", "quack": "quack"}
_versions, _absent = {}, []


def found(package, module=None):
    """A peer, or None; that it is not installed is said, and stands in the file."""
    try:
        found = importlib.import_module(module or package)
        _versions[package.partition("_kernel")[0]] = version_of(package)
        return found
    except Exception as error:
        why = "is not installed" if isinstance(error, ModuleNotFoundError) and error.name == package else f"is not installed so that it works: {error}"[:200]
        print(f"{os.path.basename(sys.argv[0])}: {TITLES[package]} {why}", flush=True)
        _absent.append(TITLES[package])
        return None


def version_of(package):
    version = getattr(importlib.import_module(package), "__version__", None)
    for distribution in [] if version else importlib.metadata.packages_distributions().get(package, []):
        version = importlib.metadata.version(distribution)
    return str(version or "unknown")


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


def arguments(doc, quick, budget=None, library=False):
    """Those of the command line. Without a GPU the script ends with 77."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the JSON file to write")
    parser.add_argument("--quick", action="store_true", help=quick)
    if budget is not None:
        parser.add_argument("--budget", type=float, default=budget, help="seconds after which nothing more is compiled")
    if library:
        parser.add_argument("--library", help="a shared library of this one's own calls, which are timed beside the others")
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


class Graph:
    """Calls, one for each set of buffers and at least so many in all, as a graph that is replayed."""

    def __init__(self, calls, at_least):
        self.results = [None] * len(calls)  # kept, so that every set has its own output
        rounds = math.ceil(at_least / len(calls))
        self.calls, self.graph = rounds * len(calls), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                calls[0]()
            torch.cuda.synchronize()
            self.graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(rounds):
                for i, call in enumerate(calls):
                    self.results[i] = call()
            self.graph.capture_end()
        torch.cuda.synchronize()


def in_turns(graphs, replays=15):
    """{who: a graph} -> {who: its figures}, of which real_time is the median of a call in microseconds. One replay of each follows the other,
    so that no one has a cooler GPU, or a higher clock, than another. Replays whose clock was held back do not count."""
    global _clock
    if _clock is None:
        _clock = Clock()
    order = list(graphs) * (replays + 2)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        events[0].record()
        for who, event in zip(order, events[1:]):
            graphs[who].graph.replay()
            event.record()
        clocks = []
        for event in events[:-1]:  # as a replay begins
            event.synchronize()
            clocks.append(_clock.mhz())
        torch.cuda.synchronize()
    figures = {}
    for who, graph in graphs.items():
        mine = [i for i in range(2 * len(graphs), len(order)) if order[i] == who]
        clock = statistics.median(clocks[i] for i in mine)
        times = [events[i].elapsed_time(events[i + 1]) * 1e3 / graph.calls for i in mine if clocks[i] >= HELD_BACK * clock]
        middle = statistics.median(times)
        figures[who] = {"real_time": middle, "spread": statistics.median(abs(t - middle) for t in times) / middle}
        if clock:
            figures[who].update(sm_mhz=clock, dropped=len(mine) - len(times))
    return figures


def time_us(calls, at_least, replays=15):
    """Median microseconds of a call, of a graph alone."""
    _last.update(in_turns({"": Graph(calls, at_least)}, replays)[""])
    return _last.pop("real_time")
