"""Which autograd graphs still refer to unsharded weights, so that buffers move only when none does."""

from __future__ import annotations

import weakref

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit

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

    ``may_be_open`` and ``may_be_retained`` follow from what all ranks run alone, so they are the same on all ranks.
    ``are_open`` and ``are_retained`` depend on how long this process keeps a tensor: ask all ranks before anything that they
    do together depends on one of them.

    Attributes:
        generation: how often unsharded weights have moved.
        current: the graph of the forward that runs; None outside of one.
        anchor: keeps ``current`` open until its hooks do.
        is_held: more graphs of the step will come, though none may wait for its backward meanwhile.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.is_held = False
        self.current: Graph | None = None
        self.anchor: Anchor | None = None
        self._graphs: list[Graph] = []

    def begin(self, weight_version: int) -> None:
        """Begin a graph."""
        self.anchor = Anchor()
        self.current = Graph(self.generation, weight_version, self.anchor)
        self._graphs.append(self.current)

    def end(self) -> None:
        """End the graph that is being recorded, if there is one; without gradients, or after an exception, there is no graph."""
        graph, self.current, self.anchor = self.current, None, None
        if graph is not None and not graph.units:
            self._graphs.remove(graph)

    def give_up(self) -> None:
        """End a forward that failed: whoever keeps its exception keeps a graph through which no backward goes."""
        if self.current is not None:
            self.current.units.clear()
        self.end()

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
        self._graphs = [graph for graph in self._graphs if graph.is_retained][-_MAX_RETAINED:]

    def moved(self) -> None:
        """Note that weights have moved: a backward through a graph from before is refused."""
        self.generation += 1
