"""Communication of hidden states and their gradients between pipeline stages.

Shapes: s sequence (this rank's part of it), b micro batch, h hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.pipeline_parallel.stage_schedules import Exchange, Message
from megatron.core.process_groups_config import group_rank, group_size

if TYPE_CHECKING:
    from megatron.core.model_parallel_config import ModelParallelConfig


@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """The pipeline stage of this rank, and the shape of the messages between it and its neighbours.

    Raises:
        ValueError: there are several stages and no ``hidden_shape``.
    """

    group: ProcessGroup | None = None
    """The ranks of one pipeline, in the order of the stages; None: there is one stage."""

    hidden_shape: tuple[int, int, int] | None = None
    """Shape [s, b, h] of all messages, known in advance; see ``hidden_shape``. Not used where there is one stage."""

    dtype: torch.dtype = torch.float32
    """Dtype of all messages: that of hidden states between layers."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    num_chunks: int = 1
    """Stages of each rank, which take turns (virtual stages)."""

    chunk: int = 0
    """Which of the rank's stages this is."""

    wide_from: int | None = None
    """The first stage, of all in the order of the layers, that gets several hidden states one behind the other; None: none does."""

    width: int = 1
    """How many these are."""

    def __post_init__(self) -> None:
        if self.num_stages > 1 and self.hidden_shape is None:
            raise ValueError(
                f"hidden_shape must be given where there are several stages, got None with {self.num_stages}; see "
                "megatron.core.pipeline_parallel.hidden_shape"
            )

    @property
    def index(self) -> int:
        """Index of this rank in the pipeline."""
        return group_rank(self.group)

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline."""
        return group_size(self.group)

    @property
    def is_first(self) -> bool:
        """True if the stage has the embedding."""
        return self.index == 0 and self.chunk == 0

    @property
    def is_last(self) -> bool:
        """True if the stage has the output layer, and computes the loss."""
        return self.index == self.num_stages - 1 and self.chunk == self.num_chunks - 1

    def shape_of(self, message: Message, receiver: int) -> tuple[int, int, int]:
        """Return the shape of a message to a rank of the pipeline."""
        assert self.hidden_shape is not None, "given where there are several stages"
        # Hidden states are the input of the receiving stage, a gradient is that of the next one's.
        stage = message.chunk * self.num_stages + receiver + (message.kind == "gradient")
        length, *rest = self.hidden_shape
        width = self.width if self.wide_from is not None and stage >= self.wide_from else 1
        return (length * width, rest[0], rest[1])

    @property
    def of_chunks(self) -> list[PipelineStage]:
        """All stages of the rank, in the order of the layers."""
        return [replace(self, chunk=chunk) for chunk in range(self.num_chunks)]


def hidden_shape(
    *,
    seq_length: int,
    micro_batch_size: int,
    hidden_size: int,
    context_parallel_size: int = 1,
    tensor_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
) -> tuple[int, int, int]:
    """Compute the shape [s, b, h] of a rank's hidden states between two layers.

    Raises:
        ValueError: the sequence length is not a multiple of the ranks that share a sequence.
    """
    num_parts = context_parallel_size * (tensor_model_parallel_size if sequence_parallel else 1)
    if seq_length % num_parts != 0:
        raise ValueError(
            f"the sequence length must be a multiple of the {num_parts} ranks that share a sequence (context parallel"
            f"{' times tensor parallel' if sequence_parallel else ''}), got {seq_length}"
        )
    return seq_length // num_parts, micro_batch_size, hidden_size


class PipelineCommunicator:
    """The sends and receives of a stage's schedule; each exchange is one batch on the pipeline's process group.

    [Note: one batch at a time] A communicator runs its operations in the order of issue, on the device too. A receive that is
    posted earlier than for the next act would block the sends behind it until its message arrives, which may itself depend on
    one of these sends. So a batch has the message just computed and the one needed next. A batch that only sends is waited
    for just before the next batch, so that computation continues.

    [Note: connected first] NCCL connects two ranks at the first operation between them, and in that batch both sides must use the
    same directions. Batches of a schedule may not: with one microbatch the first stage sends and receives in one batch, the last
    stage in two. So all neighbours exchange one element in both directions before the first exchange.

    Ranks: every rank of the group, each by the schedule of its stage.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self.stage = stage
        self._sending: list[tuple[Any, torch.Tensor]] = []  # works, with the memory that they read
        self._is_connected = stage.num_stages == 1

    def connect(self) -> None:
        """Connect the neighbours, so that batches may have any composition: see [Note: connected first].

        Ranks: every rank of the group, before its first exchange; later calls do nothing.
        """
        if self._is_connected:
            return
        stage = self.stage
        element = torch.zeros(1, device=stage.device)
        neighbours = [index for index in (stage.index - 1, stage.index + 1) if 0 <= index < stage.num_stages]
        if stage.num_chunks > 1:  # the last rank's outputs go to the first one
            neighbours = sorted({index % stage.num_stages for index in (stage.index - 1, stage.index + 1)})
        operations = []
        for peer in neighbours:
            operations.append(dist.P2POp(dist.isend, element, group=stage.group, group_peer=peer))
            operations.append(dist.P2POp(dist.irecv, torch.empty_like(element), group=stage.group, group_peer=peer))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        self._is_connected = True

    def exchange(self, exchange: Exchange, made: torch.Tensor | None) -> torch.Tensor | None:
        """Send the last act's result and receive what the next act needs, [s, b, h]; None where it needs nothing.

        Args:
            made: the result of the last act, sent only if ``exchange`` says so.

        Blocks the host on backends without streams, until the message has arrived.
        """
        if exchange.send is None and exchange.receive is None:
            return None
        works, sent, received = self._post(exchange, made)
        self.finish()
        if received is None:
            assert sent is not None
            self._sending = [(work, sent) for work in works]
        else:
            for work in works:
                work.wait()
        return received

    def _post(
        self, exchange: Exchange, made: torch.Tensor | None
    ) -> tuple[list[Any], torch.Tensor | None, torch.Tensor | None]:
        """Begin a batch; return its works, the tensor that is sent and the one that is received."""
        operations = []
        sent = received = None
        if exchange.send is not None:
            assert made is not None, "an act that sends has a result"
            sent = self._outgoing(exchange.send, made)
            operations.append(dist.P2POp(dist.isend, sent, group=self.stage.group, group_peer=self._to(exchange.send)))
        if exchange.receive is not None:
            shape = self.stage.shape_of(exchange.receive, self.stage.index)
            received = torch.empty(shape, dtype=self.stage.dtype, device=self.stage.device)
            peer = self._from(exchange.receive)
            operations.append(dist.P2POp(dist.irecv, received, group=self.stage.group, group_peer=peer))
        return dist.batch_isend_irecv(operations), sent, received

    def finish(self) -> None:
        """Wait, in stream order, until the sent tensors have been read and may be overwritten."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []

    def _outgoing(self, message: Message, tensor: torch.Tensor) -> torch.Tensor:
        stage = self.stage
        shape = stage.shape_of(message, self._to(message))
        if tuple(tensor.shape) != shape or tensor.dtype != stage.dtype:
            raise ValueError(
                f"messages between stages must have shape {shape} and dtype {stage.dtype}, got "
                f"{tuple(tensor.shape)} and {tensor.dtype} in the {message.kind} of microbatch {message.microbatch} on stage "
                f"{stage.index}; make hidden_shape that of the stage's batches"
            )
        return tensor.contiguous()

    def _to(self, message: Message) -> int:
        return (self.stage.index + (1 if message.kind == "output" else -1)) % self.stage.num_stages

    def _from(self, message: Message) -> int:
        return (self.stage.index + (-1 if message.kind == "output" else 1)) % self.stage.num_stages


class InterleavedCommunicator(PipelineCommunicator):
    """The sends and receives of a rank with several stages, which are waited for when their message is needed.

    A batch whose message is needed later travels beside what is computed meanwhile. It is waited for when the second batch
    after it begins at the latest, so that what is sent is not kept longer.

    Args:
        overlaps: False: wait for each batch at once.
    """

    def __init__(self, stage: PipelineStage, *, overlaps: bool) -> None:
        super().__init__(stage)
        self.overlaps = overlaps
        self._begun: deque[_Batch] = deque()
        self._received: dict[Message, torch.Tensor] = {}

    def begin(self, exchange: Exchange, made: torch.Tensor | None) -> None:
        """Begin to send the last act's result and to receive what the neighbours have made meanwhile."""
        if exchange.send is None and exchange.receive is None:
            return
        works, sent, received = self._post(exchange, made)
        self._begun.append(_Batch(works, sent, exchange.receive))
        if received is not None:
            assert exchange.receive is not None
            self._received[exchange.receive] = received
        self._wait(num_left=1 if self.overlaps else 0)

    def take(self, message: Message) -> torch.Tensor:
        """Return the message [s, b, h], which has arrived or is on its way; blocks as ``exchange``."""
        while any(batch.receives == message for batch in self._begun):
            self._wait(num_left=len(self._begun) - 1)
        return self._received.pop(message)

    def finish(self) -> None:
        super().finish()
        self._wait(num_left=0)

    def _wait(self, *, num_left: int) -> None:
        while len(self._begun) > num_left:
            for work in self._begun.popleft().works:
                work.wait()


class _Batch(NamedTuple):
    """Sends and receives that have begun together."""

    works: list[Any]
    sent: torch.Tensor | None  # the memory that they read
    receives: Message | None


Shapes = Sequence[int] | Sequence[Sequence[int]]
Tensors = torch.Tensor | None | list[torch.Tensor | None]


class P2PCommunicator:
    """Messages between neighboring stages by Megatron-Core's names, for callers' schedules.

    A message is a tensor, or a list of them where its shapes are a list; None where there is no neighbor. Received tensors
    require gradients. The host waits for each exchange, as far as the backend makes it.

    Args:
        pp_group: the ranks of a pipeline, in the order of the stages.
        config: ``pipeline_dtype`` is that of all messages.
    """

    def __init__(self, pp_group: ProcessGroup, config: ModelParallelConfig) -> None:
        self.pp_group, self.config = pp_group, config

    @property
    def total_stages(self) -> int:
        """Ranks of the pipeline."""
        return group_size(self.pp_group)

    @property
    def current_stage(self) -> int:
        """Index of this rank in the pipeline."""
        return group_rank(self.pp_group)

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether no stage is before this one."""
        return self.current_stage == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether no stage is behind this one."""
        return self.current_stage == self.total_stages - 1

    def recv_forward(self, tensor_shapes: Shapes, is_first_stage: bool) -> Tensors:
        """Receive the outputs of the stage before."""
        return self._exchange(None, 0, tensor_shapes, 0 if is_first_stage else -1)

    def recv_backward(self, tensor_shapes: Shapes, is_last_stage: bool) -> Tensors:
        """Receive the gradients of the outputs from the stage behind."""
        return self._exchange(None, 0, tensor_shapes, 0 if is_last_stage else 1)

    def send_forward(self, output_tensors: Tensors, is_last_stage: bool) -> None:
        """Send the outputs to the stage behind."""
        self._exchange(output_tensors, 0 if is_last_stage else 1)

    def send_backward(self, input_tensor_grads: Tensors, is_first_stage: bool) -> None:
        """Send the gradients of the inputs to the stage before."""
        self._exchange(input_tensor_grads, 0 if is_first_stage else -1)

    def send_forward_recv_backward(
        self, output_tensors: Tensors, tensor_shapes: Shapes, is_last_stage: bool
    ) -> Tensors:
        """Send the outputs to the stage behind, and receive gradients from it."""
        step = 0 if is_last_stage else 1
        return self._exchange(output_tensors, step, tensor_shapes, step)

    def send_backward_recv_forward(
        self, input_tensor_grads: Tensors, tensor_shapes: Shapes, is_first_stage: bool
    ) -> Tensors:
        """Send the gradients of the inputs to the stage before, and receive outputs from it."""
        step = 0 if is_first_stage else -1
        return self._exchange(input_tensor_grads, step, tensor_shapes, step)

    def _exchange(self, tensors: Tensors, to: int, shapes: Shapes = (), receives_from: int = 0) -> Tensors:
        """Send to and receive from the stages so many places on; 0: nobody."""
        is_one = not shapes or isinstance(shapes[0], int)
        all_shapes: list[Any] = [shapes] if is_one else list(shapes)
        if not receives_from:
            received: list[torch.Tensor | None] = [None] * len(all_shapes)
        else:
            device = torch.cuda.current_device() if dist.get_backend(self.pp_group) == "nccl" else "cpu"
            dtype = self.config.pipeline_dtype
            received = [
                torch.empty(tuple(shape), dtype=dtype, device=device, requires_grad=True) for shape in all_shapes
            ]
        operations = []
        for tensor in (tensors if isinstance(tensors, list) else [tensors]) if to else []:
            if tensor is not None:
                operations.append(self._operation(dist.isend, tensor.detach().contiguous(), to))
        operations += [self._operation(dist.irecv, x.detach(), receives_from) for x in received if x is not None]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received[0] if is_one else received

    def _operation(self, act: Any, tensor: torch.Tensor, step: int) -> dist.P2POp:
        return dist.P2POp(act, tensor, group=self.pp_group, group_peer=(self.current_stage + step) % self.total_stages)
