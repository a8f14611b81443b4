"""AdamW's arithmetic on flat shards: in Triton kernels on CUDA, in torch operations elsewhere.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101), algorithm 2, in the order of
operations of ``torch.optim.AdamW(foreach=True)``: on the CPU the results are bitwise the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.core.distributed.fsdp.codec.float8 import E4M3_MAX
from megatron.core.distributed.fsdp.codec.update_encoding import UpdateEncoding
from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run, block_table

# Columns of the hyperparameters [P, 5] fp64, and of the coefficients [R, 9] fp32 that a step computes from them.
HYPERPARAMETERS = ("lr", "weight_decay", "beta1", "beta2", "eps")
COLUMNS = (
    "decay",
    "1 - beta1",
    "beta2",
    "1 - beta2",
    "-step size",
    "sqrt(1 - beta2^t)",
    "eps",
    "gradient factor",
    "skips",
)


@dataclass(frozen=True)
class HyperparameterColumns:
    """Device tensors of a ``HyperparameterTable`` of R rows. R is a power of two; the last rows may be unused.

    Args:
        hyperparameters: [P, 5] fp64 hyperparameters of each param group, in the columns of ``HYPERPARAMETERS``.
        param_group: [R] int32 param group of each row.
        steps: [R] fp32 steps taken, as torch counts them.
        advances: [R] fp32 1 for rows that take part in the next step, else 0.
        coefficients: [R, 9] fp32 coefficients of the next step, in the columns of ``COLUMNS``.
        row_of: [T] int64 row of each parameter.
        shown_steps: [T] fp32 steps of each parameter, for ``state``: parameters of one row must not share what users may write.
    """

    hyperparameters: torch.Tensor
    param_group: torch.Tensor
    steps: torch.Tensor
    advances: torch.Tensor
    coefficients: torch.Tensor
    row_of: torch.Tensor
    shown_steps: torch.Tensor

    def show_steps(self) -> None:
        """Copy the step counts to ``shown_steps``, whose version counter counts the writes of users alone."""
        torch.index_select(self.steps, 0, self.row_of, out=self.shown_steps.data)


@dataclass(eq=False)
class FlatShard:
    """The flat local buffers [N] of a parameter group that one update reads and writes.

    Args:
        main: main weights; with ``remainder`` their upper halves in bf16.
        remainder: int16 lower halves of fp32 main weights; None where ``main`` holds the main weights whole.
        model: model weights in another dtype than the main weights; None where the main weights are the model weights.
        runs: the elements to update.
        blocks: the same as a table for the kernel; None where there is no kernel.
    """

    main: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    remainder: torch.Tensor | None
    model: torch.Tensor | None
    runs: tuple[Run, ...]
    blocks: torch.Tensor | None


class TorchUpdate:
    """The update as torch operations, without a host synchronisation on any device, but for steps that may be skipped."""

    def __init__(self) -> None:
        self._skips = False

    def write_coefficients(
        self, table: HyperparameterColumns, grad_factor: torch.Tensor, found_inf: torch.Tensor | None = None
    ) -> None:
        """Count a step in the rows that advance, and compute the coefficients of that step.

        Powers are computed in fp64, as torch computes them on the host.

        Args:
            found_inf: [1] fp32; where it is not 0, no step is counted and updates do nothing. None: they do.
        """
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
        """Return the table of blocks that ``update`` needs besides the runs; None if it needs none."""
        return None

    def update(
        self,
        shard: FlatShard,
        grad: torch.Tensor,
        coefficients: torch.Tensor,
        encoding: UpdateEncoding | None = None,
    ) -> None:
        """Update the shard by one step, and encode it where asked. ``grad`` [N], in fp32 or in half precision, is only read."""
        for begin, end, table_row, _ in () if self._skips else shard.runs:
            decay, one_minus_beta1, beta2, one_minus_beta2, step, root, eps, factor, _ = coefficients[
                table_row
            ].unbind()
            main, m, v = (flat[begin:end] for flat in (shard.main, shard.exp_avg, shard.exp_avg_sq))
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
            if remainder is not None:
                split(w, main, remainder)
            elif w is not main:
                main.copy_(w)
            if shard.model is not None:
                shard.model[begin:end].copy_(main if remainder is not None else w)
        _encode(shard, encoding)


def _encode(shard: FlatShard, encoding: UpdateEncoding | None) -> None:
    if encoding is not None:
        for begin, end, _, weight in shard.runs:
            encoding.encode(shard.main, weight, begin, end)


class KernelUpdate(TorchUpdate):
    """The update as Triton kernels: one launch per shard, and one for the coefficients."""

    def __init__(self) -> None:
        from megatron.core.distributed.fsdp.flat_optimizer import adamw_kernel

        super().__init__()
        self._kernels = adamw_kernel
        # Each product and sum is rounded by itself, so that all compiled variants compute the same.
        self._options = {"num_warps": adamw_kernel.NUM_WARPS, "enable_fp_fusion": False}

    def write_coefficients(
        self, table: HyperparameterColumns, grad_factor: torch.Tensor, found_inf: torch.Tensor | None = None
    ) -> None:
        t = table
        skips = grad_factor if found_inf is None else found_inf  # what is not read may have any address
        tensors = (t.hyperparameters, t.param_group, t.steps, t.advances, grad_factor, skips, t.coefficients)
        constants = {"MAY_SKIP": found_inf is not None, "num_warps": 1, "enable_fp_fusion": False}
        self._kernels.coefficients_kernel[(1,)](*tensors, t.steps.numel(), **constants)

    def blocks(self, runs: Sequence[Run], device: torch.device) -> torch.Tensor:
        return block_table(runs, self._kernels.BLOCK_NUMEL).to(device)

    def update(
        self,
        shard: FlatShard,
        grad: torch.Tensor,
        coefficients: torch.Tensor,
        encoding: UpdateEncoding | None = None,
    ) -> None:
        main, blocks = shard.main, shard.blocks
        assert blocks is not None
        if not blocks.shape[0]:
            return
        fused = encoding if encoding is not None and encoding.nominal in (torch.bfloat16, main.dtype) else None
        # What a kernel is not told to touch may have any address.
        scale, amax, target = (main, main, None) if fused is None else (fused.scale, fused.amax, fused.target)
        model = target if shard.model is None else shard.model
        remainder = shard.exp_avg if shard.remainder is None else shard.remainder
        state = (main, grad, shard.exp_avg, shard.exp_avg_sq, remainder, main if model is None else model, scale, amax)
        constants = {
            "KEEPS_REMAINDER": shard.remainder is not None,
            "WRITES_MODEL": shard.model is not None,
            "MEASURES": fused is not None,
            "WRITES_BYTES": target is not None,
            "ROUNDS": fused is not None and fused.nominal != main.dtype,
            "LARGEST": E4M3_MAX,
            "BLOCK": self._kernels.BLOCK_NUMEL,
        }
        self._kernels.update_kernel[(blocks.shape[0],)](*state, blocks, coefficients, **constants, **self._options)
        if fused is None:
            _encode(shard, encoding)


def make_update(device: torch.device) -> TorchUpdate:
    """Return the update for shards on the device: by Triton kernels where they can run."""
    has_kernels = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return KernelUpdate() if has_kernels else TorchUpdate()


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
