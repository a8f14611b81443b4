"""The training loop: steps, and between them log lines, evaluations, checkpoints and the decision to end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import contexts_of
from megatron.core.distributed.fsdp.overlap_report import OverlapReport
from megatron.core.pipeline_parallel import PipelineStage
from megatron.training.checkpointing import Checkpointer
from megatron.training.data.batches import BatchConfig
from megatron.training.loop.evaluation import ValidationSet, evaluate
from megatron.training.loop.garbage import GarbageCollector
from megatron.training.loop.replica_check import check_replicas
from megatron.training.loop.step_agreement import StepAgreement
from megatron.training.loop.train_state import TrainState
from megatron.training.loop.train_step import Batch, ForwardStep, TrainStep
from megatron.training.telemetry.metrics import MetricLog
from megatron.training.telemetry.profiling import StepProfiler


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Settings of the training loop."""

    train_iters: int
    """Iterations to train, over all runs; with ``train_samples`` those of a run from the start on."""

    train_samples: int | None = None
    """Samples to train, over all runs, in whole global batches; None: ``train_iters`` alone says where training ends."""

    eval_interval: int | None = None
    """Iterations between evaluations; None: there is none before the end."""

    eval_iters: int = 100
    """Global batches of an evaluation; 0: no evaluation."""

    start_eval_at_iter: int | None = None
    """Iteration before which there is no evaluation."""

    exit_interval: int | None = None
    """End after an iteration that is a multiple of this."""

    exit_duration_mins: float | None = None
    """End after this many minutes."""

    exit_signal_handler: bool = False
    """Save and end on SIGTERM."""

    check_finite: bool = True
    """Raise an error if a loss or gradient norm is not finite."""

    empty_unused_memory_level: int = 0
    """Return unused CUDA memory after each step (1), or before it too (2)."""

    check_weight_hash_interval: int | None = None
    """Iterations between comparisons of replicas' weights; None: they are not compared."""

    seed: int = 1234
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("train_iters", "eval_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.eval_iters < 0:
            raise ValueError(f"--eval-iters must not be negative, got {self.eval_iters}")
        for name, value in {
            "--exit-interval": self.exit_interval,
            "--exit-duration-in-mins": self.exit_duration_mins,
            "--check-weight-hash-across-dp-replicas-interval": self.check_weight_hash_interval,
        }.items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")

    def last_iteration(self, state: TrainState, batch: BatchConfig) -> int:
        """Return the iteration after which training that continues from ``state`` is done. Pure."""
        if self.train_samples is None:
            return self.train_iters
        return state.iteration + batch.iterations_until(self.train_samples, state.consumed_train_samples)


class TrainingLoop:
    """The loop that trains until the configured end.

    Args:
        train_batches: iterator over this rank's microbatches, from the current sample on.
        validation_sets: the held-out data; empty: nothing is evaluated.
        eval_stage: the pipeline stage of this rank in evaluations.
        profiler: of this rank's steps; None: none are profiled.
        overlap: reports one of the steps; None: none is reported.

    Ranks: all of the run.
    """

    def __init__(
        self,
        config: LoopConfig,
        batch: BatchConfig,
        *,
        step: TrainStep,
        forward_step: ForwardStep,
        state: TrainState,
        train_batches: Iterator[Batch] | None,
        validation_sets: Sequence[ValidationSet],
        checkpointer: Checkpointer,
        agreement: StepAgreement,
        log: MetricLog,
        garbage: GarbageCollector,
        device: torch.device,
        eval_stage: PipelineStage,
        profiler: StepProfiler | None = None,
        overlap: OverlapReport | None = None,
    ) -> None:
        self.config, self.batch, self.step, self.forward_step, self.state = config, batch, step, forward_step, state
        self.train_batches, self.validation_sets = train_batches, validation_sets
        self.checkpointer, self.agreement, self.log, self.garbage = checkpointer, agreement, log, garbage
        self.device, self.eval_stage, self.profiler, self.overlap = device, eval_stage, profiler, overlap
        self.last_iteration = config.last_iteration(state, batch)
        self._contexts = contexts_of(step.model)
        step.computation.timer = log.timers

    def run(self) -> str:
        """Train to the end, save the last state and return why training ended.

        Raises:
            RuntimeError: a loss or gradient norm was not finite (unless that is not checked).
        """
        try:
            return self._run()
        except RuntimeError as error:
            error.add_note(self._where())
            raise

    def _run(self) -> str:
        reason = None
        self.step.model.train()
        self.log.start_clock()
        while reason is None and self.state.iteration < self.last_iteration:
            self._train_one_step()
            reason = self._after_step()
        if self.profiler is not None:
            self.profiler.finish()
        if self.overlap is not None and dist.get_rank() == 0:
            print(
                f" there is no overlap report: training ended before iteration {self.overlap.reported}; give an earlier one by "
                "--overlap-report-step",
                flush=True,
            )
        self.log.stop_clock("save")
        self.agreement.collect()
        self.checkpointer.save(self.state)
        self.checkpointer.finish()
        return reason or self._why_done()

    def _why_done(self) -> str:
        asked, consumed = self.config.train_samples, self.state.consumed_train_samples
        if asked is None:
            return "all iterations are done"
        if consumed == asked:
            return f"all of --train-samples {asked} are consumed"
        return (
            f"{consumed} of --train-samples {asked} are consumed, and a global batch is {self.batch.global_batch_size}"
        )

    def progress(self) -> tuple[int, str]:
        """How many collectives of the engine this rank has begun, and where it is, in words; from any thread."""
        of_contexts = [context.observer.progress for context in self._contexts]
        where = f"iteration {self.state.iteration + 1}, microbatch {self.step.computation.microbatch}"
        return sum(number for number, _ in of_contexts), ", ".join((where, *(words for _, words in of_contexts)))

    def _where(self) -> str:
        return (
            f"rank {dist.get_rank()} of {dist.get_world_size()} had completed iteration {self.state.iteration}; if a "
            "connection was closed or timed out, another rank has ended or hangs: its own output says where"
        )

    def _train_one_step(self) -> None:
        level = self.config.empty_unused_memory_level
        if level >= 2:
            _return_memory(self.device)
        assert self.train_batches is not None
        if self.profiler is not None:
            self.profiler.before_step(self.state.iteration)
        if self.batch.schedule:
            self._take_batch_size()
        with nullcontext() if self.overlap is None else self.overlap.step():
            record = self.step(self.train_batches, self.state.iteration)
        if self.overlap is not None and self.overlap.is_done:
            self._tell_report(self.overlap)
        if level >= 1:
            _return_memory(self.device)
        self.state.iteration += 1
        self.state.consumed_train_samples += self.step.batch.global_batch_size
        self.log.add_step(
            record,
            iteration=self.state.iteration,
            consumed_samples=self.state.consumed_train_samples,
            optimizer=self.step.optimizer,
        )
        self._reason = self.agreement.collect().end_requested
        self.agreement.post(self.state.iteration, record.loss_and_tokens[0], record.grad_norm)

    def _tell_report(self, overlap: OverlapReport) -> None:
        if overlap.path is not None:
            print(f" the overlap report of iteration {overlap.reported} is in {overlap.path}", flush=True)
            self.log.tell_overlap_report(overlap.path, overlap.reported)
        self.overlap = None

    def _take_batch_size(self) -> None:
        """Give the step the batch size that is scheduled for the samples consumed so far, and say so where it changes."""
        batch = self.batch.at(self.state.consumed_train_samples)
        if batch != self.step.batch:
            if dist.get_rank() == 0:
                print(
                    f" the global batch size is {batch.global_batch_size} from iteration {self.state.iteration + 1} on, after "
                    f"{self.state.consumed_train_samples} samples",
                    flush=True,
                )
            self.step.set_batch(batch)
            self.log.batch = batch

    def _after_step(self) -> str | None:
        """Log, evaluate and save if due; return why training should end, or None to continue."""
        iteration = self.state.iteration
        if self.profiler is not None:
            self.profiler.after_step(iteration)
        self.log.write_if_due(self.step.optimizer)
        if self.config.check_weight_hash_interval and iteration % self.config.check_weight_hash_interval == 0:
            self._check_replicas()
        self.garbage.after_step(iteration)
        self.checkpointer.poll()
        if self._evaluation_is_due(iteration):
            self.evaluate(f"iteration {iteration}")
        if self.checkpointer.is_due(iteration):
            self._save()
        if self._reason is None and self.config.exit_interval and iteration % self.config.exit_interval == 0:
            return f"--exit-interval {self.config.exit_interval} divides iteration {iteration}"
        return self._reason

    def _check_replicas(self) -> None:
        self.log.stop_clock("check of replicas")
        check_replicas(self.step.model.module)
        if dist.get_rank() == 0:
            print(f" weights of replicas are the same after iteration {self.state.iteration}", flush=True)
        self.log.start_clock()

    def _evaluation_is_due(self, iteration: int) -> bool:
        config = self.config
        if not self.validation_sets or config.eval_interval is None or iteration % config.eval_interval != 0:
            return False
        return config.start_eval_at_iter is None or iteration >= config.start_eval_at_iter

    def _save(self) -> None:
        self.log.stop_clock("save")
        # A state with a non-finite loss or gradient must not become the latest checkpoint, so flags are read first.
        self._reason = self.agreement.collect().end_requested or self._reason
        began = time.perf_counter()
        self.checkpointer.save(self.state)
        self.log.write_times({"save-checkpoint": time.perf_counter() - began})
        self.log.start_clock()

    def evaluate(self, where: str) -> None:
        """Compute and log the loss of each validation set."""
        if not self.validation_sets:
            return
        self.log.stop_clock("evaluation")
        self.garbage.around_evaluation()
        began = time.perf_counter()
        losses = [self._loss_of(held_out) for held_out in self.validation_sets]
        self.log.write_times({"evaluate": time.perf_counter() - began})
        for held_out, loss in zip(self.validation_sets, losses, strict=True):
            self.log.write_evaluation(
                where,
                "validation",
                loss,
                iteration=self.state.iteration,
                consumed_samples=self.state.consumed_train_samples,
                suffix=held_out.suffix,
            )
        self.state.consumed_valid_samples += self.validation_sets[0].num_consumed
        self.garbage.around_evaluation()
        self.log.start_clock()

    def _loss_of(self, held_out: ValidationSet) -> float:
        return evaluate(
            self.step.model,
            self.forward_step,
            held_out.batches,
            num_microbatches=held_out.num_microbatches,
            device=self.device,
            stage=self.eval_stage,
        )


def _return_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
