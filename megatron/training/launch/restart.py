"""What a run loads after torchrun has started it anew, and what earlier starts of the job left for that."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store

from megatron.core.distributed.fsdp.checkpoint import agree, is_complete
from megatron.training.checkpointing import CheckpointConfig, print_rank_0
from megatron.training.launch.rendezvous import Rendezvous
from megatron.training.run_folder import TRACKER, read_tracker, saved_iterations


@dataclass(frozen=True, kw_only=True)
class EarlierStarts:
    """What earlier starts of this job did in the folder of ``--save``, as they left it in torchrun's store.

    torchrun's own count of restarts does not tell: it is each host's, and grows neither where a host joins nor by what was
    saved. Where the store ends with a start, the count is all there is.

    Ranks: all have one; rank 0 asks and answers.
    Source: ours.
    """

    config: CheckpointConfig
    """As the flags say."""

    store: Store | None
    """Outlives the starts; None where there is no such store."""

    @staticmethod
    def of(config: CheckpointConfig, rendezvous: Rendezvous) -> EarlierStarts:
        """Return those of this job."""
        return EarlierStarts(config=config, store=rendezvous.connection if rendezvous.outlives_a_start else None)

    def were_admitted(self) -> bool:
        """Return whether an earlier start found that this job may save in the folder."""
        return self._knows("admitted", otherwise=num_restarts() > 0)

    def remember_admission(self) -> None:
        """Leave to later starts that this job may save in the folder."""
        self._leave("admitted")

    def have_saved(self, iteration: int) -> bool:
        """Return whether the checkpoint of an iteration, which the tracker names, is of this job.

        Without a store that knows, it is this job's where the folder had to hold none when the job began.
        """
        return self._knows(f"saved {iteration}", otherwise=not continues(self.config))

    def remember_save(self, iteration: int) -> None:
        """Leave to later starts that this job saved an iteration; call it before the tracker names it."""
        with suppress(dist.DistError):  # no store, no later start: the save itself must not fail
            self._leave(f"saved {iteration}")

    def _knows(self, what: str, *, otherwise: bool) -> bool:
        return otherwise if self.store is None else bool(self.store.check([self._key(what)]))

    def _leave(self, what: str) -> None:
        if self.store is not None:
            self.store.set(self._key(what), "")

    def _key(self, what: str) -> str:
        assert self.config.save is not None
        return f"megatron/{what} {os.environ.get('TORCHELASTIC_RUN_ID', '')} {os.path.realpath(self.config.save)}"


def num_restarts() -> int:
    """Return how often torchrun has restarted the ranks of this host after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def continues(config: CheckpointConfig) -> bool:
    """Return whether the run continues what is in the folder where it saves. Pure but for links in paths."""
    if config.save is None or config.load is None or config.finetune:
        return False
    return os.path.realpath(config.load) == os.path.realpath(config.save)


def after_restart(starts: EarlierStarts) -> CheckpointConfig:
    """Return what to load and save: after a restart this job's own last checkpoint is loaded, once it has one.

    At the first start, and as long as the job has saved nothing, it is what the flags say.

    Raises:
        ValueError: the tracker does not hold a number, and what this job has saved is not known.

    Ranks: all; blocks.
    """
    config = starts.config
    if config.save is None:
        return config
    admitted, iteration = agree(lambda: None, lambda _: _earlier(starts))
    if not admitted:
        return config
    if iteration is None:
        print_rank_0(f" restarted by torchrun: starts as it did first, since it has saved nothing in {config.save}")
        return config
    print_rank_0(f" restarted by torchrun: continues from iteration {iteration}, which it saved in {config.save}")
    return replace(
        config,
        load=config.save,
        load_step=iteration,
        finetune=False,
        load_optim=config.save_optim,
        load_rng=config.save_rng,
    )


def _earlier(starts: EarlierStarts) -> tuple[bool, int | None]:
    """Return whether there was an earlier start, and the iteration that it saved last."""
    if not starts.were_admitted():
        return False, None
    assert starts.config.save is not None
    folder = Path(starts.config.save)
    try:
        latest = read_tracker(folder / TRACKER)
    except ValueError as error:
        complete = [iteration for iteration, path in saved_iterations(folder).items() if is_complete(path)]
        latest = next((one for one in reversed(complete) if starts.store is not None and starts.have_saved(one)), None)
        if latest is None:
            raise
        print(f" {error}; this job saved iteration {latest} last", flush=True)
    return True, latest if latest is not None and starts.have_saved(latest) else None
