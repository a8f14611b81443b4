"""Cross entropy in chunks equals torch's on fp32 logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_numel", [1, 33, 2**24])
def test_losses_and_gradients_equal_torchs(
    dtype: torch.dtype, chunk_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one token, of three, and all tokens at once; large logits must not overflow."""
    monkeypatch.setattr(cross_entropy, "CHUNK_NUMEL", chunk_numel)
    logits = (torch.randn(5, 2, 11) * 50).to(dtype).requires_grad_()
    reference = logits.detach().float().requires_grad_()
    target = torch.randint(11, (5, 2))
    weights = torch.randn(5, 2)

    losses = vocab_parallel_cross_entropy(logits, target)
    expected = F.cross_entropy(reference.view(-1, 11), target.view(-1), reduction="none").view(5, 2)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()

    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        logits.grad, reference.grad.to(dtype), rtol=1e-5 if dtype is torch.float32 else 2**-7, atol=1e-6
    )


def test_gradients_are_right_for_a_target_that_is_not_contiguous() -> None:
    logits = torch.randn(3, 2, 7, dtype=torch.float32, requires_grad=True)
    target = torch.randint(7, (2, 3)).t()
    vocab_parallel_cross_entropy(logits, target).t().contiguous().sum().backward()
    expected = logits.detach().softmax(-1) - F.one_hot(target, 7)
    torch.testing.assert_close(logits.grad, expected)


def test_label_smoothing_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"label_smoothing must be 0.0, got 0.1"):
        vocab_parallel_cross_entropy(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), 0.1)
