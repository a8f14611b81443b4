"""Newton-Schulz iterations alone, on one device: ``python3 benchmarks/newton_schulz.py [--output PAGE]``.

Matrices of layers of the 1.1B model, as an owner gets them in a round: iterated on in bf16 one after the other, and on their Gram
matrices in fp16, with tiles of several sizes. For each: time, the products' speed, and the error beside iterations in fp32.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megatron.core.distributed.fsdp.matrices.gram_iteration import GramIteration, PlacedMatrix, Tiling, _Product
from megatron.core.distributed.fsdp.matrices.newton_schulz import NewtonSchulz, newton_schulz_coefficients

# Of two layers on each of two ranks: queries, output projection, MLP.
_LAYERS = [(2048, 2048), (2048, 2048), (11264, 2048), (2048, 5632)]
_SMALL = [(512, 512), (640, 512)]
_TILINGS = [
    Tiling(128, 128, 64, 4, 3),
    Tiling(128, 128, 64, 8, 3),
    Tiling(128, 128, 64, 8, 4),
    Tiling(128, 128, 128, 8, 2),
    Tiling(128, 256, 64, 8, 3),
    Tiling(128, 256, 64, 8, 4),
]


def _placed(shapes: Sequence[tuple[int, int]]) -> list[PlacedMatrix]:
    found, offset = [], 0
    for rows, columns in shapes:
        found.append(PlacedMatrix(offset, 1, rows, 0, rows, columns))
        offset += rows * columns
    return found


def _ms(run: Callable[[], object], repeats: int = 5) -> float:
    run()
    if not torch.cuda.is_available():
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end) / repeats)


def _error(places: Sequence[PlacedMatrix], whole: torch.Tensor, out: torch.Tensor, exact: NewtonSchulz) -> float:
    errors = []
    for place in places:
        expected = exact(place.view(whole).reshape(place.rows, place.columns))
        got = place.view(out).reshape(place.rows, place.columns).float()
        errors.append(float((got - expected).norm() / expected.norm()))
    return max(errors)


def _parts(grams: GramIteration, whole: torch.Tensor) -> list[tuple[str, float, float]]:
    """Return what each kind of step of the iteration takes: name, ms and TFLOP of the arithmetic that is done."""
    places, size = grams.places, grams.places[0].short
    x, out = (torch.randn(whole.numel(), device=whole.device).half() for _ in range(2))
    squares = torch.randn(5, len(places), size, size, device=whole.device).half()
    found = [("norms and division", _ms(lambda: grams._divide(whole, x)), 0.0)]
    seen = set()
    for step in grams._steps:
        if not isinstance(step, _Product) or step.tiles.data_ptr() in seen:
            continue
        seen.add(step.tiles.data_ptr())
        lengths = sum(place.long if step.from_x else size for place in places)
        count = step.tiles.shape[0] // (grams._steps[0].tiles.shape[0])  # type: ignore[union-attr]
        name = "X X^T" if step.from_x else f"{count} products, {'' if step.gamma else 'not '}added to"
        factors = x if step.from_x else squares.view(-1)
        ms = _ms(lambda step=step, factors=factors: grams._multiply(step, factors, squares.view(-1)))  # type: ignore[misc]
        found.append((name, ms, count * size * size * lengths / 1e12))
    flops = sum(2 * size * size * place.long for place in places) / 1e12
    wide, other = grams._wide(x), grams._wide(out)

    def apply() -> None:
        for q, old, new in zip(squares[0].unbind(), wide, other, strict=True):
            torch.mm(q, old, out=new)

    return [
        *found,
        ("Q X", _ms(apply), flops),
        ("Q X at the end", _ms(lambda: grams._finish(squares[0].unbind(), x, out)), flops),
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Time Newton-Schulz iterations alone.")
    parser.add_argument("--output", type=Path, help="markdown page to write")
    parser.add_argument("--layers", type=int, nargs="*", default=[1, 2, 4], help="pairs of layers in a round")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    coefficients = newton_schulz_coefficients("quintic", 5)
    plain = NewtonSchulz(coefficients=coefficients, eps=1e-15, may_use_grams=True)
    exact = NewtonSchulz(coefficients=coefficients, eps=1e-15, dtype=torch.float32, fp32_precision="highest")
    lines = ["| matrices | how | ms | TFLOP/s of the arithmetic on X | error |", "|---|---|---|---|---|"]
    tilings = _TILINGS
    for count in arguments.layers:
        places = _placed(_LAYERS * count if device.type == "cuda" else _SMALL)
        whole = torch.randn(sum(place.numel for place in places), device=device)
        flops = sum(plain.flops(place.rows, place.columns) for place in places)
        first = _placed(_LAYERS if device.type == "cuda" else _SMALL)

        def add(how: str, run: Callable[[torch.Tensor, torch.Tensor], None], dtype: torch.dtype) -> float:
            out = torch.empty_like(whole, dtype=dtype)  # noqa: B023 (called at once)
            ms = _ms(lambda: run(whole, out))  # noqa: B023
            error = _error(first, whole, out, exact)  # noqa: B023
            lines.append(f"| {len(places)} | {how} | {ms:.3f} | {flops / ms / 1e9:.0f} | {error:.1e} |")  # noqa: B023
            print(lines[-1], flush=True)
            return ms

        add("on X, in bf16", functools.partial(_in_turn, plain, places), torch.bfloat16)
        times = []
        for tiling in tilings:
            grams = GramIteration(places, plain, device, tiling=tiling)
            scratch = torch.empty(grams.scratch_numel, dtype=torch.float16, device=device)
            times.append((add(f"on X X^T, {tiling}", functools.partial(_run, grams, scratch), torch.float16), tiling))
        if tilings is _TILINGS:
            tilings = [tiling for _, tiling in sorted(times, key=lambda item: item[0])[:3]]
    grams = GramIteration(places, plain, device, tiling=tilings[0])
    lines += ["", f"Parts, {len(places)} matrices, {tilings[0]}:", "", "| part | ms | TFLOP/s |", "|---|---|---|"]
    print("\n".join(lines[-3:]))
    for name, ms, done in _parts(grams, whole):
        lines.append(f"| {name} | {ms:.3f} | {done / ms * 1e3:.0f} |")
        print(lines[-1], flush=True)
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n")
    return 0


def _run(grams: GramIteration, scratch: torch.Tensor, whole: torch.Tensor, out: torch.Tensor) -> None:
    grams.run(whole, out, scratch)


def _in_turn(iterate: NewtonSchulz, places: Sequence[PlacedMatrix], whole: torch.Tensor, out: torch.Tensor) -> None:
    for place in places:
        place.view(out).copy_(iterate(place.view(whole).reshape(place.rows, place.columns)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
