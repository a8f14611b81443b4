"""Combinations of splits and features that are not served: a table, one test a row, and the README's table of them.

Everything else that the flags can name together is served. What merely contradicts itself is in ``flag_conflicts``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron.training.cli.flags_graphs import captures_iterations


@dataclass(frozen=True)
class Refusal:
    """A lawful wish that is not served."""

    what: str
    """The combination, as the README names it."""

    when: Callable[[Namespace], bool]
    reason: str
    remedy: str
    """What to change on the command line."""

    @property
    def message(self) -> str:
        """What the user reads."""
        return f"{self.what}: not served, since {self.reason}; {self.remedy}"


def refusals_of(args: Namespace) -> list[str]:
    """The messages of all rows that hold for these flags."""
    return [row.message for row in REFUSALS if row.when(args)]


def _divides(parts: int, number: int | None) -> bool:
    return number is None or parts < 1 or number % parts == 0


_GRAPH_REMEDY = "use `--cuda-graph-impl none`"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "attention dropout with `--context-parallel-size` above 1",
        lambda a: a.context_parallel_size > 1 and a.attention_dropout > 0.0,
        "which probabilities are dropped would depend on the number of ranks",
        "give `--attention-dropout 0`",
    ),
    Refusal(
        "query groups that the tensor-parallel ranks do not divide",
        lambda a: a.group_query_attention and not _divides(a.tensor_model_parallel_size, a.num_query_groups),
        "key and value heads are divided over ranks, and not replicated",
        "choose a `--tensor-model-parallel-size` that divides `--num-query-groups`",
    ),
    Refusal(
        "stages of different numbers of layers",
        lambda a: not _divides(a.pipeline_model_parallel_size, a.num_layers),
        "a stage is one block, and all are alike",
        "choose a `--pipeline-model-parallel-size` that divides `--num-layers`",
    ),
    Refusal(
        "`--num-experts` with `--tensor-model-parallel-size` above 1 and no `--sequence-parallel`",
        lambda a: a.num_experts is not None and a.tensor_model_parallel_size > 1 and not a.sequence_parallel,
        "every tensor-parallel rank would route the same tokens",
        "add `--sequence-parallel`",
    ),
    Refusal(
        "biases of shared experts, or of experts that tensor parallelism splits",
        lambda a: (
            a.num_experts is not None
            and a.add_bias_linear
            and (
                a.moe_shared_expert_intermediate_size is not None
                or (a.expert_tensor_parallel_size or a.tensor_model_parallel_size) > 1
            )
        ),
        "these are sums over ranks, to which a bias would be added more than once",
        "add `--disable-bias-linear`",
    ),
    Refusal(
        "other dispatchers of tokens than `alltoall` where experts are divided",
        lambda a: (
            a.moe_token_dispatcher_type == "flex"
            or (a.moe_token_dispatcher_type == "allgather" and a.expert_model_parallel_size > 1)
        ),
        "an exchange moves each token once to each of its experts",
        "give `--moe-token-dispatcher-type alltoall`",
    ),
    Refusal(
        "the balancing of experts by `sinkhorn` or `global_aux_loss`",
        lambda a: a.moe_router_load_balancing_type in ("sinkhorn", "global_aux_loss"),
        "auxiliary losses are over a microbatch or a sequence",
        "give `--moe-router-load-balancing-type aux_loss`, `seq_aux_loss` or `none`",
    ),
    Refusal(
        "a CUDA graph with experts",
        lambda a: captures_iterations(a) and a.num_experts is not None,
        "the host must know how many tokens an expert gets, in each step anew",
        _GRAPH_REMEDY,
    ),
    Refusal(
        "a CUDA graph with several pipeline stages or `--context-parallel-size` above 1",
        lambda a: captures_iterations(a) and (a.pipeline_model_parallel_size > 1 or a.context_parallel_size > 1),
        "exchanges between two ranks have not been captured yet",
        _GRAPH_REMEDY,
    ),
)
