"""The classes that ``fully_shard`` builds with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Classes that add public names of other libraries to what ``fully_shard`` makes. The default adds none.

    The core works with its own classes. Code around it subclasses them and hands the subclasses in here, so the core imports
    none of these names.

    Args:
        module_bases: the classes that a unit's module derives from before its own class, ``FsdpModule`` or a subclass of it among
            them; (): ``FsdpModule``.
        group_class: subclass of ``FsdpParameterGroup``; None: that class itself.
        context_class: subclass of ``FsdpContext``; None: that class itself.
        observer_class: subclass of ``Observer``, which a context reports to; None: that class itself, which checks nothing.
    """

    module_bases: tuple[type, ...] = ()
    group_class: type[Any] | None = None
    context_class: type[Any] | None = None
    observer_class: type[Any] | None = None
