"""Clocks on a GPU, and what launches and graphs cost on it. Nothing here captures the workload.

The GPU time of a call is taken without its launches: the call is queued behind a kernel that only waits, and timed by
events once the host has issued everything. A call that synchronises, or that is longer than the launch queue, outlives
the wait while it is being issued; that is seen, and no such time is given.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bucketgraph.doctor.predict import DeviceCosts, Saving, Times

Run = Callable[[], object]
_ROUND_S = 0.1  # a round of calls in a row
_LONGEST_WAIT_MS = 2000.0
_CHAIN = 200  # kernels in the tiny graph
_LONGER = 1 << 22  # floats: a kernel of some microseconds in the L2 cache


def times(call: Run, device: torch.device) -> Times:
    """Of a call that was run before. On a CPU, the wall time alone."""
    rounds = in_a_row(call, device)
    eager = statistics.median(rounds)
    spread = (max(rounds) - min(rounds)) / eager
    if device.type != "cuda":
        return Times(eager, eager, None, spread)
    host = statistics.median(issue(call, device) for _ in range(5))
    return Times(eager, host, queued(call, device, host), spread)


def in_a_row(call: Run, device: torch.device, rounds: int = 7) -> list[float]:
    """Milliseconds of one of many calls in a row, each round ended by waiting for the device."""
    once = _row(call, device, 1)
    count = max(1, min(1000, int(1e3 * _ROUND_S / max(once, 1e-3))))
    return [_row(call, device, count) for _ in range(rounds)]


def _row(call: Run, device: torch.device, count: int) -> float:
    _sync(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    _sync(device)
    return 1e3 * (time.perf_counter() - began) / count


def issue(call: Run, device: torch.device) -> float:
    """Milliseconds until the call returns, on an idle GPU."""
    _sync(device)
    began = time.perf_counter()
    result = call()
    ended = time.perf_counter()
    _sync(device)
    del result
    return 1e3 * (ended - began)


def queued(call: Run, device: torch.device, host_ms: float, rounds: int = 5) -> float | None:
    """GPU time of a call whose work was all queued before it started, in ms; None where it cannot be queued."""
    wait = 2.0 * host_ms + 2.0
    if wait > _LONGEST_WAIT_MS:
        return None
    found = []
    with torch.cuda.device(device):
        cycles = int(wait * cycles_per_ms())
        waited, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for turn in range(rounds + 1):
            torch.cuda.synchronize()
            torch.cuda._sleep(cycles)
            waited.record()
            result = call()
            in_time = not waited.query()  # the GPU still waits: nothing of the call has started
            done.record()
            torch.cuda.synchronize()
            del result
            if not in_time:
                return None
            if turn:
                found.append(float(waited.elapsed_time(done)))
    return statistics.median(found)


def cycles_per_ms() -> float:
    """Of `torch.cuda._sleep`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = []
    for _ in range(3):
        start.record()
        torch.cuda._sleep(2_000_000)
        end.record()
        torch.cuda.synchronize()
        rates.append(2_000_000 / max(float(start.elapsed_time(end)), 1e-3))
    return max(rates)  # the clock may be rising: rather wait too long


def tiny(device: torch.device, size: int = 1) -> tuple[Tensor, Run]:
    """A tensor, and a chain of small kernels on it, each of which waits for the one before."""
    x = torch.zeros(size, device=device)

    def chain() -> None:
        for _ in range(_CHAIN):
            x.add_(1.0)

    return x, chain


def calibrate(device: torch.device) -> DeviceCosts:
    """Costs of launches and nodes on this device, from graphs of `_CHAIN` kernels; takes about a second."""
    with torch.cuda.device(device), torch.no_grad():
        stream = torch.cuda.Stream(device)
        x, short = tiny(device)
        _, longer = tiny(device, _LONGER)
        for chain in (short, longer):
            chain()
        host = statistics.median(issue(short, device) for _ in range(5))
        graph, recorded = _captured(short, stream)
        one, recorded_one = _captured(lambda: x.add_(1.0), stream)
        replay, replay_one = (1e3 * statistics.median(issue(g.replay, device) for _ in range(20)) for g in (graph, one))
        other, _ = _captured(longer, stream)
        savings = tuple(_saving(chain, g, device, host) for chain, g in ((short, graph), (longer, other)))
        node = savings[0].kernel_us - savings[0].saved_us
        more = max(0.0, recorded - recorded_one - host) / (_CHAIN - 1)
        costs = DeviceCosts(
            node_us=node,
            launch_us=1e3 * host / _CHAIN,
            replay_us=replay_one,
            replay_node_us=max(0.0, replay - replay_one) / (_CHAIN - 1),
            capture_ms=recorded_one,
            capture_node_us=1e3 * more,
            tiny_us=node,
            savings=savings,
            measured=True,
        )
        torch.cuda.synchronize()
    return costs


def _saving(chain: Run, graph: torch.cuda.CUDAGraph, device: torch.device, host: float) -> Saving:
    in_stream = queued(chain, device, host)
    in_graph = statistics.median(in_a_row(graph.replay, device, rounds=3)) * 1e3 / _CHAIN
    each = in_graph if in_stream is None else 1e3 * in_stream / _CHAIN
    return Saving(each, max(0.0, each - in_graph))


def _captured(run: Run, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, float]:
    """A graph, and the milliseconds that its capture took, the shorter of two."""
    found: list[tuple[torch.cuda.CUDAGraph, float]] = []
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    gc.collect()
    for _ in range(2):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        began = time.perf_counter()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            run()
            graph.capture_end()
        found.append((graph, 1e3 * (time.perf_counter() - began)))
        graph.replay()
        torch.cuda.synchronize()
    return found[-1][0], min(took for _, took in found)


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
