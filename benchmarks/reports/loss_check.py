"""Check that two engines that started equal train alike: losses and gradient norms within bf16 noise."""

from __future__ import annotations

from benchmarks.measure.steps import Measurement

# [Note: tolerances] Both engines start from the same bf16 weights and run the same kernels forward, so the first loss
# may differ only where a GEMM is chosen differently: one part in 10,000 is far above that. Later losses differ by the
# order in which bf16 gradients are added on the wire, which AdamW turns into updates of either sign where a gradient is
# near zero. One such rounding is 2**-8 of its value; a loss is a mean over thousands of tokens, in which independent
# roundings average out, so the whole stays below one rounding. A gradient norm is taken from rounded gradients, whose
# noise averages out likewise, but it also follows weights that drift apart: four roundings. AdamW does not see a
# gradient's scale, so losses alone would pass a wrongly divided gradient: that is what the norms are for.
FIRST_LOSS_TOLERANCE = 1e-4
LOSS_TOLERANCE = 2.0**-8
NORM_TOLERANCE = 2.0**-6


def differences(ours: Measurement, reference: Measurement) -> list[str]:
    """Describe each step at which ``ours`` differs from ``reference`` by more than noise; an empty list if none does.

    Raises:
        ValueError: they have different numbers of steps, or none.
    """
    if len(ours.losses) != len(reference.losses) or not ours.losses:
        raise ValueError(
            f"both engines must have run the same steps, got {len(ours.losses)} of {ours.name} and "
            f"{len(reference.losses)} of {reference.name}; run them with the same --steps"
        )
    found = []
    series = (
        ("loss", ours.losses, reference.losses, LOSS_TOLERANCE),
        ("gradient norm", ours.grad_norms, reference.grad_norms, NORM_TOLERANCE),
    )
    for what, got, wanted, tolerance in series:
        for step, (a, b) in enumerate(zip(got, wanted, strict=True), start=1):
            limit = FIRST_LOSS_TOLERANCE if step == 1 and what == "loss" else tolerance
            off = abs(a - b) / abs(b) if b else abs(a)
            if not off <= limit:  # also where either is not a number
                found.append(
                    f"step {step}: {what} {a:.6f} of {ours.name} differs from {b:.6f} of {reference.name} by "
                    f"{off:.2e}, more than {limit:.2e}"
                )
    return found


def largest_difference(got: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference of any step."""
    return max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))
