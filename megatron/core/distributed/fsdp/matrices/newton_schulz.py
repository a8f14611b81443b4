"""Newton-Schulz iterations, which bring the singular values of matrices close to 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

Coefficients = tuple[float, float, float]

COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    # K. Jordan et al., Muon (2024).
    "simple": ((3.4445, -4.7750, 2.0315),),
    # F. Cesista et al., squeezing 1-2 % efficiency gains out of Muon by optimizing the coefficients (2025).
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # The Polar Express (arXiv:2505.16932), with its safety factor.
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # Chebyshev-type polynomials (arXiv:2506.10935).
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    # Almost orthogonal layers (T. Boissin et al., Turbo-Muon).
    "aol": ((4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169)),
    # DeepSeek-V4's report: eight fast steps, then two that settle.
    "deepseekv4": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
    # Relaxed cubic schedule (arXiv:2606.00371).
    "cubic5": (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
}
"""Coefficients (a, b, c) of the steps X -> a X + b (X X^T) X + c (X X^T)^2 X, by the names that NVIDIA's
emerging_optimizers gives them."""

_REPEAT_LAST = ("polar_express", "cans", "deepseekv4")

# Equal matrices are multiplied in one call until its first product takes this many multiplications and additions: less does
# not fill the device. On the CPU whatever is not tiny is multiplied one by one.
_BATCH_FLOPS = {"cuda": 2**32, "cpu": 2**22}
_LARGEST_BATCH = 32


def newton_schulz_coefficients(kind: str, num_steps: int) -> tuple[Coefficients, ...]:
    """Return the coefficients of each step. Of more steps than a kind lists, some kinds repeat the last, others begin again.

    Raises:
        ValueError: the kind is unknown, there is no step, or the kind has a fixed number of other steps.
    """
    if kind not in COEFFICIENTS:
        raise ValueError(f"the Newton-Schulz coefficients must be one of {', '.join(COEFFICIENTS)}, got {kind!r}")
    if num_steps < 1:
        raise ValueError(f"Newton-Schulz must take 1 step at least, got {num_steps}")
    listed = COEFFICIENTS[kind]
    if kind == "cubic5" and num_steps != len(listed):
        raise ValueError(f"cubic5 is a schedule of {len(listed)} steps, got {num_steps}; take 5, or other coefficients")
    last = len(listed) - 1
    return tuple(listed[min(at, last) if kind in _REPEAT_LAST else at % len(listed)] for at in range(num_steps))


@dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """Newton-Schulz iterations on matrices.

    Args:
        coefficients: [steps] of each step.
        eps: least norm by which a matrix is divided.
        norm_dtype: dtype of the matrices as they come, in which they are divided by their Frobenius norm.
        dtype: dtype of the products.
        fp32_precision: of products in fp32, as ``torch.set_float32_matmul_precision`` has it; None leaves the setting.
        may_use_grams: whoever calls this may take a ``GramIteration`` in its place.

    Source: Muon (K. Jordan et al., 2024); the order of operations is that of ``torch.optim.Muon`` and of NVIDIA's
    emerging_optimizers, which agree.
    """

    coefficients: tuple[Coefficients, ...]
    eps: float
    norm_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.bfloat16
    fp32_precision: str | None = None
    may_use_grams: bool = False

    @torch.no_grad()
    def __call__(
        self, x: torch.Tensor, *, split_over: ProcessGroup | None = None, split_dim: int | None = None
    ) -> torch.Tensor:
        """Orthogonalize matrices x [R, C] or [B, R, C] of ``norm_dtype``; return them in ``dtype``.

        Args:
            split_over: x is this rank's part, along ``split_dim`` (0 or 1 of the matrix), of matrices that the ranks of this
                group hold together. Products over the split dim are summed over them.

        Ranks: all of ``split_over``, with parts of the same matrices.
        """
        is_tall = x.size(-2) > x.size(-1) if split_over is None else split_dim == 0
        x = x.mT if is_tall else x
        x = (x / self._norm(x, split_over).clamp(min=self.eps)).to(self.dtype)
        add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
        with _precision(self.fp32_precision):
            for a, b, c in self.coefficients:
                gram = x @ x.mT
                if split_over is not None:
                    dist.all_reduce(gram, group=split_over)
                if c == 0.0:
                    x = add_product(x, gram, x, beta=a, alpha=b)
                else:
                    x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.mT if is_tall else x

    def _norm(self, x: torch.Tensor, split_over: ProcessGroup | None) -> torch.Tensor:
        if split_over is None:
            return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        squares = (x * x).sum(dim=(-2, -1), keepdim=True)
        dist.all_reduce(squares, group=split_over)
        return squares.sqrt()

    def flops(self, rows: int, columns: int) -> float:
        """Return the multiplications and additions for a matrix of this shape."""
        short, long = sorted((rows, columns))
        per_step = [4.0 * short * short * long + (2.0 * short**3 if c else 0.0) for _, _, c in self.coefficients]
        return sum(per_step)


def batch_size(rows: int, columns: int, device_type: str) -> int:
    """Return how many matrices of this shape are multiplied in one call, a power of two.

    It depends on nothing else, and batches that lack matrices are filled with zeros: libraries choose kernels, and with
    them orders of summation, by the size of a batch. So results do not depend on how many matrices a rank has.
    """
    short, long = sorted((rows, columns))
    limit = _BATCH_FLOPS.get(device_type, _BATCH_FLOPS["cpu"]) / max(2.0 * short * short * long, 1.0)
    return max(1, 1 << min(int(limit), _LARGEST_BATCH).bit_length() - 1) if limit >= 1 else 1


@contextmanager
def _precision(precision: str | None) -> Iterator[None]:
    if precision is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
