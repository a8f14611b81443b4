"""The ``Trainer`` of ``transformers`` over a sharded model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.api.module import FsdpModule, microbatch
from megatron.core.distributed.fsdp.api.optimizer import fully_shard_optimizer
from megatron.core.distributed.fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.huggingface.conversion import trainer_class
from megatron.core.distributed.fsdp.huggingface.save import save_pretrained
from megatron.core.distributed.fsdp.huggingface.shard import fully_shard_pretrained

_RESUME = "training_state"
_Trainer: Any = trainer_class()


class FullyShardedTrainer(_Trainer):  # type: ignore[misc]
    """A ``Trainer`` whose model is sharded by this engine: where it would be moved to the device, unless it is sharded already.

    It saves and resumes by all ranks at once: weights as ``save_pretrained`` does, and next to them, in ``training_state``, main
    weights and optimizer state, which any number of ranks loads. All else is ``Trainer``'s, without its ``fsdp`` settings. With a
    trainer of ``trl`` as second base class, that trainer's model is sharded: ``class Tuner(FullyShardedTrainer, SFTTrainer)``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._move_model_to_device(self.model, self.args.device)  # where the arguments leave that for later
        self.is_distributed_loading_by_transformers = True  # so that the model is wrapped in nothing

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Shard the model, which moves its shards.

        Raises:
            NotImplementedError: ``trl`` is to compute a reference's log-probabilities beforehand, and names them by a hash of weights.
        """
        if getattr(self.args, "precompute_ref_log_probs", False):
            raise NotImplementedError(
                "precompute_ref_log_probs must be False for a sharded model, got True, for which trl hashes whole weights; without it "
                "the reference, which is the model with adapters disabled, runs in each step"
            )
        if not isinstance(model, FsdpModule):
            fully_shard_pretrained(model)

    def create_optimizer(self, model: Any = None) -> Any:
        """Build the optimizer over sharded parameters."""
        if getattr(self, "optimizer", None) is None:
            self.optimizer: Any = fully_shard_optimizer(super().create_optimizer(model))
        return self.optimizer

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        with microbatch(self.model, is_last=False):
            yield

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for ``from_pretrained``. Ranks: all."""
        folder = self.args.output_dir if output_dir is None else output_dir
        save_pretrained(self.model, folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = {"scheduler": self.lr_scheduler.state_dict()}
        save_checkpoint(self.model, self._sharded_optimizer(), Path(output_dir) / _RESUME, extra_state=state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_checkpoint(self.model, None, Path(resume_from_checkpoint) / _RESUME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = load_checkpoint(self.model, self._sharded_optimizer(), Path(checkpoint) / _RESUME)
            self.lr_scheduler.load_state_dict(state["scheduler"])

    def _sharded_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # without what accelerate puts around it
