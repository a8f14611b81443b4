"""Flags of mixtures of experts; names, types and defaults are Megatron-LM's unless the help says otherwise."""

from __future__ import annotations

import argparse
import ast
from typing import Any


class _OneOrSeveral(argparse.Action):
    """Keeps one value as it is, and several as a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def add_expert_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of experts and of their routers."""
    _add_shape_flags(parser.add_argument_group("mixture of experts"))
    _add_router_flags(parser.add_argument_group("router of experts"))


def _add_shape_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-experts", type=int, help="experts of a layer (default: all layers are dense)")
    group.add_argument(
        "--moe-layer-freq",
        type=layer_pattern,
        default=1,
        help="every n-th layer has experts, or a 1 or 0 for each layer, as in ([0]*3+[1]*58) (default: 1)",
    )
    group.add_argument(
        "--moe-ffn-hidden-size", type=int, help="width inside an expert (default: that of the dense MLP)"
    )
    group.add_argument(
        "--moe-latent-size",
        type=int,
        help="width of the routed experts' input, between two projections (default: --hidden-size)",
    )
    group.add_argument(
        "--moe-apply-probs-on-input",
        action="store_true",
        help="the probability multiplies an expert's input, not its result; with --moe-router-topk 1",
    )
    group.add_argument(
        "--moe-shared-expert-intermediate-size",
        type=int,
        help="width of a shared expert, which computes all tokens (default: none)",
    )
    group.add_argument(
        "--moe-shared-expert-gate", action="store_true", help="multiply the shared expert's output by a learned gate"
    )
    group.add_argument(
        "--moe-grouped-gemm", action="store_true", help="one grouped kernel for all experts, where the device has it"
    )
    group.add_argument(
        "--moe-token-dispatcher-type",
        choices=["allgather", "alltoall", "flex"],
        default="allgather",
        help="how tokens reach their experts (default: allgather). Where experts are divided, all three are one all-to-all, "
        "which gives the same numbers",
    )
    group.add_argument(
        "--overlap-moe-expert-parallel-comm",
        action="store_true",
        help="exchange tokens of a microbatch while another one computes: the forward of each microbatch takes turns with the backward "
        "of the one before",
    )
    group.add_argument(
        "--delay-wgrad-compute",
        action="store_true",
        help="with --overlap-moe-expert-parallel-comm: weight gradients of routed experts are computed while the next exchange is in flight",
    )


def _add_router_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--moe-router-topk", type=int, default=2, help="experts of each token (default: 2)")
    group.add_argument(
        "--moe-router-score-function",
        choices=["softmax", "sigmoid", "sqrtsoftplus"],
        default="softmax",
        help="turns logits into scores (default: softmax)",
    )
    group.add_argument(
        "--moe-router-pre-softmax", action="store_true", help="softmax over all experts, before the top-k choice"
    )
    group.add_argument(
        "--moe-router-topk-scaling-factor", type=float, help="factor on the probabilities of a token's experts"
    )
    group.add_argument(
        "--moe-router-num-groups", type=int, help="groups of experts, of which a token uses some (default: one group)"
    )
    group.add_argument("--moe-router-group-topk", type=int, help="groups whose experts a token may use")
    group.add_argument(
        "--moe-router-enable-expert-bias",
        action="store_true",
        help="choose experts by score + a bias that follows their load, without an auxiliary loss; with --moe-router-score-function "
        "sigmoid or sqrtsoftplus",
    )
    group.add_argument(
        "--moe-router-bias-update-rate",
        type=float,
        default=1e-3,
        help="change of the expert bias in a step (default: 1e-3)",
    )
    group.add_argument("--moe-router-dtype", choices=["fp32", "fp64"], help="dtype of logits (default: the model's)")
    group.add_argument(
        "--moe-router-load-balancing-type",
        choices=["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"],
        nargs="+",
        action=_OneOrSeveral,
        default="aux_loss",
        help="tokens over which a loss balances the load: a microbatch, each sequence, the step so far on all ranks, or none; or "
        "a balanced choice of experts, sinkhorn (default: aux_loss). Several losses go with as many coefficients",
    )
    group.add_argument(
        "--moe-router-force-load-balancing",
        action="store_true",
        help="random logits, so that all experts get as many tokens; to measure speed",
    )
    group.add_argument(
        "--moe-enable-routing-replay",
        action="store_true",
        help="routers can record the experts that they choose, and replay those that a script gives (RouterReplay)",
    )
    group.add_argument(
        "--moe-aux-loss-coeff",
        type=float,
        nargs="+",
        action=_OneOrSeveral,
        default=0.0,
        help="coefficient of the load-balancing loss, or of each (default: 0)",
    )
    group.add_argument("--moe-z-loss-coeff", type=float, help="coefficient of the z-loss (default: none)")
    group.add_argument(
        "--moe-expert-capacity-factor",
        type=float,
        help="capacity of an expert, in multiples of the mean; assignments above it are dropped (default: none)",
    )
    group.add_argument(
        "--moe-expert-rank-capacity-factor",
        type=float,
        help="with experts on several ranks: what each rank takes from each, in multiples of the mean; more is dropped. Shapes are "
        "constant, and the host does not wait for counts of tokens (default: no bound)",
    )
    group.add_argument(
        "--moe-pad-expert-input-to-capacity", action="store_true", help="pad the rows of every expert to its capacity"
    )
    group.add_argument(
        "--moe-token-drop-policy",
        choices=["probs", "position"],
        default="probs",
        help="which assignments are dropped: the least probable or the last (default: probs)",
    )


_SAME_NAME_IN_TRANSFORMER_CONFIG = (
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_latent_size",
    "moe_apply_probs_on_input",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_grouped_gemm",
    "moe_token_dispatcher_type",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_router_dtype",
    "moe_router_load_balancing_type",
    "moe_router_force_load_balancing",
    "moe_enable_routing_replay",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_expert_rank_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
)


def expert_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the fields of ``TransformerConfig`` for experts and routers."""
    return {"num_moe_experts": args.num_experts} | {
        name: getattr(args, name) for name in _SAME_NAME_IN_TRANSFORMER_CONFIG
    }


def layer_pattern(text: str) -> int | list[int]:
    """Parse a number, or an expression of lists of numbers, ``+`` and ``*``.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    try:
        value = _value_of(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        value = None
    if value is None:
        raise argparse.ArgumentTypeError(f"must be a number or an expression such as ([0]*3+[1]*58), got {text!r}")
    return value


def _value_of(node: ast.expr) -> int | list[int] | None:
    """Evaluate the expression without calling or looking up anything; None for other kinds of expressions."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        elements = [_value_of(element) for element in node.elts]
        return elements if all(isinstance(element, int) for element in elements) else None  # type: ignore[return-value]
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value_of(node.left), _value_of(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int) and right < 10_000:
        return left * right
    return None
