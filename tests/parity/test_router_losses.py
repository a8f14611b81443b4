"""Losses of routers are those of their papers, under every split: a plain model in float64 on whole batches trains alike."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.parity.cells import MICRO_BATCH
from tests.parity.outcomes import Outcome, train
from tests.support import plain_moe_gpt
from tests.support.launch import run_ranks
from tests.support.plain_moe_gpt import NUM_EXPERTS, NUM_HEADS, NUM_LAYERS, TOPK, Routing

STEPS, LR, LENGTH, VOCABULARY = 2, 0.5, 16, 62
_COMMON = (
    f"--num-layers {NUM_LAYERS} --hidden-size 32 --num-attention-heads {NUM_HEADS} --seq-length {LENGTH} "
    f"--max-position-embeddings {LENGTH} --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2 "
    "--make-vocab-size-divisible-by 8 --position-embedding-type none --untie-embeddings-and-output-weights "
    "--normalization RMSNorm --swiglu --disable-bias-linear --moe-ffn-hidden-size 24 --optimizer sgd --sgd-momentum 0 "
    f"--num-experts {NUM_EXPERTS} --moe-router-topk {TOPK} --train-iters {STEPS} --micro-batch-size {MICRO_BATCH} "
    f"--lr-decay-style constant --weight-decay 0 --clip-grad 1e6 --mock-data --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCABULARY} --num-workers 0 --eval-iters 0 --distributed-backend gloo "
    "--distributed-timeout-minutes 5 --use-megatron-fsdp"
)
ROUTINGS = {
    "aux": Routing({"aux_loss": 0.3}),
    "seq": Routing({"seq_aux_loss": 0.3}, scaling=1.5),
    "global": Routing({"global_aux_loss": 0.5}),
    "several": Routing({"global_aux_loss": 0.3, "seq_aux_loss": 0.2, "aux_loss": 0.1}, z=0.05),
    "deepseek": Routing({"seq_aux_loss": 0.3, "global_aux_loss": 0.3}, z=0.02, sigmoid=True, groups=2, scaling=2.5),
    "capacity": Routing({"aux_loss": 0.2, "global_aux_loss": 0.2}, z=0.05, capacity=0.75),
}
LAYOUTS = {
    "plain": (1, 1, ""),
    "tp2+sp": (2, 1, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "cp2": (2, 1, "--context-parallel-size 2"),
    "pp2": (2, 1, "--pipeline-model-parallel-size 2"),
    "pp2+recompute": (
        2,
        1,
        "--pipeline-model-parallel-size 2 --recompute-granularity selective --recompute-modules moe",
    ),
    "dp2": (2, 2, "--overlap-grad-reduce --overlap-param-gather"),
    "ep2": (2, 2, "--expert-model-parallel-size 2"),
    "cp2+dp2": (4, 2, "--context-parallel-size 2 --num-distributed-optimizer-instances 2"),
    "tp2+sp+ep2+dp2": (4, 2, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"),
}
"""Name: (ranks, data-parallel ranks, flags)."""
_SPLITS_SEQUENCES = ("tp2+sp", "cp2", "cp2+dp2", "tp2+sp+ep2+dp2")
TOLERANCE = 5e-6
"""Relative, of losses and norms: fp32 rounds at 6e-8, and sums make it a few times that. What is measured is below 3e-7."""
TOLERANCE_OF_MOVES = 3e-5
"""Relative: weights are a hundred times larger than what they move by, and are rounded. What is measured is below 8e-6."""


@dataclass(frozen=True)
class Case:
    """A run that the plain model is compared with."""

    routing: str
    layout: str

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def data_ranks(self) -> int:
        return LAYOUTS[self.layout][1]

    @property
    def microbatches(self) -> int:
        """Of each data-parallel rank."""
        return 4 // self.data_ranks if self.routing == "seq" else 3

    @property
    def argv(self) -> list[str]:
        """The command line; losses are per token, or per microbatch, in turn: all tokens count, so numbers are the same."""
        index = list(ROUTINGS).index(self.routing) + list(LAYOUTS).index(self.layout)
        batch = MICRO_BATCH * self.data_ranks * self.microbatches
        flags = f"--lr {LR} --global-batch-size {batch} {LAYOUTS[self.layout][2]} {_flags(ROUTINGS[self.routing])}"
        return f"{_COMMON} {flags} {'--calculate-per-token-loss' if index % 2 else ''}".split()


def _flags(routing: Routing) -> str:
    flags = f"--moe-router-load-balancing-type {' '.join(routing.losses)} --moe-router-topk-scaling-factor {routing.scaling} "
    flags += f"--moe-aux-loss-coeff {' '.join(map(str, routing.losses.values()))} "
    if routing.z:
        flags += f"--moe-z-loss-coeff {routing.z} "
    if routing.sigmoid:
        flags += "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        flags += f"--moe-router-bias-update-rate {routing.bias_rate} "
    if routing.groups > 1:
        flags += f"--moe-router-num-groups {routing.groups} --moe-router-group-topk 1 "
    if routing.capacity is not None:
        flags += f"--moe-expert-capacity-factor {routing.capacity} --moe-pad-expert-input-to-capacity "
    return flags


CASES = {
    f"{routing} {layout}": Case(routing, layout)
    for routing in ROUTINGS
    for layout in LAYOUTS
    if routing != "capacity" or layout not in _SPLITS_SEQUENCES  # a rank counts the capacity of its own tokens
}
IN_CI = (
    "global plain",
    "capacity plain",
    "aux tp2+sp",
    "several tp2+sp",
    "seq cp2",
    "several cp2",
    "deepseek pp2",
    "global pp2+recompute",
    "global dp2",
    "several dp2",
    "aux ep2",
    "deepseek ep2",
    "capacity ep2",
    "seq tp2+sp+ep2+dp2",
    "several cp2+dp2",
)
"""The cases that every run of the tests computes: each routing, each layout."""
_INITIAL = "initial weights"


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of random tokens, of which sample i is row i."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._tokens[index]
        places, counts = torch.arange(LENGTH), torch.ones(LENGTH)
        return {"tokens": row[:-1], "labels": row[1:], "position_ids": places, "loss_mask": counts}


def _tokens() -> torch.Tensor:
    """[samples, LENGTH + 1] of all cases."""
    most = STEPS * MICRO_BATCH * max(case.data_ranks * case.microbatches for case in CASES.values())
    return torch.randint(VOCABULARY, (most, LENGTH + 1), generator=torch.Generator().manual_seed(5))


def _train_all(jobs: dict[str, list[str]]) -> dict[str, Outcome]:
    """What the command lines lead to. Ranks: all."""
    import pretrain_gpt
    from megatron.training.data.datasets import Datasets

    def provider(*_: Any) -> Datasets:
        return Datasets(_Samples(_tokens()), None, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_gpt, "datasets_provider", provider)
        return {name: train(argv) for name, argv in jobs.items()}


@functools.cache
def _ran(ranks: int, in_ci: bool) -> list[dict[str, Outcome]]:
    """[ranks] what the cases of that many ranks led to."""
    of_launch = {name: case for name, case in CASES.items() if case.ranks == ranks and (name in IN_CI) == in_ci}
    return run_ranks(ranks, _train_all, {name: case.argv for name, case in of_launch.items()}, timeout_s=600)


@functools.cache
def _initial() -> dict[str, torch.Tensor]:
    """The weights that all cases start with."""
    argv = f"{_COMMON} --lr 0 --global-batch-size {MICRO_BATCH}".split()
    weights = run_ranks(1, _train_all, {_INITIAL: argv})[0][_INITIAL].weights
    return {name: torch.from_numpy(value) for name, value in weights.items()}


def _marked(name: str) -> object:
    marks = [pytest.mark.matrix, *([] if name in IN_CI else [pytest.mark.slow])]
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.timeout(1200)  # the first case of a number of ranks waits for all of them
@pytest.mark.parametrize("name", [_marked(name) for name in CASES])
def test_a_plain_model_trains_alike(name: str) -> None:
    """Losses, gradient norms and logged values of two steps, and what all weights and expert biases have moved by."""
    case, initial = CASES[name], _initial()
    shape = (STEPS, case.microbatches, case.data_ranks, MICRO_BATCH, LENGTH + 1)
    tokens = _tokens()[: torch.Size(shape[:-1]).numel()].view(shape)
    expected = plain_moe_gpt.train(initial, list(tokens), ROUTINGS[case.routing], LR)
    outcomes = [of_rank[name] for of_rank in _ran(case.ranks, name in IN_CI)]
    for one in outcomes:
        assert one.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert one.norms == pytest.approx(expected.norms, rel=TOLERANCE)
        assert len(one.auxiliary) == STEPS
        for got, true in zip(one.auxiliary, expected.auxiliary, strict=True):
            assert got == pytest.approx(true, rel=TOLERANCE)
    weights = {key: torch.from_numpy(value) for one in outcomes for key, value in one.weights.items()}
    for layer, bias in enumerate(expected.biases):
        got_bias = weights.pop(f"decoder.layers.{layer}.mlp.router.expert_bias", None)
        assert (got_bias is not None) == ROUTINGS[case.routing].sigmoid
        if got_bias is not None:
            torch.testing.assert_close(got_bias.double(), bias)
    assert weights.keys() == expected.weights.keys()
    for key, start in initial.items():
        moved, true_move = weights[key].double() - start, expected.weights[key] - start
        assert float((moved - true_move).norm()) <= TOLERANCE_OF_MOVES * float(true_move.norm()), key


def test_ci_has_each_routing_and_each_layout() -> None:
    assert set(IN_CI) <= set(CASES)
    assert {CASES[name].routing for name in IN_CI} == set(ROUTINGS)
    assert {CASES[name].layout for name in IN_CI} == set(LAYOUTS)
