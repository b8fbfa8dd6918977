"""What this machine has to offer. The only place that asks."""

import os
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


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
