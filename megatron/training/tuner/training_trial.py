"""A candidate of the tuner as training steps: in a process of its own, by the code that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from megatron.core.distributed.fsdp.tuner import Trial, engine_facts
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.launch.distributed_init import initialize_distributed, process_groups, set_deterministic
from megatron.training.launch.samples import train_batches
from megatron.training.loop.dropout_seed import seed_everything
from megatron.training.loop.evaluation import evaluate
from megatron.training.loop.train_step import Batch, ForwardStep, TrainStep
from megatron.training.tuner.flags_of_choices import settings_with

if TYPE_CHECKING:
    from megatron.training.arguments import Settings
    from megatron.training.launch.pretrain import TrainingSetup

_EAGER_STEPS = 3


@dataclass
class _Built:
    setup: TrainingSetup
    step: TrainStep
    batches: Sequence[Batch]
    iteration: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainingTrial:
    """Builds and steps what a launch line trains, on its data, from initial weights.

    Args:
        words: of the launch line.
        set_up: builds the components; see ``pretrain``.
        make_step: (components, forward step, batch, seed) -> a training step.
    """

    words: tuple[str, ...]
    world_size: int
    set_up: Callable[..., TrainingSetup]
    make_step: Callable[..., TrainStep]
    model_provider: Callable[..., Any]
    datasets_provider: Callable[..., Any]
    forward_step: ForwardStep
    _kept: dict[str, Any] = field(default_factory=dict)
    """Data and process groups, for the further candidates of a process."""

    def trial(self) -> Trial:
        """Return it as the tuner takes it."""
        return Trial(build=self.build, step=_step, close=_close, facts=self.facts, warmup_steps=self.warmup_steps)

    def build(self, chosen: Mapping[str, Any]) -> _Built:
        """Build a candidate. Ranks: all."""
        settings = self._settings(chosen)
        device = initialize_distributed(settings.distributed)
        if settings.loop.deterministic:
            set_deterministic()
        seed_everything(settings.loop.seed)
        setup = self.set_up(settings, device, self.model_provider, self._datasets, groups=self._groups(settings))
        batch = settings.batch.at(0)
        step = self.make_step(setup, self.forward_step, batch, settings.loop.seed)
        drawn = train_batches(setup, 0)
        if drawn is None:
            raise ValueError("there must be training data, got none")
        microbatches = list(islice(drawn, batch.num_microbatches))
        drawn.close()
        return _Built(setup, step, microbatches)

    def facts(self, built: _Built) -> dict[str, Any]:
        """Evaluate a microbatch, since runs do, so that its memory counts; tell of the engine. Ranks: all."""
        setup = built.setup
        if setup.settings.loop.eval_iters > 0:
            evaluate(
                setup.model,
                self.forward_step,
                iter(built.batches),
                num_microbatches=1,
                device=setup.device,
                stage=setup.stage,
            )
        return _facts(setup.model)

    def warmup_steps(self, chosen: Mapping[str, Any]) -> int:
        """Return the steps before the measured ones: those before a capture, the capture and the first replay, or three."""
        graph = self._settings(chosen).cuda_graph
        return graph.warmup_steps + 2 if graph.enabled else _EAGER_STEPS

    def _settings(self, chosen: Mapping[str, Any]) -> Settings:
        settings = settings_with(self.words, chosen, world_size=self.world_size)
        # A daemon has no processes of its own; batches are read before steps are measured.
        return replace(settings, data=replace(settings.data, num_workers=0))

    def _datasets(self, *arguments: Any) -> Any:
        if "datasets" not in self._kept:
            self._kept["datasets"] = self.datasets_provider(*arguments)
        return self._kept["datasets"]

    def _groups(self, settings: Settings) -> ProcessGroupCollection:
        key = f"groups {settings.distributed.create_all_gather_group}"
        if key not in self._kept:
            self._kept[key] = process_groups(settings.distributed, settings.grid)
        groups: ProcessGroupCollection = self._kept[key]
        return groups


def _step(built: _Built) -> None:
    built.step(iter(built.batches), built.iteration)
    built.iteration += 1


def _close(built: _Built) -> None:
    built.step.close()
    built.setup.model.close()


def _facts(model: Any) -> dict[str, Any]:
    chunks = getattr(model, "model_chunks", [model])
    found = [engine_facts(chunk.module) for chunk in chunks]
    return {
        "transports": sorted({name for facts in found for name in facts["transports"]}),
        "serving": sorted(set.intersection(*(set(facts["serving"]) for facts in found))),
        "unsharded_nbytes": sum(facts["unsharded_nbytes"] for facts in found),
        "largest_unit_nbytes": max(facts["largest_unit_nbytes"] for facts in found),
        "largest_unit_numel": max(facts["largest_unit_numel"] for facts in found),
    }
