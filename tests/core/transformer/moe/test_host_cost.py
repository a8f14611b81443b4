"""Bounds on a layer's host cost around its experts: operations in forward and backward, and autograd nodes.

With experts on several ranks the host waits once in each layer's forward, so it is never ahead of the device there, and each
operation adds to the step's time. The bounds are the current numbers: lower them when a layer gets cheaper. Operations are
counted; no time is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.delayed_read import DelayedRead
from megatron.core.jit import Fusible
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import record_auxiliary_losses
from megatron.core.transformer.moe.token_exchange import ExpertRows
from tests.support.launch import run_ranks
from tests.support.tiny_moe import build_moe_gpt


@dataclass(frozen=True)
class Work:
    """The host work of one layer without that of its experts, or a bound on it.

    Attributes:
        forward: operations, views among them; a function that is compiled on CUDA is one.
        backward: the same.
        collectives: of both.
        nodes: of autograd, between the layer's output and its input and the router's weight.
    """

    forward: int
    backward: int
    collectives: int
    nodes: int


# On the CPU; on CUDA the order of assignments is one kernel, and so is that of rows that arrive.
BOUNDS = {
    ("dropless", 1): Work(33, 23, 0, 8),
    ("dropless", 2): Work(57, 34, 7, 8),
    ("not_balanced", 1): Work(30, 23, 0, 8),
    ("not_balanced", 2): Work(54, 34, 7, 8),
    ("padded", 2): Work(77, 45, 6, 8),
    ("bounded", 2): Work(138, 56, 7, 8),
}
FIELDS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "not_balanced": {"moe_aux_loss_coeff": 0.0},
    "bounded": {"moe_expert_rank_capacity_factor": 2.0},
    "padded": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
}


class _Operations(TorchDispatchMode):
    """A counter of operations by name; a fused function counts as one."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._in_fused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._in_fused:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def fused_as_one(self) -> Iterator[None]:
        call = Fusible.__call__

        def count(function: Fusible, *args: Any) -> Any:
            self.counts[function.eager.__name__] += 1
            self._in_fused += 1
            try:
                return call(function, *args)
            finally:
                self._in_fused -= 1

        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(Fusible, "__call__", count)
            yield


class _Factors(nn.Module):
    """A stand-in for experts: each row times its factor, which is two operations in forward and five in backward."""

    def forward(self, rows: ExpertRows) -> torch.Tensor:
        return rows.hidden_states * rows.probs.unsqueeze(1)


def _num_nodes(output: torch.Tensor) -> int:
    seen, to_see = set(), [output.grad_fn]
    while to_see:
        node = to_see.pop()
        if node is not None and node not in seen:
            seen.add(node)
            to_see += [before for before, _ in node.next_functions]
    return len(seen)


def _work(kind: str) -> Work:
    size = dist.get_world_size() if dist.is_initialized() else 1
    groups = ProcessGroupCollection(ep=dist.group.WORLD) if size > 1 else None
    fields = {"num_moe_experts": 8, "moe_shared_expert_intermediate_size": None, "moe_z_loss_coeff": None}
    model = build_moe_gpt(groups, expert_model_parallel_size=size, **fields, **FIELDS[kind])
    layer: Any = model.decoder.layers[0].mlp
    layer.experts = _Factors()
    record_auxiliary_losses(model, model.config)  # as training does
    x = torch.randn(32, 2, 16, requires_grad=True)
    forward, backward = _Operations(), _Operations()
    with forward.fused_as_one():
        output = layer(x)[0]
    num_nodes, grad = _num_nodes(output), torch.ones_like(output)
    with backward.fused_as_one():
        output.backward(grad)
    return Work(
        forward=forward.counts.total(),
        backward=backward.counts.total(),
        collectives=sum(n for name, n in (forward.counts + backward.counts).items() if name.startswith("c10d")),
        nodes=num_nodes,
    )


def _works(kinds: list[str]) -> dict[str, Work]:
    return {kind: _work(kind) for kind in kinds}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_layer_costs_the_host_no_more_than_it_did(num_ranks: int) -> None:
    kinds = [kind for kind, size in BOUNDS if size == num_ranks]
    for works in run_ranks(num_ranks, _works, kinds):
        for kind, work in works.items():
            bound = BOUNDS[kind, num_ranks]
            assert all(a <= b for a, b in zip(astuple(work), astuple(bound), strict=True)), (kind, work, bound)


def _acts_of_layers(kinds: list[dict[str, Any]]) -> list[list[str]]:
    return [_acts_of_a_layer(**fields) for fields in kinds]


def _acts_of_a_layer(**fields: Any) -> list[str]:
    """List the acts of a layer with a shared expert, in order."""
    groups = ProcessGroupCollection(ep=dist.group.WORLD)
    model = build_moe_gpt(groups, expert_model_parallel_size=dist.get_world_size(), **fields)
    layer: Any = model.decoder.layers[0].mlp
    if fields:
        layer.experts = _Factors()
    acts: list[str] = []
    exchange, read = dist.all_to_all_single, DelayedRead.tensor
    layer.shared_experts.register_forward_hook(lambda *_: acts.append("shared expert"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", lambda *args, **kw: acts.append("exchange") or exchange(*args, **kw))
        patch.setattr(DelayedRead, "tensor", lambda self: acts.append("wait") or read(self))
        # What reads a value of the device makes the host wait for it.
        with _Operations() as operations:
            output = layer(torch.randn(8, 2, 16, requires_grad=True))[0]
            output.sum().backward()
    acts += ["read"] * sum(n for name, n in operations.counts.items() if "_local_scalar_dense" in name)
    return acts


def test_the_shared_expert_is_queued_before_the_host_waits_and_rows_leave_at_once_after_it() -> None:
    for unbounded, bounded in run_ranks(2, _acts_of_layers, [{}, {"moe_expert_rank_capacity_factor": 2.0}]):
        forward = ["exchange", "shared expert", "wait", "exchange", "exchange", "exchange"]
        assert unbounded[: len(forward)] == forward and "wait" not in unbounded[len(forward) :]
        assert bounded == ["exchange", "shared expert"] + ["exchange"] * 6, "nothing waits, nothing is read"
