"""The choice of transports: the kind that was asked for, or an error with the reason; one for all units over a mesh."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import redirect_stdout
from functools import partial
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel, fully_shard
from megatron.core.distributed.fsdp.adapter.megatron_fsdp import fully_shard_model
from megatron.core.distributed.fsdp.comm import choose
from megatron.core.distributed.fsdp.comm.choose import (
    TRANSPORT_KINDS,
    TRANSPORTS,
    SharedTransports,
    TransportKind,
    make_transport,
)
from megatron.core.distributed.fsdp.comm.peer_copy import PeerCopyTransport
from megatron.core.distributed.fsdp.comm.peer_memory import Place, problem_between
from megatron.core.distributed.fsdp.comm.process_group import (
    ProcessGroupTransport,
    RankOrderTransport,
    compare_on_ranks,
)
from megatron.core.distributed.fsdp.comm.symmetric import SymmetricTransport, settings_problem
from megatron.core.distributed.fsdp.comm.transport import LocalTransport
from megatron.core.distributed.fsdp.fastest_transport import fastest_transport
from megatron.core.distributed.fsdp.fsdp2.fully_shard import PUBLIC
from tests.support.rank_checks import RankChecks
from tests.support.tiny_gpt import build_gpt

CHECKS = RankChecks(__name__)
CPU = torch.device("cpu")
MIB = 2**20


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _transport_of(module: Any) -> Any:
    (transport,) = module.parameter_groups[0].group_mesh.axes
    return transport


# ---- which one ------------------------------------------------------------------------------------------------------


def test_names_are_the_kinds_and_what_stands_in_for_them() -> None:
    """The literal for type checkers, the names of the classes and the table agree."""
    classes = (ProcessGroupTransport, SymmetricTransport, PeerCopyTransport, RankOrderTransport, LocalTransport)
    assert [each.name for each in classes] == [*TRANSPORTS, "gloo", "local"]
    assert get_args(TransportKind) == tuple(TRANSPORT_KINDS) == ("auto", *TRANSPORTS)


@CHECKS.on(2)
def kinds_on_cpus() -> None:
    for kind, expected in (("nccl", "gloo"), ("auto", "gloo"), ("peer_copy", "peer_copy")):
        transport = make_transport(_world(), _world(), CPU, kind)
        assert transport.name == expected, kind
        full = torch.empty(2)
        transport.close()  # nothing is registered: it goes on
        transport.all_gather(full.zero_(), torch.tensor([float(dist.get_rank())]))
        assert full.tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="transport must be one of auto, nccl, symm, peer_copy, got 'rdma'"):
        make_transport(_world(), _world(), CPU, "rdma")


@CHECKS.on(2)
def auto_on_cpus_costs_and_says_nothing() -> None:
    calls: list[Any] = []
    keep = dist.all_gather_object, dist.all_reduce
    dist.all_gather_object = dist.all_reduce = lambda *a, **k: calls.append(a)  # type: ignore[assignment]
    try:
        with redirect_stdout(io.StringIO()) as printed:
            assert isinstance(make_transport(_world(), _world(), CPU, "auto"), RankOrderTransport)
    finally:
        dist.all_gather_object, dist.all_reduce = keep
    assert not calls and not printed.getvalue()


@CHECKS.on(2)
def a_rank_alone_needs_no_transport() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for kind in TRANSPORT_KINDS:
        assert isinstance(make_transport(alone, alone, CPU, kind), LocalTransport)
    with pytest.raises(ValueError, match="transport must be one of"):
        make_transport(alone, alone, CPU, "rdma")


@CHECKS.on(2)
def no_memory_is_registered_where_that_is_asked_for() -> None:
    model = fully_shard_model(nn.Linear(2, 2), disable_symmetric_registration=True)
    assert model.ddp_config.transport_kind == "nccl" and model.transport_names == ["gloo"]
    with pytest.raises(NotImplementedError, match="disable_symmetric_registration must be False with symmetric memory"):
        fully_shard_model(nn.Linear(2, 2), nccl_ub=True, disable_symmetric_registration=True)


@CHECKS.on(2)
def symmetric_memory_on_cpus_is_refused_wherever_it_is_asked_for() -> None:
    reason = (
        r"transport='symm' cannot serve ranks \[0, 1\] on cpu: NCCL's symmetric memory is for CUDA devices and the nccl "
        r"backend, got cpu and gloo; use transport='nccl' .* or 'auto'"
    )
    for refused in (
        lambda: make_transport(_world(), _world(), CPU, "symm"),
        lambda: fully_shard(nn.Linear(2, 2), use_symm_mem=True),
        lambda: fully_shard(nn.Linear(2, 2), use_symm_mem=True, transport="auto"),
        lambda: fully_shard(nn.Linear(2, 2), transport="symm"),
        lambda: _wrap(use_symm_mem=True),
        lambda: _wrap(nccl_ub=True),
        lambda: _wrap(fsdp_transport="symm"),
    ):
        with pytest.raises(ValueError, match=reason):
            refused()


def _wrap(**settings: Any) -> FullyShardedDataParallel:
    model = build_gpt()
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", **settings
    )
    return FullyShardedDataParallel(model.config, config, model)


@CHECKS.on(1, 2)
def the_configuration_names_the_transport() -> None:
    for kind in ("auto", "nccl", "peer_copy"):
        names = {_transport_of(group_owner).name for group_owner in (_wrap(fsdp_transport=kind),)}
        alone = dist.get_world_size() == 1
        assert names == {"local" if alone else {"auto": "gloo", "nccl": "gloo"}.get(kind, kind)}


# ---- one for all units ----------------------------------------------------------------------------------------------


@CHECKS.on(2)
def units_over_a_mesh_share_a_transport_that_outlives_them() -> None:
    mesh = init_device_mesh("cpu", (2,))
    gathers = dist.new_group([0, 1])
    for arguments in ({"mesh": mesh}, {}, {"mesh": mesh, "fsdp_group_ag": gathers}, {"transport": "peer_copy"}):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for unit in (*net, net):
            fully_shard(unit, **arguments)
        first, second = (_transport_of(unit) for unit in net)
        assert (first.gather_group is gathers) == ("fsdp_group_ag" in arguments) == (second.gather_group is gathers)
        if "transport" not in arguments:
            continue  # the process group's is made by each rank alone, and keeps its groups no longer than its unit
        assert first is second
        del second, net, unit
        again = fully_shard(nn.Linear(2, 2), **arguments)
        assert _transport_of(again) is first, "when a rank lets go of a model is no matter for the others"


@CHECKS.on(2)
def other_groups_and_kinds_have_other_transports() -> None:
    mesh, gathers = init_device_mesh("cpu", (2,)), dist.new_group([0, 1])
    shared = SharedTransports.of(mesh)
    made = [
        shared.get("nccl", _world(), _world(), CPU),
        shared.get("nccl", _world(), gathers, CPU),
        shared.get("peer_copy", _world(), _world(), CPU),
    ]
    assert len(set(map(id, made))) == 3
    assert shared.get("peer_copy", _world(), _world(), CPU) is made[2]
    other = SharedTransports.of(init_device_mesh("cpu", (2,)))
    assert other.get("peer_copy", _world(), _world(), CPU) is not made[2]


@CHECKS.on(2)
def a_choice_is_made_once_for_a_mesh() -> None:
    mesh, asked = init_device_mesh("cpu", (2,)), []
    keep = choose.resolve_kind

    def first(*_: Any) -> str:
        return "nccl"

    def resolve(kind: str, *arguments: Any, **options: Any) -> str:
        asked.append((kind, arguments[-1]))
        return keep(kind, *arguments, **options)

    choose.resolve_kind = resolve
    try:
        assert SharedTransports.of(mesh).get("auto", _world(), _world(), CPU, first).name == "gloo"
        for _ in range(3):
            fully_shard(nn.Linear(2, 2), mesh, transport="auto")
    finally:
        choose.resolve_kind = keep
    assert [fastest for kind, fastest in asked if kind == "auto"] == [first]


@CHECKS.on(2)
def auto_is_what_was_measured_on_devices() -> None:
    asked: list[Any] = []

    def fastest(*arguments: Any) -> str:
        asked.append(arguments)
        return "symm"

    asking = _world(), _world(), torch.device("cuda", 0)
    with patch.object(dist, "get_backend_config", lambda group: "cuda:nccl"):
        assert choose.resolve_kind("peer_copy", *asking, fastest) == "peer_copy" and not asked
        assert choose.resolve_kind("auto", *asking, fastest) == "symm" and asked == [asking]
        assert choose.resolve_kind("auto", *asking) == "nccl", "the core alone measures nothing"
    assert PUBLIC.fastest_transport is fastest_transport


@CHECKS.on(2)
def units_are_measured_with_their_sizes() -> None:
    keep, asked = choose.resolve_kind, []

    def resolve(kind: str, *arguments: Any, **options: Any) -> str:
        asked.append(arguments[-1])
        return keep(kind, *arguments, **options)

    with patch.object(choose, "resolve_kind", resolve):
        _wrap(fsdp_transport="auto")
    (fastest,) = (each for each in asked if isinstance(each, partial))
    assert fastest.func is fastest_transport and all(nbytes > 0 for nbytes in fastest.keywords["nbytes"])


@CHECKS.on(2)
def ranks_that_ask_for_different_transports_are_told() -> None:
    """They would wait for each other in different collectives; and the mesh is as good as before."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    gathers = dist.new_group([0, 1])

    def shard(**options: Any) -> Any:
        return fully_shard(nn.Linear(2, 2), mesh, **options)

    expected = "transport of fully_shard must be the same on all ranks .*, got 'nccl' on ranks \\[0\\] and 'peer_copy' on ranks \\[1\\]"
    with pytest.raises(ValueError, match=expected):
        shard(transport=("nccl", "peer_copy")[rank])
    with pytest.raises(
        ValueError,
        match=r"\(fsdp_group_ag\) of fully_shard must be .*, got False on ranks \[0\] and True on ranks \[1\]",
    ):
        shard(fsdp_group_ag=(None, gathers)[rank])
    torch.use_deterministic_algorithms(rank == 0)
    try:
        with pytest.raises(ValueError, match=r"use_deterministic_algorithms .*, got True on ranks"):
            shard(transport="auto")
        shard()  # it counts for auto alone
    finally:
        torch.use_deterministic_algorithms(False)
    with patch(f"{choose.__name__}.compare_on_ranks", wraps=compare_on_ranks) as compared:
        for kind in ("nccl", "auto", "auto"):
            shard(transport=kind)
    assert compared.call_count == 1, "once for each kind and process group: nccl was compared above"


@CHECKS.on(2)
def a_mesh_is_copied_without_its_transports() -> None:
    """DTensors carry the mesh into checkpoints and copies, where a transport of this process means nothing."""
    mesh = init_device_mesh("cpu", (2,))
    net = fully_shard(nn.Linear(2, 2), mesh, transport="peer_copy")
    shared = SharedTransports.of(mesh)
    assert len(shared._made) == 1
    for copied in (copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        assert len(copied._made) == 0
    torch.save(net.state_dict(), io.BytesIO())


# ---- why not --------------------------------------------------------------------------------------------------------

_TWO = (Place("a", 0, (1,)), Place("a", 1, (0,)))
_PROBLEMS: dict[str, tuple[tuple[Place, ...], str | None]] = {
    "none": (_TWO, None),
    "several hosts": ((Place("a", 0, ()), Place("b", 0, ())), "on one host, in one NVLink domain, got 2 hosts: a, b"),
    "devices that hide each other": ((Place("a", 0, ()), Place("a", 0, ())), r"see the others', got devices \[0, 0\]"),
    "one device, as all ranks ask": ((Place("a", 0, (), None, "GPU-1"), Place("a", 0, (), None, "GPU-1")), None),
    "one device, as a rank asks": (
        (Place("a", 0, (), None, "GPU-1"), Place("a", 0, ())),
        "peer copy only, with TORCH_.*=1",
    ),
    "devices that hide each other, though asked": (
        (Place("a", 0, (), None, "GPU-1"), Place("a", 0, (), None, "GPU-2")),
        r"see the others', got devices \[0, 0\]",
    ),
    "two devices for three": (
        (Place("a", 0, (1,), None, "GPU-1"), Place("a", 1, (0,), None, "GPU-2"), Place("a", 0, (1,), None, "GPU-1")),
        None,
    ),
    "no NVLink": ((Place("a", 0, (1,)), Place("a", 1, ())), "NVLink must connect all .* none between devices 1 and 0"),
    "not all to all": (
        (Place("a", 0, (1,)), Place("a", 1, (0, 2)), Place("a", 2, (1,))),
        "none between devices 0 and 2",
    ),
    "a word from one rank": ((_TWO[0], Place("a", 1, (0,), "NCCL is too old")), "NCCL is too old"),
}


@pytest.mark.parametrize("name", _PROBLEMS)
def test_ranks_that_cannot_share_symmetric_memory(name: str) -> None:
    places, message = _PROBLEMS[name]
    problem = problem_between(places)
    assert (problem is None) == (message is None)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            raise ValueError(problem)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable segments cannot .*PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8, expandable_segments: True"}, "PYTORCH_ALLOC_CONF="),
        ({"NCCL_CUMEM_ENABLE": "0"}, "cannot register windows with NCCL_CUMEM_ENABLE=0"),
        ({"NCCL_CUMEM_ENABLE": "1"}, None),
        ({"NCCL_WIN_ENABLE": "0"}, "cannot register windows with NCCL_WIN_ENABLE=0"),
        ({"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}, "registers all memory, and none symmetrically"),
        ({"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "0"}, None),
    ],
)  # fmt: skip
def test_settings_that_rule_symmetric_memory_out(environment: dict[str, str], message: str | None) -> None:
    problem = settings_problem(environment)
    assert (problem is None) == (message is None)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            raise ValueError(problem)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
