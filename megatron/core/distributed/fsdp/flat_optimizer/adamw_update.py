"""AdamW's arithmetic on flat shards: by Triton kernels on CUDA, by torch operations elsewhere.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101), algorithm 2, in the order of
operations of ``torch.optim.AdamW(foreach=True)``: on the CPU results are the same to the last bit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run, block_table
from megatron.core.extensions.kernel_launcher import KernelLauncher

# Columns of the hyperparameters [G, 5] fp64, and of the coefficients [C, 8] fp32 that a step makes of them.
HYPERPARAMETERS = ("lr", "weight_decay", "beta1", "beta2", "eps")
COLUMNS = ("decay", "1 - beta1", "beta2", "1 - beta2", "-step size", "sqrt(1 - beta2^t)", "eps", "gradient factor")


@dataclass(frozen=True)
class HyperparameterColumns:
    """HyperparameterTable: parameters that share hyperparameters, a count of steps, and whether they step at all.

    Args:
        hyperparameters: [G, 5] fp64, of each parameter group.
        group_of_cohort: [C] int32. C is a power of two; cohorts at the end may serve no parameter.
        steps: [C] fp32 steps taken, as torch counts them.
        advances: [C] fp32 1 for cohorts that take part in the next step, else 0.
        coefficients: [C, 8] fp32, the columns of ``COLUMNS``.
    """

    hyperparameters: torch.Tensor
    group_of_cohort: torch.Tensor
    steps: torch.Tensor
    advances: torch.Tensor
    coefficients: torch.Tensor


@dataclass(eq=False)
class FlatShard:
    """What one update reads and writes: flat parts [N] of a group's buffers.

    Args:
        main: main weights; with ``remainder`` their upper halves, in bf16.
        model: model weights in a dtype of their own, made of the main ones; None where those are the model's.
        remainder: int16 lower halves of fp32 main weights; None where ``main`` is all there is.
        runs: the elements that are updated.
        blocks: the same for kernels.
        launch: what the last launch for this shard found out, to be used again.
    """

    main: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    remainder: torch.Tensor | None
    model: torch.Tensor | None
    runs: tuple[Run, ...]
    blocks: torch.Tensor | None
    launch: _ShardLaunch | None = None


class _ShardLaunch(NamedTuple):
    """A compiled kernel with a shard's arguments; the gradient's address, which may be another in each step, is the second."""

    kind: tuple[Any, ...]
    run: Callable[..., None]
    main: int
    others: tuple[Any, ...]


def has_kernels(device: torch.device) -> bool:
    """True if updates on the device run as Triton kernels."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


class TorchUpdate:
    """The update as torch operations; no synchronisation with the host on any device."""

    def write_coefficients(self, cohorts: HyperparameterColumns, grad_factor: torch.Tensor) -> None:
        """Afterwards cohorts that advance have counted a step, and coefficients are those of the step that they are at.

        Powers are taken in fp64, as torch takes them on the host.
        """
        cohorts.steps.add_(cohorts.advances)
        lr, weight_decay, beta1, beta2, eps = cohorts.hyperparameters[cohorts.group_of_cohort].unbind(1)
        step = cohorts.steps.double().clamp_(min=1.0)  # a cohort that has never had a gradient is not used
        columns = (
            1 - lr * weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            -(lr / (1 - beta1**step)),
            (1 - beta2**step).sqrt(),
            eps,
            grad_factor.double().expand_as(eps),
        )
        cohorts.coefficients.copy_(torch.stack(columns, dim=1))

    def blocks(self, runs: Sequence[Run], device: torch.device) -> torch.Tensor | None:
        """What ``update`` needs besides the runs."""
        return None

    def update(self, shard: FlatShard, grad: torch.Tensor, coefficients: torch.Tensor) -> None:
        """Afterwards the shard has taken one step. ``grad``: [N] fp32 or bf16; it is not written."""
        for begin, end, cohort in shard.runs:
            decay, one_minus_beta1, beta2, one_minus_beta2, step, root, eps, factor = coefficients[cohort].unbind()
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


class KernelUpdate(TorchUpdate):
    """The update as Triton kernels: one launch for each shard, and one for the coefficients."""

    def __init__(self) -> None:
        from megatron.core.distributed.fsdp.flat_optimizer import adamw_kernel

        self._kernels = adamw_kernel
        # Products and sums are rounded one by one, whatever the variant.
        exact = {"enable_fp_fusion": False}
        self._launch_coefficients = KernelLauncher(adamw_kernel.coefficients_kernel, num_warps=1, **exact)
        self._launch_update = KernelLauncher(adamw_kernel.update_kernel, num_warps=adamw_kernel.NUM_WARPS, **exact)

    def write_coefficients(self, cohorts: HyperparameterColumns, grad_factor: torch.Tensor) -> None:
        c = cohorts
        tensors = (c.hyperparameters, c.group_of_cohort, c.steps, c.advances, grad_factor, c.coefficients)
        self._launch_coefficients(1, tensors, (), (c.steps.numel(),))

    def blocks(self, runs: Sequence[Run], device: torch.device) -> torch.Tensor:
        return block_table(runs, self._kernels.BLOCK_NUMEL).to(device)

    def update(self, shard: FlatShard, grad: torch.Tensor, coefficients: torch.Tensor) -> None:
        address = grad.data_ptr()
        kind = (grad.dtype, address % 16, coefficients.data_ptr())
        launch = shard.launch
        if launch is not None and launch.kind == kind:
            launch.run(launch.main, address, *launch.others)
            return
        self._first_update(shard, grad, coefficients, kind)

    def _first_update(
        self, shard: FlatShard, grad: torch.Tensor, coefficients: torch.Tensor, kind: tuple[Any, ...]
    ) -> None:
        main, blocks = shard.main, shard.blocks
        assert blocks is not None
        if not blocks.shape[0]:
            return
        model = main if shard.model is None else shard.model
        remainder = shard.exp_avg if shard.remainder is None else shard.remainder  # any address serves what is not read
        tensors = (main, grad, shard.exp_avg, shard.exp_avg_sq, remainder, model, blocks, coefficients)
        constants = (shard.remainder is not None, shard.model is not None, self._kernels.BLOCK_NUMEL)
        run = self._launch_update(blocks.shape[0], tensors, (), constants)
        if run is not None:
            addresses = [tensor.data_ptr() for tensor in tensors]
            shard.launch = _ShardLaunch(kind, run, addresses[0], (*addresses[2:], *constants))


def make_update(device: torch.device) -> TorchUpdate:
    """The update for shards on the device."""
    return KernelUpdate() if has_kernels(device) else TorchUpdate()


# ---- fp32 in two halves ---------------------------------------------------------------------------------------------


def join(high: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers whose bits are the bf16's, as upper half, plus the signed remainders'."""
    bits = (high.view(torch.int16).to(torch.int32) << 16) + remainder
    return bits.view(torch.float32)


def split(whole: torch.Tensor, high: torch.Tensor, remainder: torch.Tensor) -> None:
    """Afterwards ``high`` (bf16) and ``remainder`` (int16) are fp32 numbers ``whole`` that ``join`` gives back.

    ``high`` is ``whole`` rounded to bf16; a tie goes away from zero, where a conversion would go to the even neighbour.
    Not-a-number stays that, in its canonical form.
    """
    bits = torch.where(whole.isnan(), 0x7FC00000, whole.view(torch.int32))
    upper = (bits + 0x8000) >> 16
    high.view(torch.int16).copy_(upper)
    remainder.copy_(bits - (upper << 16))
