"""The settings of a run with what the tuner has chosen: read from its file, or measured before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.distributed.fsdp.tuner import Choice, Measured, engine_choices, tune, without
from megatron.core.distributed.fsdp.tuner import Settings as Chosen
from megatron.training.launch.distributed_init import local_device
from megatron.training.launch.refusals import StartRefusedError
from megatron.training.launch.rendezvous import Rendezvous
from megatron.training.launch.same_settings import flat_values, tokenizer_fingerprints
from megatron.training.tuner.config import IN_PLACE, LAYERS, MICRO_BATCH
from megatron.training.tuner.flags_of_choices import flags_of, line_with, named_on, settings_with, words_of
from megatron.training.tuner.planned import planned_nbytes
from megatron.training.tuner.training_trial import TrainingTrial

if TYPE_CHECKING:
    from megatron.training.arguments import Settings

_OF_THE_RUN = ("model.", "tokenizer.", "grid.", "batch.", "ddp.", "cuda_graph.")
_ALSO_OF_THE_RUN = (
    "data.seq_length",
    "data.sft",
    "data.reset_attention_mask",
    "distributed.backend",
    "distributed.create_all_gather_group",
    "loop.deterministic",
    "optimizer.optimizer",
    "optimizer.optimizer_cpu_offload",
    "optimizer.optimizer_offload_fraction",
    "optimizer.store_param_remainders",
    "optimizer.exp_avg_dtype",
    "optimizer.exp_avg_sq_dtype",
    "tuning.also",
)
_LAYERS = (2, 4)
_IN_PLACE_FROM = (0, 2**23)
"""Elements from which on weights get their gradients in place: all of them, and those of layers of a few billion parameters."""

_NOT_OF_THE_RUN = {"model.transformer.init_seed"}


def tuned(settings: Settings, rendezvous: Rendezvous, **functions: Any) -> Settings:
    """Return the settings as the tuner's file says, or as it finds by measuring; as they are where nothing is to be tuned.

    Args:
        functions: those of ``TrainingTrial``.

    Raises:
        StartRefusedError: the file is none of the tuner's, or cannot be written.

    Ranks: all; blocks. Nothing of torch.distributed, of the device or of the random generators is touched.
    """
    config, words = settings.tuning, settings.launch_line.words
    if config.file is None:
        return settings
    try:
        if not words:
            raise ValueError(
                "settings must be those of a command line, got some that were made otherwise; find flags with pretrain_gpt.py, and "
                "give them to this script by hand"
            )
        device = local_device(settings.distributed)
        trial = TrainingTrial(words=words, world_size=rendezvous.world_size, **functions)
        found = tune(
            trial.trial(),
            choices_of(settings, words),
            of=what_it_is(settings),
            file=config.file,
            seconds=config.seconds,
            refuses=Refusals(words, rendezvous.world_size, _memory_nbytes(device)),
            words=words_of,
            device=device,
            store=rendezvous.store,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
        )
        return settings_with(words, found.settings, world_size=rendezvous.world_size)
    except (ValueError, OSError) as error:
        raise StartRefusedError(f"--fsdp-tune {config.file}: {error}", rendezvous) from error


def what_it_is(settings: Settings) -> dict[str, str]:
    """Return what a run must be for settings that were tuned for it, by name."""
    values = flat_values(settings) | tokenizer_fingerprints(settings)
    names = {name for name in values if name.startswith(_OF_THE_RUN) or name in _ALSO_OF_THE_RUN} - _NOT_OF_THE_RUN
    return {name: values[name] for name in sorted(names)}


def choices_of(settings: Settings, words: tuple[str, ...]) -> list[Choice]:
    """Return what is chosen for a launch line: what it does not name, and what it asks to be chosen besides."""
    fixed, also, ddp = named_on(words), settings.tuning.also, settings.ddp
    on = {"overlap_grad_reduce": ddp.reductions_overlap, "overlap_param_gather": ddp.gathers_overlap}
    fixed |= {name for name, is_on in on.items() if is_on}
    num_ranks = settings.grid.size("dp_cp")
    choices = engine_choices(
        fixed=fixed,
        shards_weights=ddp.sharding_strategy == "optim_grads_params",
        num_ranks=num_ranks,
        any_transport=ddp.transport_kind == "auto" and not settings.loop.deterministic,
    )
    choices = [_with_communicators(choice) if choice.name == "transport" else choice for choice in choices]
    first = [choice for choice in choices if choice.name in ("overlap", "transport")]
    last = [choice for choice in choices if choice not in first]
    own = []
    if MICRO_BATCH in also:
        own.append(_micro_batches(settings))
    if LAYERS in also:
        own.append(Choice(name="layers of a unit", options=[{"fsdp_layers_per_unit": number} for number in _LAYERS]))
    if torch.cuda.is_available() and settings.distributed.backend != "gloo":
        own.append(Choice(name="CUDA graph", options=[{"cuda_graph_impl": "full_iteration"}]))
    if num_ranks > 1 and "transport" not in [choice.name for choice in first]:
        own.append(Choice(name="communicator of gathers", options=[{"create_all_gather_group": True}]))
    if IN_PLACE in also:
        sizes: list[dict[str, object]] = [{"gradient_accumulation_fusion_min_numel": size} for size in _IN_PLACE_FROM]
        own.append(Choice(name="gradients in place", options=[*sizes, {"no_gradient_accumulation_fusion": True}]))
    kept = [narrowed for choice in (*first, *own) if (narrowed := without(choice, fixed)) is not None]
    return [*kept, *last]


def _with_communicators(transports: Choice) -> Choice:
    """Return the choice with a second communicator, for gathers beside reductions, where a transport has use for it."""
    options = transports.options
    assert callable(options)

    def with_them(best: Measured) -> list[Chosen]:
        alone = list(options(best))
        of_nccl = [option for option in alone if option["fsdp_transport"] in ("nccl", "symm")]
        return [*alone, *({**option, "create_all_gather_group": True} for option in of_nccl)]

    return replace(transports, options=with_them)


def _micro_batches(settings: Settings) -> Choice:
    """Return two and four times the micro batch size, where these divide a rank's part of the global batch."""
    batch = settings.batch.at(0)
    of_rank = batch.global_batch_size // batch.data_parallel_size
    size = batch.micro_batch_size
    sizes = [one for one in (2 * size, 4 * size) if of_rank % one == 0]
    return Choice(
        name="micro batch",
        options=[{"micro_batch_size": one} for one in sizes],
        ascending=True,
        renewing=("micro_batch_size",),
    )


class Refusals:
    """Says why a candidate is not worth an attempt: its launch line would be refused, or a larger micro batch cannot fit.

    Args:
        memory_nbytes: of a device; None: not bounded.
        plan: plans the bytes that a launch line takes; see ``planned_nbytes``.
    """

    def __init__(
        self,
        words: Sequence[str],
        world_size: int,
        memory_nbytes: int | None,
        plan: Callable[..., int | None] = planned_nbytes,
    ) -> None:
        self._words, self._world_size, self._memory, self._plan = words, world_size, memory_nbytes, plan

    def __call__(self, chosen: Chosen) -> str | None:
        if faults := line_with(self._words, chosen, world_size=self._world_size).faults:
            return "; ".join(faults)
        if self._memory is None or "micro_batch_size" not in chosen:
            return None
        planned = self._plan([*self._words, *flags_of(chosen)], world_size=self._world_size)
        if planned is None or planned <= self._memory:
            return None
        return f"it is planned to take {planned / 2**30:.1f} GiB, and a device has {self._memory / 2**30:.1f}"


def _memory_nbytes(device: torch.device) -> int | None:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
