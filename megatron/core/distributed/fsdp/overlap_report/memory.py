"""Memory of a step as a stack by kind, from a trace's record of allocations."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.distributed.fsdp.overlap_report.trace import BACKWARD, FORWARD, Trace

WEIGHTS, OPTIMIZER, GATHERED, STAGING = "weights", "optimizer", "gathered weights", "gradient staging"
GRADIENTS, ACTIVATIONS, REST = "gradients", "activations", "other"
KINDS = (WEIGHTS, OPTIMIZER, GATHERED, STAGING, GRADIENTS, ACTIVATIONS, REST)
_NUM_POINTS = 400


@dataclass
class KnownMemory:
    """What the engine and the optimizer know of the memory in a step.

    Attributes:
        blocks: {address: (bytes, kind)} of what was there when the step began.
        unknown_nbytes: what else was allocated then.
        named: [(time, address, kind)] of memory that was allocated within the step, known at that time; microseconds of the
            trace's clock.
    """

    blocks: dict[int, tuple[int, str]] = field(default_factory=dict)
    unknown_nbytes: int = 0
    named: list[tuple[float, int, str]] = field(default_factory=list)


@dataclass
class _Block:
    begin: float
    nbytes: int
    kind: str
    end: float = math.inf


def memory_stack(
    events: Iterable[dict[str, Any]], trace: Trace, known: KnownMemory, *, device_type: int, window: tuple[float, float]
) -> dict[str, Any]:
    """Return the bytes of each kind over the window.

    Memory that forward allocates and that is still there when the backward after it begins is activations.

    Args:
        events: those of the trace, in Chrome's format.
        device_type: of the allocations that count, as the profiler numbers them: 0 for the host, 1 for CUDA.

    Returns:
        ``times`` [P] in milliseconds from the window's begin, ``series`` {kind: [P] bytes}, ``peak_ms`` and ``peak`` {kind:
        bytes}, and ``phases`` [(milliseconds, direction)].
    """
    changes = sorted(
        (float(event["ts"]), int(event["args"]["Addr"]), int(event["args"]["Bytes"]))
        for event in events
        if event.get("name") == "[memory]" and int(event["args"]["Device Type"]) == device_type
    )
    blocks = _blocks(changes, trace, known)
    deltas = sorted(
        [(block.begin, block.nbytes, block.kind) for block in blocks if block.begin > -math.inf]
        + [(block.end, -block.nbytes, block.kind) for block in blocks if block.end < math.inf]
    )
    now = dict.fromkeys(KINDS, 0)
    for block in blocks:
        if block.begin == -math.inf:
            now[block.kind] += block.nbytes
    now[REST] = max(now[REST], known.unknown_nbytes)  # what is freed of it was there
    points: list[tuple[float, dict[str, int]]] = [(window[0], dict(now))]
    grain = (window[1] - window[0]) / _NUM_POINTS
    for time, nbytes, kind in deltas:
        now[kind] += nbytes
        is_near = time - points[-1][0] < grain and len(points) > 1
        if is_near and sum(now.values()) <= sum(points[-1][1].values()):
            continue  # of moments close together, the one with most memory is shown
        if is_near:
            points[-1] = (points[-1][0], dict(now))
        else:
            points.append((time, dict(now)))
    points.append((window[1], dict(now)))
    peak = max(points, key=lambda point: sum(point[1].values()))
    return {
        "times": [round((time - window[0]) / 1e3, 4) for time, _ in points],
        "series": {kind: [values[kind] for _, values in points] for kind in KINDS},
        "peak_ms": round((peak[0] - window[0]) / 1e3, 4),
        "peak": peak[1],
        "phases": [(round((time - window[0]) / 1e3, 4), direction) for time, direction in trace.phases],
    }


def _blocks(changes: Sequence[tuple[float, int, int]], trace: Trace, known: KnownMemory) -> list[_Block]:
    """Find the life of each block of memory, and what it is for."""
    alive = {address: _Block(-math.inf, nbytes, kind) for address, (nbytes, kind) in known.blocks.items()}
    blocks = list(alive.values())
    addresses: list[tuple[_Block, int]] = []
    for time, address, nbytes in changes:
        if nbytes > 0:
            block = alive[address] = _Block(time, nbytes, REST)
            blocks.append(block)
            addresses.append((block, address))
        elif address in alive:
            alive.pop(address).end = time
        else:  # of what nobody knew
            blocks.append(_Block(-math.inf, -nbytes, REST, end=time))
    named: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for time, address, kind in known.named:
        named[address].append((time, kind))
    backwards = [time for time, direction in trace.phases if direction == BACKWARD]
    for block, address in addresses:
        names = [kind for time, kind in named[address] if block.begin <= time < block.end]
        if names:
            block.kind = names[0]
        elif trace.direction_at(block.begin) == FORWARD:
            index = bisect.bisect_right(backwards, block.begin)
            if index < len(backwards) and block.end > backwards[index]:
                block.kind = ACTIVATIONS
    return blocks
