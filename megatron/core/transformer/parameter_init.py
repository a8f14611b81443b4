"""Initial weights as a function of seed, parameter name and full shape alone.

[Note: names at construction] A module that is built alone initialises its parameters under its own short names. Full names
are known only when the model is complete. So a model builds its submodules on the meta device, and ``initialize_model``
names and materialises them by the same calls as meta-device initialisation (``to_empty``, then ``reset_parameters``): the
results cannot differ, and nothing is drawn twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.module_names import named_modules
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel.partition import part_extent, partition
from megatron.core.transformer.init_methods import ConstantInit, InheritedInit, InitMethod, NormalInit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.transformer.transformer_config import TransformerConfig


def parameter_seed(init_seed: int, name: str, shape: torch.Size) -> int:
    """Compute a seed in [0, 2**63) that depends on the arguments alone, never on ``hash()``, ranks or order.

    Source: ours.
    """
    text = f"{init_seed}/{name}/{'x'.join(map(str, shape))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a parameter that a tensor-parallel rank holds.

    Attributes:
        shape: shape of the full parameter.
        dim: the split dim; None: the rank holds the whole parameter.
        stride: see [Note: partition stride] in tensor_parallel/partition.py.
        rank: index of the part.
        size: number of parts.
    """

    shape: torch.Size
    dim: int | None = None
    stride: int = 1
    rank: int = 0
    size: int = 1

    @property
    def own_shape(self) -> torch.Size:
        """Shape of the rank's part. Raises: ValueError where the extent of the split dim is not a multiple of ``size``."""
        extents = list(self.shape)
        if self.dim is not None:
            extents[self.dim] = part_extent(extents[self.dim], self.stride, self.size)
        return torch.Size(extents)

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Cut the rank's part out of a full tensor."""
        return full if self.dim is None else partition(full, self.dim, self.stride, self.rank, self.size)


@torch.no_grad()
def initialize_parameter(
    parameter: torch.Tensor,
    *,
    name: str,
    init_method: InitMethod,
    init_seed: int,
    on_cpu: bool,
    part: Part | None = None,
) -> None:
    """Fill a parameter with the initial values that follow from the seed, its name and its full shape.

    Normal values are drawn in fp32 and rounded, so a bf16 model starts at the rounded weights of the fp32 model. A part of
    a parameter is cut out of the values of the whole one.

    Args:
        parameter: the parameter before any sharding, on a real device.
        name: its full name in the unwrapped model.
        init_method: ``NormalInit`` draws from the parameter's own generator; any other callable runs with torch's
            default generators seeded for this parameter alone and restored after it.
        on_cpu: draw on the CPU and copy, whatever the parameter's device: the same values on every kind of device.
        part: which part of the full parameter ``parameter`` is; None: the whole.
    """
    if parameter.is_meta:
        return
    if isinstance(init_method, InheritedInit):
        init_method = init_method.init_method
    if isinstance(init_method, ConstantInit):
        init_method(parameter)
        return
    part = part or Part(shape=parameter.shape)
    seed = parameter_seed(init_seed, name, part.shape)
    device = torch.device("cpu") if on_cpu else parameter.device
    values = torch.empty(part.shape, dtype=torch.float32, device=device)
    if isinstance(init_method, NormalInit):
        init_method(values, torch.Generator(device=device).manual_seed(seed))
    else:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            _seed_default_generator(device, seed)
            init_method(values)
    parameter.copy_(part.of(values))


def _seed_default_generator(device: torch.device, seed: int) -> None:
    # Only the generators that fork_rng restores: torch.manual_seed would reseed every CUDA device.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


class SeededParameters:
    """What a module needs to reset the parameters that it owns directly to their initial values at any time.

    A class to inherit from beside a subclass of ``torch.nn.Module``; ``describe_parameters`` must be called once that is
    constructed. ``parameter_prefix`` is the module's full name in the unwrapped model; empty for a module that is built
    alone.
    """

    parameter_prefix: str
    resets_to_the_same_values = True  # the sharding engine asks: values are a function of seed, name and shape
    names_in_checkpoint: Mapping[str, str] = {}
    """Names of parameters, relative to this module, that differ from those in checkpoints; see ``initialize_model``."""

    def begin_parameters(self, config: TransformerConfig) -> None:
        """Make the empty tables; called once, after the constructor of ``torch.nn.Module``."""
        self.config = config
        self.parameter_prefix = ""
        self._names_of_seeds: dict[str, str] = {}
        self._init_methods: dict[str, InitMethod] = {}
        self._parameter_attributes: dict[str, dict[str, Any]] = {}
        self._parts: dict[str, Part] = {}

    def own_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the (name, parameter) pairs that this module owns directly."""
        assert isinstance(self, torch.nn.Module)
        return list(self.named_parameters(recurse=False))

    def describe_parameter(
        self,
        name: str,
        full_shape: tuple[int, ...],
        init_method: InitMethod,
        *,
        partition_dim: int | None = None,
        partition_stride: int = 1,
        group: ProcessGroup | None = None,
        **attributes: Any,
    ) -> torch.Size:
        """Note how a parameter is initialised and split; the arguments are those of ``add_parameter``.

        Returns:
            The shape of this rank's part.
        """
        part = Part(
            shape=torch.Size(full_shape),
            dim=partition_dim,
            stride=partition_stride,
            rank=group_rank(group),
            size=group_size(group),
        )
        if partition_dim is not None:
            attributes |= {
                "tensor_model_parallel": True,
                "partition_dim": partition_dim,
                "partition_stride": partition_stride,
            }
        self._init_methods[name], self._parts[name] = init_method, part
        self._parameter_attributes[name] = attributes
        return part.own_shape

    def set_parameter_attribute(self, name: str, attribute: str, value: Any) -> None:
        """Set an attribute of a parameter that survives ``to_empty`` and ``reset_parameters``."""
        self._parameter_attributes[name][attribute] = value
        setattr(dict(self.own_parameters())[name], attribute, value)

    def sum_gradients_over_tensor_ranks(self) -> None:
        """Mark the parameters (``sequence_parallel``) so that gradients are summed over tensor-parallel ranks."""
        for name, _ in self.own_parameters():
            self.set_parameter_attribute(name, "sequence_parallel", True)

    def name_parameters(self, prefix: str, stored_names: Mapping[str, str]) -> None:
        """Take the module's full name, and the names in checkpoints of parameters, by full name, where they differ."""
        self.parameter_prefix = prefix
        full = {name: f"{prefix}.{name}" if prefix else name for name in self._init_methods}
        self._names_of_seeds = {name: stored_names[own] for name, own in full.items() if own in stored_names}

    def reset_parameters(self) -> None:
        """Fill this module's own parameters with their initial values. Ranks: each alone, no communication.

        Parameters with random initial values are left alone where ``config.perform_initialization`` is off.
        """
        for name, parameter in self.own_parameters():
            init_method, attributes = self._init_methods[name], self._parameter_attributes[name]
            for attribute, value in attributes.items():
                setattr(parameter, attribute, value)
            if self.config.perform_initialization or isinstance(init_method, ConstantInit):
                initialize_parameter(
                    parameter,
                    name=attributes.get("canonical_name") or self._full_name(name),
                    init_method=init_method,
                    init_seed=self.config.init_seed,
                    on_cpu=self.config.use_cpu_initialization,
                    part=self._parts[name],
                )

    def _full_name(self, name: str) -> str:
        own = f"{self.parameter_prefix}.{name}" if self.parameter_prefix else name
        return self._names_of_seeds.get(name, own)


class InitializedParameters(SeededParameters, torch.nn.Module):
    """A module that makes its own parameters and can reset them to their initial values at any time."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.begin_parameters(config)

    def add_parameter(
        self,
        name: str,
        full_shape: tuple[int, ...],
        init_method: InitMethod,
        *,
        partition_dim: int | None = None,
        partition_stride: int = 1,
        group: ProcessGroup | None = None,
        **attributes: Any,
    ) -> None:
        """Register an uninitialised parameter of the configured dtype: this rank's part of one of ``full_shape``.

        Args:
            partition_dim: the dim that is split over ``group``; None: each rank holds the whole parameter. If given, the
                parameter gets the attributes ``tensor_model_parallel`` (True), ``partition_dim`` and ``partition_stride``.
            partition_stride: see [Note: partition stride] in tensor_parallel/partition.py.
            attributes: attributes of the parameter; they survive ``to_empty``. With ``canonical_name`` the initial values
                are those of the parameter of that name.

        Raises:
            ValueError: the extent of ``partition_dim`` is not a multiple of the ranks.

        Ranks: each alone, no communication.
        """
        shape = self.describe_parameter(
            name,
            full_shape,
            init_method,
            partition_dim=partition_dim,
            partition_stride=partition_stride,
            group=group,
            **attributes,
        )
        self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype)))


def initialize_model(model: torch.nn.Module, device: torch.device) -> None:
    """Materialise a model that was built on the meta device: name all parameters, move them to ``device`` and fill them.

    With the meta device as ``device`` it only names them. See [Note: names at construction].

    Raises:
        ValueError: a module owns parameters or buffers and has no ``reset_parameters()``.
    """
    stored_names = _stored_names(model)
    for name, module in named_modules(model):
        owned = [tensor_name for tensor_name, _ in module.named_parameters(recurse=False)]
        owned += [tensor_name for tensor_name, _ in module.named_buffers(recurse=False)]
        if isinstance(module, SeededParameters):
            module.name_parameters(name, stored_names)
        if owned and not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                "every module that owns parameters or buffers must have reset_parameters(), got"
                f" {type(module).__name__} at {name!r} with {owned}; give it one that fills its own tensors"
            )
        if device.type != "meta":
            module.to_empty(device=device, recurse=False)
        if owned:
            module.reset_parameters()  # type: ignore[operator]


def _stored_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the names in checkpoints of the parameters, by full name, that have others in the model.

    Initial values follow these, so that a module which holds the weights of several others starts as they do.
    """
    return {
        f"{prefix}.{own}".lstrip("."): f"{prefix}.{stored}".lstrip(".")
        for prefix, module in named_modules(model)
        for own, stored in getattr(module, "names_in_checkpoint", {}).items()
    }
