"""Models with and without a fused down-projection read each other's DTensor checkpoints."""

from __future__ import annotations

import logging
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard_model
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from megatron.core.transformer.fsdp_dtensor_checkpoint import (
    handle_mla_down_proj_in_state_dict,
    validate_fsdp_dtensor_model_load,
)
from megatron.training.checkpointing import preprocess_fsdp_dtensor_state_dict
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
ARGS = SimpleNamespace(swiglu=False, num_experts=None)
QUERIES, OTHERS, WIDTH = 3, 4, 4


class _Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(q_lora_rank=QUERIES, kv_lora_rank=OTHERS - 1, qk_pos_emb_head_dim=1)
        if fused:
            self.linear_qkv_down_proj = nn.Linear(WIDTH, QUERIES + OTHERS, bias=False)
            self.linear_qkv_down_proj.layer_norm_weight = nn.Parameter(torch.randn(WIDTH))
        else:
            self.linear_q_down_proj = nn.Linear(WIDTH, QUERIES, bias=False)
            self.linear_kv_down_proj = nn.Linear(WIDTH, OTHERS, bias=False)


class _Layer(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        if not fused:
            self.input_layernorm = nn.LayerNorm(WIDTH, bias=False)
        self.self_attention = _Attention(fused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Model(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.layer, self.mtp_model_layer = _Layer(fused), nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        self.mtp = nn.ModuleDict({"mtp_model_layer": nn.Linear(WIDTH, 2, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _sharded(fused: bool, seed: int) -> Any:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return fully_shard_model(_Model(fused), mesh, "dp", fsdp_unit_modules=[_Layer])


def _on_disk(model: Any) -> dict[str, Any]:
    state: dict[str, Any] = preprocess_fsdp_dtensor_state_dict(ARGS, {"model": model.state_dict()}, model)["model"]
    return state


def _full(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: uneven_dtensor_to_full_tensor(value.detach()) for name, value in state.items()}


@CHECKS.on(2)
def fused_and_unfused_models_store_the_same_names() -> None:
    fused, unfused = _sharded(True, 1), _sharded(False, 2)
    stored = _full(_on_disk(unfused))
    assert set(_on_disk(fused)) == set(stored)
    assert "module.layer.self_attention.linear_q_down_proj.weight" in stored
    assert "module.mtp.transformer_layer.weight" in stored and "module.layer.input_layernorm.weight" in stored
    with tempfile.TemporaryDirectory() as own:
        folders: list[str] = [own]
        dist.broadcast_object_list(folders)
        dcp.save({"model": _on_disk(unfused)}, checkpoint_id=folders[0])
        names = dcp.FileSystemReader(folders[0]).read_metadata().state_dict_metadata
        asked = {"model": _on_disk(fused)}
        assert validate_fsdp_dtensor_model_load(names, asked, folders[0]) == set()
        dcp.load(asked, checkpoint_id=folders[0])  # into views of the model's weights
        dist.barrier()
    for name, value in _full(_on_disk(fused)).items():
        assert torch.equal(value, stored[name]), name
    whole = _full(fused.state_dict())["module.layer.self_attention.linear_qkv_down_proj.weight"]
    parts = [stored[f"module.layer.self_attention.linear_{kind}_down_proj.weight"] for kind in ("q", "kv")]
    assert torch.equal(whole, torch.cat(parts))


@CHECKS.on(2)
def optimizer_state_is_stored_apart_too() -> None:
    model = _sharded(True, 1)
    name = "module.layer.self_attention.linear_qkv_down_proj.weight"
    moments = model.state_dict()[name].detach().clone()
    given = {"state": {name: {"exp_avg": moments, "step": 3}}, "param_groups": []}
    _, changed = handle_mla_down_proj_in_state_dict(model, {}, given)
    assert changed is not None and changed["param_groups"] == []
    queries = changed["state"]["module.layer.self_attention.linear_q_down_proj.weight"]
    assert queries["step"] == 3 and queries["exp_avg"].shape == (QUERIES, WIDTH)
    assert set(changed["state"]) == {name.replace("qkv", kind) for kind in ("q", "kv")}


@CHECKS.on(2)
def parameters_tell_which_elements_a_rank_holds() -> None:
    model = _sharded(False, 1)
    for parameter in model.parameters():
        held: list[Any] = [None, None]
        own = parameter.megatron_fsdp_slice
        assert own.stop - own.start == parameter.to_local().numel()
        assert torch.equal(
            uneven_dtensor_to_full_tensor(parameter.detach()).flatten()[own], parameter.to_local().flatten()
        )
        dist.all_gather_object(held, (own.start, own.stop))
        assert sum(stop - start for start, stop in held) == parameter.numel()


@CHECKS.on(2)
def the_wrapper_takes_names_with_and_without_its_prefix() -> None:
    source, target = _sharded(False, 1), _sharded(False, 2)
    state = source.state_dict()
    assert set(state) == {name for name, _ in source.named_parameters()}
    for given in (state, {name.removeprefix("module."): value for name, value in state.items()}):
        target.load_state_dict(given)
        assert all(torch.equal(value, _full(state)[name]) for name, value in _full(target.state_dict()).items())
        for parameter in target.parameters():
            nn.init.zeros_(parameter)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)


def test_absent_weights_raise_are_returned_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    asked = {"model": {"a": 0, "b": 0, "c._extra_state": 0}, "optimizer": {"d": 0}}
    for strict in ("raise_unexpected", "assume_ok_unexpected", "raise_all"):
        with pytest.raises(CheckpointingException, match=r"got none for model\.b; they would keep"):
            validate_fsdp_dtensor_model_load(["model.a"], asked, "folder", strict=strict)
    assert validate_fsdp_dtensor_model_load(["model.a"], asked, "folder", strict="ignore_all") == set()
    assert validate_fsdp_dtensor_model_load(["model.a"], asked, "folder", strict="return_all") == {"model.b"}
    with caplog.at_level(logging.WARNING):
        assert validate_fsdp_dtensor_model_load([], asked, "folder", strict="log_all") == {"model.a", "model.b"}
    assert "got none for model.a, model.b" in caplog.text


def test_gates_and_experts_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="swiglu and num_experts must be off, got True and None"):
        preprocess_fsdp_dtensor_state_dict(
            SimpleNamespace(swiglu=True, num_experts=None), {"model": {}}, nn.Linear(1, 1)
        )
