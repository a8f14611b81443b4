"""Lawful combinations of flags that are not served: a table of (name, condition, reason, remedy), one test for each row.

The documentation lists them; a test compares.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron.training.cli.flags_model import has_states
from megatron.training.cli.flags_training import captures_iterations

_GRAPH_REMEDY = "use `--cuda-graph-impl none`"
_DOCUMENTS = "`--sft`, `--reset-attention-mask` or `--dataloader-inter-document-masking`"
_STATES = "`--experimental-attention-variant` or `--hybrid-layer-pattern`"


@dataclass(frozen=True)
class Refusal:
    """A combination of flags that is refused before anything is allocated."""

    what: str
    """The combination; of a row that is not served, as the documentation names it."""

    when: Callable[[Namespace], bool]
    message: str
    """What the user reads; formatted with the values of the flags."""

    reason: str = ""
    """Why a lawful combination is not served; empty where flags contradict each other."""

    remedy: str = ""
    """What to change on the command line, where ``reason`` is given."""

    spoils: tuple[str, ...] = ()
    """Settings without which components cannot be checked."""


def _not_served(what: str, when: Callable[[Namespace], bool], reason: str, remedy: str) -> Refusal:
    message = f"{what}: not served, since {reason}; {remedy}".replace("`", "")
    return Refusal(what, when, message, reason, remedy)


def _divides(parts: int, number: int | None) -> bool:
    return number is None or parts < 1 or number % parts == 0


def _waits_for_experts(args: Namespace) -> bool:
    if args.moe_router_load_balancing_type == "sinkhorn":
        return True
    is_bounded = args.moe_expert_rank_capacity_factor is not None and args.moe_grouped_gemm and args.bf16
    return not (args.moe_pad_expert_input_to_capacity or (is_bounded and args.fp8_format is None))


def _keeps_documents_apart(args: Namespace) -> bool:
    return bool(args.reset_attention_mask or args.dataloader_inter_document_masking or args.sft)


NOT_SERVED: tuple[Refusal, ...] = (
    _not_served(
        "attention dropout with `--context-parallel-size` above 1, unless ranks can divide the heads (`--cp-comm-type a2a`)",
        lambda a: a.context_parallel_size > 1 and a.attention_dropout > 0.0 and a.cp_comm_type != ["a2a"],
        "with other exchanges attention takes blocks of keys one after the other, without dropout",
        "give `--attention-dropout 0`",
    ),
    _not_served(
        "query groups that the tensor-parallel ranks do not divide",
        lambda a: a.group_query_attention and not _divides(a.tensor_model_parallel_size, a.num_query_groups),
        "key and value heads are divided over ranks, not replicated",
        "choose a `--tensor-model-parallel-size` that divides `--num-query-groups`",
    ),
    _not_served(
        "`--num-experts` with `--tensor-model-parallel-size` above 1 and no `--sequence-parallel`",
        lambda a: a.num_experts is not None and a.tensor_model_parallel_size > 1 and not a.sequence_parallel,
        "all tensor-parallel ranks would route the same tokens",
        "add `--sequence-parallel`",
    ),
    _not_served(
        "biases of shared experts",
        lambda a: a.num_experts is not None and a.add_bias_linear and a.moe_shared_expert_intermediate_size is not None,
        "shared experts have none in Megatron-Core either",
        "add `--disable-bias-linear`",
    ),
    _not_served(
        "`--rope-type yarn` without `--multi-latent-attention`",
        lambda a: a.rope_type == "yarn" and not a.multi_latent_attention,
        "other attentions have the frequencies of `--rotary-base` or `--use-rope-scaling`",
        "leave it out",
    ),
    _not_served(
        "a CUDA graph with `--rampup-batch-size` or `--step-batch-size-schedule`",
        lambda a: captures_iterations(a) and bool(a.rampup_batch_size or a.step_batch_size_schedule),
        "a graph has one number of microbatches",
        _GRAPH_REMEDY,
    ),
    _not_served(
        "`--optimizer-cpu-offload` with `--fp8-param-gather`",
        lambda a: a.optimizer_cpu_offload and a.fp8_param_gather,
        "bytes of weights are written by the update on the device",
        "leave out one of the two",
    ),
    _not_served(
        "a CUDA graph with offloaded optimizer state or activations",
        lambda a: (
            captures_iterations(a)
            and bool(a.optimizer_cpu_offload or a.cpu_offloading_num_layers or a.fine_grained_activation_offloading)
        ),
        "updates on the host cannot be captured, nor buffers of the host that change hands",
        _GRAPH_REMEDY,
    ),
    _not_served(
        "a CUDA graph with `--timing-log-level` above 0",
        lambda a: captures_iterations(a) and a.timing_log_level > 0,
        "parts of a graph are not timed",
        "use `--profile`",
    ),
    _not_served(
        "a CUDA graph with experts whose numbers of rows the host must know",
        lambda a: captures_iterations(a) and a.num_experts is not None and _waits_for_experts(a),
        "the host waits in each step until it knows how many tokens an expert gets",
        "use `--moe-expert-rank-capacity-factor` with `--moe-grouped-gemm` and `--bf16`, or `--moe-pad-expert-input-to-capacity`; "
        "not with sinkhorn",
    ),
    _not_served(
        "a CUDA graph with `--overlap-moe-expert-parallel-comm`",
        lambda a: captures_iterations(a) and a.overlap_moe_expert_parallel_comm,
        "passes that take turns run in two threads, and a graph is captured by one",
        _GRAPH_REMEDY,
    ),
    _not_served(
        "a CUDA graph with several pipeline stages or `--context-parallel-size` above 1",
        lambda a: captures_iterations(a) and (a.pipeline_model_parallel_size > 1 or a.context_parallel_size > 1),
        "sends and receives between two ranks cannot be captured yet",
        _GRAPH_REMEDY,
    ),
    _not_served(
        f"{_DOCUMENTS} with `--context-parallel-size` above 1",
        lambda a: a.context_parallel_size > 1 and _keeps_documents_apart(a),
        "blocks of keys have no borders of documents",
        "leave it out, or use `--context-parallel-size 1`",
    ),
    _not_served(
        f"{_DOCUMENTS} with {_STATES}",
        lambda a: has_states(a) and _keeps_documents_apart(a),
        "states are not reset within a sequence",
        "leave it out",
    ),
    _not_served(
        f"`--context-parallel-size` above 1 with {_STATES}",
        lambda a: has_states(a) and a.context_parallel_size > 1,
        "states go through the whole sequence",
        "use `--tensor-model-parallel-size` with `--sequence-parallel`",
    ),
    _not_served(
        f"a CUDA graph with {_DOCUMENTS}",
        lambda a: captures_iterations(a) and _keeps_documents_apart(a),
        "microbatches have different numbers of documents",
        _GRAPH_REMEDY,
    ),
)
