"""This repository's engine, with each of its optimisations as an option that can be left out."""

from __future__ import annotations

import dataclasses
import functools
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import megatron.core.distributed.fsdp as fsdp
from benchmarks.engines.engine import BETAS, WEIGHT_DECAY, Engine, EngineSettings, MemoryPlan, adamw
from benchmarks.engines.plain_gpt import Linear, MainGradLinear, PlainGpt
from megatron.core.distributed.fsdp.comm.choose import transport_problem
from megatron.core.distributed.fsdp.matrices.orthogonalizer import ROUND_NUMEL

# The transport in an engine's name, and ``fully_shard``'s name for it.
TRANSPORTS = {"nccl": "nccl", "symm": "symm", "peer": "peer_copy"}


@dataclass(frozen=True, kw_only=True)
class OursOptions:
    """Options of an engine of ours."""

    transport: str = "nccl"
    """A key of ``TRANSPORTS``."""
    linear: type = MainGradLinear
    """Class of the linear layers; ``MainGradLinear`` writes weight gradients in place."""
    flat_optimizer: bool = True
    """``FlatAdamW`` over flat shards, not PyTorch's AdamW over the parameters."""
    muon: bool = False
    """``FlatMuon`` for the layers' matrices, with queries, keys and values apart, and AdamW for all else."""
    gram_iterations: bool = True
    """Muon iterates on Gram matrices in fp16 where there are kernels."""
    round_numel: int = ROUND_NUMEL
    """Elements of matrices for Muon that a rank receives in an exchange."""
    remainders: bool = True
    """Main weights are stored as the bf16 model weight and the 16 bits that it lacks, not as fp32 beside it."""
    overlaps_forward: bool = True
    """The optimizer's update of a unit may run under the next forward."""
    gathers_apart: bool = True
    """All-gathers have a communicator of their own, so that they run beside reductions; peer copy needs none."""
    wide_grads: bool = False
    """Main gradients of a single microbatch are fp32, not bf16 as they came over the wire."""
    fine_units: bool = False
    """Each matrix of a layer is a unit, not each layer: smaller arenas, four times as many gathers and reductions."""
    layers_per_unit: int = 1
    """Layers that are one unit: fewer gathers, reductions and updates for the host to issue, larger arenas."""
    least_memory: bool = False
    """No bf16 weights rest beside fp32 ones, and gradients get memory when a unit's backward ends; with NCCL alone."""
    prepares_forward: bool = True
    """The first all-gather of the next step begins after each step."""
    memory_budget_gib: float = 0.0
    """GiB of weights that may stay unsharded from forward to backward, and between microbatches."""
    graph: bool = False
    """Whole steps are one CUDA graph."""


# ``+keep=GIB`` after an engine's name: its ``memory_budget_gib``.
_KEEP = re.compile(r"keep=(\d+(?:\.\d+)?)")
# ``+round=MI`` after an engine's name: its ``round_numel``, in Mi elements.
_ROUND = re.compile(r"round=(\d+)")
# ``+layers=N`` after an engine's name: its ``layers_per_unit``.
_LAYERS = re.compile(r"layers=([1-9]\d*)")
# What ``+name`` after an engine's name changes, and its description.
VARIATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({"linear": Linear}, "on torch's linear layers"),
    "fp32main": ({"remainders": False}, "fp32 main weights beside the bf16 ones"),
    "torchadam": (
        {"flat_optimizer": False, "remainders": False, "overlaps_forward": False},
        "PyTorch's fused AdamW on fp32 main weights",
    ),
    "muon": ({"muon": True, "remainders": False}, "Muon on fp32 main weights, queries, keys and values apart"),
    "bf16": ({"gram_iterations": False}, "Newton-Schulz iterations on the matrices themselves, in bf16"),
    "nooverlap": ({"overlaps_forward": False}, "the whole update before the next forward"),
    "fp32grads": ({"wide_grads": True}, "fp32 main gradients, also of one microbatch"),
    "fine": ({"fine_units": True}, "each matrix of a layer a unit"),
    "least": ({"least_memory": True, "remainders": False}, "the least memory, as with a policy of FSDP2's"),
    "together": ({"gathers_apart": False}, "gathers and reductions on one communicator"),
    "nosync": ({"prepares_forward": False}, "nothing launched between step and forward"),
}
_ALIASES = {"ours-plain": "ours-nccl+plain"}


def parse_ours(name: str) -> OursOptions:
    """Parse ``ours-TRANSPORT[-graph][+VARIATION...]``.

    Raises:
        ValueError: there is no such engine, transport or variation.
    """
    base, *variations = _parts(name)
    prefix, _, rest = base.partition("-")
    transport, _, suffix = rest.partition("-")
    if prefix != "ours" or transport not in TRANSPORTS or suffix not in ("", "graph"):
        raise ValueError(
            f"an engine of ours must be named ours-{{{','.join(TRANSPORTS)}}}[-graph][+VARIATION...], got {name}"
        )
    numbers = (_KEEP, _ROUND, _LAYERS)
    unknown = [v for v in variations if v not in VARIATIONS and not any(n.fullmatch(v) for n in numbers)]
    if unknown:
        raise ValueError(
            f"variations must be among {', '.join(VARIATIONS)}, keep=GIB, round=MI, layers=N, got {', '.join(unknown)} in {name}"
        )
    changes: dict[str, Any] = {}
    for variation in variations:
        if keep := _KEEP.fullmatch(variation):
            changes |= {"memory_budget_gib": float(keep[1])}
        elif of_round := _ROUND.fullmatch(variation):
            changes |= {"round_numel": int(of_round[1]) << 20}
        elif layers := _LAYERS.fullmatch(variation):
            changes |= {"layers_per_unit": int(layers[1])}
        else:
            changes |= VARIATIONS[variation][0]
    if suffix:
        # A graph holds whole steps: no step may launch work of the next one or leave work to it.
        changes |= {"graph": True, "prepares_forward": False, "overlaps_forward": False}
    return dataclasses.replace(OursOptions(transport=transport), **changes)


def _parts(name: str) -> list[str]:
    base, *variations = name.split("+")
    return [*_ALIASES.get(base, base).split("+"), *variations]


def describe_ours(name: str) -> str:
    """Describe the engine in words."""
    options = parse_ours(name)
    words = [f"this repository's fully_shard (ZeRO-3), transport {TRANSPORTS[options.transport]}"]
    words += [VARIATIONS[v][1] for v in _parts(name)[1:] if v in VARIATIONS]
    if options.memory_budget_gib:
        words.append(f"{options.memory_budget_gib:g} GiB of weights stay unsharded for backward")
    if options.layers_per_unit > 1:
        words.append(f"{options.layers_per_unit} layers a unit")
    if options.graph:
        words.append("each step one CUDA graph")
    return ", ".join(words)


def why_not_ours(options: OursOptions, settings: EngineSettings) -> str | None:
    """Return why an engine with these options cannot run here, None if it can. Ranks: all, with the same answer."""
    if options.graph and options.muon:
        return "steps with Muon cannot be captured"
    if options.least_memory and options.transport != "nccl":
        return f"the least memory goes with NCCL alone, got {options.transport}"
    if options.graph and settings.device.type != "cuda":
        return "CUDA graphs need CUDA devices"
    kind = TRANSPORTS[options.transport]
    if kind == "nccl" or settings.mesh.size() == 1:
        return None
    problem = transport_problem(kind, settings.mesh.get_group(), settings.device)
    return None if problem is None else f"transport {kind} cannot serve these ranks: {problem}"


class Ours(Engine):
    """Fully sharded by this repository's ``fully_shard`` (ZeRO-3)."""

    model: PlainGpt

    def __init__(self, settings: EngineSettings, options: OursOptions) -> None:
        self.options = options
        self._gather_group = dist.new_group() if options.gathers_apart and options.transport != "peer" else None
        accumulates = settings.num_microbatches > 1
        policy = fsdp.MixedPrecisionPolicy(
            main_params_dtype=torch.bfloat16 if options.remainders else torch.float32,
            main_grads_dtype=torch.float32 if accumulates or options.wide_grads else torch.bfloat16,
            grad_comm_dtype=torch.bfloat16,
        )
        with torch.device("meta"):
            model = PlainGpt(settings.shape, linear=options.linear, dtype=torch.bfloat16, seed=settings.seed)
        kind = TRANSPORTS[options.transport]
        inner = [m for layer in model.layers for m in layer.children()] if options.fine_units else []
        matrices = [module for module in inner if isinstance(module, options.linear)]
        shard = functools.partial(fsdp.fully_shard, transport=kind, least_memory=options.least_memory)  # type: ignore[arg-type]
        layers = list(model.layers)
        runs = [layers[at : at + options.layers_per_unit] for at in range(0, len(layers), options.layers_per_unit)]
        for unit in (*matrices, model.embedding, *(run if len(run) > 1 else run[0] for run in runs), model.head, model):
            shard(unit, settings.mesh, None, policy, fsdp_group_ag=self._gather_group)
        self.model = model
        self.contexts: list[fsdp.FsdpContext] = fsdp.contexts_of(model)
        for context in self.contexts:
            context.change_options(memory_budget_nbytes=int(options.memory_budget_gib * 2**30))
        self.optimizer = self._make_optimizer(settings)

    def _make_optimizer(self, settings: EngineSettings) -> torch.optim.Optimizer:
        options, parameters = self.options, self.model.parameters()
        if not options.flat_optimizer:
            return fsdp.fully_shard_optimizer(adamw(parameters, settings, capturable=options.graph))
        if options.muon:
            return self._make_muon(settings)
        return fsdp.FlatAdamW(
            parameters,
            lr=settings.learning_rate,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            store_param_remainders=options.remainders,
            overlaps_forward=options.overlaps_forward,
        )

    def _make_muon(self, settings: EngineSettings) -> fsdp.FlatMuon:
        matrices = [parameter for parameter in self.model.layers.parameters() if parameter.dim() == 2]
        of_muon = set(matrices)
        others = [parameter for parameter in self.model.parameters() if parameter not in of_muon]
        queries = {layer.qkv.weight for layer in self.model.layers}  # type: ignore[union-attr]
        shape = settings.shape
        kv = shape.num_kv_heads * shape.head_dim
        return fsdp.FlatMuon(
            [{"params": matrices, "use_muon": True}, {"params": others}],
            lr=settings.learning_rate,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            extra_scale_factor=0.2,
            gram_iterations=self.options.gram_iterations,
            round_numel=self.options.round_numel,
            row_blocks_of=lambda parameter: (shape.hidden_size, kv, kv) if parameter in queries else None,
            overlaps_forward=self.options.overlaps_forward,
        )

    def scope(self, *, is_first: bool, is_last: bool) -> AbstractContextManager[Any]:
        return fsdp.microbatch(self.model, is_first=is_first, is_last=is_last)

    def after_step(self) -> None:
        if self.options.prepares_forward:
            for context in self.contexts:
                context.prepare_forward()

    def memory_plan(self) -> MemoryPlan:
        reports = [context.describe() for context in self.contexts]
        return MemoryPlan("\n".join(map(str, reports)), sum(report.at_rest for report in reports))

    def close(self) -> None:
        groups = [group for context in self.contexts for group in context.groups]
        for transport in {axis for group in groups for axis in group.group_mesh.axes}:
            transport.close()  # what it has registered must not outlive its process groups
        if self._gather_group is not None:
            dist.destroy_process_group(self._gather_group)
            self._gather_group = None
