"""A forward and a backward that take turns, so that the tokens of one are exchanged while the other computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

if TYPE_CHECKING:
    from megatron.core.model_parallel_config import ModelParallelConfig

Result = TypeVar("Result")
Begin = Callable[[], tuple[list[torch.Tensor], list[Any]]]
"""Begins an exchange; returns the tensors that it fills and the works to wait for."""
_FORWARD, _BACKWARD = 0, 1


class AbandonedPassError(RuntimeError):
    """The other one of two passes has failed, so this one cannot be completed."""


class AlternatingPasses:
    """The forward of a microbatch and the backward of another one, of which one runs at a time.

    [Note: two passes take turns] The two passes are independent of each other, and neither is cut into pieces: the forward is a call of the
    model, and the backward is a call of autograd, in a separate thread. At each exchange of tokens the pass that runs gives the other
    one the turn, and waits. So a pass's exchange is in flight while the other pass computes. Only one thread runs at a time, and who has the turn
    depends on the model alone. Hence the order of operations on the device, of collectives and of random numbers is fixed,
    and the same on all ranks.

    A dispatch gives the turn twice: before it begins, since the host must know the counts of rows, for which it would
    wait with an idle device; and while its rows are on their way. A combine does so once. In a stack of layers with experts this
    leads to the following order (F: forward, B: backward; it repeats for each layer):

    ```
    device     | attention, router (F) | experts (B) | their weight gradients (B) | experts (F) | router, attention (B) |
    exchanges  | combine (B)           | dispatch (F)             | dispatch (B)                | combine (F)           |
    ```

    The backward runs inside the forward of the layers: it begins after the embedding of the forward and ends before its final norm.
    So whatever surrounds the two passes nests. On CUDA exchanges are issued on a separate stream, behind what the pass itself has
    computed, not behind what the other one has queued meanwhile.

    Source: the order is that of Megatron-Core's combined 1F1B schedule; the turns are ours.

    Attributes:
        delays_weight_gradients: experts compute weight gradients after the exchange that follows them has begun.
    """

    def __init__(self, *, delays_weight_gradients: bool = False) -> None:
        self.delays_weight_gradients = delays_weight_gradients
        self._delayed: list[Callable[[], None]] = []
        self._stream: torch.cuda.Stream | None = None  # of exchanges
        self._is_open = self._is_abandoned = False
        self._error: BaseException | None = None
        self._has_streams = torch.cuda.is_initialized()
        self._turns: tuple[SimpleQueue[None], SimpleQueue[None]] = (SimpleQueue(), SimpleQueue())
        self._end_run()

    @property
    def are_open(self) -> bool:
        """True if two passes take turns now."""
        return self._is_open

    def run(self, forward: Callable[[], Result], backward: Callable[[], None]) -> Result:
        """Run both passes to their ends and return what ``forward`` returns. Ranks: all, with passes of the same layers.

        Raises:
            What one of them raises; the other one is given up.
        """
        assert not self._is_open, "a pair of passes does not contain another one"
        self._turns = (SimpleQueue(), SimpleQueue())
        self._is_open, self._has_streams = True, torch.cuda.is_initialized()
        thread = threading.Thread(
            target=self._run_backward, args=(backward, _ThreadState()), name="backward", daemon=True
        )
        thread.start()
        try:
            result = forward()
            self.finish()
        except BaseException:
            self._is_abandoned = True
            self._turns[_BACKWARD].put(None)
            raise
        finally:
            thread.join()
            self._end_run()
        return result

    def _end_run(self) -> None:
        self._is_open = self._is_abandoned = False
        self._error, self._running = None, _FORWARD
        self._delayed.clear()

    def _run_backward(self, backward: Callable[[], None], state: _ThreadState) -> None:
        self._turns[_BACKWARD].get()
        try:
            self._check()
            with state.adopted():
                backward()
            self._check_delayed()
        except BaseException as error:
            self._error = error
        self._is_open, self._running = False, _FORWARD
        self._turns[_FORWARD].put(None)

    # ---- turns ----------------------------------------------------------------------------------------------------

    def give_turn(self) -> None:
        """Let the other pass run until it gives the turn back or ends; without one, do nothing.

        Raises:
            What the other pass has raised.
        """
        if not self._is_open:
            return
        self._check()
        own = self._running
        self._running = 1 - own
        self._turns[1 - own].put(None)
        self._turns[own].get()
        self._check()

    def _check(self) -> None:
        if self._is_abandoned:
            raise AbandonedPassError("the forward that took turns with this backward has failed")
        if self._error is not None:
            raise self._error

    def begin_layers(self) -> None:
        """Let the backward begin, if there is one: the forward has reached its layers."""
        self.give_turn()

    def finish(self) -> None:
        """Let the backward run to its end, if there is one: the forward has left its layers."""
        while self._is_open:
            self.give_turn()

    # ---- what runs meanwhile --------------------------------------------------------------------------------------

    def reached(self) -> torch.cuda.Event | None:
        """Return a mark of what the running pass has queued until now; None on a device without streams."""
        return torch.cuda.current_stream().record_event() if self._has_streams else None

    def pause(self) -> torch.cuda.Event | None:
        """Let the other pass run, and return a mark of what this one had queued before; without two passes, do nothing."""
        ready = self.reached() if self._is_open else None
        self.give_turn()
        return ready

    def exchange(self, begin: Begin, ready: torch.cuda.Event | None) -> list[torch.Tensor]:
        """Exchange rows while the other pass computes. Ranks: all of the exchange.

        Args:
            ready: a mark behind which what is sent is complete; None on a device without streams.

        Returns:
            What ``begin`` returned, complete.
        """
        if ready is None:
            received, works = begin()
        else:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_event(ready)
            with torch.cuda.stream(self._stream):
                received, works = begin()
        self._compute_delayed()
        self.give_turn()
        for work in works:
            work.wait()
        if ready is not None:
            for rows in received:  # their memory is that of the other stream
                rows.record_stream(torch.cuda.current_stream())
        return received

    def delay(self, compute: Callable[[], None]) -> bool:
        """Take a computation of the backward, to run it once the next exchange has begun; False: the caller must run it now."""
        if not (self._is_open and self.delays_weight_gradients):
            return False
        self._delayed.append(compute)
        return True

    def _compute_delayed(self) -> None:
        while self._running == _BACKWARD and self._delayed:
            self._delayed.pop(0)()

    def _check_delayed(self) -> None:
        if self._delayed:
            raise RuntimeError(
                "an exchange of tokens must follow delayed weight gradients in backward, got none: nothing before the first layer with "
                "experts requires gradients, its router neither; leave delay_wgrad_compute off"
            )


class _ThreadState:
    """What PyTorch keeps for each thread and a backward depends on, as it is in the thread that makes the object."""

    def __init__(self) -> None:
        # Another number of threads would sum in another order.
        self._num_threads = torch.get_num_threads()
        self._modes = (
            _get_current_dispatch_mode_stack()
        )  # a counter of operations, a plan that is made without a device
        # The current device goes with the stream.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def adopted(self) -> Iterator[None]:
        """Have this state in the thread that runs."""
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        for mode in self._modes:
            _push_mode(mode)
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                yield
        finally:
            for _ in self._modes:
                _pop_mode()


def alternating_passes(chunks: Sequence[torch.nn.Module], config: ModelParallelConfig) -> AlternatingPasses | None:
    """Return what lets passes of a rank's stages take turns, as the configuration asks; None: each pass runs by itself.

    Modules that take part have a method ``take_turns``. Later calls return the same object.
    """
    if not config.overlap_moe_expert_parallel_comm:
        return None
    modules: list[Any] = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "take_turns")]
    known = next((module.passes for module in modules if module.passes is not None), None)
    passes = known or AlternatingPasses(delays_weight_gradients=config.delay_wgrad_compute)
    for module in modules:
        module.take_turns(passes)
    return passes
