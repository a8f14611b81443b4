"""What parameters say of the model that they are part of, and what is refused of it, by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from megatron.core.distributed.fsdp import fully_shard
from megatron.core.distributed.fsdp.dtensor.placements import BlockShard
from megatron.core.distributed.fsdp.mesh.model_parallel import ModelParallel, TensorPart, part_of
from megatron.core.module_names import ModuleListPart
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.support.launch import run_ranks
from tests.support.split_models import Layout, wrap


def _parameter(*shape: int, **attributes: object) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape))
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def test_attributes_say_of_which_tensor_a_parameter_is_a_part() -> None:
    split = {"tensor_model_parallel": True}
    assert part_of(_parameter(4, 3, **split), "w", None) == TensorPart(torch.Size([4, 3]))
    assert part_of(_parameter(4, 3), "w", 2) == TensorPart(torch.Size([4, 3]), (Replicate(),))
    assert part_of(_parameter(4, 3, **split), "w", 2) == TensorPart(torch.Size([8, 3]), (Shard(0),))
    columns = part_of(_parameter(4, 3, **split, partition_dim=1, partition_stride=1), "w", 2)
    assert columns == TensorPart(torch.Size([4, 6]), (Shard(1),)) and not columns.is_replicated
    gated = part_of(_parameter(4, 3, **split, partition_dim=0, partition_stride=2), "w", 4)
    assert gated == TensorPart(torch.Size([16, 3]), (BlockShard(2),))


@pytest.mark.parametrize(
    ("attributes", "error", "message"),
    [
        ({"partition_dim": 2}, ValueError, r"partition_dim of parameter mlp\.w must be one of its 2 dims, got 2"),
        ({"partition_dim": -1}, ValueError, r"partition_dim of parameter mlp\.w must be one of its 2 dims, got -1"),
        ({"partition_stride": 3}, ValueError, r"partition_stride of parameter mlp\.w must divide its 4 entries"),
        (
            {"partition_dim": 1, "partition_stride": 2},
            NotImplementedError,
            r"mlp\.w must hold its 2 matrices along dim 0",
        ),
    ],
)
def test_attributes_that_do_not_fit_are_refused(
    attributes: dict[str, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        part_of(_parameter(4, 2, tensor_model_parallel=True, **attributes), "mlp.w", 2)


class _Experts(nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.experts = ModuleListPart([nn.Linear(2, 2)], first)
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts[0](x)
        return out


def refuse_by_name() -> None:
    rank = dist.get_rank()
    with pytest.raises(
        ValueError, match=rf"experts\.{rank}\.weight belongs to an expert .*ModelParallel\(expert_mesh="
    ):
        fully_shard(_Experts(rank))
    same = fully_shard(_Experts(0))  # without expert parallelism experts are sharded like everything
    assert same.get_parameter("experts.0.weight").shape == (2, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="tensor_axis must be an axis of the mesh"):
        fully_shard(nn.Linear(2, 2), mesh, model_parallel=ModelParallel(tensor_axis="tp"))
    world = dist.group.WORLD
    groups = ProcessGroupCollection(dp=world, dp_cp=world, ep=world)
    with pytest.raises(ValueError, match=r"pg_collection must hold expt_dp.*split over 2 ranks"):
        wrap(Layout(ep=2), groups)


def test_what_would_train_other_ranks_experts_is_refused_by_name() -> None:
    """Experts of several ranks sharded as one would be overwritten by the first rank's, without a word."""
    run_ranks(2, refuse_by_name)
