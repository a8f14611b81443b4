"""Which autograd graphs still refer to unsharded weights, so that buffers move only when none does."""

from __future__ import annotations

import weakref


class GraphToken:
    """Stands for the autograd graph of one outermost forward; hooks in the graph hold it.

    Attributes:
        generation: where gathered weights lived when the graph saved them.
        is_done: a backward has run through the graph.
        is_retained: the latest backward through the graph keeps it (``retain_graph``).
    """

    __slots__ = ("__weakref__", "generation", "is_done", "is_retained")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.is_done = self.is_retained = False


class Graphs:
    """The graphs of a context's outermost forwards. [Note: the generation of a graph] in DESIGN.md.

    Attributes:
        generation: how often gathered weights have moved.
        current: the token of the forward that runs, None outside of one; afterwards its graph alone holds it.
        is_held: more graphs of the step will come, though none may wait for its backward meanwhile.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.is_held = False
        self.current: GraphToken | None = None
        self._tokens: list[weakref.ref[GraphToken]] = []

    def begin(self) -> None:
        """Begin a graph."""
        self.current = GraphToken(self.generation)
        self._tokens.append(weakref.ref(self.current))

    def end(self) -> None:
        """End the graph that is being recorded."""
        self.current = None

    @property
    def are_open(self) -> bool:
        """True if a graph waits for its backward, or more of the step will come."""
        return self.is_held or any((token := ref()) is not None and not token.is_done for ref in self._tokens)

    def forget(self) -> None:
        """Forget all graphs that no backward may go through again. None waits for a backward."""
        self._tokens = [ref for ref in self._tokens if (token := ref()) is not None and token.is_retained]

    @property
    def are_retained(self) -> bool:
        """True if a backward may go through a graph once more."""
        return any((token := ref()) is not None and token.is_retained for ref in self._tokens)

    def moved(self) -> None:
        """Note that weights have moved: a second backward through a graph from before is refused."""
        self.generation += 1
