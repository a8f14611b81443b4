"""The gated delta rule in chunks equals its recurrence, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.ssm.delta_rule import L2_EPSILON, gated_delta_rule

BATCH, WIDTH, VALUE_WIDTH = 2, 5, 3


def _token_by_token(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The rule as its definition says it, for every value head [s, b, n, ...]."""
    repeats = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
    query, key = (x / (x.square().sum(-1, keepdim=True) + L2_EPSILON).sqrt() for x in (query, key))
    query = query / math.sqrt(query.shape[-1])
    state = value.new_zeros(*value.shape[1:3], key.shape[-1], value.shape[-1])
    rows = []
    for q, k, v, g, b in zip(query, key, value, log_decay, beta, strict=True):
        state = g.exp()[..., None, None] * state
        error = v - torch.einsum("bnk,bnkv->bnv", k, state)
        state = state + torch.einsum("bnk,bnv->bnkv", k, b[..., None] * error)
        rows.append(torch.einsum("bnk,bnkv->bnv", q, state))
    return torch.stack(rows)


def _inputs(length: int, groups: int, heads: int, *, alike: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(length, BATCH, *shape, generator=generator)

    key = draw(groups, WIDTH)
    beta, decay = draw(heads).sigmoid(), -torch.nn.functional.softplus(draw(heads))
    if alike:  # the same key over and over, written in full and never forgotten
        key, beta, decay = key[:1].expand(length, -1, -1, -1).clone(), torch.ones_like(beta), torch.zeros_like(decay)
    tensors = [draw(groups, WIDTH), key, draw(heads, VALUE_WIDTH), decay, beta]
    return [tensor.requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(("length", "groups", "heads"), [(1, 1, 1), (8, 2, 2), (21, 2, 6)])
def test_chunks_are_the_recurrence(length: int, groups: int, heads: int, alike: bool) -> None:
    """Outputs and all gradients, in fp32, with a last chunk that is full, short, or the only one."""
    inputs = _inputs(length, groups, heads, alike=alike)
    found, true = gated_delta_rule(*inputs, chunk=4), _token_by_token(*inputs)
    torch.testing.assert_close(found, true, atol=2e-6, rtol=1e-5)
    weights = torch.randn(true.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((found * weights).sum(), inputs)
    for grad, of_definition in zip(grads, torch.autograd.grad((true * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, of_definition, atol=1e-5, rtol=1e-4)


def test_no_digits_are_lost_where_keys_are_alike() -> None:
    """A whole chunk of one key: powers of the chunk's matrix reach 1e17."""
    inputs = _inputs(150, 1, 1, alike=True)
    with torch.no_grad():
        torch.testing.assert_close(gated_delta_rule(*inputs), _token_by_token(*inputs), atol=1e-5, rtol=1e-5)


def test_states_that_are_forgotten_at_once_give_no_nan() -> None:
    """exp(-1,000) is zero, whatever comes before and behind."""
    query, key, value, _, beta = _inputs(9, 1, 2)
    decay = torch.full((9, BATCH, 2), -1000.0, requires_grad=True)
    found = gated_delta_rule(query, key, value, decay, beta, chunk=4)
    torch.testing.assert_close(found, _token_by_token(query, key, value, decay, beta))
    found.sum().backward()
    assert decay.grad is not None and decay.grad.isfinite().all()
