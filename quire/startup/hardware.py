"""Detection of device, available memory and processor features."""

import os
import platform
from math import ceil
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")
_INSTRUCTION_SETS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"),
    *("asimd", "sve", "bf16", "i8mm"),
)


def pick_device(name: str) -> str:
    """The device name; "auto" becomes "cuda" if torch finds a CUDA device, else "cpu"."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def available_memory(device: str) -> int:
    """Bytes that an engine on `device` can allocate now, without swapping and within the container's limit."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min(_host_memory(), _cgroup_memory())


def _host_memory() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_memory() -> int:
    """Bytes left of the cgroup's memory limit; 2**62 without a limit."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(statistics["inactive_file"])  # the kernel reclaims the page cache
    except (OSError, ValueError, KeyError):  # no cgroup v2, or the limit is "max"
        return 2**62


def num_cores() -> int:
    """Cores that this process may use: those of its affinity, and no more than the container's share of time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return max(1, min(allowed, ceil(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # no cgroup v2, or the quota is "max"
        return allowed


def cpu_description() -> str:
    """Name of the processor, cores that this process may use, and instruction sets that kernels use."""
    facts = _cpu_facts()
    flags = facts.get("flags", facts.get("Features", "")).split()
    found = ", ".join(flag for flag in _INSTRUCTION_SETS if flag in flags) or "no vector extensions that kernels use"
    return f"{facts.get('model name', platform.machine())}, {num_cores()} cores, {found}"


def gpu_description() -> str:
    """The CUDA devices that torch finds, or why there are none."""
    if torch.version.cuda is None:
        return "none: this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "none: torch finds no device"
    devices = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return "; ".join(f"{device.name}, {device.total_memory / 2**30:.0f} GiB" for device in devices)


def _cpu_facts() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo."""
    if not _CPUINFO.exists():
        return {}
    lines = _CPUINFO.read_text().split("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
