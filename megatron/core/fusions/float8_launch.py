"""Launches the kernels of ``float8_kernels``."""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
import torch.nn.functional as F

_logger = logging.getLogger(__name__)


class Written(NamedTuple):
    """What a kernel has written."""

    data: torch.Tensor | None
    """Bytes [..., columns]."""
    transposed: torch.Tensor | None
    """Transposed bytes [columns, ...]."""
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    """The input [..., 2f] in E4M3 and its inverse scales [rows, tiles], fp32; [Note: kept input] in ``float8_kernels``."""


@functools.cache
def kernels_work(activation: str, device: torch.device) -> bool:
    """Return whether the kernels write on this device what torch computes; if not, one log line says so.

    [Note: kernels that are compared] A version of Triton may compile them to something else, as happened once ([Note: rounded
    twice] in ``float8_kernels``), and gradients would be wrong without a word. So each process compares them once, for every
    way in which they are compiled, before it relies on them. Blocks the host.
    """
    with torch.no_grad():
        failed = [shape for shape in ((160, 208), (90, 208)) if not _agree(activation, shape, device)]
    if failed:
        _logger.warning(
            "kernels of the gated activation %s in FP8 do not write what torch computes on %s (shapes %s): "
            "transformer-engine's are taken, which are slower; please report your versions of torch and Triton",
            activation,
            torch.cuda.get_device_name(device) if device.type == "cuda" else device,
            failed,
        )
    return not failed


def _agree(activation: str, shape: tuple[int, int], device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(shape[0], 2 * shape[1], generator=generator).bfloat16().to(device)
    grad = torch.randn(shape, generator=generator).bfloat16().to(device)
    scale = torch.full((1,), 4.0, device=device)
    gate, up = x.float().chunk(2, dim=-1)
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        activated = F.silu(leaf) if activation == "silu" else F.gelu(leaf, approximate="tanh")
        (slope,) = torch.autograd.grad(activated.sum(), leaf)
    expected, of_gate = activated.detach() * up, grad.float() * up * slope
    expected_grad = torch.cat((of_gate, grad.float() * activated.detach()), dim=-1)
    for rows, columns, keeps in ((True, True, False), (True, False, False), (False, True, False), (True, True, True)):
        amax = torch.zeros(1, device=device)
        written = gated_in_fp8(
            x,
            activation=activation,
            dtype=torch.float8_e4m3fn,
            scale=scale,
            amax=amax,
            rows=rows,
            columns=columns,
            keeps_input=keeps,
        )
        of_x = gated_backward_in_fp8(
            grad,
            *(written.kept or (x, None)),
            activation=activation,
            dtype=torch.float8_e5m2,
            scale=scale,
            amax=amax,
            columns=columns,
        )
        if not (
            _is_near(written, expected * 4.0, torch.float8_e4m3fn, 0.09)
            and _is_near(of_x, expected_grad * 4.0, torch.float8_e5m2, 0.25 if keeps else 0.17)
        ):
            return False
    return True


def _is_near(written: Written, expected: torch.Tensor, dtype: torch.dtype, tolerance: float) -> bool:
    """Whether all that was written is near the expected values [rows, columns], and transposed bytes are those of the rows."""
    parts = [written.data, None if written.transposed is None else written.transposed.t()]
    values = [part.contiguous().view(dtype).float() for part in parts if part is not None]
    noise = [(value - expected).norm() / expected.norm() for value in values]
    return all(bool(of_one <= tolerance) for of_one in noise) and torch.equal(values[0], values[-1])


def gated_in_fp8(
    x: torch.Tensor,
    *,
    activation: str,
    dtype: torch.dtype,
    scale: torch.Tensor,
    amax: torch.Tensor,
    rows: bool,
    columns: bool,
    keeps_input: bool = False,
) -> Written:
    """Compute ``activation``(gate) * up of x [..., 2f] in FP8: [..., f].

    Args:
        activation: "silu" or "gelu" (its tanh form).
        dtype: torch's float8 dtype of the result.
        scale: [1] factor, fp32.
        amax: [1] raised to the largest absolute value before scaling, fp32.
        rows, columns: what is to be written: the bytes, the transposed bytes.
    """
    from megatron.core.fusions import float8_kernels as kernels

    x = x.contiguous()
    lead, width = x.shape[:-1], x.shape[-1] // 2
    num_rows, num_tiles = lead.numel(), -(-width // kernels.COLUMNS)
    out = x.new_empty((*lead, width), dtype=dtype) if rows else None
    transposed = x.new_empty((width, *lead), dtype=dtype) if columns else None
    kept = None
    if keeps_input:
        kept = torch.empty_like(x, dtype=torch.float8_e4m3fn), scale.new_empty(num_rows, 2 * num_tiles)
    written = out if out is not None else transposed
    if written is not None and written.numel():
        kernels.gated_kernel[num_tiles, -(-num_rows // kernels.ROWS)](
            x,
            scale,
            amax,
            written if out is None else out,
            written if transposed is None else transposed,
            *((written, amax) if kept is None else kept),
            num_rows,
            width,
            IS_SILU=activation == "silu",
            LARGEST=torch.finfo(dtype).max,
            WRITES_ROWS=rows,
            WRITES_COLUMNS=columns,
            KEEPS=keeps_input,
            ROWS=kernels.ROWS,
            COLUMNS=kernels.COLUMNS,
            num_warps=kernels.NUM_WARPS,
        )
    return Written(_bytes(out), _bytes(transposed), kept)


def gated_backward_in_fp8(
    grad: torch.Tensor,
    x: torch.Tensor,
    inverse: torch.Tensor | None = None,
    *,
    activation: str,
    dtype: torch.dtype,
    scale: torch.Tensor,
    amax: torch.Tensor,
    columns: bool,
) -> Written:
    """Compute the gradient [..., 2f] of x from that of ``activation``(gate) * up [..., f], in FP8.

    Args:
        inverse: x and it are what ``gated_in_fp8`` kept; None: x is what it was given.
        activation, dtype, scale, amax, columns: as for ``gated_in_fp8``, of the gradient.
    """
    from megatron.core.fusions import float8_kernels as kernels

    grad, x = grad.contiguous(), x.contiguous()
    lead, width = x.shape[:-1], x.shape[-1] // 2
    num_rows = lead.numel()
    out = torch.empty_like(x, dtype=dtype)
    transposed = x.new_empty((2 * width, *lead), dtype=dtype) if columns else None
    if out.numel():
        kernels.gated_backward_kernel[-(-width // kernels.COLUMNS), -(-num_rows // kernels.ROWS)](
            grad,
            x,
            scale if inverse is None else inverse,
            scale,
            amax,
            out,
            out if transposed is None else transposed,
            num_rows,
            width,
            IS_SILU=activation == "silu",
            LARGEST=torch.finfo(dtype).max,
            WRITES_COLUMNS=columns,
            IS_KEPT=inverse is not None,
            ROWS=kernels.ROWS,
            COLUMNS=kernels.COLUMNS,
            num_warps=kernels.NUM_WARPS,
        )
    return Written(out.view(torch.uint8), _bytes(transposed))


def kept_values(kept: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the input [..., 2f] that ``gated_in_fp8`` kept."""
    from megatron.core.fusions import float8_kernels as kernels

    halves = kept.float().view(len(inverse), 2, -1)
    scales = inverse.view(len(inverse), 2, -1).repeat_interleave(kernels.COLUMNS, dim=-1)
    return (halves * scales[..., : halves.shape[-1]]).view(kept.shape).to(dtype)


def _bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.view(torch.uint8)
