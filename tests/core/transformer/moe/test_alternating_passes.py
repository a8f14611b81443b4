"""A forward and a backward take turns in one order, compute what they compute alone, and end together if one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid
from megatron.core.transformer.moe.alternating_passes import AbandonedPassError, AlternatingPasses
from tests.support.launch import run_ranks
from tests.support.tiny_moe import LENGTH, build_moe_gpt, tokens_of

EP: dict[str, Any] = {"expert_model_parallel_size": 2}
OVERLAP: dict[str, Any] = {"overlap_moe_expert_parallel_comm": True}
DELAY: dict[str, Any] = {**OVERLAP, "delay_wgrad_compute": True}

# ---- turns ------------------------------------------------------------------------------------------------------------


def _steps(passes: AlternatingPasses, log: list[str], name: str, number: int) -> None:
    for step in range(number):
        log.append(f"{name}{step}")
        passes.give_turn()


@pytest.mark.parametrize(
    ("num_forward", "num_backward", "expected"),
    [(2, 2, "f0 b0 f1 b1"), (3, 1, "f0 b0 f1 f2"), (1, 3, "f0 b0 b1 b2"), (0, 2, "b0 b1")],
)
def test_passes_take_turns_and_the_longer_one_goes_on(num_forward: int, num_backward: int, expected: str) -> None:
    passes, log = AlternatingPasses(), list[str]()

    def forward() -> str:
        _steps(passes, log, "f", num_forward)
        return "result"

    assert passes.run(forward, partial(_steps, passes, log, "b", num_backward)) == "result"
    assert " ".join(log) == expected
    assert not passes.are_open


def test_without_a_second_pass_nobody_waits() -> None:
    passes = AlternatingPasses(delays_weight_gradients=True)
    passes.begin_layers()
    passes.give_turn()
    passes.finish()
    assert passes.pause() is None
    assert not passes.delay(lambda: None), "there is nothing to fill"


def test_the_backward_begins_and_ends_within_the_layers_of_the_forward() -> None:
    passes, log = AlternatingPasses(), list[str]()

    def forward() -> None:
        log.append("embedding")
        passes.begin_layers()
        _steps(passes, log, "f", 1)
        passes.finish()
        log.append("norm")

    passes.run(forward, partial(_steps, passes, log, "b", 3))
    assert log == ["embedding", "b0", "f0", "b1", "b2", "norm"]


def test_an_error_of_the_backward_ends_the_forward_too() -> None:
    passes, log = AlternatingPasses(), list[str]()

    def backward() -> None:
        passes.give_turn()
        raise ValueError("of the backward")

    with pytest.raises(ValueError, match="of the backward"):
        passes.run(partial(_steps, passes, log, "f", 3), backward)
    assert log == ["f0", "f1"]
    assert passes.run(lambda: "again", lambda: None) == "again"


def test_an_error_of_the_forward_ends_the_backward_too() -> None:
    passes, errors = AlternatingPasses(), list[BaseException]()

    def forward() -> None:
        passes.give_turn()
        raise ValueError("of the forward")

    def backward() -> None:
        try:
            passes.give_turn()
        except AbandonedPassError as error:
            errors.append(error)
            raise

    num_threads = threading.active_count()
    with pytest.raises(ValueError, match="of the forward"):
        passes.run(forward, backward)
    assert len(errors) == 1 and threading.active_count() == num_threads
    assert passes.run(lambda: "again", lambda: None) == "again"


class _Count(TorchDispatchMode):
    num_calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return function(*args, **(kwargs or {}))


def test_a_mode_around_both_passes_sees_both() -> None:
    """A counter of operations, or a plan that is made without a device."""
    passes, x = AlternatingPasses(), torch.ones(2)
    with _Count() as count:
        passes.run(lambda: x.neg(), lambda: [x.neg(), x.neg()].clear())
    assert count.num_calls == 3


def test_delayed_computations_run_once_the_next_exchange_has_begun() -> None:
    passes, log = AlternatingPasses(delays_weight_gradients=True), list[str]()

    def begin() -> tuple[list[torch.Tensor], list[Any]]:
        log.append("exchange begins")
        return [], []

    def forward() -> None:
        passes.begin_layers()
        log.append("forward")
        passes.exchange(begin, None)  # does not run what the backward has delayed

    def backward() -> None:
        assert passes.delay(lambda: log.append("weight gradient"))
        passes.give_turn()
        passes.exchange(begin, None)

    passes.run(forward, backward)
    assert log == ["forward", "exchange begins", "exchange begins", "weight gradient"]


def test_weight_gradients_that_no_exchange_follows_are_refused() -> None:
    """The engine has reduced the gradients of their unit without them."""
    passes = AlternatingPasses(delays_weight_gradients=True)
    with pytest.raises(
        RuntimeError, match="an exchange of tokens must follow delayed weight gradients in backward, got none"
    ):
        passes.run(lambda: None, lambda: [passes.delay(lambda: None)].clear())


def test_a_backward_of_more_layers_ends_before_the_forward_leaves_its_own() -> None:
    """As with virtual stages of different sizes. The scopes around both passes nest."""
    passes, log, model = AlternatingPasses(), list[str](), build_moe_gpt()
    model.decoder.take_turns(passes)
    for name, module in (("embedding", model.embedding), ("norm", model.decoder.final_layernorm)):
        assert module is not None
        module.register_forward_hook(lambda *_, name=name: log.append(name))
    tokens = tokens_of(0)
    passes.run(lambda: model(tokens, None, None), partial(_steps, passes, log, "b", 3))
    assert log == ["embedding", "b0", "b1", "b2", "norm"]


# ---- a model ------------------------------------------------------------------------------------------------------------


def _batches(rank: int) -> Iterator[torch.Tensor]:
    index = 0
    while True:
        yield tokens_of(100 * index + rank)
        index += 1


def _forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    tokens = next(data)
    losses = model(tokens[:, :-1], None, None, labels=tokens[:, 1:])

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, float]:
        return output.mean(), float(output.detach().mean())

    return losses, loss_of


def _train(
    groups: ProcessGroupCollection, num_microbatches: int, **fields: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of the microbatches of a step and all gradients."""
    model = build_moe_gpt(groups, **EP, **fields)
    torch.manual_seed(dist.get_rank())
    losses = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=_batches(dist.get_rank()),
        model=model,
        num_microbatches=num_microbatches,
        seq_length=LENGTH,
        micro_batch_size=2,
        pg_collection=groups,
    )
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


MODELS: dict[str, dict[str, Any]] = {
    "experts in all layers": {"num_layers": 4},
    "an odd number of layers": {"num_layers": 3, "moe_shared_expert_intermediate_size": None},
    "some dense layers": {"num_layers": 4, "moe_layer_freq": [0, 1, 0, 1]},
    "dropout, recomputed attention": {
        "hidden_dropout": 0.2,
        "attention_dropout": 0.1,
        "recompute_granularity": "selective",
    },
    "padded to capacity": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "bounded rows": {"moe_expert_rank_capacity_factor": 2.0},
    "gradients by autograd": {"gradient_accumulation_fusion": False, "moe_grouped_gemm": True},
}


def _differences() -> list[str]:
    """Return the cases in which passes that take turns compute other bits than passes that run by themselves."""
    groups = build_process_groups(RankGrid(world_size=2, **EP))
    found = []
    for name, fields in MODELS.items():
        for number in (1, 2, 5) if name == "experts in all layers" else (3,):
            losses, gradients = _train(groups, number, **fields)
            assert len(losses) == number and all(bool(grad.any()) for grad in gradients.values()), name
            for overlap in (OVERLAP, DELAY):
                own_losses, own_gradients = _train(groups, number, **fields, **overlap)
                same = own_losses == losses and own_gradients.keys() == gradients.keys()
                if not same or not all(torch.equal(own_gradients[key], gradients[key]) for key in gradients):
                    found.append(f"{name}, {number} microbatches, {sorted(overlap)}")
    return found


def test_losses_and_gradients_are_bitwise_those_without_turns() -> None:
    assert run_ranks(2, _differences) == [[], []]


class _Watch:
    """Logs exchanges and computations of both passes, in order, with the layer's number."""

    def __init__(self, model: Any, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        for index, layer in enumerate(model.decoder.layers):
            for name, module in (("attention", layer.self_attention), ("experts", layer.mlp.experts)):
                module.register_forward_hook(partial(self._note, f"{name} {index}"))
        begin = AlternatingPasses.exchange

        def exchange(passes: AlternatingPasses, *arguments: Any) -> list[torch.Tensor]:
            own = "B" if threading.current_thread().name == "backward" else "F"
            self.log.append(f"{own} begins")
            result = begin(passes, *arguments)
            self.log.append(f"{own} has arrived")
            return result

        patch.setattr(AlternatingPasses, "exchange", exchange)

    def _note(self, what: str, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        self.log.append(f"F {what}")
        tensor = output[0] if isinstance(output, tuple) else output
        tensor.register_hook(lambda _: self.log.append(f"B {what}"))


def _order() -> list[str]:
    groups = build_process_groups(RankGrid(world_size=2, **EP))
    model = build_moe_gpt(groups, **EP, **OVERLAP)
    with pytest.MonkeyPatch.context() as patch:
        watch = _Watch(model, patch)
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=_batches(dist.get_rank()),
            model=model,
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=2,
            pg_collection=groups,
        )
    first = watch.log.index("F experts 1") + 1  # the first forward runs by itself
    return watch.log[first:]


def test_each_exchange_is_in_flight_while_the_other_pass_computes() -> None:
    """The drawing of [Note: two passes take turns], twice: the forward goes up the layers and the backward down."""
    of_layers = []
    for forward, backward in ((0, 1), (1, 0)):
        of_layers += [
            "B begins",  # gradients of the results, to the experts
            *(["F has arrived"] if forward else []),
            f"F attention {forward}",
            "B has arrived",
            f"B experts {backward}",
            "F begins",  # tokens to the experts
            "B begins",  # gradients back to the tokens
            "F has arrived",
            f"F experts {forward}",
            "F begins",  # results back to the tokens
            "B has arrived",
            f"B attention {backward}",
        ]
    alone = ["B experts 1", "B attention 1", "B experts 0", "B attention 0"]
    assert run_ranks(2, _order) == [[*of_layers, "F has arrived", *alone]] * 2
