"""Settings of the optimizer: its kind, its rates and gradient clipping."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of ``get_megatron_optimizer``; names and defaults are Megatron-Core's.

    Raises:
        ValueError: a value is out of range.
    """

    optimizer: str = "adam"
    """``adam`` is AdamW (decoupled weight decay), ``sgd`` is SGD with momentum."""

    lr: float | None = None
    """Largest learning rate; the scheduler scales it from step to step."""

    min_lr: float = 0.0
    """Learning rate at the end of the decay."""

    decoupled_lr: float | None = None
    """Largest learning rate of embedding and output layer; None: ``lr``."""

    decoupled_min_lr: float | None = None
    """Smallest learning rate of embedding and output layer; None: ``min_lr``."""

    weight_decay: float = 0.01
    """Decay of matrices; vectors (biases, norm weights) are never decayed."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9

    store_param_remainders: bool = False
    """Adam on bf16 main weights: keep the lower 16 bits of the fp32 weights as optimizer state; see ``FlatAdamW``."""

    overlap_update_with_forward: bool = True
    """Adam's updates of sharded models overlap the next forward; see ``FlatAdamW`` for what must wait for them."""

    clip_grad: float = 1.0
    """Largest norm of the whole model's gradient; 0 does not clip."""

    log_num_zeros_in_grad: bool = False
    """Count the zeros of the gradient in each step, at the cost of a pass over all gradients."""

    def __post_init__(self) -> None:
        if self.optimizer not in ("adam", "sgd"):
            raise ValueError(
                f"optimizer must be adam or sgd, got {self.optimizer!r}; other optimizers are not served yet"
            )
        if self.lr is not None and not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"0 <= min_lr <= lr must hold, got min_lr={self.min_lr} and lr={self.lr}")
        if self.store_param_remainders and self.optimizer != "adam":
            raise ValueError(f"store_param_remainders must go with optimizer adam, got {self.optimizer}")
        if self.clip_grad < 0:
            raise ValueError(f"clip_grad must be 0 (off) or positive, got {self.clip_grad}")
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"0 <= {name} < 1 must hold, got {getattr(self, name)}")
