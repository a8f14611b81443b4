"""Measure the rates of the device and the host that this process runs on."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron.core import jit
from megatron.core.distributed.fsdp import contexts_of
from megatron.core.distributed.fsdp.planning import timed_kernels
from megatron.core.optimizer import get_megatron_optimizer
from megatron.training.arguments import Settings, check_command_line
from megatron.training.launch.distributed_init import process_groups
from megatron.training.launch.gpt_config import build_gpt_model
from megatron.training.launch.pretrain import sharded_model
from megatron.training.loop.train_step import StepComputation
from megatron.training.planner.hollow import Operation, is_causal_attention, is_composed, operation, tensors_in
from megatron.training.planner.rank import forward_step
from megatron.training.planner.rates import (
    ATTENTION,
    GEMMS,
    DeviceRates,
    attention_flops,
    gemm_flops,
    kind_of_host_work,
)

_FLAGS = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 1 --train-iters 8 --lr 1e-5 "
    "--lr-decay-style constant --bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--megatron-fsdp-grad-comm-dtype bf16 --use-precision-aware-optimizer --cross-entropy-loss-fusion --mock-data "
    "--tokenizer-type NullTokenizer --transformer-impl local --fsdp-transport nccl --init-model-with-meta-device "
    "--no-check-for-nan-in-loss-and-grad --group-query-attention"
)
_LARGE = (
    "--num-layers 2 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 "
    "--vocab-size 32000 --seq-length 8192 --max-position-embeddings 8192"
)
# The same operations with next to nothing to compute: their time is the host's.
_SMALL = (
    "--num-layers 8 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-query-groups 2 "
    "--vocab-size 512 --seq-length 128 --max-position-embeddings 128"
)
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured."""

    large: str = _LARGE
    """Flags of the model whose operations are timed."""
    steps: int = 6
    """Steps of each model that are timed."""
    gemm_seconds: float = 3.0
    """How long products run in a row: devices slow down when they get warm."""
    sizes: tuple[int, ...] = (8 * _MIB, 128 * _MIB, 436 * _MIB)
    """Bytes of whole buffers of the collectives that are timed."""


SHORT = Effort(large=_SMALL, steps=2, gemm_seconds=0.05, sizes=(2**16, 2**18))
"""For a machine without GPUs, where times are of no use but to test this."""


def calibrate(device: torch.device, effort: Effort | None = None) -> DeviceRates:
    """Measure rates on all ranks of the default process group, which may be one.

    Ranks: all; rank 0's rates are returned on all.
    """
    effort = effort or (Effort() if device.type == "cuda" else SHORT)
    timed = _times(_trained(effort.large, device), effort.steps)
    kernels = _bandwidths(timed)
    products = _sustained(timed, device, effort.gemm_seconds)
    links, link_seconds, contention = _collectives(device, effort)
    rates = DeviceRates(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        memory_nbytes=torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 2**34,
        outside_nbytes=_outside(device),
        workspace_nbytes=96 * _MIB if device.type == "cuda" else 0,
        gemm_flops={"bf16": products, "fp32": products / 8},
        attention_flops=_attention(timed, kernels["default"]),
        memory_bandwidth=kernels,
        host_seconds=_host_seconds(device, effort.steps),
        link_bandwidth=links,
        link_seconds=link_seconds,
        contention=contention,
        measured=f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {dist.get_world_size()} ranks",
    )
    found = [rates]
    dist.broadcast_object_list(found)
    return found[0]


# ---- operations -----------------------------------------------------------------------------------------------------


class _Trained:
    """A model on this rank alone, to be stepped."""

    def __init__(self, settings: Settings, vocab_size: int, device: torch.device) -> None:
        self.device, self.settings = device, settings
        groups = process_groups(settings.distributed, settings.grid)
        build = partial(build_gpt_model, settings.model, vocab_size=vocab_size, device=device, pg_collection=groups)
        self.model = sharded_model(settings, groups, device, build)
        self.optimizer = get_megatron_optimizer(settings.optimizer, [self.model])
        self.computation = StepComputation(
            self.model, self.optimizer, forward_step, num_microbatches=1, per_token_loss=False, device=device
        )
        length = settings.data.seq_length
        ids = torch.randint(0, vocab_size, (1, length), device=device)
        positions = torch.arange(length, device=device).unsqueeze(0)
        mask = torch.ones(1, length, device=device)
        self.batch = {"tokens": ids, "labels": ids.roll(-1, 1), "position_ids": positions, "loss_mask": mask}

    def step(self) -> None:
        self.computation([dict(self.batch)], lambda *_: None)
        self.model.start_param_sync()


def _trained(shape: str, device: torch.device) -> _Trained:
    world_size = dist.get_world_size()
    flags = [*_FLAGS.split(), *shape.split(), "--distributed-backend", "nccl" if device.type == "cuda" else "gloo"]
    flags += ["--global-batch-size", str(world_size)]
    line = check_command_line(flags, world_size=world_size)
    assert line.settings is not None, line.faults
    vocab_size = line.settings.tokenizer.vocab_size
    assert vocab_size is not None
    return _Trained(line.settings, vocab_size, device)


def _times(trained: _Trained, steps: int) -> list[tuple[Operation, float]]:
    """Time each operation of some steps, with a wait for the device in between only at the end of each."""
    for _ in range(4):
        trained.step()
    found: list[tuple[Operation, float]] = []
    for _ in range(steps):
        mode = _Timed(trained.device)
        with mode.everywhere():
            trained.step()
        found += mode.times()
    return found


class _Timed(TorchDispatchMode):
    """A scope that times what it runs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._is_cuda, self._entries, self._inside = device.type == "cuda", list[Any](), 0

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Time operations, and functions that are one kernel as one."""
        call = jit.Fusible.__call__

        def fused(function: jit.Fusible, compiled: bool, first: torch.Tensor, *rest: Any) -> Any:
            return self.fused(function.eager.__name__, call, function, compiled, first, *rest)

        with ExitStack() as stack:
            stack.enter_context(patch.object(jit.Fusible, "__call__", fused))
            for change in timed_kernels(self.fused):
                stack.enter_context(change)
            stack.enter_context(self)
            yield

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types or self._inside or func.is_view or func.namespace != "aten":
            return func(*args, **kwargs)
        if is_composed(types):
            return NotImplemented
        begin = self._now()
        result = func(*args, **kwargs)
        end = self._now()
        given = tensors_in((*args, *kwargs.values()))
        if given:
            causal = is_causal_attention(func, args)
            described = operation(str(func._overloadpacket), given, tensors_in((result,)), is_causal=causal)
            self._entries.append((described, begin, end))
        return result

    def fused(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, as one operation."""
        self._inside += 1
        begin = self._now()
        try:
            with _disable_current_modes():  # torch.compile is not for modes
                result = function(*args, **kwargs)
        finally:
            self._inside -= 1
        given = tensors_in((*args, *kwargs.values()))
        self._entries.append((operation(name, given, tensors_in((result,))), begin, self._now()))
        return result

    def times(self) -> list[tuple[Operation, float]]:
        """Return the operations with their seconds; waits for the device."""
        if not self._is_cuda:
            return [(described, max(end - begin, 1e-9)) for described, begin, end in self._entries]
        torch.cuda.synchronize()
        return [(described, begin.elapsed_time(end) / 1e3) for described, begin, end in self._entries]

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _bandwidths(timed: list[tuple[Operation, float]]) -> dict[str, float]:
    """Return bytes per second by the name of the kernel, and ``default``; of those that take long enough to tell."""
    largest = max(op.nbytes for op, _ in timed if op.name not in GEMMS)
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for op, seconds in timed:
        is_large = op.nbytes * 50 >= largest and op.name != "aten._unsafe_view"  # which moves nothing
        if op.name not in GEMMS and ATTENTION not in op.name and is_large:
            by_name[op.name].append(op.nbytes / seconds)
    found = {name: statistics.median(rates) for name, rates in sorted(by_name.items())}
    return {"default": statistics.median(found.values()), **found}


def _attention(timed: list[tuple[Operation, float]], bandwidth: float) -> dict[str, float]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    for op, seconds in timed:
        if ATTENTION in op.name:
            left = max(seconds - op.nbytes / bandwidth, seconds / 2)  # as ``DeviceRates`` adds them
            found["backward" if op.name.endswith("_backward") else "forward"].append(attention_flops(op) / left)
    return {name: statistics.median(rates) for name, rates in found.items()} or {"forward": 1e12, "backward": 1e12}


def _sustained(timed: list[tuple[Operation, float]], device: torch.device, seconds: float) -> float:
    """Return operations per second of the products of a step, in its shapes, one after the other."""
    shapes = [op for op, _ in timed if op.name == "aten.mm" and len(op.shapes) > 1]
    shapes = sorted(set(shapes), key=gemm_flops)[-8:]
    pairs = [tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in op.shapes[:2]) for op in shapes]
    flops = sum(map(gemm_flops, shapes))
    begin, rounds, rate = time.perf_counter(), 0, 0.0
    while time.perf_counter() - begin < seconds or rounds < 2:
        first = time.perf_counter()
        for _ in range(8 if device.type == "cuda" else 1):
            for left, right in pairs:
                left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rounds += 1
        rate = flops * (8 if device.type == "cuda" else 1) / (time.perf_counter() - first)
    return rate


# How much longer the host is at one kind of operation than at a fused function, on machines that were looked at.
_HOST_SHARES = {"product": 3.6, "fused": 1.0, "small": 0.4, "collective": 0.6, "unit": 5.0}


def _host_seconds(device: torch.device, steps: int) -> dict[str, float]:
    """Return the host's time for an operation, by its kind, with all Python around it: of a model too small to compute."""
    trained = _trained(_SMALL, device)
    for _ in range(4):
        trained.step()
    counter = _Timed(device)
    with counter.everywhere():
        trained.step()
    # Collectives go past the counter: each unit has three.
    units = 3 * len(contexts_of(trained.model.module)[0].units)
    weight = (
        sum(_HOST_SHARES[kind_of_host_work(described)] for described, _ in counter.times())
        + units * _HOST_SHARES["unit"]
    )
    seconds = []
    for _ in range(2 * steps):
        _wait(device)
        begin = time.perf_counter()
        trained.step()
        seconds.append(time.perf_counter() - begin)
    return {kind: share * statistics.median(seconds) / weight for kind, share in _HOST_SHARES.items()}


def _outside(device: torch.device) -> int:
    """Return the bytes that the process has on the device beyond what PyTorch's allocator has reserved."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


# ---- collectives ----------------------------------------------------------------------------------------------------


def _collectives(device: torch.device, effort: Effort) -> tuple[dict[str, float], float, float]:
    """Return bytes of whole buffers per second by collective, their fixed seconds, and how much they slow products."""
    size = dist.get_world_size()
    if size == 1:
        return {"default": 3.3e11}, 4e-5, 0.25
    found: dict[str, float] = {}
    fixed = []
    for name, run in (("c10d._allgather_base_", _gather), ("c10d._reduce_scatter_base_", _reduce)):
        seconds = [_time_of(partial(run, nbytes, device), device) for nbytes in effort.sizes]
        slope = (seconds[-1] - seconds[0]) / (effort.sizes[-1] - effort.sizes[0])
        found[name] = 1 / max(slope, 1e-15)
        fixed.append(max(seconds[0] - effort.sizes[0] * slope, 1e-6))
    return {"default": min(found.values()), **found}, statistics.mean(fixed), _contention(device, effort.sizes[-1])


def _gather(nbytes: int, device: torch.device) -> Callable[[], object]:
    full = torch.empty(nbytes // 2, dtype=torch.bfloat16, device=device)
    shard = full.new_ones(full.numel() // dist.get_world_size())
    return lambda: dist.all_gather_into_tensor(full, shard)


def _reduce(nbytes: int, device: torch.device) -> Callable[[], object]:
    full = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device)
    shard = full.new_empty(full.numel() // dist.get_world_size())
    return lambda: dist.reduce_scatter_tensor(shard, full)


def _time_of(make: Callable[[], Callable[[], object]], device: torch.device, repeats: int = 5) -> float:
    run = make()
    seconds = []
    for _ in range(repeats + 2):
        dist.barrier()
        _wait(device)
        begin = time.perf_counter()
        for _ in range(4):
            run()
        _wait(device)
        seconds.append((time.perf_counter() - begin) / 4)
    return statistics.median(seconds[2:])


def _contention(device: torch.device, nbytes: int) -> float:
    """Return the share by which a product takes longer while weights are gathered beside it."""
    if device.type != "cuda":
        return 0.2
    left = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    gather, beside = _gather(nbytes, device), torch.cuda.Stream(device, priority=-1)

    def products(number: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(number):
            left @ left
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end))

    products(20)
    alone = products(20)
    dist.barrier()
    with torch.cuda.stream(beside):
        for _ in range(64):
            gather()
    together = products(20)
    torch.cuda.synchronize(device)
    return max(0.0, together / alone - 1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
