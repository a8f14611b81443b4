"""``accelerate`` over sharded models: a script with our ``Accelerator`` against itself with DDP, on two ranks."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

CHECKS = RankChecks(__name__)


def _model(**fields: Any) -> Any:
    warnings.simplefilter("default")
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(num_key_value_heads=2, vocab_size=64, pad_token_id=0, **sizes, **fields)
    return transformers.LlamaForCausalLM(config)


def _data() -> Any:
    return list(torch.randint(1, 64, (48, 12), generator=torch.Generator().manual_seed(4)))


def _accelerator(kind: Any, **fields: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", LOCAL_WORLD_SIZE="2")  # as torchrun
    return kind(cpu=True, gradient_accumulation_steps=2, **fields)


class _Run:
    """What a user's script does."""

    def __init__(self, accelerator: Any, model: Any) -> None:
        self.accelerator = accelerator
        decayed = [p for p in model.parameters() if p.dim() > 1]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 40)
        loader: Any = DataLoader(_data(), batch_size=4)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def train(self, num_epochs: int = 1) -> list[tuple[float, float]]:
        entries = []
        for _ in range(num_epochs):
            for rows in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(input_ids=rows, labels=rows).loss
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                        entries.append((self.accelerator.gather(loss.detach()).mean().item(), norm.item()))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
        return entries

    def weights(self) -> dict[str, torch.Tensor]:
        return self.accelerator.get_state_dict(self.model)


@CHECKS.on(2)
def a_script_has_the_numbers_of_ddp() -> None:
    from megatron.core.distributed.fsdp.huggingface import FullyShardedAccelerator

    for ties in (False, True):
        plain = _Run(_accelerator(accelerate.Accelerator), _model(tie_word_embeddings=ties))
        expected = plain.train()
        ours = _Run(_accelerator(FullyShardedAccelerator), _model(tie_word_embeddings=ties))
        found = ours.train()
        assert len(expected) == 3 and torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5), (
            found,
            expected,
        )
        weights = ours.weights()
        assert bool(weights) == (dist.get_rank() == 0)
        for name, value in weights.items():
            # Adam's steps of 0.01 are ratios of gradients, whose sums are rounded in another order.
            torch.testing.assert_close(value, plain.model.module.state_dict()[name], rtol=0.0, atol=2e-5)
        with shared_folder() as folder:
            model = ours.accelerator.unwrap_model(ours.model)
            model.save_pretrained(
                folder,
                is_main_process=ours.accelerator.is_main_process,
                save_function=ours.accelerator.save,
                state_dict=weights,
            )
            dist.barrier()
            again = transformers.LlamaForCausalLM.from_pretrained(folder)
            for name, value in weights.items():
                assert torch.equal(again.state_dict()[name], value)


@CHECKS.on(2)
def state_is_saved_and_loaded_by_all_ranks() -> None:
    from megatron.core.distributed.fsdp.huggingface import FullyShardedAccelerator

    with shared_folder() as folder:
        whole = _Run(_accelerator(FullyShardedAccelerator), _model())
        whole.train()
        seen: list[int] = []
        whole.accelerator.register_save_state_pre_hook(lambda models, weights, where: seen.append(len(weights)))
        whole.accelerator.save_state(folder)
        assert seen == [0] and len(whole.accelerator._models) == 1
        expected = whole.train()
        again = _Run(_accelerator(FullyShardedAccelerator), _model())
        again.accelerator.load_state(folder)
        assert again.scheduler.get_last_lr() != [0.01, 0.01]
        assert again.train() == expected
        for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local())


@CHECKS.on(2)
def any_module_is_sharded_by_a_function_of_the_user() -> None:
    from megatron.core.distributed.fsdp import fully_shard
    from megatron.core.distributed.fsdp.huggingface import FullyShardedAccelerator

    accelerator = _accelerator(FullyShardedAccelerator, shard=fully_shard, mixed_precision="no")
    torch.manual_seed(1)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model, optimizer, criterion = accelerator.prepare(model, optimizer, nn.MSELoss())
    assert list(model.parameters()) == optimizer.param_groups[0]["params"] and type(criterion) is nn.MSELoss
    accelerator.backward(criterion(model(torch.ones(2, 6)), torch.zeros(2, 3)))
    with pytest.raises(ValueError, match="must get an optimizer without state"):
        plain = nn.Linear(2, 2)
        used = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
        plain(torch.ones(2)).sum().backward()
        used.step()
        accelerator.prepare(plain, used)
    with pytest.raises(ValueError, match="mixed_precision must be one of"):
        _accelerator(FullyShardedAccelerator, mixed_precision="fp8")


@CHECKS.on(2)
def in_bf16_main_weights_are_fp32() -> None:
    from megatron.core.distributed.fsdp.huggingface import FullyShardedAccelerator

    run = _Run(_accelerator(FullyShardedAccelerator, mixed_precision="bf16"), _model())
    seen: list[torch.dtype] = []
    run.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    losses = run.train()
    assert set(seen) == {torch.bfloat16} and losses[-1][0] < losses[0][0] * 1.1
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_accelerator(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
