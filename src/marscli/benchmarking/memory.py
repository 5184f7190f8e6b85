"""How much memory one pass needs at its highest point.

On a GPU: what torch had allocated on the device (weights, caches, activations; not the CUDA context). On a CPU: the
process's resident memory, weights and libraries included; where the system cannot reset the high-water mark (anything
but Linux), the resident memory right after the pass.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def start_watching(device: torch.device) -> None:
    """Forget earlier peaks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        try:
            # What earlier passes freed and the allocator kept would count for this one.
            ctypes.CDLL(None).malloc_trim(0)
            _CLEAR.write_text("5")  # resets VmHWM of this process
        except (OSError, AttributeError):  # neither Linux nor glibc
            return


def peak_megabytes(device: torch.device) -> float | None:
    """Highest memory since ``start_watching``, in 10⁶ bytes; None where the device cannot tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    if device.type == "mps":
        return torch.mps.current_allocated_memory() / 1e6
    if device.type != "cpu":
        return None
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6
    except (OSError, StopIteration):
        import psutil

        return psutil.Process().memory_info().rss / 1e6


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
