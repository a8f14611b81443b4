"""The interface of codecs, which make model weights from main weights, and of tensor subclasses that ask for one.

The core has one codec, a cast. Others are in ``codec/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class SharedScales(Protocol):
    """State that all weights with codecs of one class have in common in a context, which makes one such object for them."""

    def __init__(self, unsharder: Any) -> None: ...

    def add(self, weights: Any) -> None:
        """Serve these weights too."""

    def clear(self) -> None:
        """Forget all weights, which another context will serve."""

    def prepare_update(self) -> None:
        """Prepare an optimizer's update, which may encode the weights that it writes. Ranks: all."""

    def begin_replay(self) -> None:
        """Restore the state in which a captured step begins."""


class WeightCodec:
    """What a model weight is made of, and how it is made from the main weight. This one, the default, is a cast.

    A parameter asks for another codec by its attribute ``fsdp_codec``, set before ``fully_shard``, the same on all ranks.
    Parameters whose codecs are equal may share a group, so codecs compare by value and hold nothing that changes.

    Attributes:
        casts: the model weight is the main weight in another dtype, or the main weight itself. What other codecs make depends on
            other parts of the main weight than those at its place, so that an optimizer cannot write it with its update, or
            only as ``Weights.begin_update`` says, and their ``weights_class`` defines ``sync``.
        encodes_by_tensor: an update must know which elements are which tensor's.
        nan: the element of a resting weight that layers read as NaN.
        scales_class: of the state that weights of this codec share in a context; None: they share none.
    """

    casts = True
    encodes_by_tensor = False
    nan: float = float("nan")
    scales_class: ClassVar[type[SharedScales] | None] = None

    def weights_class(self, *, trainable: bool) -> Callable[..., Any] | None:
        """Return the subclass of ``Weights`` that keeps weights of this codec; None: that class itself.

        Args:
            trainable: the weights are trained when they are sharded.
        """
        return None

    def rest_dtype(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which the model weight rests and travels, one element for each of the weight's."""
        return compute

    def check(self, parameter: torch.Tensor, name: str) -> None:
        """Refuse a parameter that the codec cannot serve.

        Raises:
            ValueError: it cannot.
        """


CAST = WeightCodec()


def codec_of(parameter: torch.Tensor, name: str) -> WeightCodec:
    """Return the codec that a parameter asks for by its attribute ``fsdp_codec``; a cast where it asks for none.

    Raises:
        TypeError: the attribute is no codec.
        ValueError: the codec cannot serve the parameter.
    """
    # Part of the key by which parameters share a group, so it must be equal on all ranks.
    codec: object = getattr(parameter, "fsdp_codec", None)
    if codec is None:
        return CAST
    if not isinstance(codec, WeightCodec):
        raise TypeError(f"fsdp_codec of parameter {name} must be a codec, such as an Fp8Codec, got {codec!r}")
    codec.check(parameter, name)
    return codec


# ---- parameters that are no plain tensors ---------------------------------------------------------------------------


class ParameterKind:
    """A kind of parameters that can be sharded. This one, the default, takes plain tensors and those that are placed (DTensors).

    Others take tensor subclasses, with a codec of their own.
    """

    def takes(self, parameter: torch.Tensor) -> bool:
        """Return whether the parameter is of this kind."""
        return True

    def plain(self, parameter: nn.Parameter, name: str, module: nn.Module) -> nn.Parameter:
        """Return a plain parameter in its place, whose attributes name the codec, as ``plain_of`` says.

        Raises:
            NotImplementedError: this parameter cannot be sharded.
        """
        # Its flat buffer would be made of the outer tensor's dtype and values, and training would go on with the wrong ones.
        if is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"the {type(parameter).__name__} {name} must be a plain tensor, or of a class with fsdp_pre_all_gather and "
                "fsdp_post_all_gather, since its rows are to be shared by ranks; convert (quantize) the module after training, or "
                "pass the parameter in ignored_params: then each rank keeps it whole, and does not train it"
            )
        return parameter

    def keeping_initial_values(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a scope in which the module's parameters of this kind keep their initial values, for ``plain``."""
        return nullcontext()

    def forget_initial_values(self, parameter: torch.Tensor) -> None:
        """Free what a parameter of this kind keeps in addition to its values."""


_kinds = [ParameterKind()]  # filled when the package is imported, and constant after that


def register_parameter_kind(kind: ParameterKind) -> None:
    """Let ``fully_shard`` take parameters of this kind, unless one that was registered before takes them."""
    _kinds.insert(-1, kind)  # the default takes all that others leave


def plain_of(parameter: nn.Parameter, name: str, module: nn.Module) -> nn.Parameter:
    """Return the parameter; in place of a tensor subclass a plain one whose attributes name its codec.

    These are ``fsdp_codec``, or ``fsdp_make_codec``: a function of the plain parameter, the mesh of its shards, its dtypes and its
    device, called by all ranks of the mesh.

    Args:
        name: of the parameter, for errors.
        module: that holds it.

    Raises:
        NotImplementedError: no codec serves this kind of tensor.
    """
    return _kind_of(parameter).plain(parameter, name, module)


def plain_parameter(parameter: nn.Parameter, values: torch.Tensor, attributes: Mapping[str, Any]) -> nn.Parameter:
    """Return a parameter over these values, with these attributes, that requires gradients if ``parameter`` does."""
    plain = nn.Parameter(values, requires_grad=parameter.requires_grad)
    plain.__dict__.update(attributes)
    return plain


@contextmanager
def keeping_initial_values(module: nn.Module) -> Iterator[None]:
    """Enter each kind's scope of this name."""
    with ExitStack() as scopes:
        for kind in _kinds:
            scopes.enter_context(kind.keeping_initial_values(module))
        yield


def forget_initial_values(parameter: torch.Tensor) -> None:
    """Free what the parameter's kind keeps in addition to its values."""
    _kind_of(parameter).forget_initial_values(parameter)


def _kind_of(parameter: torch.Tensor) -> ParameterKind:
    return next(kind for kind in _kinds if kind.takes(parameter))
