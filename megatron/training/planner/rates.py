"""How fast a kind of device computes, moves and launches, and how long an operation of a step takes on it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from math import prod
from pathlib import Path

import torch

from megatron.core.regular_file import read_json
from megatron.training.planner.hollow import Operation

_FLOPS_NAMES = {
    torch.uint8: "fp8",
    torch.bfloat16: "bf16",
    torch.float16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp32",
}
GEMMS = frozenset({"fp8.mm", "aten.mm", "aten.addmm", "aten.addmm_", "aten.bmm", "aten.baddbmm", "aten._grouped_mm"})
ATTENTION = "_attention"
_FP8_GAIN = 1.85  # how many times as fast as in bf16 products are, where that was not measured

_NEEDED = {
    "gemm_flops": {"bf16"},
    "attention_flops": {"forward", "backward"},
    "memory_bandwidth": {"default"},
    "host_seconds": {"product", "fused", "small", "collective", "unit"},
    "link_bandwidth": {"default"},
}
"""Tables of rates, and what none of them can be without."""


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Rates of one kind of device and host; ``tools/calibrate.py`` measures them, and writes them as JSON.

    Raises:
        ValueError: a rate is not positive.
    """

    name: str
    """Of the device."""

    memory_nbytes: int
    """Memory of the device that a process can use."""

    outside_nbytes: int = 0
    """Memory past PyTorch's allocator: context, kernels, buffers of communicators."""

    workspace_nbytes: int = 0
    """Memory by the allocator that is no tensor's: workspaces of cuBLAS and cuDNN."""

    graph_nbytes: int = 2**26
    """What a captured step has besides: workspaces of cuBLAS for the stream of the capture."""

    gemm_flops: dict[str, float] = field(default_factory=dict)
    """Floating-point operations per second of large products, by dtype."""

    gemm_fixed_seconds: float = 6e-6
    """What a product takes besides: a small one is mostly that."""

    attention_flops: dict[str, float] = field(default_factory=dict)
    """Of attention, ``forward`` and ``backward``; masked pairs of a causal one are not counted."""

    memory_bandwidth: dict[str, float] = field(default_factory=dict)
    """Bytes per second that kernels read and write: ``default``, and by name of a kernel."""

    kernel_seconds: float = 2e-6
    """The least time of a kernel."""

    host_seconds: dict[str, float] = field(default_factory=dict)
    """Time of the host to launch an operation, with the Python around it: a ``product`` (of matrices, or attention, with a module around
    it), a ``fused`` function, a ``small`` operation, a ``collective`` of the model, and for a ``unit`` one of the engine."""

    link_bandwidth: dict[str, float] = field(default_factory=dict)
    """Bytes of whole buffers per second of a collective within a host: ``default``, by its number of ranks, and by its name."""

    link_seconds: float = 40e-6
    """What a collective takes besides, within a host."""

    network_bandwidth: float = 50e9
    """Bytes per second of each device's network adapter, each way."""

    network_seconds: float = 30e-6
    """What each doubling of the number of hosts adds to a collective."""

    devices_of_host: int = 8
    """Devices that are connected by links."""

    contention: float = 0.2
    """Share by which computation is longer while a collective runs beside it."""

    measured: str = ""
    """When, where and by which program these were measured."""

    def __post_init__(self) -> None:
        kinds = {"product", "fused", "small", "collective", "unit"}
        if self.host_seconds and kinds - set(self.host_seconds):
            raise ValueError(f"host_seconds must have {', '.join(sorted(kinds))}, got {', '.join(self.host_seconds)}")
        for one in fields(self):
            value = getattr(self, one.name)
            for rate in value.values() if isinstance(value, dict) else [value]:
                if isinstance(rate, (int, float)) and (rate < 0 or (rate == 0 and isinstance(value, dict))):
                    raise ValueError(f"rates must be positive, got {one.name}={value}")

    @classmethod
    def load(cls, path: Path) -> DeviceRates:
        """Read what ``save`` wrote.

        Raises:
            ValueError: it is something else.
            OSError: it cannot be read.
        """
        try:
            values = read_json(path)
        except ValueError as error:
            raise ValueError(
                f"{path} must be a JSON file of tools/calibrate.py, got something else: {error}"
            ) from error
        known = {one.name for one in fields(cls)}
        if not isinstance(values, dict) or "name" not in values or set(values) - known:
            raise ValueError(
                f"{path} must be a file of tools/calibrate.py, got one with "
                f"{sorted(set(values) - known) if isinstance(values, dict) else type(values).__name__}; measure anew"
            )
        for name in [one.name for one in fields(cls) if one.name not in ("name", "measured")]:
            value, needed = values.get(name, 0), _NEEDED.get(name)
            table = value if needed is not None and isinstance(value, dict) else {"": value}
            if not all(type(rate) in (int, float) and abs(rate) < 1e300 for rate in table.values()) or not (
                needed or set()
            ) <= set(table):
                of = f" of {', '.join(sorted(needed))}" if needed else ""
                raise ValueError(
                    f"{path} must be a file of tools/calibrate.py, with numbers as {name}{of}, got {value!r}; measure anew"
                )
        if "memory_nbytes" not in values:
            raise ValueError(
                f"{path} must be a file of tools/calibrate.py, got one without memory_nbytes; measure anew"
            )
        return cls(**values)

    def save(self, path: Path) -> None:
        """Write all rates as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    # ---- operations ---------------------------------------------------------------------------------------------

    def seconds(self, operation: Operation) -> float:
        """Return the time of an operation on the device, alone."""
        if operation.group_size:
            return self._collective(operation)
        if operation.name in GEMMS:
            return self._gemm(operation)
        if ATTENTION in operation.name:
            return self._attention(operation)
        bandwidth = self.memory_bandwidth.get(operation.name, self.memory_bandwidth["default"])
        return max(self.kernel_seconds, operation.nbytes / bandwidth)

    def launch_seconds(self, operation: Operation) -> float:
        """Return the time that the host takes to launch an operation, with the Python around it."""
        return self.host_seconds[kind_of_host_work(operation)]

    def _gemm(self, operation: Operation) -> float:
        dtype = operation.dtypes[1]
        name = _FLOPS_NAMES.get(dtype, "bf16")
        rate = self.gemm_flops.get(name, self.gemm_flops["bf16"] * (_FP8_GAIN if name == "fp8" else 1.0))
        flops = gemm_flops(operation)
        return self.gemm_fixed_seconds + max(flops / rate, operation.nbytes / self.memory_bandwidth["default"])

    def _attention(self, operation: Operation) -> float:
        rate = self.attention_flops["backward" if operation.name.endswith("_backward") else "forward"]
        seconds = attention_flops(operation) / rate
        return self.gemm_fixed_seconds + seconds + operation.nbytes / self.memory_bandwidth["default"]

    def _collective(self, operation: Operation) -> float:
        size, span = operation.group_size, operation.group_span
        if size == 1:
            return self.kernel_seconds
        stride = max(1, span // (size - 1))
        on_host = max(1, min(size, self.devices_of_host // stride))
        num_hosts = -(-size // on_host)
        links = self.link_bandwidth
        bandwidth = links.get(operation.name, links.get(str(on_host), links["default"]))
        doublings = (num_hosts - 1).bit_length()
        if num_hosts > 1:
            # All adapters of a host share in what it must receive.
            bandwidth = min(bandwidth, self.network_bandwidth * on_host * size / max(1, size - on_host))
        if operation.name == "c10d.allreduce_":
            bandwidth /= 2 * (size - 1) / size
        return self.link_seconds + doublings * self.network_seconds + operation.nbytes / bandwidth


def kind_of_host_work(operation: Operation) -> str:
    """Return which of ``DeviceRates.host_seconds`` an operation takes."""
    if operation.group_size:
        return "collective" if operation.stream == "compute" else "unit"
    if operation.name in GEMMS or ATTENTION in operation.name:
        return "product"
    return "small" if operation.name.startswith("aten.") else "fused"


def attention_flops(operation: Operation) -> float:
    """Return the floating-point operations of attention, without those of pairs that are masked."""
    is_backward = operation.name.endswith("_backward")
    # Of a backward the first tensor is the gradient of the output.
    query, key, value = operation.shapes[1:4] if is_backward else operation.shapes[:3]
    pairs = prod(query[:-1]) * key[-2] * (0.5 if operation.is_causal else 1.0)
    return 2 * pairs * (query[-1] + value[-1]) * (2.5 if is_backward else 1.0)


def gemm_flops(operation: Operation) -> float:
    """Return the floating-point operations of a product of matrices."""
    shapes = operation.shapes[1:] if "addmm" in operation.name else operation.shapes
    left, right = shapes[0], shapes[1]
    # [.., m, k] by [.., k, n]; of experts also [r, i] by [l, i, o], and [i, r] by [r, o], whose rows are of several products.
    return 2.0 * prod(left) * right[-1] * operation.share


def built_in(name: str) -> DeviceRates:
    """Return rates that come with the framework.

    Raises:
        ValueError: there are none of this name.
    """
    folder = Path(__file__).parent / "devices"
    known = sorted(path.stem for path in folder.glob("*.json"))
    if name not in known:
        raise ValueError(f"rates must be a file of tools/calibrate.py, or one of {', '.join(known)}, got {name}")
    return DeviceRates.load(folder / f"{name}.json")


def rates_of(name_or_path: str) -> DeviceRates:
    """Return rates by name, or those of a file.

    Raises:
        ValueError: there are none of this name, or the file is something else.
        OSError: the file cannot be read.
    """
    return DeviceRates.load(Path(name_or_path)) if Path(name_or_path).suffix == ".json" else built_in(name_or_path)
