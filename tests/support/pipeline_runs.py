"""Steps of a tiny GPT on pipeline stages, with the engine inside of each, and the same steps in one process without it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.module_names import named_parameters
from tests.support.models import order_of
from tests.support.tiny_gpt import VOCAB_SIZE, build_gpt

LENGTH, SIZE, HIDDEN, LAYERS = 8, 2, 16, 4
OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "sgd_momentum": 0.9, "clip_grad": 0.0, "optimizer": "sgd"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train: on how many stages and with what inside of each."""

    stages: int = 2
    strategy: str = "optim_grads_params"
    microbatches: int = 4
    """Of each data-parallel rank."""
    replicas: int = 1
    """Data-parallel ranks of each stage."""
    tied: bool = False
    per_token: bool = False
    clip: float = 0.0
    budget: float | None = None
    """Bytes for weights that stay gathered throughout a step."""
    ahead: int | None = None
    """Elements of weights to have on their way; None: one unit's."""
    transport: str = "nccl"
    """What moves the engine's bytes; "nccl" is the process group, gloo's here."""
    steps: int = 3
    evaluates: bool = False
    recompute: str | None = None
    """The method of recomputation; None: nothing is recomputed."""
    virtual: int = 1
    """Stages of each rank."""
    group: int | None = None
    """Microbatches that a virtual stage runs in a row; None: as many as ranks."""
    overlaps: bool = False
    """Messages of virtual stages travel beside the computation."""

    @property
    def num_ranks(self) -> int:
        """Ranks that it takes."""
        return self.stages * self.replicas

    @property
    def is_sharded(self) -> bool:
        """True if weights must be gathered."""
        return self.strategy == "optim_grads_params"

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.microbatches * self.replicas * SIZE


@dataclass
class Outcome:
    """What a run led to."""

    losses: list[float] = field(default_factory=list)
    """Mean over the tokens of each step's global batch."""
    norms: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    """After each step."""
    weights: dict[str, Any] = field(default_factory=dict)
    """Of this stage, in full."""
    gathers: list[int] = field(default_factory=list)
    """Of each step, on this rank."""
    reductions: list[int] = field(default_factory=list)
    in_plan: list[bool] = field(default_factory=list)
    most_in_flight: int = 0
    """Graphs that waited for their backward at once."""
    most_outputs: int = 0
    """Outputs of earlier forwards that were alive in a later one."""
    num_groups: dict[str, int] = field(default_factory=dict)
    """Parameter groups of the embedding, of a layer, of the output layer, of the root, and of all units of this stage."""


def samples(first: int, count: int) -> dict[str, Tensor]:
    """Consecutive samples of the endless training data; a different number of tokens counts in each."""
    made = [torch.Generator().manual_seed(index) for index in range(first, first + count)]
    tokens = torch.stack([torch.randint(VOCAB_SIZE, (LENGTH + 1,), generator=one) for one in made])
    mask = torch.stack([(torch.rand(LENGTH, generator=one) < 0.7).float() for one in made])
    mask[:, 0] = 1.0
    positions = torch.arange(LENGTH).expand(count, LENGTH)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": positions}


def batches_of(case: Case, *, replica: int) -> Iterator[dict[str, Tensor]]:
    """The microbatches of a data-parallel rank: together the ranks take consecutive samples."""
    at = replica * SIZE
    while True:
        yield samples(at, SIZE)
        at += SIZE * case.replicas


def train(case: Case) -> Outcome:
    """The run on this rank's stage. Ranks: all."""
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp import FullyShardedDataParallel, ModelChunks
    from megatron.core.distributed.fsdp.api.module import contexts_of
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import PipelineStage
    from megatron.core.process_group_builder import build_process_groups
    from megatron.core.rank_grid import RankGrid
    from megatron.training.data.batches import BatchConfig
    from megatron.training.loop.evaluation import evaluate
    from megatron.training.loop.train_step import StepComputation
    from pretrain_gpt import forward_step

    groups = build_process_groups(RankGrid(world_size=dist.get_world_size(), pipeline_model_parallel_size=case.stages))
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    stage = PipelineStage(group=groups.pp, hidden_shape=(LENGTH, SIZE, HIDDEN), device=device, num_chunks=case.virtual)
    with device:
        modules = [
            _model(
                case,
                pre_process=own.is_first,
                post_process=own.is_last,
                pg_collection=groups,
                vp_stage=own.chunk if case.virtual > 1 else None,
            )
            for own in stage.of_chunks
        ]
    settings: dict[str, Any] = {
        "data_parallel_sharding_strategy": case.strategy,
        "fsdp_memory_budget": case.budget,
        "fsdp_transport": case.transport,
        "suggested_communication_unit_size": case.ahead,
    }
    ddp = DistributedDataParallelConfig(use_megatron_fsdp=True, **settings)
    chunks = [FullyShardedDataParallel(module.config, ddp, module, pg_collection=groups) for module in modules]
    model = chunks[0] if case.virtual == 1 else ModelChunks(chunks)
    contexts = contexts_of(model)
    assert len(contexts) == case.virtual
    for context in contexts:
        context.change_options(poisons=True)
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**OPTIMIZER, "clip_grad": case.clip}), chunks)
    step = StepComputation(
        model,
        optimizer,
        forward_step,
        num_microbatches=case.microbatches,
        per_token_loss=case.per_token,
        device=device,
        stage=stage,
    )
    outcome = Outcome()
    for _, stage_forward in step.stages:
        stage_forward.forward_step = _counting(stage_forward.forward_step, contexts, outcome)
    replica = dist.get_rank() % case.replicas
    batches = (_to(batch, device) for batch in batches_of(case, replica=replica))
    shape = BatchConfig(micro_batch_size=SIZE, global_batch_size=case.global_batch, data_parallel_size=case.replicas)
    for _ in range(case.steps):
        gathers, reductions = _collectives(contexts)
        results = step((next(batches) for _ in range(case.microbatches)), lambda index, chunk=0: None)
        outcome.gathers.append(_collectives(contexts)[0] - gathers)
        outcome.reductions.append(_collectives(contexts)[1] - reductions)
        outcome.in_plan.append(all(context.planner.in_plan for context in contexts))
        sums = results["loss_and_tokens"].clone()
        dist.all_reduce(sums)
        outcome.losses.append(float(sums[0] / sums[1]))
        outcome.norms.append(float(results["grad_norm"]))
        assert not any(context.unsharder.live for context in contexts), "nothing stays gathered after a step"
        if case.evaluates:
            held_out = (_to(batch, device) for batch in batches_of(case, replica=replica))
            outcome.evaluations.append(
                evaluate(
                    model,
                    forward_step,
                    held_out,
                    num_microbatches=2 * shape.num_microbatches,
                    device=device,
                    stage=stage,
                )
            )
    outcome.num_groups = {"all": sum(len(context.groups) for context in contexts)}
    for unit in (unit for context in contexts for unit in context.units):
        last = unit.prefix.rstrip(".").rpartition(".")[2] or "root"
        outcome.num_groups["layer" if last.isdigit() else last] = len(unit.own_groups)
    for name, parameter in (named for module in modules for named in named_parameters(module)):
        assert isinstance(parameter, DTensor)
        outcome.weights[name] = parameter.full_tensor().detach().cpu().numpy()
    return outcome


def _collectives(contexts: Any) -> tuple[int, int]:
    """All-gathers and reductions that this rank has issued."""
    orders = [order_of(context) for context in contexts]
    return sum(order.num_gathers for order in orders), sum(order.num_reductions for order in orders)


def _counting(forward_step: Any, contexts: Any, outcome: Outcome) -> Any:
    """``forward_step``, which also counts the graphs that wait for their backward, its own included, and old outputs."""
    outputs: list[weakref.ref[Tensor]] = []

    def count_and_step(batch: dict[str, Tensor], model: Any) -> Any:
        outcome.most_outputs = max(outcome.most_outputs, sum(output() is not None for output in outputs))
        output = forward_step(batch, model)
        if isinstance(output, Tensor):
            outputs.append(weakref.ref(output))
        graphs = [graph for context in contexts for graph in context.state.graphs._graphs]
        num_waiting = sum(graph.anchor() is not None and not graph.is_done for graph in graphs)
        outcome.most_in_flight = max(outcome.most_in_flight, num_waiting)
        return output

    return count_and_step


def train_plainly(case: Case) -> Outcome:
    """The same steps in this process, without engine, stages or process groups."""
    model = _model(case)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}],
        lr=OPTIMIZER["lr"],
        momentum=OPTIMIZER["sgd_momentum"],
    )
    outcome = Outcome()
    for number in range(case.steps):
        sums, count = torch.zeros(2, dtype=torch.float64), case.microbatches * case.replicas
        pieces = [samples(number * case.global_batch + index * SIZE, SIZE) for index in range(count)]
        tokens = sum(piece["loss_mask"].sum() for piece in pieces)
        for piece in pieces:
            loss, own_tokens = _loss(model, piece)
            torch.autograd.backward(loss / (tokens if case.per_token else own_tokens * count))
            sums += torch.stack((loss.detach().double(), own_tokens.double()))
        outcome.losses.append(float(sums[0] / sums[1]))
        limit = case.clip or float("inf")
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluates:
            with torch.no_grad():
                loss, own_tokens = _loss(model, samples(0, 2 * case.global_batch))
            outcome.evaluations.append(float(loss / own_tokens))
    outcome.weights = {name: parameter.detach().numpy() for name, parameter in named_parameters(model)}
    return outcome


def _model(case: Case, **arguments: Any) -> Any:
    arguments["share_embeddings_and_output_weights"] = case.tied
    # A device would draw other weights than the CPU does.
    fields: dict[str, Any] = {"calculate_per_token_loss": case.per_token, "use_cpu_initialization": True}
    if case.virtual > 1 and arguments.get("pg_collection") is not None:
        fields |= {
            "pipeline_model_parallel_size": case.stages,
            "virtual_pipeline_model_parallel_size": case.virtual,
            "microbatch_group_size_per_vp_stage": case.group,
            "overlap_p2p_comm": case.overlaps,
        }
    if case.recompute is not None:
        fields |= {"recompute_granularity": "full", "recompute_method": case.recompute, "recompute_num_layers": 1}
    return build_gpt(arguments, num_layers=LAYERS, hidden_size=HIDDEN, **fields)


def _loss(model: Any, piece: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = model(piece["tokens"], piece["position_ids"], None, labels=piece["labels"])
    return (losses * piece["loss_mask"]).sum(), piece["loss_mask"].sum()


def _to(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {key: value.to(device) for key, value in batch.items()}
