"""Each setting of ``DistributedDataParallelConfig`` is served, or refused by name with the reason."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.distributed_data_parallel_config import NOT_SERVED
from megatron.core.distributed.fsdp import TRANSPORT_KINDS

# For each setting that is not served, a value other than its default.
_WISHES: dict[str, Any] = {
    "bucket_size": 1000,
    "preserve_fp32_weights": False,
    "gradient_reduce_div_fusion": False,
}
# Settings that are served; tests/core/distributed/fsdp/adapter/test_adapter.py shows what each changes.
_SERVED = {
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_grad_comm_dtype",
    "grad_reduce_in_fp32",
    "fsdp_forward_prefetch_depth",
    "fsdp_backward_prefetch_depth",
    "suggested_communication_unit_size",
    "fsdp_all_gather_in_start_param_sync",
    "check_for_nan_in_grad",
    "fsdp_transport",
    "use_symm_mem",
    "nccl_ub",
    "fp8_param_gather",
    "keep_fp8_transpose_cache",
    "fsdp_memory_budget",
    "fsdp_debug",
    "num_distributed_optimizer_instances",
    "outer_dp_sharding_strategy",
}


def test_every_setting_is_served_or_refused() -> None:
    """A new field must be added to one of the two lists; no setting is accepted and ignored."""
    assert {field.name for field in fields(DistributedDataParallelConfig)} == _SERVED | set(NOT_SERVED)
    assert not _SERVED & set(NOT_SERVED)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_a_setting_that_is_not_served_is_refused_by_name(name: str) -> None:
    wish = _WISHES.get(name, True)
    with pytest.raises(NotImplementedError) as caught:
        DistributedDataParallelConfig(**{name: wish})
    message = str(caught.value)
    assert message.startswith(f"{name} must be ") and f"got {wish!r}" in message and NOT_SERVED[name] in message


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_strategies(strategy: Any) -> None:
    config = DistributedDataParallelConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy)
    assert config.data_parallel_sharding_strategy == strategy
    if strategy != "no_shard":
        with pytest.raises(ValueError, match=f"'{strategy}' needs use_megatron_fsdp=True"):
            DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel_sharding_strategy": "zero3"}, "must be one of no_shard, optim, .*got 'zero3'"),
        ({"fsdp_forward_prefetch_depth": -1}, "fsdp_forward_prefetch_depth must be 0 or more units, got -1"),
        ({"fsdp_backward_prefetch_depth": -2}, "fsdp_backward_prefetch_depth must be 0 or more units, got -2"),
        ({"fsdp_forward_prefetch_depth": 1.5}, "fsdp_forward_prefetch_depth must be 0 or more units, got 1.5"),
        ({"fsdp_forward_prefetch_depth": 3}, "fsdp_forward_prefetch_depth=3 needs overlap_param_gather=True"),
        (
            {"overlap_param_gather": True, "fsdp_backward_prefetch_depth": 0, "suggested_communication_unit_size": 9},
            "suggested_communication_unit_size=9 needs prefetch depths of 1 or more, got 0",
        ),
        ({"suggested_communication_unit_size": 0}, "must be at least 1 element, got 0"),
        ({"fsdp_memory_budget": 0}, "must be bytes, or a fraction above 0 and below 1, got 0"),
        ({"fsdp_memory_budget": -0.5}, "must be bytes, or a fraction above 0 and below 1, got -0.5"),
        ({"fsdp_memory_budget": 1.5}, "must be bytes, or a fraction above 0 and below 1, got 1.5"),
        ({"fsdp_transport": "rdma"}, "fsdp_transport must be one of auto, nccl, symm, peer_copy, got 'rdma'"),
        ({"use_symm_mem": True, "fsdp_transport": "nccl"}, "use_symm_mem=True means fsdp_transport='symm', got 'nccl'"),
        ({"nccl_ub": True, "fsdp_transport": "peer_copy"}, "nccl_ub=True means fsdp_transport='symm', got 'peer_copy'"),
        ({"num_distributed_optimizer_instances": 0}, "must be at least 1, got 0"),
        (
            {"num_distributed_optimizer_instances": 2},
            "num_distributed_optimizer_instances=2 needs use_megatron_fsdp=True",
        ),
        ({"outer_dp_sharding_strategy": "optim_grads"}, "must be no_shard or optim, got 'optim_grads'"),
        ({"outer_dp_sharding_strategy": "optim"}, "needs num_distributed_optimizer_instances above 1, got 1"),
        ({"keep_fp8_transpose_cache": True}, "must come with fp8_param_gather=True, got False"),
        ({"use_distributed_optimizer": True}, "use_distributed_optimizer=True must come with use_megatron_fsdp=True"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedDataParallelConfig(**settings)


@pytest.mark.parametrize("settings", [{"fsdp_transport": "symm"}, {"use_symm_mem": True}, {"nccl_ub": True}])
def test_symmetric_memory_has_three_names(settings: dict[str, Any]) -> None:
    assert DistributedDataParallelConfig(**settings).transport_kind == "symm"
    assert DistributedDataParallelConfig(**settings | {"fsdp_transport": "symm"}).transport_kind == "symm"


def test_every_kind_of_transport_can_be_asked_for() -> None:
    for kind in TRANSPORT_KINDS:
        assert DistributedDataParallelConfig(fsdp_transport=kind).transport_kind == kind  # type: ignore[arg-type]
    assert DistributedDataParallelConfig().transport_kind == "auto"


def test_fields_are_keywords_only_and_default_to_plain_data_parallelism() -> None:
    with pytest.raises(TypeError):
        DistributedDataParallelConfig(True)  # type: ignore[call-arg]
    config = DistributedDataParallelConfig()
    assert config.data_parallel_sharding_strategy == "no_shard" and not config.use_megatron_fsdp
    assert config.megatron_fsdp_main_params_dtype is torch.float32
