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
    transformer = settings.model.transformer
    vocab_size = vocab_size or settings.tokenizer.vocab_size
    numbers, of_stages = _looked_at(settings)
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
    of_ranks = [time.microbatch or time.total for time in times]
    # The slowest stage has work all the time but while the first microbatch comes to it, and the last one goes on from it.
    waited = sum(of_ranks[at] for at in of_stages) - max(of_ranks)
    assert vocab_size is not None, "record_rank has checked it"
    return RunPlan(
        settings=settings,
        rates=rates,
        ranks=ranks,
        times=times,
        microbatch_seconds=max(of_ranks),
        bubble_seconds=waited / (transformer.virtual_pipeline_model_parallel_size or 1),
        flops=settings.batch.global_batch_size
        * flops_per_sample(
            transformer,
            seq_length=settings.data.seq_length,
            vocab_size=settings.model.padded_vocab_size(vocab_size),
        ),
    )


def _looked_at(settings: Settings) -> tuple[list[int], list[int]]:
    """Return ranks of those pipeline stages that are planned, and for each stage which of them stands for it.

    Planned are the first stage, the last one, and each that has layers which no earlier one has all of: others are no fuller, since
    earlier stages keep more microbatches.
    """
    config = settings.model.transformer
    layers = [Counter[object]() for _ in range(config.pipeline_model_parallel_size)]
    for stage in stages_of(config):
        own = layers[stage.index % len(layers)]
        own.update(_kind_of_layer(config, number + 1) for number in stage.decoder)
        own["multi-token prediction"] += stage.mtp
    pipeline = settings.grid.ranks("pp", 0) or [0]
    planned: list[int] = []
    of_stages = []
    for number, own in enumerate(layers):
        alike = [at for at, other in enumerate(planned) if own <= layers[other]]
        if number + 1 == len(layers) or not alike:
            planned.append(number)
            alike = [len(planned) - 1]
        of_stages.append(min(alike, key=lambda at: layers[planned[at]].total()))
    return [pipeline[number] for number in planned], of_stages


def _kind_of_layer(config: TransformerConfig, number: int) -> tuple[object, ...]:
    """Return what distinguishes a layer (counted from 1) from others of the model."""
    return (
        has_experts(config, number),
        is_linear(config, number),
        window_of_layer(config, number),
        kind_of_layer(config, number),
    )
