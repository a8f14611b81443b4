"""Configurations with all fields of Megatron-Core's, in its order, that are checked when they are made and when they change."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

from megatron.core.served_arguments import Served, refusal
from megatron.core.substitutions import Substitution

logger = logging.getLogger(__name__)

Class = TypeVar("Class", bound=type)
Families = Sequence[tuple[str, str]]
"""[(start of a field's name, why other values than its default are not served)]"""


class CheckedConfig:
    """The base of configurations: a field that is set after the checks is checked again, with all others.

    Attributes:
        served: by field, the values that are served and why others are not; fields that are not in it are up to the class.
        free: fields that training code sets as it goes, such as functions; they are never checked.
        substitutions: values that are taken as others, since the results are the same or nothing would read them. What was
            given comes back when the fields that it depends on are set.
    """

    served: ClassVar[dict[str, tuple[tuple[object, ...], str]]] = {}
    free: ClassVar[frozenset[str]] = frozenset()
    substitutions: ClassVar[tuple[Substitution, ...]] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is taken as something else, one line each; also logged when it is."""
        remarks: tuple[str, ...] = self.__dict__.get("_remarks", ())
        return remarks

    def contradictions(self, *, has_faults: bool) -> list[str]:
        """Return messages of fields that contradict each other, or are out of range; for subclasses to say.

        Args:
            has_faults: fields have values that are not served.
        """
        return []

    def check(self) -> None:
        """Check all fields.

        Raises:
            NotImplementedError: a field has a value that is not served; the message names it.
            ValueError: fields contradict each other; see the class.

        The message has a line for each fault.
        """
        owner = type(self).__name__
        not_served = [refusal(owner, name, getattr(self, name), self.served) for name in self.served]
        faults = [text for text in not_served if text is not None]
        contradictions = self.contradictions(has_faults=bool(faults))
        if faults:
            raise NotImplementedError("\n".join((*faults, *contradictions)))
        if contradictions:
            raise ValueError("\n".join(contradictions))

    def settle(self) -> None:
        """Take values as others as ``substitutions`` says, beginning with those that were given."""
        for name, value in self.__dict__.get("_given", {}).items():
            super().__setattr__(name, value)
        given: dict[str, Any] = {}
        remarks: list[str] = []
        for row in self.substitutions:
            if not _holds(row, self):
                continue
            remarks.append(row.text(self))
            for name, value in row.values(self).items():
                given.setdefault(name, getattr(self, name))
                super().__setattr__(name, value)
        for text in remarks:
            if text not in self.remarks:
                logger.info("%s: %s", type(self).__name__, text)
        self.__dict__.update(_given=given, _remarks=tuple(remarks))

    def finish(self) -> None:
        """Check all fields, from now on whenever one is set."""
        self.settle()
        self.check()
        self.__dict__["_is_checked"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        unchecked = name in self.free or not self.__dict__.get("_is_checked")
        if unchecked or name not in self.__dataclass_fields__:  # type: ignore[attr-defined]
            super().__setattr__(name, value)
            return
        before = dict(self.__dict__)
        self.__dict__["_given"] = {key: given for key, given in before.get("_given", {}).items() if key != name}
        super().__setattr__(name, value)
        try:
            self.settle()
            self.check()
        except (ValueError, NotImplementedError):
            self.__dict__.clear()
            self.__dict__.update(before)
            raise


def _holds(row: Substitution, config: CheckedConfig) -> bool:
    try:
        return row.when(config)
    except (TypeError, ZeroDivisionError):
        return False  # a value of a wrong kind, of which the checks tell


@dataclass_transform(kw_only_default=True)
def megatron_dataclass(
    upstream: Mapping[str, object], *, special: Served, families: Families = (), eq: bool = True
) -> Callable[[Class], Class]:
    """Make a ``CheckedConfig`` a dataclass with Megatron-Core's fields in its order, so that they can be given by position.

    Fields that the class declares are served, with its own default and kind. Others have Megatron-Core's default and are
    served at that value alone, unless ``special`` says more. What the class declares beside them is ours, and keyword-only.

    Args:
        upstream: maps a field to its default.
        special: fields that are served at some values alone, or at all (``ANY``).
        families: reasons for the others.
    """

    def decorate(cls: Class) -> Class:
        own = dict(inspect.get_annotations(cls))
        inherited = getattr(cls, "__dataclass_fields__", {})
        ordered: dict[str, Any] = {}
        served = dict(cls.served)  # type: ignore[attr-defined]
        for name, default in upstream.items():
            if name in own:
                ordered[name] = own.pop(name)
            elif name not in inherited:
                setattr(cls, name, default)
                ordered[name] = "Any"
                served[name] = _no_op(default), _reason(name, families)
        cls.__annotations__ = {**ordered, "_": KW_ONLY, **own}
        cls.served = {**served, **special}  # type: ignore[attr-defined]
        return dataclass(eq=eq)(cls)  # type: ignore[return-value]

    return decorate


def _no_op(default: object) -> tuple[object, ...]:
    return (default, [], None) if default == () else (default,)


def _reason(name: str, families: Families) -> str:
    return next((reason for start, reason in families if name.startswith(start)), "it is not served")
