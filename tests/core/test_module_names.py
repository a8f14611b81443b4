"""Parts of a model number their layers and experts from 0, and name them by their number in the whole model where ranks must agree."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.dist_checkpointing.model_tensors import sharded_state_dict_default
from megatron.core.distributed.fsdp.adapter.model_chunks import StagesOfRank
from megatron.core.module_names import ModuleListPart, named_modules, named_parameters, whole_names


class _Stage(nn.Module):
    """The second of two stages, on the second of two expert-parallel ranks: layers 2 and 3, with experts 1 of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = ModuleListPart([_layer(), _layer()], first_index=2)
        self.norm = nn.LayerNorm(1)
        self.tied = self.layers[1]


def _layer() -> nn.Module:
    return nn.ModuleDict({"experts": ModuleListPart([nn.Linear(1, 1, bias=False)], first_index=1)})


def test_names_are_local_as_in_megatron_core() -> None:
    """Callers add the offset themselves, so names with it would count it twice."""
    stage = _Stage()
    own = ["layers.0.experts.0.weight", "layers.1.experts.0.weight", "norm.weight", "norm.bias"]
    assert [name for name, _ in stage.named_parameters()] == own
    assert list(stage.state_dict()) == [*own, "tied.experts.0.weight"]
    assert isinstance(stage.layers, nn.ModuleList) and stage.layers[-1] is stage.layers[1] and len(stage.layers) == 2


def test_names_in_the_whole_model() -> None:
    stage = _Stage()
    whole = ["layers.2.experts.1.weight", "layers.3.experts.1.weight", "norm.weight", "norm.bias"]
    found = dict(named_parameters(stage))
    assert list(found) == whole and found["layers.3.experts.1.weight"] is stage.layers[1].experts[0].weight  # type: ignore[index]
    translate = whole_names(stage)
    assert [translate(name) for name in stage.state_dict()] == [*whole, "tied.experts.1.weight"]
    assert translate("layers.1.renamed.weight") == "layers.3.renamed.weight"  # no module, but within one
    assert translate("elsewhere.0.weight") == "elsewhere.0.weight"


def test_modules_are_found_as_torch_finds_them() -> None:
    """Each once unless asked otherwise, without those in ``memo``, in the order of torch."""
    stage = _Stage()
    for remove_duplicate in (True, False):
        own = [module for _, module in stage.named_modules(remove_duplicate=remove_duplicate)]
        assert [module for _, module in named_modules(stage, remove_duplicate=remove_duplicate)] == own
    memo: set[nn.Module] = {stage.layers[1]}
    assert "tied" not in dict(named_modules(stage, memo)) and "layers.2" in dict(
        named_modules(stage, {stage.layers[1]})
    )


def test_sharded_state_dict_has_local_keys_for_tensors_of_the_whole_model() -> None:
    """What is loaded goes into ``load_state_dict``; on disk each layer has one name, whatever stage holds it."""
    stage = _Stage()
    described = sharded_state_dict_default(stage)
    assert set(described) == set(stage.state_dict())
    assert described["layers.1.experts.0.weight"].key == "layers.3.experts.1.weight"
    stage.load_state_dict({key: torch.zeros_like(entry.data) for key, entry in described.items()})


def test_stages_of_one_rank_are_one_model() -> None:
    """Each stage has layers 0 and 1; names in the whole model keep them apart."""
    first = nn.ModuleDict({"layers": ModuleListPart([nn.Linear(1, 1), nn.Linear(1, 1)])})
    last = nn.ModuleDict({"layers": ModuleListPart([nn.Linear(1, 1), nn.BatchNorm1d(1)], first_index=4)})
    stages = StagesOfRank([first, last])
    weights = [name for name, _ in stages.named_parameters("model") if name.endswith("weight")]
    assert weights == [f"model.layers.{index}.weight" for index in (0, 1, 4, 5)]
    assert next(name for name, _ in stages.named_buffers()) == "layers.5.running_mean"
