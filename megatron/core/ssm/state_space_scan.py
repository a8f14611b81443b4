"""Mamba-2's recurrence, chunk by chunk, in plain PyTorch.

A head has a state S [n, p]. At each token it forgets, is written to, and is read:

    S <- exp(-dt rate) S + dt write input^T;  out = read^T S

Within a chunk that is attention whose scores are products of reads and writes, times what is kept between the two tokens; between
chunks, states are summed in the same way, so there is no loop. All is computed in fp32, since decays multiply over the
whole sequence.

Shapes: s sequence, b batch, g groups, r heads of a group, h = g * r, p width of a head, n of a state, c chunks, l tokens of a chunk.

Source: state space duality (arXiv:2405.21060) section 6.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange

from megatron.core.ssm.delta_rule import chunked

CHUNK = 64


def state_space_scan(
    x: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    *,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Compute the recurrence's outputs.

    Args:
        x: [s, b, g * r, p] inputs; heads are ordered by their groups.
        step: [s, b, g * r] steps of time (dt), not negative.
        rate: [g * r] of decay, not negative.
        write: [s, b, g, n] (B), and read [s, b, g, n] (C).
        chunk: tokens of a chunk.

    Returns:
        [s, b, g * r, p] in the dtype of ``x``.
    """
    length, groups, by_group = x.shape[0], write.shape[2], "b (g r) c l w -> b g r c l w"
    write, read = (chunked(part, chunk).unsqueeze(2) for part in (write, read))  # [b, g, 1, c, l, n]
    steps = rearrange(chunked(step.unsqueeze(-1), chunk), by_group, g=groups)  # [b, g, r, c, l, 1]
    inputs = steps * rearrange(chunked(x, chunk), by_group, g=groups)  # [b, g, r, c, l, p]
    decay = (-steps * rate.float().view(groups, -1, 1, 1, 1)).cumsum(-2)
    within = _kept(decay, decay) * (read @ write.transpose(-1, -2))
    last = decay[..., -1:, :]
    written = (write * (last - decay).exp()).transpose(-1, -2) @ inputs  # [b, g, r, c, n, p], of each chunk alone
    ends = last.squeeze(-1).cumsum(-2)  # [b, g, r, c, 1]
    before = _kept(ends - last.squeeze(-1), ends, own=False) @ written.flatten(-2)
    states = before.unflatten(-1, written.shape[-2:])
    outputs: torch.Tensor = within @ inputs + (read * decay.exp()) @ states
    in_order = rearrange(outputs, "b g r c l p -> b (g r) (c l) p")[:, :, :length]
    return rearrange(in_order, "b h s p -> s b h p").to(x.dtype)


def _kept(until: torch.Tensor, since: torch.Tensor, *, own: bool = True) -> torch.Tensor:
    """Return exp(until_i - since_j) [..., l, l] of sums of logarithms [..., l, 1] for j before i, or at i; 0 elsewhere."""
    size = until.shape[-2]
    not_yet = torch.ones(size, size, dtype=torch.bool, device=until.device).triu(int(own))
    return (until - since.transpose(-1, -2)).masked_fill(not_yet, -math.inf).exp()
