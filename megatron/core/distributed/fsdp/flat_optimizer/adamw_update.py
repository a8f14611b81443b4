"""AdamW's arithmetic on flat shards: in Triton kernels on CUDA, in torch operations elsewhere.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101), algorithm 2, in the order of
operations of ``torch.optim.AdamW(foreach=True)``: on the CPU the results are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.distributed.fsdp.codec.float8 import E4M3_MAX, UpdateEncoding
from megatron.core.distributed.fsdp.config.torch_versions import HAS_TRITON
from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run, block_table
from megatron.core.distributed.fsdp.flat_optimizer.hyperparameter_table import HyperparameterTable
from megatron.core.distributed.fsdp.flat_optimizer.moments import (
    LEAST_EXPONENT,
    SCALED_FORMATS,
    read_moment,
    write_moment,
)


@dataclass(eq=False)
class FlatShard:
    """The flat local buffers [N] of a parameter group that one update reads and writes.

    Args:
        main: main weights; with ``remainder`` their upper halves in bf16.
        exp_avg, exp_avg_sq: moments, in one of ``MOMENT_DTYPES``.
        remainder: int16 lower halves of fp32 main weights; None where ``main`` holds the main weights whole.
        model: model weights in another dtype than the main weights; None where the main weights are the model weights.
        runs: the elements to update.
        blocks: the same as a table for the kernel; None where there is no kernel.
        exp_avg_scales, exp_avg_sq_scales: [S] scales of the moments; None where their dtype has none.
    """

    main: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    remainder: torch.Tensor | None
    model: torch.Tensor | None
    runs: tuple[Run, ...]
    blocks: torch.Tensor | None
    exp_avg_scales: torch.Tensor | None = None
    exp_avg_sq_scales: torch.Tensor | None = None


class AdamWUpdate:
    """The update in Triton kernels, one launch per shard and one for the coefficients, or as torch operations.

    Neither synchronizes with the host, except torch operations for steps that may be skipped.

    Args:
        uses_kernels: Triton can run here.
    """

    def __init__(self, *, uses_kernels: bool) -> None:
        self._skips, self._kernels = False, None
        if uses_kernels:
            from megatron.core.distributed.fsdp.flat_optimizer import adamw_kernel

            self._kernels = adamw_kernel

    def write_coefficients(
        self, table: HyperparameterTable, grad_factor: torch.Tensor, found_inf: torch.Tensor | None = None
    ) -> None:
        """Count a step in the rows that advance, and compute the coefficients of that step.

        Powers are computed in fp64, as torch computes them on the host.

        Args:
            found_inf: [1] fp32; where it is not 0, no step is counted and updates do nothing. None: they do.
        """
        if self._kernels is not None:
            t, constants = table, {"MAY_SKIP": found_inf is not None, "num_warps": 1, "enable_fp_fusion": False}
            skips = grad_factor if found_inf is None else found_inf  # what is not read may have any address
            tensors = (t.hyperparameters, t.param_group, t.steps, t.advances, grad_factor, skips, t.coefficients)
            self._kernels.coefficients_kernel[(1,)](*tensors, t.steps.numel(), **constants)
            return
        self._skips = found_inf is not None and bool(found_inf)
        if self._skips:
            return
        table.steps.add_(table.advances)
        lr, weight_decay, beta1, beta2, eps = table.hyperparameters[table.param_group].unbind(1)
        step = table.steps.double().clamp_(min=1.0)  # coefficients of a row without steps are not used
        columns = (
            1 - lr * weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            -(lr / (1 - beta1**step)),
            (1 - beta2**step).sqrt(),
            eps,
            grad_factor.double().expand_as(eps),
            torch.zeros_like(eps),
        )
        table.coefficients.copy_(torch.stack(columns, dim=1))

    def blocks(self, runs: Sequence[Run], device: torch.device) -> torch.Tensor | None:
        """Return the table of blocks that ``update`` needs in addition to the runs; None if it needs none."""
        return None if self._kernels is None else block_table(runs, self._kernels.BLOCK_NUMEL).to(device)

    def update(
        self, shard: FlatShard, grad: torch.Tensor, coefficients: torch.Tensor, encoding: UpdateEncoding | None = None
    ) -> None:
        """Update the shard by one step, and encode it where asked. ``grad`` [N], in fp32 or in half precision, is only read."""
        if self._kernels is not None:
            self._launch(shard, grad, coefficients, encoding)
            return
        first, second = (shard.exp_avg, shard.exp_avg_scales), (shard.exp_avg_sq, shard.exp_avg_sq_scales)
        for run in () if self._skips else shard.runs:
            begin, end = run.begin, run.end
            decay, one_minus_beta1, beta2, one_minus_beta2, step, root, eps, factor, _ = coefficients[
                run.table_row
            ].unbind()
            main, m, v = shard.main[begin:end], read_moment(*first, run), read_moment(*second, run)
            remainder = None if shard.remainder is None else shard.remainder[begin:end]
            if remainder is not None:
                w = join(main, remainder)
            else:
                w = main if main.dtype == torch.float32 else main.float()
            g = grad[begin:end] * factor if grad.dtype == torch.float32 else grad[begin:end].float().mul_(factor)
            w.mul_(decay)
            m.lerp_(g, one_minus_beta1)
            v.mul_(beta2).addcmul_(g * one_minus_beta2, g)
            w.addcdiv_(m * step, v.sqrt().div_(root).add_(eps))
            if shard.exp_avg.dtype != torch.float32:
                write_moment(*first, run, m, is_square=False)
            if shard.exp_avg_sq.dtype != torch.float32:
                write_moment(*second, run, v, is_square=True)
            if remainder is not None:
                split(w, main, remainder)
            elif w is not main:
                main.copy_(w)
            if shard.model is not None:
                shard.model[begin:end].copy_(main if remainder is not None else w)
        _encode(shard, encoding)

    def _launch(
        self, shard: FlatShard, grad: torch.Tensor, coefficients: torch.Tensor, encoding: UpdateEncoding | None
    ) -> None:
        kernels: Any = self._kernels
        main, blocks = shard.main, shard.blocks
        assert blocks is not None
        if not blocks.shape[0]:
            return
        fused = encoding if encoding is not None and encoding.nominal in (torch.bfloat16, main.dtype) else None
        # What a kernel is not told to touch may have any address.
        scale, amax, target = (main, main, None) if fused is None else (fused.scale, fused.amax, fused.target)
        model = target if shard.model is None else shard.model
        remainder = shard.exp_avg if shard.remainder is None else shard.remainder
        moments = (shard.exp_avg, shard.exp_avg_sq)
        moment_scales = (main if own is None else own for own in (shard.exp_avg_scales, shard.exp_avg_sq_scales))
        state = (main, grad, *moments, *moment_scales, remainder, main if model is None else model, scale, amax)
        (top, _), (top_of_squares, smallest_square) = (SCALED_FORMATS.get(moment.dtype, (0, 0.0)) for moment in moments)
        constants = {
            "TOP": top,
            "TOP_OF_SQUARES": top_of_squares,
            "SMALLEST_SQUARE": smallest_square,
            "LEAST_EXPONENT": LEAST_EXPONENT,
            "KEEPS_REMAINDER": shard.remainder is not None,
            "WRITES_MODEL": shard.model is not None,
            "MEASURES": fused is not None,
            "WRITES_BYTES": target is not None,
            "ROUNDS": fused is not None and fused.nominal != main.dtype,
            "LARGEST": E4M3_MAX,
            "BLOCK": kernels.BLOCK_NUMEL,
            "num_warps": kernels.NUM_WARPS,
            # Each product and sum is rounded by itself, so that all compiled variants compute the same.
            "enable_fp_fusion": False,
        }
        kernels.update_kernel[(blocks.shape[0],)](*state, blocks, coefficients, **constants)
        if fused is None:
            _encode(shard, encoding)


def _encode(shard: FlatShard, encoding: UpdateEncoding | None) -> None:
    if encoding is not None:
        for run in shard.runs:
            encoding.encode(shard.main, run.weight, run.begin, run.end)


def make_update(device: torch.device) -> AdamWUpdate:
    """Return the update for shards on the device: by Triton kernels where they can run."""
    return AdamWUpdate(uses_kernels=device.type == "cuda" and HAS_TRITON)


# ---- fp32 in two halves ---------------------------------------------------------------------------------------------


def join(high: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the fp32 numbers whose bits are those of ``high`` (bf16), as upper half, plus the signed remainder."""
    bits = (high.view(torch.int16).to(torch.int32) << 16) + remainder
    return bits.view(torch.float32)


def split(whole: torch.Tensor, high: torch.Tensor, remainder: torch.Tensor) -> None:
    """Split fp32 numbers into ``high`` (bf16) and ``remainder`` (int16), from which ``join`` restores them.

    ``high`` is ``whole`` rounded to bf16, ties away from zero (a cast rounds ties to even). NaN becomes the canonical
    NaN.
    """
    bits = torch.where(whole.isnan(), 0x7FC00000, whole.view(torch.int32))
    upper = (bits + 0x8000) >> 16
    high.view(torch.int16).copy_(upper)
    remainder.copy_(bits - (upper << 16))


def round_up_half(whole: torch.Tensor, high: torch.Tensor) -> None:
    """Write to ``high`` (bf16) what ``split`` writes there; ``whole`` (fp32) is overwritten."""
    bits = whole.view(torch.int32).masked_fill_(whole.isnan(), 0x7FC00000)
    high.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))
