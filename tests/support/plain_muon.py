"""Muon as its papers and Megatron-Core write it, on whole matrices in one process, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# The first five steps of each kind, written down anew.
SIMPLE = [(3.4445, -4.7750, 2.0315)] * 5
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def orthogonalized(
    matrix: torch.Tensor, coefficients: Sequence[tuple[float, float, float]], *, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Newton-Schulz iterations on a matrix in fp32; the result is fp32."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-15)).to(dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, alpha=c, beta=b), x, beta=a)
    return (x.mT if matrix.shape[0] > matrix.shape[1] else x).float()


def scale_of(matrix: torch.Tensor, mode: str) -> float:
    """The factor of an orthogonalized matrix."""
    rows, columns = matrix.shape
    if mode == "spectral":
        return float(max(rows, columns)) ** 0.5
    return float((rows / columns if mode == "unit_rms_norm" else max(1.0, rows / columns)) ** 0.5)


class PlainMuon:
    """Muon for some matrices; ``step`` takes their gradients."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        nesterov: bool = False,
        coefficients: Sequence[tuple[float, float, float]] = QUINTIC,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        dtype: torch.dtype = torch.bfloat16,
        row_blocks: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        self.weights = list(weights)
        self.momenta = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        self.lr, self.weight_decay, self.momentum, self.nesterov = lr, weight_decay, momentum, nesterov
        self.coefficients, self.dtype = coefficients, dtype
        self.scale_mode, self.extra_scale_factor = scale_mode, extra_scale_factor
        self.row_blocks = [None] * len(self.weights) if row_blocks is None else row_blocks

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for weight, momentum, gradient, blocks in zip(
            self.weights, self.momenta, gradients, self.row_blocks, strict=True
        ):
            if gradient is None:
                continue
            weight.add_(weight, alpha=-self.weight_decay * self.lr)
            momentum.lerp_(gradient, 1 - self.momentum)
            direction = gradient.lerp(momentum, self.momentum) if self.nesterov else momentum
            weight.add_(self._update(direction, blocks), alpha=-self.lr)

    def _update(self, direction: torch.Tensor, blocks: Sequence[int] | None) -> torch.Tensor:
        if blocks is None:
            scaled = orthogonalized(direction, self.coefficients, dtype=self.dtype) * scale_of(
                direction, self.scale_mode
            )
            return scaled * self.extra_scale_factor
        columns = direction.shape[1]
        parts = torch.split(direction.view(-1, sum(blocks), columns), list(blocks), dim=1)
        done = [self._update(part.reshape(-1, columns), None).view(part.shape) for part in parts]
        return torch.cat(done, dim=1).view(direction.shape)
