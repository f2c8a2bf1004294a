"""How the scripts that measure PyTorch time it."""
import math

import torch


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
