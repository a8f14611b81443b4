"""Dtypes of the weights and gradients of a parameter group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of weights, gradients, and what modules get and give; the compute dtype is the parameter's own by default.

    Args:
        main_params_dtype: dtype of the weights that the optimizer updates. None: the parameter's own dtype,
            and where modules compute in it the model weight *is* the main weight. Frozen parameters always keep their own dtype.
        main_grads_dtype: dtype in which gradients are accumulated (over microbatches of a step that is not synchronised before its
            last: in ``grad_comm_dtype`` if that is wider) and handed to the optimizer. None: the dtype of
            the main weights, so that any optimizer can use ``param.grad`` as it is.
        grad_comm_dtype: dtype of gradients on the wire. None: the parameter's own dtype, in which backward makes
            them, so that nothing is cast or copied before the reduction.

        param_dtype: dtype in which modules compute, and in which weights are gathered. None: the parameter's own dtype.
            The others above that follow from the compute dtype follow from this one, and ``main_params_dtype=None`` still
            means the parameter's own.
        output_dtype: dtype of the floating-point outputs of the module. None: as they are.
        cast_forward_inputs: cast floating-point inputs of the module to ``param_dtype``, if there is one.

    Raises:
        TypeError: a dtype that is not floating point of 16, 32 or 64 bits.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype", "param_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in SERVED_DTYPES:
                raise TypeError(f"{name} must be None or one of {[str(d) for d in SERVED_DTYPES]}, got {dtype}")

    def resolve(self, own_dtype: torch.dtype, *, trainable: bool) -> GroupDtypes:
        """Return the dtypes of a group whose parameters have ``own_dtype``."""
        compute = self.param_dtype if self.param_dtype is not None and own_dtype.is_floating_point else own_dtype
        if not trainable:
            return GroupDtypes(compute, own_dtype, own_dtype, compute)
        main = self.main_params_dtype or own_dtype
        return GroupDtypes(compute, main, self.main_grads_dtype or main, self.grad_comm_dtype or compute)


@dataclass(frozen=True)
class GroupDtypes:
    """Dtypes of one parameter group, defaults resolved."""

    compute: torch.dtype
    main_params: torch.dtype
    main_grads: torch.dtype
    grad_comm: torch.dtype

    @property
    def sums(self) -> torch.dtype:
        """Dtype of sums over microbatches before they are main gradients."""
        return torch.promote_types(self.main_grads, self.grad_comm)
