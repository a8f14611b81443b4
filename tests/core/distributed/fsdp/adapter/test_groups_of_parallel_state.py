"""``FullyShardedDataParallel`` without a ``pg_collection``: the groups of ``parallel_state``, or an error for a model that is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.support.rank_checks import RankChecks
from tests.support.tiny_gpt import build_gpt, random_tokens

CHECKS = RankChecks(__name__)


def _wrap(model: Any, config: Any = None, **arguments: Any) -> FullyShardedDataParallel:
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    return FullyShardedDataParallel(config or model.config, ddp_config, model, **arguments)


@CHECKS.on(2)
def the_groups_of_parallel_state_are_used() -> None:
    assert not parallel_state.model_parallel_is_initialized()
    groups = parallel_state.initialize_model_parallel(2)
    model = build_gpt({"pg_collection": groups}, tensor_model_parallel_size=2)
    wrapped = _wrap(model)
    assert wrapped.pg_collection is groups
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    whole = build_gpt({"pg_collection": ProcessGroupCollection.data_parallel()}).decoder.layers[0].mlp.linear_fc1.weight
    assert weight.shape == whole.shape, "rows of both tensor-parallel ranks are one tensor"
    tokens, positions, labels = random_tokens()
    wrapped(tokens, positions, None, labels=labels).mean().backward()
    parallel_state.destroy_model_parallel()
    assert _wrap(build_gpt()).dist_index.get_dp_group().size() == 2


@CHECKS.on(2)
def parts_of_tensors_are_not_sharded_as_if_they_were_one() -> None:
    groups = parallel_state.initialize_model_parallel(2)
    parallel_state.destroy_model_parallel()
    build = lambda: build_gpt({"pg_collection": groups}, tensor_model_parallel_size=2)  # noqa: E731
    split = (
        r"pg_collection must hold in tp the ranks over which the model is split, 2 by .*, got 1; pass the collection"
    )
    for arguments in ({}, {"pg_collection": ProcessGroupCollection.data_parallel()}):
        with pytest.raises(ValueError, match=split):
            _wrap(build(), **arguments)
        with pytest.raises(ValueError, match=split + r"|2 by the tp_group of"):
            _wrap(build(), build_gpt().config, **arguments)
    plain = nn.Sequential(nn.Linear(4, 4))
    plain[0].weight.tensor_model_parallel = True
    config = build_gpt().config
    with pytest.raises(ValueError, match=r"must say which ranks are tensor-parallel, got None and a parameter of 0"):
        _wrap(plain, config)
    wrapped = _wrap(plain, config, pg_collection=ProcessGroupCollection.data_parallel())
    wrapped(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"must hold in pp .*, 2 by the config's pipeline_model_parallel_size, got 1"):
        _wrap(build_gpt(), replace(config, pipeline_model_parallel_size=2))
    assert dist.get_world_size() == 2


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
