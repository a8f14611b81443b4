"""The gated delta rule, chunk by chunk, in plain PyTorch.

A head has a state S [k, v]. At each token it forgets, is corrected towards the token's value, and is read:

    S <- exp(g) S;  S <- S + beta key (value - key^T S)^T;  out = query^T S

[Note: chunks of the delta rule] Within a chunk of l tokens, what the corrections add up to is the solution X of a triangular system
(I + A) X = beta (values - decayed keys S), where A [l, l] has beta_i key_i . key_j exp(g between j and i) below its diagonal, and S
is the state before the chunk. The systems of all chunks are solved at once, for the values and for the keys, and then a loop over
chunks carries the state with two small products each. The system is solved by substitution: a product of powers of A, which would
be matrix products alone, loses all digits where keys are alike.

All is computed in fp32, since decays multiply over the whole sequence.

Shapes: s sequence, b batch, g key heads, r value heads of a key head, n = g * r, k and v widths of a key and a value head, c chunks,
l tokens of a chunk.

Source: Gated DeltaNet (arXiv:2412.06464) section 3.3; the chunks are DeltaNet's (arXiv:2406.06484) section 3.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange

CHUNK = 64
L2_EPSILON = 1e-6


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Compute the rule's outputs.

    Args:
        query: [s, b, g, k], and key [s, b, g, k]: any length; they are divided by it, and queries by sqrt(k).
        value: [s, b, g * r, v]; value heads are ordered by their key heads.
        log_decay: [s, b, g * r] logarithms of what is kept of the state, at most 0.
        beta: [s, b, g * r] how far the state is corrected, from 0 to 1.
        chunk: tokens of a chunk.

    Returns:
        [s, b, g * r, v] in the dtype of ``value``.
    """
    groups, width = key.shape[2:]
    query = chunked(_unit(query) / math.sqrt(width), chunk).unsqueeze(2)  # [b, g, 1, c, l, k]
    key = chunked(_unit(key), chunk).unsqueeze(2)
    length, by_group = value.shape[0], "b (g r) c l w -> b g r c l w"
    values = rearrange(chunked(value, chunk), by_group, g=groups)  # [b, g, r, c, l, v]
    beta = rearrange(chunked(beta.unsqueeze(-1), chunk), by_group, g=groups)  # [b, g, r, c, l, 1]
    decay = rearrange(chunked(log_decay.unsqueeze(-1), chunk), by_group, g=groups).cumsum(-2)

    later = torch.ones(chunk, chunk, dtype=torch.bool, device=value.device).triu(1)
    between = (decay - decay.transpose(-1, -2)).masked_fill(later, -math.inf).exp()  # [b, g, r, c, l, l]
    system = beta * between * (key @ key.transpose(-1, -2))
    from_start, until_end = decay.exp(), (decay[..., -1:, :] - decay).exp()
    known = torch.cat((beta * values, beta * from_start * key), dim=-1)
    # The diagonal is not read: it is taken as ones.
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    values, seen = solved.split([values.shape[-1], width], dim=-1)

    written, states = _states(values, seen, key * until_end, from_start[..., -1:, :])
    outputs: torch.Tensor = (query * from_start) @ states + (between * (query @ key.transpose(-1, -2))) @ written
    in_order = rearrange(outputs, "b g r c l v -> b (g r) (c l) v")[:, :, :length]
    return rearrange(in_order, "b h s v -> s b h v").to(value.dtype)


def _states(
    values: torch.Tensor, seen: torch.Tensor, keys: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carry the state through the chunks.

    Args:
        values: [b, g, r, c, l, v] what would be written if the state before each chunk were zero.
        seen: [b, g, r, c, l, k] what multiplies that state to give what it lacks less.
        keys: [b, g, r, c, l, k] decayed from each token until the end of its chunk.
        kept: [b, g, r, c, 1, 1] what is kept of the state over a chunk.

    Returns:
        What is written [b, g, r, c, l, v], and the states before the chunks [b, g, r, c, k, v].
    """
    state = values.new_zeros(*values.shape[:3], keys.shape[-1], values.shape[-1])
    states, written = [], []
    for own, lacks, key, keeps in zip(*(x.unbind(3) for x in (values, seen, keys, kept)), strict=True):
        states.append(state)
        written.append(own - lacks @ state)
        state = keeps * state + key.transpose(-1, -2) @ written[-1]
    return torch.stack(written, dim=3), torch.stack(states, dim=3)


def chunked(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return [s, b, n, w] as fp32 [b, n, c, l, w]; tokens that fill the last chunk are zero, which changes no state."""
    padded: torch.Tensor = F.pad(rearrange(x.float(), "s b n w -> b n s w"), (0, 0, 0, -x.shape[0] % chunk))
    return rearrange(padded, "b n (c l) w -> b n c l w", l=chunk)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Divide the vectors of the last dim by their length, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)
