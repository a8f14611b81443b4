"""The peak of known devices, for the share of it that training reaches."""

from __future__ import annotations

_DENSE_BF16_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 150.0,
    "L40S": 362.0,
    "B200": 2250.0,
    "GB200": 2500.0,
}
"""TFLOP/s of dense matrix products in bf16 by a part of the name that the driver gives. Source: the makers' data sheets."""


def peak_tflops(name: str) -> float | None:
    """Return the TFLOP/s of a device by its name; None where it is not known."""
    found = [
        part for part in _DENSE_BF16_TFLOPS if all(word in name.replace("-", " ").split() for word in part.split())
    ]
    return _DENSE_BF16_TFLOPS[max(found, key=len)] if found else None
