"""Dtypes of the weights and gradients of a parameter group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of main weights, main gradients and gradient communication; the compute dtype is the parameter's own.

    Args:
        main_params_dtype: dtype of the weights that the optimizer updates. None: the parameter's own dtype,
            and the model weight then *is* the main weight. Frozen parameters always keep their own dtype.
        main_grads_dtype: dtype in which gradients are accumulated and handed to the optimizer. None: the dtype of
            the main weights, so that any optimizer can use ``param.grad`` as it is.
        grad_comm_dtype: dtype of gradients on the wire. None: the parameter's own dtype, in which backward makes
            them, so that nothing is cast or copied before the reduction.

    Raises:
        TypeError: a dtype that is not floating point of 16, 32 or 64 bits.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in SERVED_DTYPES:
                raise TypeError(f"{name} must be None or one of {[str(d) for d in SERVED_DTYPES]}, got {dtype}")

    def resolve(self, compute_dtype: torch.dtype, *, trainable: bool) -> GroupDtypes:
        """Return the dtypes of a group whose parameters have ``compute_dtype``."""
        if not trainable:
            return GroupDtypes(compute_dtype, compute_dtype, compute_dtype, compute_dtype)
        main = self.main_params_dtype or compute_dtype
        return GroupDtypes(compute_dtype, main, self.main_grads_dtype or main, self.grad_comm_dtype or compute_dtype)


@dataclass(frozen=True)
class GroupDtypes:
    """Dtypes of one parameter group, defaults resolved."""

    compute: torch.dtype
    main_params: torch.dtype
    main_grads: torch.dtype
    grad_comm: torch.dtype
