"""Plot of the losses of a training log.

Example::

    python examples/loss_curve.py runs/quickstart/log.txt --output loss.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# Works without an installed package too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.training_log import LossCurves, read_losses


def draw_losses(curves: LossCurves, output: Path, *, title: str = "", unit: str = "nats per token") -> None:
    """Plot training and validation loss by iteration to the PNG ``output``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*sorted(curves.train.items()), strict=True), label="training", color="tab:blue", linewidth=1.2)
    if curves.validation:
        steps, losses = zip(*sorted(curves.validation.items()), strict=True)
        axes.plot(steps, losses, label="validation (held out)", color="tab:orange", marker="o")
        axes.annotate(f"{losses[-1]:.2f}", (steps[-1], losses[-1]), textcoords="offset points", xytext=(0, 9))
    axes.set(xlabel="iteration", ylabel=f"loss, {unit}", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, format="png")


def main(argv: Sequence[str] | None = None) -> int:
    """Plot the losses of a log; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="output of pretrain_gpt.py")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), help="the picture (default: loss.png)")
    arguments = parser.parse_args(argv)
    with arguments.log.open(encoding="utf-8", errors="replace") as lines:
        curves = read_losses(lines)
    if not curves.train:
        print(f"loss_curve: {arguments.log} must hold log lines of iterations, got none", file=sys.stderr)
        return 1
    draw_losses(curves, arguments.output)
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
