"""Each setting of ``DistributedDataParallelConfig`` is served, or refused by name with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import TRANSPORT_KINDS, MixedPrecisionPolicy
from megatron.core.distributed.fsdp.adapter.fully_sharded_data_parallel import _transport_kind

_ZERO3: dict[str, Any] = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}


@pytest.mark.parametrize(
    ("strategy", "reductions", "gathers"),
    [
        ("no_shard", False, False),
        ("optim", False, False),
        ("optim_grads", True, False),
        ("optim_grads_params", True, True),
    ],
)
def test_communication_overlaps_without_being_asked_where_it_is_sharded(
    strategy: Any, reductions: bool, gathers: bool
) -> None:
    """As in Megatron-FSDP, where both fields default to False; separate fields turn overlap off."""
    fields: dict[str, Any] = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    config = DistributedDataParallelConfig(**fields, overlap_grad_reduce=False, overlap_param_gather=False)
    assert (config.reductions_overlap, config.gathers_overlap) == (reductions, gathers)
    assert config.prefetch_depths == ((1, 1) if gathers else (0, 0))
    asked = DistributedDataParallelConfig(**fields, overlap_grad_reduce=True, overlap_param_gather=True)
    assert asked.reductions_overlap and asked.gathers_overlap and asked.prefetch_depths == (1, 1)
    off = DistributedDataParallelConfig(**fields, no_overlap_grad_reduce=True, no_overlap_param_gather=True)
    assert not off.reductions_overlap and not off.gathers_overlap and off.prefetch_depths == (0, 0)
    assert off.describe_overlap().endswith(
        "prefetch depth 0 in forward and 0 in backward (no_overlap_grad_reduce, no_overlap_param_gather)"
    )


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_strategies(strategy: Any) -> None:
    config = DistributedDataParallelConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy)
    assert config.data_parallel_sharding_strategy == strategy
    # The package megatron-fsdp makes configurations without the flag.
    assert DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy).sharding_strategy == strategy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel_sharding_strategy": "zero3"}, "must be one of no_shard, optim, .*got 'zero3'"),
        ({"fsdp_forward_prefetch_depth": -1}, "fsdp_forward_prefetch_depth must be 0 or more units, got -1"),
        ({"fsdp_backward_prefetch_depth": -2}, "fsdp_backward_prefetch_depth must be 0 or more units, got -2"),
        ({"fsdp_forward_prefetch_depth": 1.5}, "fsdp_forward_prefetch_depth must be 0 or more units, got 1.5"),
        ({"fsdp_forward_prefetch_depth": 3}, "fsdp_forward_prefetch_depth=3 needs overlap_param_gather=True"),
        (
            {**_ZERO3, "no_overlap_param_gather": True, "fsdp_forward_prefetch_depth": 3},
            "fsdp_forward_prefetch_depth=3 must be left out with no_overlap_param_gather=True",
        ),
        (
            {"overlap_grad_reduce": True, "no_overlap_grad_reduce": True},
            "overlap_grad_reduce and no_overlap_grad_reduce must not both be True",
        ),
        (
            {"overlap_param_gather": True, "no_overlap_param_gather": True},
            "overlap_param_gather and no_overlap_param_gather must not both be True",
        ),
        (
            {"overlap_param_gather": True, "fsdp_backward_prefetch_depth": 0, "suggested_communication_unit_size": 9},
            "suggested_communication_unit_size=9 needs prefetch depths of 1 or more, got 0",
        ),
        ({"fsdp_layers_per_unit": 0}, "fsdp_layers_per_unit must be at least 1 layer, got 0"),
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
        ({"fsdp_manual_registration": True}, "fsdp_manual_registration=True must come with nccl_ub=True, got False"),
        ({"megatron_fsdp_version": 3}, "megatron_fsdp_version must be 1 or 2, got 3"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedDataParallelConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"check_for_large_grads": True}, "check_for_large_grads must be False, got True: .*use check_for_nan_in_grad"),
        (
            {"param_name_patterns_for_fp32_local_accumulation": ("all",)},
            r"\['all'\] needs megatron_fsdp_main_grads_dtype=torch.float32, got sums in torch.bfloat16",
        ),
        (
            {"reduce_scatter_with_fp32_accumulation": True, "nccl_ub": True},
            "reduce_scatter_with_fp32_accumulation=True needs fsdp_transport='peer_copy'.*got fsdp_transport='symm'",
        ),
        (
            {"disable_symmetric_registration": True, "nccl_ub": True},
            "disable_symmetric_registration must be False with symmetric memory.*leave out nccl_ub",
        ),
    ],
)
def test_what_the_engine_does_not_do_is_refused_with_the_way_out(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        DistributedDataParallelConfig(use_megatron_fsdp=True, **settings)


def test_what_the_engine_does_in_any_case_is_served() -> None:
    fp32, patterns = torch.float32, ("*.weight",)
    served: list[tuple[dict[str, Any], str]] = [
        ({"disable_symmetric_registration": True}, "nccl"),
        ({"disable_symmetric_registration": True, "fsdp_transport": "peer_copy"}, "peer_copy"),
        ({"param_name_patterns_for_fp32_local_accumulation": patterns, "megatron_fsdp_main_grads_dtype": fp32}, "auto"),
        ({"param_name_patterns_for_fp32_local_accumulation": patterns, "megatron_fsdp_grad_comm_dtype": fp32}, "auto"),
        (
            {
                "reduce_scatter_with_fp32_accumulation": True,
                "megatron_fsdp_grad_comm_dtype": fp32,
                "use_symm_mem": True,
            },
            "symm",
        ),
    ]
    for settings, kind in served:
        config = DistributedDataParallelConfig(use_megatron_fsdp=True, **settings)
        assert config.transport_kind == kind, settings


def test_gradients_in_bf16_are_added_in_fp32_where_a_transport_does() -> None:
    bf16 = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    served: list[tuple[dict[str, Any], torch.device, str]] = [
        ({}, cuda, "peer_copy"),
        ({"fsdp_transport": "peer_copy"}, cuda, "peer_copy"),
        ({"fsdp_transport": "nccl"}, cpu, "nccl"),
    ]
    for settings, device, kind in served:
        config = DistributedDataParallelConfig(reduce_scatter_with_fp32_accumulation=True, **settings)
        assert _transport_kind(config, bf16, device) == kind
    refused: list[dict[str, Any]] = [
        {"fsdp_transport": "nccl"},
        {"num_distributed_optimizer_instances": 2, "use_megatron_fsdp": True},
    ]
    for settings in refused:
        config = DistributedDataParallelConfig(reduce_scatter_with_fp32_accumulation=True, **settings)
        with pytest.raises(NotImplementedError, match="needs fsdp_transport='peer_copy' and one instance"):
            _transport_kind(config, bf16, cuda)
        fp32 = MixedPrecisionPolicy(grad_comm_dtype=torch.float32)
        assert _transport_kind(config, fp32, cuda) == config.transport_kind


@pytest.mark.parametrize("settings", [{"fsdp_transport": "symm"}, {"use_symm_mem": True}, {"nccl_ub": True}])
def test_symmetric_memory_has_three_names(settings: dict[str, Any]) -> None:
    assert DistributedDataParallelConfig(**settings).transport_kind == "symm"
    assert DistributedDataParallelConfig(**settings | {"fsdp_transport": "symm"}).transport_kind == "symm"


def test_every_kind_of_transport_can_be_asked_for() -> None:
    for kind in TRANSPORT_KINDS:
        assert DistributedDataParallelConfig(fsdp_transport=kind).transport_kind == kind  # type: ignore[arg-type]
    assert DistributedDataParallelConfig().transport_kind == "auto"


def test_the_distributed_optimizer_alone_shards_the_optimizer_state() -> None:
    assert DistributedDataParallelConfig(use_distributed_optimizer=True).sharding_strategy == "optim"
    with_engine = DistributedDataParallelConfig(use_distributed_optimizer=True, use_megatron_fsdp=True)
    assert with_engine.sharding_strategy == "no_shard"


def test_the_defaults_are_plain_data_parallelism_and_fields_have_the_order_of_megatron_core() -> None:
    config = DistributedDataParallelConfig()
    assert config.data_parallel_sharding_strategy == "no_shard" and not config.use_megatron_fsdp
    assert config.megatron_fsdp_main_params_dtype is torch.float32
    in_order: Any = DistributedDataParallelConfig
    assert in_order(True, False, True).overlap_param_gather
