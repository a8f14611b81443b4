"""One rank of a run, built and stepped by the run's own code without devices and without other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.distributed.fsdp import FsdpContext, contexts_of, no_garbage_collection
from megatron.core.distributed.fsdp.planning import peer_copy_nbytes, storages_by_kind
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.rank_grid import RankGrid
from megatron.core.tensor_parallel.random import rng_tracker_of, seed_streams
from megatron.training.arguments import Settings
from megatron.training.launch.distributed_init import process_groups
from megatron.training.launch.gpt_config import build_gpt_model
from megatron.training.launch.pretrain import pipeline_stage, sharded_model
from megatron.training.loop.stage_forward import Batch, has_output_layer
from megatron.training.loop.train_step import StepComputation
from megatron.training.planner import fp8_layers
from megatron.training.planner.hollow import HollowMode
from megatron.training.planner.stand_ins import on_hollow_device
from megatron.training.planner.timeline import STEP_END, Event, Microbatch, RecordingStreams

_CPU = torch.device("cpu")
_MOST_SAMPLES = 48


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one step of a rank takes, from the second on.

    Attributes:
        rank: which rank of the run.
        at_rest: bytes between steps, by kind.
        at_peak: bytes when memory is fullest, by kind.
        over_time: bytes by kind from the begin to the end of a step, at most so often as ``_MOST_SAMPLES`` says.
        peak_nbytes: their sum.
        first_peak_nbytes: the fullest from the construction of the model to the end of the second step, which adopts the engine's plan.
        transport_nbytes: of the transport, where it is peer copy.
        host_nbytes: in the host's memory: optimizer state, activations.
        padding: elements of padding for each element of a weight.
        entries: operations of two steps in a row, and the events between streams.
        num_microbatches: of the step that was run; more of them take as long as its last ones.
        repeats_after: as of ``run_timeline``.
        num_units: of the engine.
    """

    rank: int
    at_rest: Mapping[str, int]
    at_peak: Mapping[str, int]
    over_time: Sequence[Mapping[str, int]] = field(repr=False)
    peak_nbytes: int
    first_peak_nbytes: int
    transport_nbytes: int
    host_nbytes: int
    padding: float
    num_microbatches: int
    repeats_after: int
    num_units: int
    entries: list[Any] = field(repr=False)

    @property
    def most_nbytes(self) -> int:
        """The fullest at any time."""
        return max(self.peak_nbytes, self.first_peak_nbytes)


class Care(Enum):
    """How closely a rank is looked at."""

    ROUGH = "the second step alone, of two microbatches, which begins as if no step had been before"
    STEADY = "a step as all that follow the first ones"
    BY_KIND = "such a step, and what its memory is for"


def record_rank(
    settings: Settings, rank: int = 0, *, vocab_size: int | None = None, care: Care = Care.BY_KIND
) -> RankRecord:
    """Build one rank of a run and run steps on it, without devices, without other ranks, and without allocating.

    Args:
        settings: of the run; ``settings.grid`` says of how many ranks.
            Transports are NCCL's, and layers the local ones where transformer-engine is not installed.
        vocab_size: the tokenizer's; None: the settings name it.
        care: ``at_rest``, ``at_peak`` and ``over_time`` are told ``BY_KIND`` alone.

    Raises:
        RuntimeError: torch.distributed is initialised in this process.
        ValueError: the number of ids is not known.

    Ranks: one process alone.
    """
    vocab_size = vocab_size or settings.tokenizer.vocab_size
    if vocab_size is None:
        raise ValueError("the number of the tokenizer's ids must be known, got none: add --vocab-size")
    transport = settings.ddp.fsdp_transport
    ddp = replace(settings.ddp, fsdp_transport="nccl", use_symm_mem=False, nccl_ub=False)
    settings = replace(settings, ddp=ddp)
    mode = HollowMode()
    with ExitStack() as stack:
        stack.enter_context(no_garbage_collection())  # it takes a fifth of a plan's time
        for change in fp8_layers.stand_ins(mode) if fp8_layers.multiplies_in_fp8(settings) else ():
            stack.enter_context(change)
        if settings.model.transformer.deterministic_mode:
            stack.enter_context(patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True))
        stack.enter_context(_alone(settings.grid, rank))
        stack.enter_context(on_hollow_device(mode, lambda: RecordingStreams(mode.recording)))
        return _Rank(settings, rank, vocab_size, mode, care, transport).record()


@contextmanager
def _alone(grid: RankGrid, rank: int) -> Iterator[None]:
    """Let this process be one rank of many that do not exist: they would say what it says, and what the grid says of them."""
    if dist.is_initialized():
        raise RuntimeError("a plan must be made in a process without process groups, got one that has joined some")

    def all_say_the_same(found: list[Any], value: Any, group: Any = None) -> None:
        lines = _lines_of_others(grid, rank, value)
        for at, other in enumerate(dist.get_process_group_ranks(group)):
            found[at] = value if lines is None else lines[other]

    with ExitStack() as stack:
        dist.init_process_group("fake", rank=rank, world_size=grid.world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        stack.enter_context(patch.object(dist, "all_gather_object", all_say_the_same))
        yield


def _lines_of_others(grid: RankGrid, rank: int, value: Any) -> dict[int, list[int]] | None:
    """Return each rank's tensor-parallel group, if ``value`` is this rank's."""
    if not isinstance(value, list) or rank not in value:
        return None
    for name in ("tp", "expt_tp"):
        lines = grid.groups(name).tolist()
        if value in lines:
            return {other: line for line in lines for other in line}
    return None


class _Samples:
    """Samples of memory at some of the events of a step."""

    def __init__(self, num_events: int) -> None:
        self._stride, self._count = max(1, -(-num_events // _MOST_SAMPLES)), 0
        self.taken: list[dict[str, int]] = []

    def at_event(self, look: Callable[[], dict[str, int]]) -> None:
        """Take a sample, if it is time for one."""
        if self._count % self._stride == 0:
            self.taken.append(look())
        self._count += 1


class _Rank:
    def __init__(
        self, settings: Settings, rank: int, vocab_size: int, mode: HollowMode, care: Care, transport: str
    ) -> None:
        asked, settings = settings, fp8_layers.without_fp8(settings)
        self.settings, self.rank, self.mode, self.care, self.transport = settings, rank, mode, care, transport
        self.ledger = mode.ledger
        groups = process_groups(settings.distributed, settings.grid)

        def build(**stage: int) -> torch.nn.Module:
            model = build_gpt_model(settings.model, vocab_size=vocab_size, device=_CPU, pg_collection=groups, **stage)
            if fp8_layers.multiplies_in_fp8(asked):
                fp8_layers.use_fp8(model, asked)
            return model

        self.model = sharded_model(settings, groups, _CPU, build)
        self.optimizer = get_megatron_optimizer(settings.optimizer, getattr(self.model, "model_chunks", [self.model]))
        stages = settings.grid.pipeline_model_parallel_size
        chunks = settings.model.transformer.virtual_pipeline_model_parallel_size or 1
        # Later ones repeat these. The first stage has as many under way as there are stages, the last one a single one; virtual stages
        # take microbatches by as many as there are ranks in the pipeline.
        is_last = (settings.grid.ranks("pp", rank) or [rank])[-1] == rank
        fewest = 2 if care is Care.ROUGH else 3
        most = 3 * stages if chunks > 1 else fewest if stages == 1 or is_last else stages + 1
        self.num_microbatches = min(settings.batch.num_microbatches, most)
        # A pipeline begins with forwards alone, of which nothing tells what a microbatch takes.
        is_steady = self.num_microbatches == most or (chunks == 1 and (stages == 1 or is_last))
        self.repeats_after = (stages if chunks > 1 else 1) if is_steady else 0
        self.step = StepComputation(
            self.model,
            self.optimizer,
            forward_step,
            num_microbatches=self.num_microbatches,
            per_token_loss=settings.model.transformer.calculate_per_token_loss,
            device=_CPU,
            stage=pipeline_stage(settings, groups, _CPU, settings.batch.micro_batch_size),
        )
        self.width = (
            settings.model.padded_vocab_size(vocab_size) // settings.model.transformer.tensor_model_parallel_size
        )

    def record(self) -> RankRecord:
        # The engine records the first step, the second one adopts its plan, and the third one is as all that follow.
        self._run()
        entries = self.mode.recording.entries
        if self.care is Care.ROUGH:
            entries.append(STEP_END)
        self.mode.recording.is_on = True
        self._run()
        first_peak, at_peak = self.ledger.peak, {}
        samples = _Samples(sum(isinstance(entry, Event) for entry in entries))
        by_kind = self.care is Care.BY_KIND
        if self.care is not Care.ROUGH:
            entries.append(STEP_END)
            at_peak = self._run_to(first_peak if by_kind else None, samples)
        self.mode.recording.is_on = False
        peak = self.ledger.peak
        if by_kind and not at_peak:  # the first steps were fuller than those that follow
            at_peak = self._run_to(peak, _Samples(0))
        reports = [context.describe() for context in self._contexts]
        return RankRecord(
            rank=self.rank,
            at_rest=self._kinds(began=None) if by_kind else {},
            at_peak=at_peak,
            over_time=samples.taken,
            peak_nbytes=peak,
            first_peak_nbytes=first_peak,
            transport_nbytes=self._transport_nbytes(),
            host_nbytes=max(sum(report.host_state for report in reports), self.ledger.host),
            padding=max(sum(report.padding.values()) for report in reports),
            num_microbatches=self.num_microbatches,
            repeats_after=self.repeats_after,
            num_units=sum(len(context.units) for context in self._contexts),
            entries=entries,
        )

    def _run_to(self, nbytes: int | None, samples: _Samples) -> dict[str, int]:
        """Run a step.

        Args:
            nbytes: whether so many are live is looked for; None: nothing is looked for, and no samples are taken.

        Returns:
            The bytes by kind when most are live; none if they are never so many.
        """
        found: list[dict[str, int]] = []
        began = self.ledger.num_births
        self.ledger.restart()
        if nbytes is not None:
            self.ledger.looks_from, self.ledger.at_peak = nbytes, lambda: found.append(self._kinds(began))
            self.mode.recording.at_event = lambda: samples.at_event(lambda: self._kinds(began))
        self._run()
        self.ledger.at_peak = self.mode.recording.at_event = None
        return found[-1] if found else {}

    def _transport_nbytes(self) -> int:
        if self.transport != "peer_copy":
            return 0
        return max(peer_copy_nbytes(context, self.ledger.sizes) for context in self._contexts)

    @property
    def _contexts(self) -> list[FsdpContext]:
        chunks = getattr(self.model, "model_chunks", [self.model])
        return [context for chunk in chunks for context in contexts_of(chunk.module)]

    def _run(self) -> None:
        batch = self.settings.batch.micro_batch_size
        length = self.settings.data.seq_length // self.settings.grid.context_parallel_size
        ids = torch.zeros(batch, length, dtype=torch.int64)
        one: Batch = {
            "tokens": ids,
            "labels": ids.clone(),
            "position_ids": ids.clone(),
            "loss_mask": torch.ones(batch, length),
        }
        trackers = [rng_tracker_of(model) for model, _ in self.step.stages]

        def draw(index: int, chunk: int = 0) -> None:
            if self.mode.recording.is_on and chunk == 0:
                self.mode.recording.entries.append(Microbatch(index))
            seed_streams(index, trackers[chunk])

        self.step((dict(one) for _ in range(self.num_microbatches)), draw)
        self.model.start_param_sync()

    def _kinds(self, began: int | None) -> dict[str, int]:
        """Return the live bytes by kind; ``began``: the number of births when the step began, None between steps."""
        known: dict[int, str] = {}
        for context in self._contexts:
            known |= storages_by_kind(context)
        for states in self._optimizer_states():
            known.setdefault(states.untyped_storage()._cdata, "optimizer state")
        sums: Counter[str] = Counter()
        for key, size in self.ledger.sizes.items():
            sums[known.get(key) or self._kind_of_model(key, began)] += size
        return {kind: size for kind, size in sums.items() if size}

    def _optimizer_states(self) -> Iterator[torch.Tensor]:
        """Yield the local tensors of the optimizer's state."""
        inner = getattr(self.optimizer, "optimizer", None)
        yield from getattr(inner, "state_buffers", ())
        for entries in getattr(inner, "state", {}).values():
            for value in entries.values():
                local = getattr(value, "_local_tensor", value)
                if isinstance(local, torch.Tensor):
                    yield local

    def _kind_of_model(self, key: int, began: int | None) -> str:
        birth = self.ledger.born[key]
        if began is None or birth.number <= began:
            return "other"
        if birth.shape and birth.shape[-1] == self.width:
            return "logits"
        return "workspace of backward" if birth.in_backward else "activations"


def forward_step(batch: Batch, model: torch.nn.Module) -> Any:
    """As ``forward_step`` of pretrain_gpt.py."""
    mask = batch["loss_mask"]
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=mask)
    if not has_output_layer(model):
        return losses
    return (losses.float() * mask).sum(), mask.sum()
