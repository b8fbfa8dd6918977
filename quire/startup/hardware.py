"""What this machine has to offer. The only place that asks."""

import ctypes
import os
import platform
from contextlib import suppress
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
    """The device that "auto" means: cuda where torch sees one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def available_memory(device: str) -> int:
    """Bytes that an engine on `device` could take now without pushing anybody out."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min(_host_memory(), _cgroup_memory())


def return_freed_memory() -> None:
    """Give the system what was freed and the C library kept, where that can be told to (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _host_memory() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_memory() -> int:
    """What a container's limit leaves, or more than any machine has where there is none."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(statistics["inactive_file"])  # cached files give way
    except (OSError, ValueError, KeyError):  # no cgroup v2, or the limit is "max"
        return 2**62


def cpu_description() -> str:
    """The processor, how many of its cores this process may use, and the instruction sets that kernels care about."""
    facts = _cpu_facts()
    flags = facts.get("flags", facts.get("Features", "")).split()
    found = ", ".join(flag for flag in _INSTRUCTION_SETS if flag in flags) or "no vector extensions that kernels use"
    return f"{facts.get('model name', platform.machine())}, {len(os.sched_getaffinity(0))} cores, {found}"


def gpu_description() -> str:
    """The accelerators that torch sees, or why there are none."""
    if torch.version.cuda is None:
        return "none: this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "none: torch finds no device"
    devices = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return "; ".join(f"{device.name}, {device.total_memory / 2**30:.0f} GiB" for device in devices)


def _cpu_facts() -> dict[str, str]:
    """Of the first processor."""
    if not _CPUINFO.exists():
        return {}
    lines = _CPUINFO.read_text().split("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
