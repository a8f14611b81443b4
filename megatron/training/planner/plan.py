"""The plan of a run: memory of its fullest rank, bytes on the wires, and the time of a step, without devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron.core.transformer.attention_patterns import is_linear, window_of_layer
from megatron.core.transformer.hybrid_layers import kind_of_layer
from megatron.core.transformer.moe.moe_layer import has_experts
from megatron.core.transformer.pipeline_layers import stages_of
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import Settings
from megatron.training.planner.rank import Care, RankRecord, record_rank
from megatron.training.planner.rates import DeviceRates
from megatron.training.planner.timeline import StepTime, run_timeline
from megatron.training.telemetry.flops import flops_per_sample


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run takes of one kind of device.

    Attributes:
        settings: of the run.
        rates: of the device.
        ranks: the ranks that were looked at: of the first and of the last pipeline stage, and of those between with other layers.
        times: of their steps, of the microbatches that were run.
        microbatch_seconds: what one more microbatch takes; of a step of one, all of it.
        bubble_seconds: what stages wait for each other in a step.
        flops: of a step, on all devices.
    """

    settings: Settings
    rates: DeviceRates
    ranks: tuple[RankRecord, ...]
    times: tuple[StepTime, ...]
    microbatch_seconds: float
    bubble_seconds: float
    flops: float

    @property
    def fullest(self) -> RankRecord:
        """The rank whose memory is fullest."""
        return max(self.ranks, key=lambda rank: rank.most_nbytes)

    @property
    def slowest(self) -> StepTime:
        """The time of the rank whose step takes longest."""
        whole = [time.total + self._further_seconds(rank) for time, rank in zip(self.times, self.ranks, strict=True)]
        return self.times[whole.index(max(whole))]

    def _further_seconds(self, rank: RankRecord) -> float:
        """Return what the microbatches of a step take that this rank has not run."""
        return (self.settings.batch.num_microbatches - rank.num_microbatches) * self.microbatch_seconds

    @property
    def step_seconds(self) -> float:
        """The whole step: the microbatches that were run, all further ones, and the pipeline's bubble."""
        return self.slowest.total + self.further_seconds + self.bubble_seconds

    @property
    def further_seconds(self) -> float:
        """What the microbatches take that the slowest rank has not run."""
        return self._further_seconds(self.slowest_rank)

    @property
    def slowest_rank(self) -> RankRecord:
        """That rank."""
        return self.ranks[self.times.index(self.slowest)]

    @property
    def device_nbytes(self) -> int:
        """Bytes of the fullest device, with what PyTorch's allocator does not count."""
        return self.peak_nbytes + self.rates.outside_nbytes

    @property
    def peak_nbytes(self) -> int:
        """What PyTorch's allocator would say of the fullest device, ``max_memory_allocated``."""
        return self.fullest.most_nbytes + self.workspace_nbytes

    @property
    def workspace_nbytes(self) -> int:
        """Memory by the allocator that is no tensor's."""
        of_graph = self.rates.graph_nbytes if self.settings.cuda_graph.enabled else 0
        return self.rates.workspace_nbytes + self.fullest.transport_nbytes + of_graph

    @property
    def fits(self) -> bool:
        """True if the devices have that memory."""
        return self.device_nbytes <= self.rates.memory_nbytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and device."""
        settings = self.settings
        tokens = settings.batch.global_batch_size * settings.data.seq_length
        return tokens / self.step_seconds / settings.grid.world_size

    @property
    def flops_per_second(self) -> float:
        """Floating-point operations of the model per second and device."""
        return self.flops / self.step_seconds / self.settings.grid.world_size


def plan_run(
    settings: Settings, rates: DeviceRates, *, vocab_size: int | None = None, care: Care = Care.BY_KIND
) -> RunPlan:
    """Plan a run: build its first rank and, with pipeline stages, its last one and those of other layers, and step them without devices.

    Args:
        settings: of ``check_command_line(..., world_size=N)``.
        vocab_size: the tokenizer's; None: the settings name it.
        care: how closely the ranks are looked at.

    Raises:
        ValueError: the number of the tokenizer's ids is not known.
        RuntimeError: this process has process groups.

    Ranks: one process alone.
    """
    grid, transformer = settings.grid, settings.model.transformer
    vocab_size = vocab_size or settings.tokenizer.vocab_size
    stages = grid.pipeline_model_parallel_size
    numbers = [0] if stages == 1 else [0, *_ranks_between(settings), grid.world_size - 1]
    ranks = tuple(record_rank(settings, number, vocab_size=vocab_size, care=care) for number in numbers)
    # A replay of a captured step launches everything at once, while the step before it runs.
    launch_seconds = (lambda _: 0.0) if settings.cuda_graph.enabled else rates.launch_seconds
    times = tuple(
        run_timeline(
            rank.entries,
            seconds=rates.seconds,
            host_seconds=launch_seconds,
            contention=rates.contention,
            repeats_after=rank.repeats_after,
        )
        for rank in ranks
    )
    # Of a step of one microbatch, nothing tells what a further one takes.
    microbatch = max(time.microbatch or time.total for time in times)
    bubble = (stages - 1) / (transformer.virtual_pipeline_model_parallel_size or 1) * microbatch
    assert vocab_size is not None, "record_rank has checked it"
    return RunPlan(
        settings=settings,
        rates=rates,
        ranks=ranks,
        times=times,
        microbatch_seconds=microbatch,
        bubble_seconds=bubble,
        flops=settings.batch.global_batch_size
        * flops_per_sample(
            transformer,
            seq_length=settings.data.seq_length,
            vocab_size=settings.model.padded_vocab_size(vocab_size),
        ),
    )


def _ranks_between(settings: Settings) -> list[int]:
    """Return a rank of each pipeline stage, but the first and the last one, that has layers which no earlier one has all of.

    Others are no fuller: earlier stages keep more microbatches.
    """
    config = settings.model.transformer
    layers = [Counter[object]() for _ in range(config.pipeline_model_parallel_size)]
    for stage in stages_of(config):
        own = layers[stage.index % len(layers)]
        own.update(_kind_of_layer(config, number + 1) for number in stage.decoder)
        own["multi-token prediction"] += stage.mtp
    pipeline = settings.grid.ranks("pp", 0) or [0]
    seen, found = layers[:1], []
    for rank, own in zip(pipeline[1:-1], layers[1:-1], strict=True):
        if not any(own <= earlier for earlier in seen):
            seen.append(own)
            found.append(rank)
    return found


def _kind_of_layer(config: TransformerConfig, number: int) -> tuple[object, ...]:
    """Return what distinguishes a layer (counted from 1) from others of the model."""
    return (
        has_experts(config, number),
        is_linear(config, number),
        window_of_layer(config, number),
        kind_of_layer(config, number),
    )
