"""The state of a step: its weight version and microbatch, the pass that runs, and the autograd graphs that wait for a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit, UnitRegistry

_MAX_RETAINED = 8  # of the graphs that backwards kept, most of which nobody goes through again


class Anchor:
    """Lives as long as the autograd graph of one outermost forward: only the hooks in that graph refer to it."""

    __slots__ = ("__weakref__",)


class Graph:
    """The autograd graph of one outermost forward, or of a recomputation.

    Attributes:
        generation: where unsharded weights lived when the graph saved them.
        weight_version: which weights it computed with.
        units: those that ran in it with gradients.
        is_done: a backward has run through the graph.
        is_retained: the latest backward through the graph keeps it (``retain_graph``).
        anchor: dead once nobody can go through the graph any more. Only this rank knows when that is.
    """

    __slots__ = ("anchor", "generation", "is_done", "is_retained", "units", "weight_version")

    def __init__(self, generation: int, weight_version: int, anchor: Anchor) -> None:
        self.generation, self.weight_version, self.anchor = generation, weight_version, weakref.ref(anchor)
        self.units: dict[FsdpUnit, None] = {}
        self.is_done = self.is_retained = False

    def come_back(self) -> None:
        """Note that a backward has come to the graph. What is recorded of that backward waits for one of its own."""
        # Grad mode is on in a backward with ``create_graph``, whose recorded part reads the weights again.
        self.is_done = not torch.is_grad_enabled()

    def retain(self, keeps: bool) -> None:
        """Note whether the backward that has come to the graph keeps it."""
        self.is_retained = keeps

    @property
    def is_open(self) -> bool:
        """True if a backward may still come: somebody can go through the graph, and weights are those that it computed with."""
        return self.anchor() is not None and not self._is_outdated()

    def _is_outdated(self) -> bool:
        """Return whether weights of all trained units were written since: a backward is refused by the version fence."""
        trained = [unit.trained_groups for unit in self.units if unit.trained_groups]
        return bool(trained) and all(any(map(self._was_written, groups)) for groups in trained)

    def _was_written(self, group: FsdpParameterGroup) -> bool:
        return group.weights.freshness.was_written_after(self.weight_version)


class Graphs:
    """The graphs of a context's outermost forwards. See [Note: the generation of a graph].

    ``may_be_open`` and ``may_be_retained`` follow from the code that all ranks run, so they are the same on all ranks.
    ``are_open`` and ``are_retained`` depend on how long this process keeps a tensor: ask all ranks before anything that they
    do together depends on one of them.

    Attributes:
        generation: how often unsharded weights have moved.
        current: the graph of the forward that runs; None outside of one.
        anchor: keeps ``current`` open until its hooks do.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.current: Graph | None = None
        self.anchor: Anchor | None = None
        self._graphs: list[Graph] = []

    def begin(self, weight_version: int) -> None:
        """Begin a graph."""
        self.anchor = Anchor()
        self.current = Graph(self.generation, weight_version, self.anchor)
        self._graphs.append(self.current)

    def end(self, *, has_failed: bool = False) -> None:
        """End the graph that is being recorded, if there is one; without gradients there is no graph.

        Args:
            has_failed: forward raised. Whoever keeps the exception keeps tensors, and so the anchor, but no backward goes through them.
        """
        graph, self.current, self.anchor = self.current, None, None
        if graph is not None and (has_failed or not graph.units):
            self._graphs.remove(graph)

    @property
    def may_be_open(self) -> bool:
        """True unless a backward has run through each graph."""
        return any(not graph.is_done for graph in self._graphs)

    @property
    def may_be_retained(self) -> bool:
        """True if the latest backward through a graph kept it."""
        return any(graph.is_retained for graph in self._graphs)

    @property
    def are_open(self) -> bool:
        """True if a graph waits for its backward on this rank."""
        return any(not graph.is_done and graph.is_open for graph in self._graphs)

    @property
    def are_retained(self) -> bool:
        """True if a backward may go through a graph once more on this rank."""
        return any(graph.is_retained and graph.anchor() is not None for graph in self._graphs)

    def forget(self) -> None:
        """Forget all graphs but the latest that backwards kept. On no rank does one wait for its backward."""
        # Bounded: most graphs that backwards kept are never used again, and nothing says so.
        self._graphs = [graph for graph in self._graphs if graph.is_retained][-_MAX_RETAINED:]

    def moved(self) -> None:
        """Note that weights have moved: a backward through a graph from before is refused."""
        self.generation += 1


class StepState:
    """Where a context is in a step. All of it changes by the methods below, which only the context and its backward call.

    Units keep their own places in the step, ``Backward`` the units whose gradients it still needs, and groups what happens to
    their memory.

    Attributes:
        registry: the context's units.
        weight_version: counts the steps' weights: a group is synced from its main weight once per version.
        is_prepared: the next forward or microbatch uses the version that was begun for it.
        num_scopes: microbatch scopes that are open; within one, a forward begins no version.
        is_first, is_last: the microbatch is a step's first; backwards end the step, that is, reduce over all ranks.
        goes_on: the step continues even while no graph is waiting for its backward.
        graphs: those that may still get a backward.
        outermost: the unit whose forward is under way and in no other unit's; None outside of forwards.
        num_entered: forwards of units, ever.
        first_inside: number of the first of them within the outermost one.
        is_transformed: a transform of torch.func was under way when the outermost forward began.
        retains_graph: the backward that is under way keeps its graph.
        makes_graph: that backward is recorded (``create_graph``), and a later one will read the weights again.
        is_in_backward: a backward runs.
        has_failed: a backward did not reach its end, and nothing has been done about that yet.
        is_capturing: a CUDA graph is captured.
    """

    def __init__(self, registry: UnitRegistry) -> None:
        self.registry = registry
        self.weight_version = self.num_scopes = 0
        self.is_prepared = self.goes_on = False
        self.is_first = self.is_last = True
        self.graphs = Graphs()
        self.outermost: FsdpUnit | None = None
        self.num_entered = self.first_inside = 0
        self.is_transformed = self.retains_graph = self.makes_graph = self.is_capturing = False
        self.is_in_backward = self.has_failed = False
        self._end: weakref.ref[Callable[[], None]] | None = None

    # ---- weight versions and microbatches -----------------------------------------------------------------------

    def begin_version(self, *, prepares: bool = False) -> None:
        """Begin a weight version; with ``prepares``, for the next step."""
        self.weight_version += 1
        self.is_prepared = prepares

    def take_prepared_version(self) -> bool:
        """Use the version that was prepared, if one was, and return whether so."""
        was_prepared, self.is_prepared = self.is_prepared, False
        return was_prepared

    @contextmanager
    def microbatch(self, *, is_first: bool, is_last: bool, keeps_version: bool = True) -> Iterator[None]:
        """Open the scope of a microbatch, in which forwards begin no weight version if it ``keeps_version``."""
        before = self.is_first, self.is_last  # restored, since scopes nest
        self.is_first, self.is_last = is_first, is_last
        self.num_scopes += keeps_version
        try:
            yield
        finally:
            self.num_scopes -= keeps_version
            self.is_first, self.is_last = before

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a scope in which backwards do not end the step."""
        return self.microbatch(is_first=self.is_first, is_last=False, keeps_version=False)

    def set_last(self, is_last: bool) -> None:
        """Let backwards end the step, or not, until a scope ends."""
        self.is_last = is_last

    def begin_step(self, *, spans_step: bool) -> None:
        """Begin a step. Its plan goes on until the last backward if it ``spans_step``."""
        self.goes_on = spans_step and self.num_scopes > 0

    def end_step(self) -> None:
        """Let the next forward begin a step."""
        self.goes_on = False

    # ---- passes -------------------------------------------------------------------------------------------------

    def begin_outermost(self, *, is_transformed: bool) -> None:
        """Begin an outermost forward."""
        self.first_inside = self.num_entered + 2
        self.is_transformed = is_transformed

    def enter_forward(self, unit: FsdpUnit) -> int:
        """Begin a forward of a unit, and return its number."""
        self.outermost = self.outermost or unit
        self.num_entered += 1
        return self.num_entered

    def leave_outermost(self) -> None:
        """End the outermost forward."""
        self.outermost = None

    def begin_backward(self, end: Callable[[], None], on_failure: Callable[[object], None]) -> None:
        """Begin a backward.

        Args:
            end: lives as long as autograd runs the backward.
            on_failure: called when ``end`` is gone before ``end_backward``.
        """
        # Autograd drops its callbacks when a backward raises; ``end_backward`` drops this reference before that, if it is reached.
        self._end = weakref.ref(end, on_failure)
        self.is_in_backward = True
        self.retains_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        # A recomputation always enables gradients, so grad mode does not prove create_graph. create_graph keeps the graph.
        self.makes_graph = self.retains_graph and torch.is_grad_enabled()

    def end_backward(self) -> None:
        """End a backward, and with the last microbatch's the step."""
        self._end = None
        self.is_in_backward = False
        if self.is_last:
            self.goes_on = False

    def fail_backward(self) -> None:
        """Note that the backward did not reach its end."""
        self.is_in_backward, self.has_failed = False, True

    def note_capture(self, is_capturing: bool) -> bool:
        """Note whether a CUDA graph is captured, and return whether that has changed."""
        has_changed, self.is_capturing = is_capturing is not self.is_capturing, is_capturing
        return has_changed

    def abandon(self) -> None:
        """Forget the pass that was under way, and the step that it belonged to."""
        self._end = None
        self.is_in_backward = self.has_failed = self.goes_on = False
        self.outermost = None
        self.graphs.end(has_failed=True)

    # ---- what may still come ------------------------------------------------------------------------------------

    def waits_for_backward(self, *, is_planned: bool = False) -> bool:
        """Return whether a graph waits for its backward on any rank, or more of the step will come.

        Args:
            is_planned: this step's plan goes on with what begins now: a graph that may wait does so, and no rank is asked.

        Ranks: all; where a graph may wait, blocks the host.
        """
        # What all ranks know comes first: only where that leaves it open do they ask each other, all or none of them.
        if self.goes_on or not self.graphs.may_be_open:
            return self.goes_on
        return is_planned or self.registry.is_true_on_any_rank(self.graphs.are_open)

    def move_weights(self) -> bool:
        """Return whether weights may move: no graph waits for its backward or is in it. Graphs from before are refused then.

        Ranks: all.
        """
        if self.is_in_backward or self.has_failed or self.waits_for_backward():
            return False
        self.graphs.moved()
        return True
