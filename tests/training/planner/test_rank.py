"""What a rank takes, recorded without devices: the same bytes as of the engine's real tensors, and as was measured on H200s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import pretrain_gpt
from benchmarks import layouts
from megatron.core.distributed.fsdp import FlatAdamW, contexts_of
from megatron.core.distributed.fsdp.planning import storages_by_kind
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel import linear_function
from megatron.training.arguments import Settings, check_command_line
from megatron.training.launch.distributed_init import process_groups
from megatron.training.launch.pretrain import sharded_model
from megatron.training.loop.train_step import StepComputation
from megatron.training.planner.hollow import Operation
from megatron.training.planner.rank import record_rank
from tests.support.launch import run_ranks
from tests.training.planner.tiny_runs import EXPERTS, TINY

_CPU = torch.device("cpu")
_RUNS = {
    "full sharding, tied, bf16": "--bf16 --data-parallel-sharding-strategy optim_grads_params",
    "gradients, two microbatches, fp32": "--data-parallel-sharding-strategy optim_grads --global-batch-size 8",
    "optimizer alone, bf16 main weights": "--bf16 --data-parallel-sharding-strategy optim --use-precision-aware-optimizer",
    "moments in fewer bits": "--bf16 --data-parallel-sharding-strategy optim_grads_params --use-precision-aware-optimizer "
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
    "no sharding": "--bf16 --data-parallel-sharding-strategy no_shard",
    "experts": f"--bf16 --data-parallel-sharding-strategy optim_grads_params {EXPERTS} --expert-model-parallel-size 2",
}


def _settings(flags: str, world_size: int = 2) -> Settings:
    line = check_command_line(flags.split(), world_size=world_size)
    assert line.settings is not None, line.faults
    return line.settings


_OF_RANKS = ("full sharding, tied, bf16", "experts")
_DEARER = ("no sharding", "optimizer alone, bf16 main weights")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in _DEARER else []) for n in _RUNS if n not in _OF_RANKS]
)
def test_planned_bytes_are_those_of_the_engines_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of the engine's memory between steps, to the byte (in blocks of CUDA's allocator), after three real steps."""
    # On a CPU all weight gradients are written in place, on a device those of large weights: other buffers live together.
    monkeypatch.setattr(linear_function, "IN_PLACE_MIN_NUMEL", 0)
    settings = _settings(f"{TINY} {_RUNS[name]}")
    planned = {k: v for k, v in record_rank(settings).at_rest.items() if k not in ("other", "activations")}
    assert planned == _real_bytes(settings)


def test_a_rank_that_shares_no_weight_has_no_reduce_scatter_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_function, "IN_PLACE_MIN_NUMEL", 0)
    flags = f"{TINY} --bf16 --data-parallel-sharding-strategy optim_grads_params"
    settings = _settings(f"{flags} --global-batch-size 4", world_size=1)
    assert settings.batch.num_microbatches > 1, "a microbatch adds to what another one wrote"
    planned = {k: v for k, v in record_rank(settings).at_rest.items() if k not in ("other", "activations")}
    assert planned == _real_bytes(settings) and "gradient staging" not in planned
    assert "gradient staging" in record_rank(_settings(flags)).at_rest, "two ranks share all weights"


def test_planned_bytes_are_those_of_each_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that exchange what they hold, of which each has a share of its own."""
    monkeypatch.setattr(linear_function, "IN_PLACE_MIN_NUMEL", 0)
    real = run_ranks(2, _bytes_of_runs)
    for rank, runs in enumerate(real):
        for name, found in runs.items():
            settings = _settings(f"{TINY} {_RUNS[name]}")
            at_rest = record_rank(settings, rank).at_rest
            assert {k: v for k, v in at_rest.items() if k not in ("other", "activations")} == found, (name, rank)
    assert [runs.keys() for runs in real] == [set(_OF_RANKS)] * 2


def _bytes_of_runs() -> dict[str, dict[str, int]]:
    linear_function.IN_PLACE_MIN_NUMEL = 0
    return {name: _bytes_of_run(_settings(f"{TINY} {_RUNS[name]}")) for name in _OF_RANKS}


def _real_bytes(settings: Settings) -> dict[str, int]:
    """Train a rank of two with real tensors, whose other rank sends nothing, and return bytes between steps by kind."""
    with _one_of(settings.grid.world_size):
        return _bytes_of_run(settings)


def _bytes_of_run(settings: Settings) -> dict[str, int]:
    groups = process_groups(settings.distributed, settings.grid)
    build = partial(pretrain_gpt.model_provider, settings, 250, _CPU, groups)
    model = sharded_model(settings, groups, _CPU, build)
    optimizer = get_megatron_optimizer(settings.optimizer, [model])
    step = StepComputation(
        model,
        optimizer,
        pretrain_gpt.forward_step,
        num_microbatches=settings.batch.num_microbatches,
        per_token_loss=False,
        device=_CPU,
    )
    ids = torch.zeros(settings.batch.micro_batch_size, settings.data.seq_length, dtype=torch.int64)
    batch = {"tokens": ids, "labels": ids, "position_ids": ids, "loss_mask": torch.ones(ids.shape)}
    for _ in range(3):
        step([dict(batch) for _ in range(settings.batch.num_microbatches)], lambda *_: None)
        model.start_param_sync()
    (context,) = contexts_of(model.module)
    kinds = storages_by_kind(context)
    storages = {}
    for group in context.groups:
        buffers = [group.weights.main.local, group.weights.model.local, group.weights.full.local]
        flats = [group.grads.input.storage.flat, group.grads.main.storage.flat]
        if group.grads.accumulator.storage is not None:
            flats.append(group.grads.accumulator.storage.flat)
        for tensor in (*buffers, *flats):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    assert isinstance(optimizer.optimizer, FlatAdamW)
    shown = [value for entries in optimizer.optimizer.state.values() for value in entries.values()]
    for value in (*optimizer.optimizer.state_buffers, *shown):
        local = getattr(value, "_local_tensor", value)
        if isinstance(local, torch.Tensor) and local.untyped_storage()._cdata not in kinds:
            kinds[local.untyped_storage()._cdata] = "optimizer state"
            storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    sums: Counter[str] = Counter()
    for key, nbytes in storages.items():
        sums[kinds[key]] += -(-nbytes // 512) * 512
    return {kind: nbytes for kind, nbytes in sums.items() if nbytes}


def test_moments_in_fewer_bits_are_fewer_bytes_and_less_traffic() -> None:
    """Of main weights in two halves: 2, 4 and 4 bytes at first, then 2, 2 and 1 with scales, for each parameter."""
    first, second = (record_rank(_settings(f"{TINY} {_RUNS['moments in fewer bits']} {more}")) for more in (_FP32, ""))
    assert 0.5 < second.at_rest["optimizer state"] / first.at_rest["optimizer state"] < 0.55
    traffic = [
        sum(entry.nbytes for entry in rank.entries if getattr(entry, "name", "") == "update_kernel")
        for rank in (first, second)
    ]
    assert 0 < traffic[1] < traffic[0]


_FP32 = "--exp-avg-dtype fp32 --exp-avg-sq-dtype fp32"


@contextmanager
def _one_of(world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


_FP8 = "--transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe delayed"


def test_weights_and_kept_inputs_are_bytes_in_fp8() -> None:
    """With --fp8-param-gather matrices of layers rest as bytes; products and casts are those of FP8 (no transformer-engine is needed)."""
    flags = f"{TINY} --bf16 --data-parallel-sharding-strategy optim_grads_params --use-precision-aware-optimizer"
    plain, cast, gathered = (
        record_rank(_settings(f"{flags} {more}"))
        for more in ("", _FP8, f"{_FP8} --fp8-param-gather --data-parallel-sharding-strategy optim_grads_params")
    )
    matrices = 2 * (64 * (64 + 2 * 64) + 64 * 64 + 3 * 64 * 160)  # elements of both layers'
    assert plain.at_rest["main weights"] == cast.at_rest["main weights"]
    assert gathered.at_rest["model weights"] == pytest.approx(matrices / 2, rel=0.05)  # of two ranks
    assert sum(getattr(entry, "name", "") == "fp8.mm" for entry in gathered.entries) == 2 * 2 * 4 * 3
    assert cast.at_peak["activations"] != plain.at_peak["activations"]
    over_time = [sum(sample.values()) for sample in plain.over_time]
    assert 8 < len(over_time) <= 48 and 0.5 * plain.peak_nbytes < max(over_time) <= plain.peak_nbytes
    assert min(over_time) < max(over_time)


def test_layers_that_stay_in_bf16_are_planned_so() -> None:
    """With --first-last-layers-bf16, of three layers that in the middle alone multiplies in FP8, and rests in it."""
    flags = (
        f"{TINY} --bf16 --num-layers 3 {_FP8.replace('delayed', 'tensorwise')} --fp8-param-gather --use-megatron-fsdp"
    )
    products, nbytes = [], []
    for more in ("", "--first-last-layers-bf16", "--first-last-layers-bf16 --num-layers-at-end-in-bf16 2"):
        rank = record_rank(_settings(f"{flags} {more}"))
        products.append(sum(getattr(entry, "name", "") == "fp8.mm" for entry in rank.entries))
        nbytes.append(rank.at_rest["model weights"])
    assert products == [2 * layers * 4 * 3 for layers in (3, 1, 0)]
    assert nbytes == sorted(set(nbytes))


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("Mamba", "--hybrid-layer-pattern MM --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 16"),
        (
            "gated delta net",
            "--experimental-attention-variant gdn --linear-attention-freq [1,1] --linear-key-head-dim 16 --linear-value-head-dim 16 "
            "--linear-num-key-heads 4 --linear-num-value-heads 8",
        ),
    ],
)
def test_projections_of_layers_with_states_are_planned_in_fp8(kind: str, flags: str) -> None:
    """Two of each layer; a layer of attention besides has an MLP of two."""
    rank = record_rank(_settings(f"{TINY} --bf16 {_FP8} {flags}"))
    linears = 2 if kind == "Mamba" else 4
    assert sum(getattr(entry, "name", "") == "fp8.mm" for entry in rank.entries) == 2 * 2 * linears * 3


def test_fp8_is_planned_with_tensor_parallelism() -> None:
    """Products of bytes, and bytes are gathered over the sequence; gradients of inputs are summed in bf16."""
    flags = f"{TINY} --bf16 --data-parallel-sharding-strategy optim_grads_params --tensor-model-parallel-size 2 --sequence-parallel {_FP8}"
    rank = record_rank(_settings(flags))
    sent: Counter[tuple[str, torch.dtype]] = Counter()
    for entry in rank.entries:
        if isinstance(entry, Operation) and entry.stream == "compute" and (entry.group_size or entry.name == "fp8.mm"):
            sent[entry.name, entry.dtypes[0]] += 1
    # Of two steps, two layers, and four linear layers of which two gather their input, in forward and in backward.
    assert sent["fp8.mm", torch.uint8] == 2 * 2 * 4 * 3
    assert sent["c10d._allgather_base_", torch.uint8] == 2 * 2 * 2 * 2
    assert sent["c10d._reduce_scatter_base_", torch.bfloat16] >= 2 * 2 * 2 * 2


@pytest.mark.slow
def test_planned_peak_of_llama_in_fp8_is_the_measured_one() -> None:
    """benchmarks/results/llama3_8b_fp8_2xh200_2026-11-22.md: 92.9 GiB by the allocator, and 5.6 that other ranks read."""
    shape = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256 --micro-batch-size 1 "
        "--global-batch-size 8 --bf16 --data-parallel-sharding-strategy optim_grads_params --megatron-fsdp-grad-comm-dtype bf16 "
        "--untie-embeddings-and-output-weights --cross-entropy-loss-fusion"
    )
    rank = record_rank(_settings(f"{TINY} {shape} {_FP8} --fp8-param-gather"))
    assert rank.most_nbytes / 2**30 == pytest.approx(98.5, rel=0.03)


# Peak GiB by PyTorch's allocator on 2 x H200: benchmarks/results/layouts_2xh200_2026-11-21.md and experts_2xh200_2026-11-22.md.
_MEASURED = {
    "fsdp": 59.7,
    "hsdp": 109.7,
    "tp2": 63.6,
    "moe": 38.0,
    "moe-ep2": 36.8,
    "moe-ep2-bounded": 39.6,
    "cp2-32k": 62.7,
    "hfsdp": 66.5,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "moe" else pytest.mark.slow) for n in _MEASURED])
def test_planned_peak_is_the_measured_one(name: str) -> None:
    """Peaks of whole training steps, with activations and what backward needs besides, within 1 % of what GPUs took."""
    layout = layouts.LAYOUTS[name]
    model = layouts.MODELS[layout.model][0]
    lengths = f"--seq-length {layout.length} --max-position-embeddings {layout.length}"
    settings = _settings(f"{layouts._COMMON} {model} {layout.flags} {lengths} --global-batch-size 2")
    rank = record_rank(settings)
    assert rank.most_nbytes / 2**30 == pytest.approx(_MEASURED[name], rel=0.01)
    assert sum(rank.at_peak.values()) == rank.peak_nbytes
