"""Lightning's ``ModelParallelStrategy``, made for FSDP2, over modules that this engine shards; against DDP, on two ranks."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from megatron.core.distributed.fsdp.fsdp2 import FSDPModule, fully_shard
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

lightning = pytest.importorskip("lightning")

CHECKS = RankChecks(__name__)


class _Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, *, shards: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.shards = shards
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.shards and not isinstance(self.net, FSDPModule):
            for part in (self.net[0], self.net[2], self.net):
                fully_shard(part)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _fit(num_epochs: int, *, shards: bool = True, **kwargs: Any) -> tuple[Any, list[float]]:
    warnings.simplefilter("ignore")
    # What torchrun sets.
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    os.environ.update(launched, TORCHELASTIC_RUN_ID="run")
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    strategy = lightning.pytorch.strategies.ModelParallelStrategy(**sizes) if shards else "ddp"
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=num_epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.3,
        **quiet,
    )
    rows: Any = list(torch.randn(40, 6, generator=torch.Generator().manual_seed(1)))
    module = _Net(shards=shards)
    trainer.fit(module, DataLoader(rows, batch_size=4), **kwargs)
    return trainer, module.losses


@CHECKS.on(2)
def losses_are_those_of_ddp_and_training_resumes_where_it_was() -> None:
    """With two microbatches, clipping and a schedule."""
    _, expected = _fit(3, shards=False)
    _, whole = _fit(3)
    assert len(whole) == 15 and whole == pytest.approx(expected, rel=1e-5)
    with shared_folder() as folder:
        first, _ = _fit(2)
        first.save_checkpoint(f"{folder}/checkpoint")
        _, rest = _fit(3, ckpt_path=f"{folder}/checkpoint")
    assert rest == whole[10:]


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_lightning(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
