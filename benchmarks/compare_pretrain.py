"""Compare the whole trainer with FSDP2: ``torchrun ... benchmarks/compare_pretrain.py OUTPUT.md FLAGS``.

FLAGS are those of ``pretrain_gpt.py``, which trains with them first. Then the same ``GPTModel``, from the same initial
weights and on the same samples, is trained with FSDP2, ``torch.optim.AdamW`` and ``clip_grad_norm_`` by a loop of a few
lines, which shares no code with the trainer beyond model, data and learning rates. The page compares losses, times and
memory.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pretrain_gpt
from benchmarks.reports.page import facts_of_run
from benchmarks.reports.page import page as markdown_page
from megatron.core.distributed.fsdp import peer_memory_nbytes
from megatron.core.optimizer.param_groups import get_param_groups
from megatron.core.tokenizers import build_tokenizer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.arguments import Settings, parse_settings
from megatron.training.data.batches import SequentialBatchSampler
from megatron.training.data.data_loader import iterate_batches
from megatron.training.data.datasets import build_gpt_datasets
from megatron.training.launch.distributed_init import initialize_distributed
from megatron.training.launch.gpt_config import build_gpt_model
from megatron.training.launch.pretrain import pretrain
from megatron.training.loop.train_step import Batch

WARM_UP = 5
# Two bf16 runs that sum gradients in another order differ by rounding, which training amplifies step by step.
TOLERANCE = 0.02


class Run(NamedTuple):
    """Losses, times and memory of one trainer."""

    losses: list[float]
    """[iterations] mean loss of the global batch."""
    ms: list[float]
    """[iterations] milliseconds between the first forwards of successive steps."""
    peak_gib: tuple[float, float]
    """Allocated, reserved."""
    num_parameters: int


class Recorder:
    """Losses, token counts and times of forwards, recorded without waiting for the device."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.sums: list[Tensor] = []
        self.starts: list[float] = []
        self.num_parameters = 0
        self.peer_nbytes = 0  # which PyTorch's allocator does not count

    def forward_step(self, batch: Batch, model: torch.nn.Module) -> tuple[Tensor, Tensor]:
        if len(self.sums) % self.microbatches == 0:
            self.starts.append(time.perf_counter())
            self.peer_nbytes = max(self.peer_nbytes, peer_memory_nbytes(batch["tokens"].device))
        if not self.num_parameters:
            self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        output = pretrain_gpt.forward_step(batch, model)
        assert isinstance(output, tuple), "there is one pipeline stage"
        loss, tokens = output
        self.sums.append(torch.stack((loss.detach().double(), tokens.detach().double())))
        return loss, tokens

    def run(self, iterations: int, device: torch.device) -> Run:
        """Read what was recorded. Ranks: all."""
        sums = torch.stack(self.sums[: iterations * self.microbatches])
        sums = sums.view(iterations, self.microbatches, 2).sum(1)
        dist.all_reduce(sums)
        ms = [1e3 * (b - a) for a, b in zip(self.starts, self.starts[1:], strict=False)]
        peak = (0.0, 0.0)
        if device.type == "cuda":
            counts = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
            allocated, reserved = ((count + self.peer_nbytes) / 2**30 for count in counts)
            peak = allocated, reserved
        return Run((sums[:, 0] / sums[:, 1]).tolist(), ms, peak, self.num_parameters)


def train_ours(settings: Settings, device: torch.device) -> Run:
    recorder = Recorder(settings.batch.num_microbatches)
    pretrain(
        settings,
        model_provider=pretrain_gpt.model_provider,
        datasets_provider=pretrain_gpt.datasets_provider,
        forward_step=recorder.forward_step,
    )
    return recorder.run(settings.loop.train_iters, device)


def train_fsdp2(settings: Settings, device: torch.device, learning_rate: float) -> Run:
    tokenizer = build_tokenizer(settings.tokenizer)
    batch, iterations = settings.batch, settings.loop.train_iters
    datasets = build_gpt_datasets(settings.data, tokenizer, (iterations * batch.global_batch_size, 0, 0))
    on_device = dataclasses.replace(settings.model, init_on_meta_device=False)
    model = build_gpt_model(on_device, vocab_size=tokenizer.vocab_size, device=device).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for unit in [m for m in model.modules() if isinstance(m, TransformerLayer)] + [model.embedding, model.output_layer]:
        fully_shard(unit, mp_policy=policy)
    sharded = fully_shard(model, mp_policy=policy)
    config = settings.optimizer
    optimizer = torch.optim.AdamW(
        get_param_groups(model.named_parameters(), config),
        lr=learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=device.type == "cuda",
    )
    sampler = SequentialBatchSampler(batch, rank=dist.get_rank(), total_samples=len(datasets.train))
    batches = iterate_batches(datasets.train, sampler, num_workers=settings.data.num_workers, device=device)
    recorder = Recorder(batch.num_microbatches)
    for _ in range(iterations):
        for index in range(batch.num_microbatches):
            sharded.set_is_last_backward(index == batch.num_microbatches - 1)
            loss, tokens = recorder.forward_step(next(batches), model)
            (loss / tokens / batch.num_microbatches).backward()
        if config.clip_grad > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return recorder.run(iterations, device)


def report(ours: Run, fsdp2: Run, worst: float, device: torch.device) -> str:
    """Write the markdown page of a comparison."""
    medians = [statistics.median(run.ms[WARM_UP:]) for run in (ours, fsdp2)]
    facts = facts_of_run(
        device,
        [
            ("time of FSDP2 / time of ours", f"{medians[1] / medians[0]:.3f}"),
            (
                "largest difference of losses",
                f"{worst:.5f} (allowed: {TOLERANCE}: bf16 rounding, amplified by training)",
            ),
        ],
        num_parameters=ours.num_parameters,
    )
    times = [
        f"| {name} | {median:.1f} | {min(run.ms[WARM_UP:]):.1f} | {run.peak_gib[0]:.1f} / {run.peak_gib[1]:.1f} |"
        for name, run, median in zip(("ours", "fsdp2"), (ours, fsdp2), medians, strict=True)
    ]
    losses = [
        f"| {i + 1} | {a:.6f} | {b:.6f} |" for i, (a, b) in enumerate(zip(ours.losses, fsdp2.losses, strict=True))
    ]
    sections = [
        "| trainer | median ms | min ms | peak allocated / reserved GiB |\n|---|---|---|---|\n" + "\n".join(times),
        f"Time between the first forwards of successive steps, without the first {WARM_UP}.",
        "| iteration | ours | fsdp2 |\n|---|---|---|\n" + "\n".join(losses),
    ]
    return markdown_page("pretrain_gpt.py beside PyTorch FSDP2", facts, sections)


def main(argv: list[str]) -> int:
    """Run both trainers; return 1 where their losses differ by more than bf16 noise."""
    output, flags = Path(argv[0]), argv[1:]
    settings = parse_settings(flags)
    if settings.schedule.decay_style != "constant" or settings.schedule.warmup_samples:
        raise SystemExit("the reference has one learning rate: pass --lr-decay-style constant and no warm-up")
    device = initialize_distributed(settings.distributed)
    runs: list[Any] = []
    for train in (train_ours, lambda s, d: train_fsdp2(s, d, s.optimizer.lr)):
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        runs.append(train(settings, device))
    ours, fsdp2 = runs
    worst = max(abs(a - b) for a, b in zip(ours.losses, fsdp2.losses, strict=True))
    if dist.get_rank() == 0:
        text = report(ours, fsdp2, worst, device)
        output.write_text(text)
        print(text)
    dist.destroy_process_group()
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
