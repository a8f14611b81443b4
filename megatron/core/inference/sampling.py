"""Generation of tokens with a language model, by one full forward pass for each token.

Shapes: b batch, s sequence, v vocabulary, k candidates.
"""

from __future__ import annotations

import torch


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    max_context: int | None = None,
) -> torch.Tensor:
    """Continue tokens [b, s] by ``num_tokens``, with the model in eval mode; return [b, s + num_tokens].

    Args:
        model: called as ``model(input_ids, position_ids, attention_mask)``; returns logits [b, s, v].
        temperature: divides logits; 0: choose the most probable token.
        top_k: draw among the k most probable tokens; 0: among all.
        generator: on the device of ``tokens``; None: torch's default.
        max_context: number of last tokens that the model gets at most, where learned positions are limited.

    Raises:
        ValueError: an argument is out of range.

    Ranks: all ranks of a sharded model, with the same tokens and generators in the same state, so that they run the same
    forward passes and draw the same tokens; only the model communicates.
    """
    if (
        num_tokens < 0
        or temperature < 0.0
        or top_k < 0
        or tokens.shape[1] < 1
        or (max_context is not None and max_context < 1)
    ):
        raise ValueError(
            "num_tokens, temperature and top_k must not be negative, and tokens and max_context at least 1 long, got"
            f" {num_tokens}, {temperature}, {top_k}, {tokens.shape[1]} and {max_context}"
        )
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            context = tokens if max_context is None else tokens[:, -max_context:]
            positions = torch.arange(context.shape[1], device=tokens.device).expand_as(context)
            logits = model(context, positions, None)[:, -1].float()
            tokens = torch.cat((tokens, _draw(logits, temperature, top_k, generator)), dim=1)
    finally:
        model.train(was_training)
    return tokens


def _draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draw one token [b, 1] for each row of logits [b, v]."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        values, candidates = logits.topk(top_k, dim=-1)
        return candidates.gather(1, torch.multinomial(values.softmax(dim=-1), 1, generator=generator))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
