"""A checkpoint must match what it is loaded into by name; differences are reported before anything changes."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import (
    FlatAdamW,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.api.module import contexts_of
from megatron.core.distributed.fsdp.checkpoint.state import unwrapped
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.checkpoint_models import Block, TiedModel, adamw, sharded_model, train, whole_state
from tests.support.models import local_of


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """Make this process the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Plain(nn.Module):
    """A module with given parameters and children; its forward is never called."""

    def forward(self) -> None:
        raise AssertionError("this model only holds weights")


def names_in(path: Path) -> list[str]:
    with open(path / ".metadata", "rb") as file:
        return list(pickle.load(file).state_dict_metadata)


def linear(rows: int = 4, *, dtype: torch.dtype = torch.float32, **modules: nn.Module) -> Any:
    """Return a unit of one linear layer ``a`` and given children."""
    torch.manual_seed(0)
    model = Plain()
    model.a = nn.Linear(3, rows, dtype=dtype)
    for name, module in modules.items():
        model.add_module(name, module)
    return fully_shard(model, mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


# ---- names ------------------------------------------------------------------------------------------------------


def test_entries_have_the_names_of_the_unwrapped_model_and_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = sharded_model("optim_grads_params", num_blocks=1)
    optimizer = adamw(model)
    train(model, optimizer, 1)
    save_checkpoint(model, optimizer, tmp_path / "a", extra_state={"iteration": 3, "per_rank": 7})
    weights = {f"blocks.0.{name}" for name in ("up.weight", "up.bias", "down.weight", "scale", "gain")} | {
        "embedding.weight"
    }
    state = {f"optimizer.state.{name}.{key}" for name in weights for key in ("step", "exp_avg", "exp_avg_sq")}
    rest = {"blocks.0.offset", "blocks.0.calls", "optimizer.param_groups", "optimizer.kind"}
    extra = {"extra_state.iteration", "extra_state.per_rank.0"}
    assert set(names_in(tmp_path / "a")) == weights | state | rest | extra


def test_other_tools_read_the_folder(tmp_path: Path) -> None:
    """PyTorch's own reader finds whole tensors and plain values under the same names."""
    model = sharded_model("optim_grads_params")
    save_checkpoint(model, None, tmp_path / "a", extra_state={"iteration": 3})
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert state.pop("extra_state.iteration") == 3
    assert set(state) == set(model.state_dict()) - {"output.weight"}
    for name, tensor in state.items():
        whole = model.state_dict()[name]
        assert torch.equal(tensor, whole.full_tensor() if hasattr(whole, "full_tensor") else whole)


class Wrapper(nn.Module):
    """Holds the model as ``module``, as the adapter does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(x)
        return out


class ParentOfUnits(TiedModel):
    """Not a unit; its blocks are, so its own weights are plain."""


def test_wrapped_bare_and_partly_sharded_models_load_each_other(tmp_path: Path) -> None:
    torch.manual_seed(3)
    parent = ParentOfUnits()
    for block in parent.blocks:
        fully_shard(block)
    models = {
        "root": sharded_model("optim_grads_params"),
        "wrapper": Wrapper(Wrapper(sharded_model("optim", seed=2))),
        "parent": parent,
        "adapter": FullyShardedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1),
            DistributedDataParallelConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"),
            TiedModel(),
            fsdp_unit_modules=[Block],
        ),
    }
    inside = {name: unwrapped(model) for name, model in models.items()}
    assert all(isinstance(model, TiedModel) for model in inside.values())
    for name, model in models.items():
        inner = inside[name]
        optimizer = adamw(inner)
        train(inner, optimizer, 1)
        wrapped = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
        save_checkpoint(model, wrapped, tmp_path / name)
        for other, target in models.items():
            inner_target = inside[other]
            target_optimizer = adamw(inner_target)
            load_checkpoint(target, target_optimizer, tmp_path / name)
            assert whole_state(inner_target, target_optimizer) == whole_state(inner, optimizer), (name, other)


def test_a_model_whose_only_child_is_called_module_keeps_its_own_weights(tmp_path: Path) -> None:
    """A module with weights of its own is not a wrapper."""
    model = Wrapper(nn.Linear(2, 2))
    model.own = nn.Parameter(torch.ones(2))
    save_checkpoint(fully_shard(model), None, tmp_path / "a")
    assert set(names_in(tmp_path / "a")) == {"own", "module.weight", "module.bias"}


def test_tied_weights_load_whichever_name_comes_first(tmp_path: Path) -> None:
    def tied(first: str, second: str) -> tuple[Any, torch.optim.Optimizer]:
        model = Plain()
        model.add_module(first, nn.Linear(2, 2, bias=False))
        model.add_module(second, nn.Linear(2, 2, bias=False))
        model.get_submodule(second).weight = model.get_submodule(first).weight
        fully_shard(model)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = tied("b", "a")
    step(model, optimizer)
    save_checkpoint(model, optimizer, tmp_path / "a")
    assert "a.weight" not in names_in(tmp_path / "a")
    other, other_optimizer = tied("a", "b")
    load_checkpoint(other, other_optimizer, tmp_path / "a")
    assert torch.equal(other.a.weight.to_local(), model.a.weight.to_local())
    state, wanted = other_optimizer.state[other.a.weight], optimizer.state[model.a.weight]
    assert torch.equal(state["exp_avg"].to_local(), wanted["exp_avg"].to_local())


@pytest.mark.parametrize("shard", [fully_shard, fsdp2.fully_shard], ids=["ours", "fsdp2"])
def test_checkpoints_of_other_tools_have_a_tied_weight_under_all_its_names(tmp_path: Path, shard: Any) -> None:
    """``dcp.save(model.state_dict())`` writes each of them, so all must hold the same values."""

    def tied(seed: int) -> TiedModel:
        torch.manual_seed(seed)
        return TiedModel(num_blocks=0)  # FSDP2 refuses the blocks' 0-dim parameters

    theirs = tied(1)
    shard(theirs)
    state = theirs.state_dict()
    dcp.save(state, checkpoint_id=tmp_path / "a")
    assert {"embedding.weight", "output.weight"} <= set(names_in(tmp_path / "a"))
    model = fully_shard(tied(2))
    load_checkpoint(model, None, tmp_path / "a")
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, whole[name]), name

    dcp.save({**whole, "output.weight": whole["output.weight"] + 1}, checkpoint_id=tmp_path / "b")
    message = "embedding.weight and output.weight, which are one weight of the model, must have the same values"
    check_refused(tmp_path / "b", model, None, ValueError, message)
    dcp.save({**whole, "output.weight": torch.zeros(1, 2)}, checkpoint_id=tmp_path / "c")
    check_refused(tmp_path / "c", model, None, ValueError, "of another shape: output.weight (saved [1, 2], model [")
    dcp.save({**whole, "output.weight": 3}, checkpoint_id=tmp_path / "d")
    check_refused(tmp_path / "d", model, None, ValueError, "of another kind: output.weight (saved as a plain value)")


def test_names_that_would_be_taken_for_other_state_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.weight of the model has a name"):
        save_checkpoint(linear(optimizer=nn.Linear(1, 1)), None, tmp_path / "a")


def test_parameters_without_elements_and_without_dims_are_kept(tmp_path: Path) -> None:
    model = Plain()
    model.none = nn.Parameter(torch.empty(0, 3))
    model.one = nn.Parameter(torch.tensor(2.5))
    save_checkpoint(fully_shard(model), None, tmp_path / "a")
    assert set(names_in(tmp_path / "a")) == {"none", "one"}
    with torch.no_grad():
        model.one.zero_()
    load_checkpoint(model, None, tmp_path / "a")
    assert local_of(model.one).item() == 2.5


class Counting(nn.Module):
    """Has state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_state_of_modules_beside_tensors_is_kept(tmp_path: Path) -> None:
    model, other = linear(extra=Counting()), linear(extra=Counting())
    model.extra.count = 4
    save_checkpoint(model, None, tmp_path / "a")
    load_checkpoint(other, None, tmp_path / "a")
    assert other.extra.count == 4
    with pytest.raises(ValueError, match=r"not in the model: extra\._extra_state \(1\)"):
        load_checkpoint(linear(), None, tmp_path / "a")


# ---- what does not match ----------------------------------------------------------------------------------------


def check_refused(path: Path, model: Any, optimizer: Any, error: type[Exception], *messages: str) -> None:
    """Check that loading raises with all messages and changes nothing."""
    before = whole_state(model, optimizer)
    groups = [dict(group) for group in optimizer.param_groups] if optimizer else None
    with pytest.raises(error) as found:
        load_checkpoint(model, optimizer, path)
    for message in messages:
        assert message in str(found.value)
    assert whole_state(model, optimizer) == before
    assert groups is None or [dict(group) for group in optimizer.param_groups] == groups


def test_missing_extra_and_misshaped_weights_are_all_named_before_anything_changes(tmp_path: Path) -> None:
    saved = linear(4, gone=nn.Linear(1, 1))
    save_checkpoint(saved, None, tmp_path / "a")
    wide = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(23))
    with torch.no_grad():
        saved.a.bias.fill_(9.0)
    check_refused(
        tmp_path / "a",
        linear(5, wide=wide),
        None,
        ValueError,
        "model: missing in the checkpoint: wide.0.weight, wide.1.weight,",
        "wide.19.weight, ... (23 in all)",
        "in the checkpoint, but not in the model: gone.weight, gone.bias (2)",
        "of another shape: a.weight (saved [4, 3], model [5, 3]), a.bias (saved [4], model [5]) (2)",
        "Nothing was changed",
    )


def test_missing_and_extra_parameters_of_the_optimizer_are_named_apart_from_the_models(tmp_path: Path) -> None:
    model = linear(4)
    optimizer = torch.optim.AdamW([model.a.weight])
    step(model, optimizer)
    save_checkpoint(model, optimizer, tmp_path / "a")
    other = linear(4)
    other_optimizer = torch.optim.AdamW([other.a.bias])
    step(other, other_optimizer)
    messages = ("got optimizer: missing in the checkpoint: a.bias (1)", "but not in the optimizer: a.weight (1)")
    check_refused(tmp_path / "a", other, other_optimizer, ValueError, *messages)


def test_another_optimizer_is_refused_by_the_names_of_its_hyperparameters(tmp_path: Path) -> None:
    model = linear()
    save_checkpoint(model, torch.optim.SGD(model.parameters(), momentum=0.9), tmp_path / "a")
    messages = ("missing in the checkpoint: hyperparameter betas", "not in the optimizer: hyperparameter momentum")
    check_refused(tmp_path / "a", model, torch.optim.AdamW(model.parameters()), ValueError, *messages)


def test_a_checkpoint_without_an_optimizer_says_how_to_load_it(tmp_path: Path) -> None:
    model = linear()
    save_checkpoint(model, None, tmp_path / "a")
    optimizer = torch.optim.AdamW(model.parameters())
    check_refused(tmp_path / "a", model, optimizer, ValueError, "pass load_optimizer=False")
    load_checkpoint(model, optimizer, tmp_path / "a", load_optimizer=False)


def test_optimizer_state_of_another_shape_is_named(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.AdamW([model.a.weight])
    step(model, optimizer)
    optimizer.state[model.a.weight]["exp_avg"] = torch.zeros(2, 2)
    save_checkpoint(model, optimizer, tmp_path / "a")
    message = "of another shape: optimizer.state.a.weight.exp_avg (saved [2, 2], parameter [4, 3]) (1)"
    other = linear()
    check_refused(tmp_path / "a", other, torch.optim.AdamW([other.a.weight]), ValueError, message)


@pytest.mark.parametrize("make", [torch.optim.AdamW, FlatAdamW])
@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq"])
def test_a_part_of_a_parameters_optimizer_state_is_missed_by_name(make: Any, key: str, tmp_path: Path) -> None:
    """Otherwise zeros would replace it, or the next step would raise a KeyError."""
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    del optimizer.state[model.a.weight][key]
    save_checkpoint(model, optimizer, tmp_path / "a")
    other = linear()
    message = f"got optimizer: missing in the checkpoint: optimizer.state.a.weight.{key} (1)"
    check_refused(tmp_path / "a", other, make(other.parameters()), ValueError, message)


def test_floating_dtypes_are_converted_and_others_refused(tmp_path: Path) -> None:
    model = linear(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    save_checkpoint(model, optimizer, tmp_path / "a")
    half = linear(dtype=torch.bfloat16)
    half_optimizer = torch.optim.AdamW(half.parameters())
    load_checkpoint(half, half_optimizer, tmp_path / "a")
    assert torch.equal(half.a.weight.to_local(), model.a.weight.to_local().bfloat16())
    exp_avg = half_optimizer.state[half.a.weight]["exp_avg"]
    assert exp_avg.dtype == torch.bfloat16
    assert torch.equal(exp_avg.to_local(), optimizer.state[model.a.weight]["exp_avg"].to_local().bfloat16())
    assert half_optimizer.state[half.a.weight]["step"].dtype == torch.float32

    counted = linear()
    counted.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    save_checkpoint(counted, None, tmp_path / "b")
    counted.count = torch.zeros(2)
    message = "of another kind: count (saved torch.int64, here torch.float32) (1)"
    check_refused(tmp_path / "b", counted, None, ValueError, message)


def test_an_optimizer_over_other_parameters_than_the_models_is_refused(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7, 2))], lr=0.1)
    with pytest.raises(ValueError, match=r"one of shape \[7, 2\] \(group 0, position 2\)"):
        save_checkpoint(model, optimizer, tmp_path / "a")
    with pytest.raises(TypeError, match=r"hold one as \.optimizer, got dict"):
        save_checkpoint(model, {}, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_damaged_files_are_found_before_anything_changes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_checkpoint(linear(), None, path)
    data = path / "__0_0.distcp"
    whole = data.read_bytes()
    other = linear()
    with torch.no_grad():
        other.a.weight.zero_()
    data.write_bytes(whole[:-1])
    check_refused(path, other, None, FileNotFoundError, f"must have {len(whole)} bytes, got {len(whole) - 1} bytes")
    data.unlink()
    check_refused(path, other, None, FileNotFoundError, "got no file: the checkpoint was damaged")
    data.write_bytes(whole)
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:100])
    check_refused(path, other, None, ValueError, "must have the checksum that checkpoint.json names")
    (path / ".metadata").unlink()
    check_refused(path, other, None, FileNotFoundError, "got no .metadata in it")


def test_a_unit_that_the_user_unsharded_is_saved_and_loaded(tmp_path: Path) -> None:
    model = sharded_model("optim_grads_params", num_blocks=1)
    optimizer = adamw(model)
    model.blocks[0].unshard()
    save_checkpoint(model, optimizer, tmp_path / "a")
    model.blocks[0].reshard()
    saved = [local_of(parameter).clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.blocks[0].unshard()
    load_checkpoint(model, None, tmp_path / "a")
    for parameter, value in zip(model.parameters(), saved, strict=True):
        assert torch.equal(local_of(parameter), value)


# ---- optimizers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
        lambda p: torch.optim.NAdam(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
)
def test_any_optimizer_goes_on_as_if_it_had_not_been_saved(tmp_path: Path, make: Any) -> None:
    """Load into an optimizer without state and into one with state; later updates are the same."""
    model = sharded_model("optim_grads_params", num_blocks=1)
    optimizer = fully_shard_optimizer(make([p for p in model.parameters() if p.requires_grad]))
    train(model, optimizer, 2)
    save_checkpoint(model, optimizer, tmp_path / "a")
    wanted = train(model, optimizer, 2, first=2), whole_state(model, optimizer)
    for steps in (0, 3):
        other = sharded_model("optim", seed=1, num_blocks=1)
        other_optimizer = fully_shard_optimizer(make([p for p in other.parameters() if p.requires_grad]))
        train(other, other_optimizer, steps)
        load_checkpoint(other, other_optimizer, tmp_path / "a")
        assert (train(other, other_optimizer, 2, first=2), whole_state(other, other_optimizer)) == wanted


@pytest.mark.parametrize("flattens", [False, True])
def test_what_dcp_saved_of_model_and_optimizer_is_loaded(tmp_path: Path, flattens: bool) -> None:
    """Megatron-FSDP's version 2 saves these two dicts, of PyTorch's functions, under the names ``model`` and ``optimizer``."""
    model = sharded_model("no_shard", num_blocks=1)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=flattens)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save({**state, "model": {**state["model"], "none._extra_state": None}}, checkpoint_id=tmp_path / "a")
    wanted = train(model, optimizer, 2, first=2), whole_state(model, optimizer)
    other = sharded_model("optim_grads_params", seed=1, num_blocks=1)
    other_optimizer = adamw(other)
    load_checkpoint(other, other_optimizer, tmp_path / "a")
    assert (train(other, other_optimizer, 2, first=2), whole_state(other, other_optimizer)) == wanted


def test_loading_from_before_the_first_step_removes_state(tmp_path: Path) -> None:
    model = sharded_model("optim_grads_params", num_blocks=1)
    optimizer = adamw(model)
    save_checkpoint(model, optimizer, tmp_path / "a")
    losses = train(model, optimizer, 2)
    load_checkpoint(model, optimizer, tmp_path / "a")
    assert not optimizer.state
    assert train(model, optimizer, 2) == losses


def test_hyperparameters_follow_their_parameters_into_other_groups(tmp_path: Path) -> None:
    model = linear()
    groups = [{"params": [model.a.weight], "lr": 0.5, "note": "w"}, {"params": [model.a.bias], "lr": 0.25, "note": "b"}]
    optimizer = torch.optim.AdamW(groups, foreach=True)
    step(model, optimizer)
    save_checkpoint(model, optimizer, tmp_path / "a")
    swapped: list[dict[str, Any]] = [{"params": [model.a.bias]}, {"params": [model.a.weight], "mine": 1}]
    other = torch.optim.AdamW(swapped, foreach=False)
    load_checkpoint(model, other, tmp_path / "a")
    assert [(g["lr"], g["note"], g["foreach"]) for g in other.param_groups] == [(0.25, "b", False), (0.5, "w", False)]
    assert other.param_groups[1]["mine"] == 1
    assert other.state[model.a.bias]["step"].item() == 1
    merged = torch.optim.AdamW(model.parameters())
    check_refused(tmp_path / "a", model, merged, ValueError, "must have been saved with one lr, got 0.5 and 0.25")


def test_a_learning_rate_tensor_is_set_in_place(tmp_path: Path) -> None:
    """A captured graph reads it at its address."""
    model = linear()
    rate = torch.tensor(0.1)
    save_checkpoint(model, torch.optim.AdamW(model.parameters(), lr=0.5), tmp_path / "a")
    load_checkpoint(model, torch.optim.AdamW(model.parameters(), lr=rate, foreach=False), tmp_path / "a")
    assert rate.item() == 0.5


# ---- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_the_next_forward_sees_what_was_loaded(tmp_path: Path, strategy: str) -> None:
    """Also where a cast or gathered copy of the main weights exists, or is being gathered, before the load."""
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float64)
    model, other = (sharded_model(strategy, seed=seed, policy=policy) for seed in (0, 1))
    save_checkpoint(model, None, tmp_path / "a")
    wanted = train(model, adamw(model), 1)
    train(other, adamw(other), 3)
    for context in contexts_of(other):
        assert context.planner.plan is not None
        context.prepare_forward()
    load_checkpoint(other, None, tmp_path / "a")
    assert train(other, adamw(other), 1) == wanted


def test_the_next_microbatch_sees_what_was_loaded(tmp_path: Path) -> None:
    model, other = (sharded_model("optim_grads_params", seed=seed) for seed in (0, 1))
    save_checkpoint(model, None, tmp_path / "a")
    tokens = torch.arange(6).view(2, 3)
    with torch.no_grad(), microbatch(other, is_first=True):
        assert other(tokens) != model(tokens)
    load_checkpoint(other, None, tmp_path / "a")
    with torch.no_grad(), microbatch(other, is_first=False):
        assert other(tokens) == model(tokens)


def test_extra_state_comes_back_as_it_was_at_the_call(tmp_path: Path) -> None:
    view = torch.arange(100_000)[5:8]
    extra: dict[str, Any] = {
        "numbers": [1, 2.5, True, None, 3 + 4j, b"x", "y", (1, (2,))],
        "nest": {"a": {"b": view}, 3: OrderedDict(c=torch.bfloat16)},
        "dotted.key": torch.tensor(1.5, dtype=torch.bfloat16),
    }
    save = save_checkpoint(linear(), None, tmp_path / "a", extra_state=extra, async_save=True)
    assert save is not None
    view.zero_()
    extra["numbers"].append(8)
    save.wait()
    found = load_checkpoint(linear(), None, tmp_path / "a")
    assert found["numbers"] == [1, 2.5, True, None, 3 + 4j, b"x", "y", (1, (2,))]
    assert found["nest"]["a"]["b"].tolist() == [5, 6, 7]
    assert found["nest"][3] == {"c": torch.bfloat16}
    assert found["dotted.key"].dtype == torch.bfloat16 and found["dotted.key"].item() == 1.5
    assert list(found) == list(extra)
    assert sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) < 50_000, "a view must not bring its storage"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"a": {"b": [0, object()]}}, r"extra_state\['a'\]\['b'\]\[1\] must be a tensor.*got a builtins\.object"),
        ({"per_rank": {1, 2}}, r"extra_state\['per_rank'\] must be a tensor"),
        ({"a": nn.Linear(1, 1)}, "Linear; convert it before saving"),
        ({3: 4}, "keys of extra_state must be strings"),
        ({"per_rank.0": 4}, "do not begin with per_rank"),
    ],
)
def test_values_that_could_not_be_loaded_are_refused_when_they_are_saved(
    tmp_path: Path, extra: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        save_checkpoint(linear(), None, tmp_path / "a", extra_state=extra)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_module_is_refused_and_a_plain_one_is_saved_whole(tmp_path: Path) -> None:
    model = linear()
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(TypeError, match=r"model must be an nn\.Module, .* got dict; .* each by itself"):
            call({"a": model}, None, tmp_path / "a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"stages of one model, got a\.\w+ in two of them; .* each by itself"):
        save_checkpoint([model, linear()], None, tmp_path / "a")
    save_checkpoint(model, None, tmp_path / "a")
    plain = Plain()
    plain.a = nn.Linear(3, 4)
    load_checkpoint(plain, None, tmp_path / "a")
    assert torch.equal(plain.a.weight, model.a.weight.to_local())
    save_checkpoint(plain, None, tmp_path / "b")
    with torch.no_grad():
        model.a.weight.zero_()
    load_checkpoint(model, None, tmp_path / "b")
    assert torch.equal(plain.a.weight, model.a.weight.to_local())


def test_without_process_groups_the_remedy_is_said(tmp_path: Path) -> None:
    model = linear()
    dist.destroy_process_group()
    try:
        with pytest.raises(RuntimeError, match=r"before save_checkpoint; call torch\.distributed\.init_process_group"):
            save_checkpoint(model, None, tmp_path / "a")
        with pytest.raises(RuntimeError, match="before load_checkpoint"):
            load_checkpoint(model, None, tmp_path / "a")
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
