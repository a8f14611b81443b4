"""Edges name their ends; the streams of a device without streams order nothing; the logging ones find what is not ordered."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.fsdp.comm.streams import CudaStreams, Edge, Role, Streams, make_streams
from tests.support.logging_streams import LoggingStreams

HAZARDS = ("read after write", "write after read", "free")


def test_each_edge_leads_from_one_role_to_another_for_a_hazard() -> None:
    for edge in Edge:
        producer, consumer, hazard = edge.value
        assert Role(producer) is not Role(consumer) and hazard in HAZARDS


def test_a_device_without_streams_has_nothing_to_order() -> None:
    streams = make_streams(torch.device("cpu"))
    assert type(streams) is Streams
    for role in Role:
        with streams.on(role):
            assert streams.record(role) is None
    for edge in Edge:
        streams.wait(edge, None)


def _shared() -> tuple[LoggingStreams, torch.Tensor]:
    return LoggingStreams(), torch.zeros(8)


def test_unordered_accesses_of_two_roles_are_a_race() -> None:
    streams, weight = _shared()
    with streams.on(Role.GATHER):
        streams.work("gather", writes=(weight,))
    streams.work("forward", reads=(weight,))
    assert streams.races == ["forward on compute may overtake gather on gather"]


def test_a_wait_orders_what_was_issued_before_its_event_alone() -> None:
    streams, weight = _shared()
    with streams.on(Role.GATHER):
        streams.work("gather 0", writes=(weight[:4],))
        event = streams.record(Role.GATHER)
        streams.work("gather 1", writes=(weight[4:],))
    streams.wait(Edge.WEIGHTS_GATHERED, event)
    streams.work("forward 0", reads=(weight[:4],))
    assert not streams.races
    streams.work("forward 1", reads=(weight[4:],))
    assert len(streams.races) == 1


def test_an_order_through_a_third_role_counts() -> None:
    """Reduce waits for compute, which has waited for gather."""
    streams, weight = _shared()
    with streams.on(Role.GATHER):
        streams.work("gather", writes=(weight,))
    streams.wait(Edge.WEIGHTS_GATHERED, streams.record(Role.GATHER))
    streams.wait(Edge.GRADS_WRITTEN, streams.record(Role.COMPUTE))
    with streams.on(Role.REDUCE):
        streams.work("reduce", writes=(weight,))
    assert not streams.races


def test_reads_do_not_race_and_writes_race_with_reads() -> None:
    streams, weight = _shared()
    streams.work("forward", reads=(weight,))
    with streams.on(Role.GATHER):
        streams.work("gather", reads=(weight,))
        assert not streams.races
        streams.work("gather", writes=(weight[2:3],))
    assert streams.races == ["gather on gather may overtake forward on compute"]


def test_a_wait_for_the_wrong_roles_event_is_an_error() -> None:
    streams, _ = _shared()
    with pytest.raises(AssertionError, match="WEIGHTS_GATHERED waits for the gather stream"):
        streams.wait(Edge.WEIGHTS_GATHERED, streams.record(Role.COMPUTE))


@pytest.mark.gpu
def test_cuda_streams_order_work_and_follow_the_caller() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    streams = make_streams(device)
    assert isinstance(streams, CudaStreams)
    assert len({streams.queues[role].cuda_stream for role in Role}) == len(Role)
    caller = torch.cuda.Stream(device)
    with torch.cuda.stream(caller):
        streams.follow_caller()
    assert streams.queues[Role.COMPUTE] == caller
    with streams.on(Role.GATHER):
        assert torch.cuda.current_stream(device) == streams.queues[Role.GATHER]
        values = torch.zeros(1 << 20, device=device)
        for _ in range(50):
            values += 1
    streams.wait(Edge.WEIGHTS_GATHERED, streams.record(Role.GATHER))
    with streams.on(Role.COMPUTE):
        copied = values.clone()
    torch.cuda.synchronize(device)
    assert bool((copied == 50).all())
    assert streams.queues[Role.GATHER].priority < streams.queues[Role.COMPUTE].priority
