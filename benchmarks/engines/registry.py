"""The engines by name: how each is built, what it is, and why it cannot run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.engines.engine import Engine, EngineSettings
from benchmarks.engines.graphed import Graphed
from benchmarks.engines.ours import VARIATIONS, Ours, describe_ours, parse_ours, why_not_ours
from benchmarks.engines.peers import Fsdp2, Ideal, MegatronFsdp, MegatronFsdpV2, megatron_fsdp_is_missing


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """An engine that can be built."""

    build: Callable[[EngineSettings], Engine]
    what: str
    """For the page: the engine in words."""
    why_not: Callable[[EngineSettings], str | None] = lambda settings: None
    """Why it cannot run here; None if it can. Every rank answers alike."""
    is_graph: bool = False


PEERS = {
    "ideal": EngineKind(
        build=Ideal,
        what="no communication: bf16 weights resident, fused AdamW over 1/N of fp32 state (its weights never change, "
        "so its losses are not comparable after the first step)",
    ),
    "fsdp2": EngineKind(
        build=Fsdp2, what="torch.distributed.fsdp.fully_shard, one unit per layer, defaults but for the dtypes"
    ),
    "megatron-fsdp": EngineKind(
        build=MegatronFsdp,
        what="megatron_fsdp.fully_shard_model and fully_shard_optimizer, overlap on, fp32 main weights and gradients, "
        "bf16 on the wire",
        why_not=megatron_fsdp_is_missing,
    ),
    "megatron-fsdp-v2": EngineKind(
        build=MegatronFsdpV2,
        what="megatron_fsdp.experimental.fully_shard, the same dtypes",
        why_not=megatron_fsdp_is_missing,
    ),
}
# The engines to beat.
RIVALS = ("fsdp2", "megatron-fsdp", "megatron-fsdp-v2")

NAMES = (
    f"{', '.join(PEERS)}, ours-plain, ours-{{nccl,symm,peer}}, each of ours also with -graph and then +VARIATION... "
    f"({', '.join(VARIATIONS)}, keep=GIB, round=MI)"
)


def engine_kind(name: str) -> EngineKind:
    """Look up an engine by its name.

    Raises:
        ValueError: there is no such engine.
    """
    if name in PEERS:
        return PEERS[name]
    if not is_ours(name):
        raise ValueError(f"an engine must be one of {NAMES}, got {name}")
    options = parse_ours(name)

    def build(settings: EngineSettings) -> Engine:
        engine = Ours(settings, options)
        return Graphed(engine, settings.device) if options.graph else engine

    return EngineKind(
        build=build,
        what=describe_ours(name),
        why_not=lambda settings: why_not_ours(options, settings),
        is_graph=options.graph,
    )


def is_ours(name: str) -> bool:
    """Return whether the name is one of this repository's engine, also where no such variation exists."""
    return name.split("-")[0] == "ours"


def eager_twin(name: str) -> str:
    """Return the name of the engine that does the same without a CUDA graph."""
    return name.replace("-graph", "", 1)
