"""Moments in bf16, fp16 and FP8: what is rounded and how, the same on any number of ranks, and in checkpoints of any dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from megatron.core.distributed.fsdp import (
    FlatAdamW,
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.dtensor.placements import local_rows
from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run
from megatron.core.distributed.fsdp.flat_optimizer.moments import (
    MOMENT_DTYPES,
    SCALED_FORMATS,
    make_scales,
    read_moment,
    write_moment,
)
from tests.support.agreement import groups_of
from tests.support.models import (
    STRATEGY_NAMES,
    Net,
    assert_is_cut,
    full,
    local_of,
    loss_of,
    make_cut_net,
    make_net,
    my_piece,
    shard_net,
)
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

CHECKS = RankChecks(__name__)
FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
KEYS = ("exp_avg", "exp_avg_sq")
SMALL = [(BF16, BF16), (FP16, FP16), (FP8, FP8), (FP8, FP16), (FP32, BF16)]


def _optimizer(net: nn.Module, dtypes: tuple[torch.dtype, torch.dtype], **options: Any) -> FlatAdamW:
    first, second = dtypes
    return FlatAdamW(
        net.parameters(),
        lr=0.01,
        betas=(0.9, 0.9),
        weight_decay=0.1,
        exp_avg_dtype=first,
        exp_avg_sq_dtype=second,
        **options,
    )


def _train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(net, my_piece(step % 4))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def _moments(net: nn.Module, optimizer: FlatAdamW) -> list[torch.Tensor]:
    """Return both moments of each parameter, whole and in fp32."""
    state = optimizer.state_dict()["state"]
    return [full(state[number][key]).float().clone() for number in range(len(list(net.parameters()))) for key in KEYS]


# ---- rounding -------------------------------------------------------------------------------------------------------


def _values(numel: int, *, is_square: bool, decades: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * 10 ** (torch.rand(numel, generator=generator) * decades - 9)
    return values.square() if is_square else values


def _stored(values: torch.Tensor, runs: list[Run], dtype: torch.dtype, *, is_square: bool) -> torch.Tensor:
    """Return the values after they were stored, run by run."""
    stored = torch.zeros(values.numel(), dtype=dtype)
    scales = make_scales(stored, len(runs))
    for run in runs:
        write_moment(stored, scales, run, values[run.begin : run.end], is_square=is_square)
    return torch.cat([read_moment(stored, scales, run) for run in runs])


@pytest.mark.parametrize("dtype", SCALED_FORMATS, ids=str)
@pytest.mark.parametrize("is_square", [False, True])
def test_moments_that_are_read_and_written_again_do_not_change(dtype: torch.dtype, is_square: bool) -> None:
    """Scales may become smaller, since the largest values were rounded, and lose nothing."""
    runs = [Run(0, 700, place=0), Run(700, 3000, place=1), Run(3000, 3001, place=2)]
    values = _values(3001, is_square=is_square, decades=12)
    once = _stored(values, runs, dtype, is_square=is_square)
    assert torch.equal(_stored(once, runs, dtype, is_square=is_square), once) and not torch.equal(once, values)


@pytest.mark.parametrize("dtype", SCALED_FORMATS, ids=str)
@pytest.mark.parametrize("is_square", [False, True])
def test_rounding_does_not_depend_on_where_pieces_begin(dtype: torch.dtype, is_square: bool) -> None:
    """Elements of very different sizes, but not below the normal numbers of any piece."""
    values = _values(4096, is_square=is_square, decades=2 if is_square else 3).sign() * torch.logspace(-6, -2.5, 4096)
    whole = _stored(values, [Run(0, 4096)], dtype, is_square=is_square)
    runs = [Run(0, 300, place=0), Run(300, 1500, place=1), Run(1500, 4096, place=2)]
    assert torch.equal(_stored(values, runs, dtype, is_square=is_square), whole)
    kind, largest = (torch.float16, 57344.0) if dtype == FP16 else (torch.float8_e4m3fn, 448.0)
    scale = 2.0 ** torch.ceil(torch.log2(values.abs().max() / largest))
    assert torch.equal(whole, (values / scale).to(kind).float() * scale), "as one scale for all elements rounds"


def test_squares_are_not_rounded_to_zero() -> None:
    """Updates divide by their root. What is 0 remains 0, and what is not finite remains so."""
    values = torch.full((1000,), 1e-30)
    values[0], values[1] = 1e6, 0.0
    for dtype in SCALED_FORMATS:
        run = Run(0, 1000)
        squares = _stored(values, [run], dtype, is_square=True)
        assert (squares[2:] > 0).all() and squares[1] == 0.0
        assert not _stored(values, [run], dtype, is_square=False)[2:].any()
        for bad in (float("inf"), float("nan")):
            found = _stored(torch.tensor([bad, 1.0]), [Run(0, 2)], dtype, is_square=True)
            assert not found[0].isfinite(), (dtype, found)


# ---- training -------------------------------------------------------------------------------------------------------


def _plain_step(w: torch.Tensor, g: torch.Tensor, state: list[torch.Tensor], step: int, dtypes: Any) -> None:
    """AdamW of a whole tensor, whose moments are rounded at the end, with one scale for all of its elements."""
    m, v = state
    w.mul_(1 - 0.01 * 0.1)
    m.lerp_(g, 1 - 0.9)
    v.mul_(0.9).addcmul_(g * (1 - torch.tensor(0.9, dtype=torch.float64)).float(), g)
    size = torch.tensor(-(0.01 / (1 - 0.9**step)), dtype=torch.float64).float()
    root = torch.tensor((1 - 0.9**step) ** 0.5, dtype=torch.float64).float()
    w.addcdiv_(m * size, v.sqrt().div_(root).add_(1e-8))
    for moment, dtype in zip(state, dtypes, strict=True):
        if dtype in (FP32, BF16):
            moment.copy_(moment.to(dtype))
            continue
        kind, largest = (FP16, 57344.0) if dtype == FP16 else (torch.float8_e4m3fn, 448.0)
        scale = 2.0 ** torch.ceil(torch.log2(moment.abs().max() / largest))
        moment.copy_((moment / scale).to(kind).float() * scale)


@CHECKS.on(1, 2, 4)
def sharded_moments_are_those_of_plain_pytorch_bit_for_bit() -> None:
    """Weights and moments, in each dtype, on any number of ranks and with any strategy.

    Gradients of an element keep their sign, so that no element is below the normal numbers of its piece.
    """
    for strategy, dtypes in [*((name, (BF16, BF16)) for name in STRATEGY_NAMES), *(("optim", own) for own in SMALL)]:
        plain, net = make_cut_net(), shard_net(make_cut_net(), strategy)
        if strategy == "optim" and dist.get_world_size() == 2:
            assert_is_cut(net)
        optimizer = _optimizer(net, dtypes)
        generator = torch.Generator().manual_seed(1)
        signs = [torch.randn(p.shape, generator=generator).sign() for p in plain.parameters()]
        states = [[torch.zeros_like(p) for _ in KEYS] for p in plain.parameters()]
        for step in range(1, 6):
            rows = zip(plain.parameters(), net.parameters(), signs, states, strict=True)
            for number, (whole, mine, sign, state) in enumerate(rows):
                g = sign * (1 + torch.rand(sign.shape, generator=generator)) * 10.0 ** (-number % 5)
                mine.grad = torch.zeros_like(mine)
                local_of(mine.grad).copy_(local_rows(mine, g))  # type: ignore[arg-type]
                with torch.no_grad():
                    _plain_step(whole.data, g, state, step, dtypes)
            optimizer.step()
        for mine, whole in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(mine), whole), (strategy, dtypes)
        for got, expected in zip(_moments(net, optimizer), [one for state in states for one in state], strict=True):
            assert torch.equal(got, expected), (strategy, dtypes)


@CHECKS.on(2)
def training_is_near_that_with_moments_in_fp32() -> None:
    """The losses of 40 steps over four batches; they are not the same, so something is rounded."""
    curves = {}
    for dtypes in ((FP32, FP32), *SMALL):
        net = shard_net(make_net(2))
        curves[dtypes] = torch.tensor(_train(net, _optimizer(net, dtypes), range(40)))
    exact = curves.pop((FP32, FP32))
    assert exact[-4:].mean() < 0.9 * exact[:4].mean()
    for dtypes, losses in curves.items():
        tolerance = 0.01 if FP8 in dtypes else 0.001
        assert 0 < (losses - exact).abs().max() < tolerance * exact[0], (dtypes, losses - exact)


@CHECKS.on(2)
def parameters_without_a_gradient_keep_their_moments() -> None:
    """Scales stay with their tensors when runs change."""
    for dtypes in SMALL:
        net = shard_net(make_net(2))
        optimizer = _optimizer(net, dtypes)
        _train(net, optimizer, range(2))
        before = _moments(net, optimizer)
        optimizer.zero_grad()
        loss_of(net, my_piece(2)).backward()
        names = [name for name, _ in net.named_parameters()]
        idle = {number for number, name in enumerate(names) if "up" in name or name == "head.bias"}
        for number, parameter in enumerate(net.parameters()):
            if number in idle:
                parameter.grad = None
        optimizer.step()
        for number, (old, new) in enumerate(zip(before, _moments(net, optimizer), strict=True)):
            assert torch.equal(old, new) == (number // 2 in idle), (dtypes, names[number // 2])


# ---- state and checkpoints ------------------------------------------------------------------------------------------


@CHECKS.on(2)
def memory_reports_count_the_bytes_of_moments() -> None:
    for dtypes in SMALL:
        net = shard_net(make_net(2))
        optimizer = _optimizer(net, dtypes)
        for group in groups_of(net):
            numel = group.weights.main.local.numel()
            num_scales = -(-numel // 1024) + len(group.sharded)
            expected = sum(dtype.itemsize * numel + 4 * num_scales * (dtype in SCALED_FORMATS) for dtype in dtypes)
            assert group.state_nbytes.on_device == expected
        total = sum(buffer.nbytes for buffer in optimizer.state_buffers)
        optimizer.state_dict()
        assert total == sum(buffer.nbytes for buffer in optimizer.state_buffers)
        assert total == sum(group.state_nbytes.on_device for group in groups_of(net))


@CHECKS.on(2)
def state_that_users_write_is_taken_over() -> None:
    """Moments that ``state`` does not show remain when something else is written, and go when all is cleared."""
    for dtypes in SMALL:
        net = shard_net(make_net(2))
        optimizer = _optimizer(net, dtypes)
        _train(net, optimizer, range(2))
        assert {key in optimizer.state[p] for p in net.parameters() for key in KEYS} <= {
            dtype not in SCALED_FORMATS for dtype in dtypes
        }
        before = _moments(net, optimizer)
        for parameter in net.parameters():
            optimizer.state[parameter]["step"].fill_(7.0)
        optimizer.refresh_hyperparameters()
        assert all(map(torch.equal, _moments(net, optimizer), before))
        first = next(iter(net.parameters()))
        optimizer.state[first]["exp_avg"] = torch.ones_like(first)
        optimizer.refresh_hyperparameters()
        after = _moments(net, optimizer)
        assert torch.equal(after[0], torch.ones_like(after[0])) and all(map(torch.equal, after[1:], before[1:]))
        optimizer.state.clear()
        optimizer.refresh_hyperparameters()
        assert not any(moment.any() for moment in _moments(net, optimizer))


@CHECKS.on(2)
def checkpoints_and_state_dicts_load_into_moments_of_any_dtype() -> None:
    """What both dtypes can hold is restored exactly, also where pieces begin elsewhere, as on one rank."""
    kinds = [(FP32, FP32), *SMALL]
    with shared_folder() as folder:
        for at, dtypes in enumerate(kinds):
            net = shard_net(make_cut_net(seed=at))
            optimizer = _optimizer(net, dtypes)
            _train(net, optimizer, range(3))
            save_checkpoint(net, optimizer, f"{folder}/{at}")
            assert not any(
                key in optimizer.state[p]
                for p in net.parameters()
                for key, dtype in zip(KEYS, dtypes, strict=True)
                if dtype in SCALED_FORMATS
            ), "what was made for the save is gone"
            saved = _moments(net, optimizer)
            for others in kinds:
                other = shard_net(make_cut_net(seed=9), "no_shard")
                continued = _optimizer(other, others)
                _train(other, continued, range(1))
                load_checkpoint(other, continued, f"{folder}/{at}")
                for number, (mine, moment) in enumerate(zip(_moments(other, continued), saved, strict=True)):
                    own = (dtypes[number % 2], others[number % 2])
                    _assert_converted(mine, moment, own)
                _train(other, continued, range(3, 4))
            same = shard_net(make_cut_net(seed=7))
            again = _optimizer(same, dtypes)
            same.load_state_dict(net.state_dict())
            again.load_state_dict(optimizer.state_dict())
            plain = shard_net(make_cut_net(seed=7))
            of_torch: Any = fully_shard_optimizer(torch.optim.AdamW(plain.parameters(), lr=0.01))
            of_torch.load_state_dict(optimizer.state_dict())
            reloaded = shard_net(make_cut_net(seed=6))
            third = _optimizer(reloaded, dtypes)
            load_checkpoint(reloaded, third, f"{folder}/{at}")
            losses = _train(net, optimizer, range(3, 6))
            assert _train(same, again, range(3, 6)) == losses == _train(reloaded, third, range(3, 6)), dtypes


@CHECKS.on(2)
def torchs_functions_for_state_dicts_move_moments() -> None:
    """A full state, of which the first rank reads all, goes to an optimizer with others before."""
    for dtypes in SMALL:
        nets = [shard_net(make_cut_net(seed=seed)) for seed in (0, 1)]
        given, taking = (_optimizer(net, dtypes) for net in nets)
        for net, optimizer in zip(nets, (given, taking), strict=True):
            _train(net, optimizer, range(2))
        whole = get_optimizer_state_dict(
            nets[0], given, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(nets[1], taking, whole if dist.get_rank() == 0 else {}, options=options)
        assert all(map(torch.equal, _moments(nets[1], taking), _moments(nets[0], given))), dtypes


def _assert_converted(got: torch.Tensor, saved: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    old, new = dtypes
    if new == FP32 or old == new == BF16:
        assert torch.equal(got, saved), dtypes
    elif new == BF16:
        assert torch.equal(got, saved.to(BF16).float()), dtypes
    else:
        # Below the normal numbers of a piece the distance of two numbers does not shrink with the number.
        unit, smallest = (2.0**-11, 2.0**-38) if new == FP16 else (2.0**-4, 2.0**-16)
        bound = (saved.abs() * unit).clamp(min=float(saved.abs().max()) * smallest)
        assert ((got - saved).abs() <= bound).all(), dtypes
        if old == new:
            large = saved.abs() >= saved.abs().max() * (2.0**-28 if new == FP16 else 2.0**-13)
            assert torch.equal(got[large], saved[large]), dtypes


@CHECKS.on(1)
def remainders_go_with_moments_in_fewer_bits() -> None:
    """bf16 weights with remainders train as fp32 ones do, bit for bit, whatever dtype moments have."""
    for dtypes in SMALL:
        losses = []
        for policy, splits in (
            (MixedPrecisionPolicy(main_params_dtype=None), True),
            (MixedPrecisionPolicy(main_grads_dtype=BF16), False),
        ):
            net = shard_net(make_net(2, dtype=BF16), policy=policy)
            losses.append(_train(net, _optimizer(net, dtypes, store_param_remainders=splits), range(6)))
        assert losses[0] == losses[1], dtypes


@CHECKS.on(1)
def other_dtypes_and_offloaded_state_are_refused() -> None:
    net = shard_net(make_net(2))
    with pytest.raises(ValueError, match=r"exp_avg_sq_dtype must be one of torch.float32.*got torch.float64"):
        _optimizer(net, (FP32, torch.float64))
    with pytest.raises(
        ValueError, match=r"exp_avg_dtype must be torch.float32 with offload_fraction, got torch.bfloat16"
    ):
        _optimizer(net, (BF16, BF16), offload_fraction=0.5)
    assert set(MOMENT_DTYPES) == {dtype for pair in SMALL for dtype in pair}


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
