"""What ran on a device and when: kernels by kind, and how far communication hides behind compute."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megatron.core.distributed.fsdp.overlap_report import Interval, length, overlap

# Kernels are recognised by name; NCCL's annotations ("nccl:...") are no kernels. Peer copy's copies, barriers and sums
# are communication.
_BARRIER, _SUM = r"(.*symmetric_memory.*|.*barrier_kernel)", r"_sum_kernel"
_COMMUNICATION = re.compile(rf"^(nccl(Dev|Symk|Kernel)|Memcpy PtoP|{_BARRIER}|{_SUM})")
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|wgmma", re.IGNORECASE)
_MEMORY = re.compile(r"^Mem(cpy|set)")


def counts_summary(kernels: Mapping[str, Sequence[Interval]]) -> str:
    """Count the kernels and copies of each kind that ran on the device."""

    def count(pattern: str) -> int:
        return sum(len(times) for name, times in kernels.items() if re.match(pattern, name))

    compute = sum(len(times) for name, times in kernels.items() if _is_compute(name))
    return (
        f"on the device: {compute} kernels of compute, {count('nccl(Dev|Symk|Kernel)')} of NCCL (symmetric: "
        f"{count('ncclSymk')}), {count('Memcpy PtoP')} peer copies, {count(_BARRIER)} barriers, {count(_SUM)} sums of pieces, {count('Memcpy (?!PtoP)')} other copies, "
        f"{count('Memset')} memsets"
    )


def overlap_summary(kernels: Mapping[str, Sequence[Interval]], *, num_rows: int = 15) -> str:
    """Return the share of communication that compute hides, and list the kernels that take most time.

    Args:
        kernels: for each kernel's name the times at which it ran.
        num_rows: kernels to list.
    """
    if not kernels:
        return "No kernels on a device."
    communication = [i for name, times in kernels.items() if _COMMUNICATION.match(name) for i in times]
    gemm = [i for name, times in kernels.items() if _is_compute(name) and _GEMM.search(name) for i in times]
    compute = [i for name, times in kernels.items() if _is_compute(name) for i in times]
    everything = [i for times in kernels.values() for i in times]
    span = max(end for _, end in everything) - min(start for start, _ in everything)
    sent, idle = length(communication), span - length(everything)
    lines = [
        f"Device: span {span / 1e3:.2f} ms, idle {idle / 1e3:.2f} ms ({idle / max(span, 1e-9):.1%}), compute {length(compute) / 1e3:.2f} ms "
        f"(GEMM {length(gemm) / 1e3:.2f} ms), communication {sent / 1e3:.2f} ms, exposed (communication without compute) "
        f"{(sent - overlap(communication, compute)) / 1e3:.2f} ms",
    ]
    if sent:
        lines.append(
            f"Communication overlapped with GEMMs: {overlap(communication, gemm) / sent:.1%}; with any compute: "
            f"{overlap(communication, compute) / sent:.1%}"
        )
    lines.append("Kernels by time (ms, runs, name):")
    by_time = sorted(kernels.items(), key=lambda item: -sum(end - start for start, end in item[1]))
    for name, times in by_time[:num_rows]:
        lines.append(f"  {sum(end - start for start, end in times) / 1e3:9.3f} {len(times):6d}  {name[:110]}")
    return "\n".join(lines)


def _is_compute(name: str) -> bool:
    return not _COMMUNICATION.match(name) and not _MEMORY.match(name)
