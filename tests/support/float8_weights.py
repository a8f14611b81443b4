"""FP8 weights on the CPU: a layer's weight over bytes and scales, and a net whose weights have an ``Fp8Codec``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.fsdp import Fp8Codec
from megatron.core.distributed.fsdp.codec import float8

# Sizes that are no multiples of 128, so that blocks at the edges are cut, and that ranks cut blocks.
WIDTH, HIDDEN, NUM_CLASSES = 144, 200, 3


class DequantizedWeight(torch.Tensor):
    """A weight over bytes, which ``F.linear`` multiplies in the nominal dtype.

    As transformer-engine's on Hopper, backward makes transposed bytes once and keeps them, until somebody drops them.
    """

    _data: torch.Tensor
    _inverse: torch.Tensor
    _transpose: torch.Tensor | None

    @staticmethod
    def __new__(cls: Any, data: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> DequantizedWeight:
        made: DequantizedWeight = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)
        made._data, made._inverse, made._transpose = data, inverse, None
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            out = _Linear.apply(args[0], args[1])
            return out if bias is None else out + bias
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            own = args[0]
            return cls(own._data, own._inverse, own.dtype)
        raise NotImplementedError(f"nothing but F.linear may read these bytes, got {function}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DequantizedWeight({list(self.shape)})"

    def dequantize(self) -> torch.Tensor:
        return float8.read_bytes(self._data, _of_elements(self._inverse, self._data.shape), self.dtype)

    def dequantize_transpose(self) -> torch.Tensor:
        if self._transpose is None:
            self._transpose = self._data.t().contiguous()
        inverse = _of_elements(self._inverse, self._data.shape)
        return float8.read_bytes(self._transpose, inverse.t() if inverse.dim() == 2 else inverse, self.dtype)


def _of_elements(inverse: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return inverse if inverse.numel() == 1 else float8.expand_blocks(inverse)[: shape[0], : shape[1]]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: DequantizedWeight) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.dequantize().t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad @ weight.dequantize_transpose().t(), grad_weight


@dataclass(frozen=True)
class Dequantizer:
    """The ``Fp8Wrapper`` of ``DequantizedWeight``."""

    derived: Mapping[str, Any] = field(default_factory=lambda: {"_transpose": None}, compare=False, repr=False)

    def wrap(self, data: torch.Tensor, inverse: torch.Tensor, *, codec: Fp8Codec, dtype: torch.dtype) -> torch.Tensor:
        return DequantizedWeight(data, inverse, dtype)

    def rebind(
        self, wrapped: torch.Tensor, *, data: torch.Tensor | None = None, inverse: torch.Tensor | None = None
    ) -> None:
        assert isinstance(wrapped, DequantizedWeight)
        wrapped._data = wrapped._data if data is None else data
        wrapped._inverse = wrapped._inverse if inverse is None else inverse


def make_codec(recipe: Any, **settings: Any) -> Fp8Codec:
    if recipe == "delayed":
        settings = {"amax_history_len": 3, "margin": 1, **settings}
    return Fp8Codec(recipe=recipe, wrapper=Dequantizer(), **settings)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Fp8Net(nn.Module):
    """Blocks whose matrices ask for a codec, and a head that does not."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def make_fp8_net(codec: Fp8Codec | None, *, num_blocks: int = 2) -> Fp8Net:
    """The same weights on every rank and in every call; values of blocks differ in size by powers of two."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Fp8Net(num_blocks).to(torch.bfloat16)
    for block in net.blocks:
        for linear in (block.up, block.down):
            assert isinstance(linear, nn.Linear)
            with torch.no_grad():
                linear.weight[: linear.out_features // 2] *= 4.0
            if codec is not None:
                setattr(linear.weight, "fsdp_codec", codec)  # noqa: B010
    return net


def fp8_batch(step: int, num_pieces: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """[num_pieces] (features [4, WIDTH], classes [4]) of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(2000 + step)
    features = torch.randn(num_pieces * 4, WIDTH, generator=generator).to(torch.bfloat16)
    classes = torch.randint(NUM_CLASSES, (num_pieces * 4,), generator=generator)
    return [(features[at : at + 4], classes[at : at + 4]) for at in range(0, num_pieces * 4, 4)]


def fp8_loss(net: nn.Module, piece: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(net(piece[0]).float(), piece[1])


# ---- the reference, without the engine ------------------------------------------------------------------------------


class WholeScales:
    """The scales of one whole weight, step by step: the recipes written down once more, for whole matrices."""

    def __init__(self, codec: Fp8Codec) -> None:
        self.codec, self.scale = codec, torch.empty(0)
        self.history: list[torch.Tensor] = []  # the latest first

    def encode(self, main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes of the weight as it is now, and the reciprocals of its scales, one for each element."""
        codec, largest = self.codec, torch.tensor(448.0)
        if codec.recipe == "blockwise":
            scale = torch.empty_like(main)
            for row in range(0, main.shape[0], 128):
                for column in range(0, main.shape[1], 128):
                    block = (slice(row, row + 128), slice(column, column + 128))
                    exact = largest / main[block].abs().max()
                    scale[block] = torch.exp2(torch.floor(torch.log2(exact)))
            self.scale = scale
        elif codec.recipe == "tensorwise":
            self.scale = largest / main.abs().max()
        else:
            amax = main.abs().max()
            earlier = self.history or [amax]
            chosen = torch.stack(earlier).max() if codec.amax_compute_algo == "max" else earlier[0]
            self.scale = largest / chosen / 2**codec.margin
            self.history = [amax, *self.history][: codec.amax_history_len]
        scaled = (main * self.scale).clamp(-448.0, 448.0)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), 1.0 / self.scale


class WholeNet:
    """An unsharded net that trains main weights in fp32 and multiplies bytes, one process with all ranks' pieces."""

    def __init__(self, codec: Fp8Codec | None) -> None:
        self.net, self.dtype = make_fp8_net(codec), torch.bfloat16
        self.main = {name: p.detach().float() for name, p in self.net.named_parameters()}
        self._scales = {
            name: WholeScales(codec)
            for name, p in self.net.named_parameters()
            if codec is not None and hasattr(p, "fsdp_codec")
        }
        self.data: dict[str, torch.Tensor] = {}

    def write(self) -> None:
        """Make the weights that the net multiplies from the main weights."""
        for name, main in self.main.items():
            owner, _, key = name.rpartition(".")
            module = self.net.get_submodule(owner)
            if name in self._scales:
                self.data[name], inverse = self._scales[name].encode(main.to(self.dtype).float())
                whole = nn.Parameter(_WholeWeight(self.data[name], inverse, self.dtype))
                module._parameters[key] = whole
            else:
                module._parameters[key] = nn.Parameter(main.to(self.dtype))

    def gradients(self, piece: tuple[torch.Tensor, torch.Tensor], *, share: int = 1) -> tuple[torch.Tensor, list[Any]]:
        self.net.zero_grad()
        loss = fp8_loss(self.net, piece)
        (loss / share).backward()
        return loss.detach(), [p.grad for p in self.net.parameters()]


class _WholeWeight(DequantizedWeight):
    """Scales are [] or one for each element."""

    def dequantize(self) -> torch.Tensor:
        return float8.read_bytes(self._data, self._inverse, self.dtype)

    def dequantize_transpose(self) -> torch.Tensor:
        # Laid out as the sharded net has it: where the other layout is multiplied, some CPUs sum in another order.
        return self.dequantize().t().contiguous()
