"""Flags of mixtures of experts; names, types and defaults are Megatron-LM's unless the help says otherwise."""

from __future__ import annotations

import argparse
import ast
from typing import Any

from megatron.training.cli.flag_rows import F, FlagGroup


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


EXPERT_FLAGS = FlagGroup(
    "mixture of experts",
    F("--num-experts", "experts of a layer (default: all layers are dense)"),
    F(
        "--moe-layer-freq",
        "every n-th layer has experts, or a 1 or 0 for each layer, as in ([0]*3+[1]*58)",
        type=layer_pattern,
    ),
    F("--moe-ffn-hidden-size", "width inside an expert (default: that of the dense MLP)"),
    F("--moe-latent-size", "width of the routed experts' input, between two projections (default: --hidden-size)"),
    F(
        "--moe-apply-probs-on-input",
        "the probability multiplies an expert's input, not its result; with --moe-router-topk 1",
    ),
    F("--moe-shared-expert-intermediate-size", "width of a shared expert, which computes all tokens (default: none)"),
    F("--moe-shared-expert-gate", "multiply the shared expert's output by a learned gate"),
    F("--moe-grouped-gemm", "one grouped kernel for all experts, where the device has it"),
    F(
        "--moe-token-dispatcher-type",
        "how tokens reach their experts (default: allgather). Where experts are divided, all three are "
        "one all-to-all, which gives the same numbers",
    ),
    F(
        "--overlap-moe-expert-parallel-comm",
        "exchange tokens of a microbatch while another one computes: the forward of each microbatch "
        "takes turns with the backward of the one before",
    ),
    F(
        "--delay-wgrad-compute",
        "with --overlap-moe-expert-parallel-comm: weight gradients of routed experts are computed while "
        "the next exchange is in flight",
    ),
)


ROUTER_FLAGS = FlagGroup(
    "router of experts",
    F("--moe-router-topk", "experts of each token"),
    F("--moe-router-score-function", "turns logits into scores"),
    F("--moe-router-pre-softmax", "softmax over all experts, before the top-k choice"),
    F("--moe-router-topk-scaling-factor", "factor on the probabilities of a token's experts"),
    F("--moe-router-num-groups", "groups of experts, of which a token uses some (default: one group)"),
    F("--moe-router-group-topk", "groups whose experts a token may use"),
    F(
        "--moe-router-enable-expert-bias",
        "choose experts by score + a bias that follows their load, without an auxiliary loss; with "
        "--moe-router-score-function sigmoid or sqrtsoftplus",
    ),
    F("--moe-router-bias-update-rate", "change of the expert bias in a step (default: 1e-3)"),
    F("--moe-router-dtype", "dtype of logits (default: the model's)"),
    F(
        "--moe-router-load-balancing-type",
        "tokens over which a loss balances the load: a microbatch, each sequence, the step so far on all "
        "ranks, or none; or a balanced choice of experts, sinkhorn (default: aux_loss). Several losses "
        "go with as many coefficients",
        action=_OneOrSeveral,
        choices=["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"],
    ),
    F("--moe-router-force-load-balancing", "random logits, so that all experts get as many tokens; to measure speed"),
    F(
        "--moe-enable-routing-replay",
        "routers can record the experts that they choose, and replay those that a script gives (RouterReplay)",
    ),
    F("--moe-aux-loss-coeff", "coefficient of the load-balancing loss, or of each (default: 0)", action=_OneOrSeveral),
    F("--moe-z-loss-coeff", "coefficient of the z-loss (default: none)"),
    F(
        "--moe-expert-capacity-factor",
        "capacity of an expert, in multiples of the mean; assignments above it are dropped (default: none)",
    ),
    F(
        "--moe-expert-rank-capacity-factor",
        "with experts on several ranks: what each rank takes from each, in multiples of the mean; more "
        "is dropped. Shapes are constant, and the host does not wait for counts of tokens (default: no "
        "bound)",
    ),
    F("--moe-pad-expert-input-to-capacity", "pad the rows of every expert to its capacity"),
    F("--moe-token-drop-policy", "which assignments are dropped: the least probable or the last"),
)
