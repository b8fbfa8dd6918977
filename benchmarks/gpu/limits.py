"""Limits of the device: rates of copies, reads and matrix products. The other parts are compared with them."""

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu import clock
from benchmarks.gpu.part import Part
from benchmarks.gpu.processes import Settings
from quire.startup.hardware import cpu_description

MATRIX = 8192


def measure(part: Part, settings: Settings) -> None:
    """One row, "device"."""
    device, tiny = settings.device, settings.tiny
    part.attempt("description", lambda: part.row("device", **describe(device)))
    num_bytes = 2**20 if tiny else 2**32
    size = 128 if tiny else MATRIX
    part.attempt("copy", lambda: part.row("device", copy_gb_per_second=copy_rate(num_bytes, device)))
    part.attempt("read", lambda: part.row("device", read_gb_per_second=read_rate(num_bytes, device)))
    part.attempt("bf16 product", lambda: part.row("device", bf16_tflops=matmul_rate(size, device)))
    if device.startswith("cuda"):
        part.attempt("clocks", lambda: part.row("device", clocks=clocks()))


def describe(device: str) -> dict[str, str]:
    """The device, its driver and software."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else cpu_description()
    found = {"device": name, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def copy_rate(num_bytes: int, device: str) -> float:
    """GB/s of a copy; reads and writes count."""
    source = torch.empty(num_bytes // 4, device=device).normal_()
    target = torch.empty_like(source)
    (seconds,) = clock.seconds([lambda: target.copy_(source)], device)
    return 2 * num_bytes / seconds / 1e9


def read_rate(num_bytes: int, device: str) -> float:
    """GB/s of reading every number once with almost no writes: the best of three methods."""
    numbers = torch.empty(num_bytes // 4, device=device).normal_()
    matrix = torch.empty(num_bytes // 2, device=device, dtype=torch.bfloat16).normal_().view(-1, 4096)
    vector = torch.randn(4096, device=device).to(torch.bfloat16)
    ways = [lambda: numbers.sum(), lambda: numbers.amax(), lambda: matrix @ vector]
    return num_bytes / min(clock.seconds(ways, device)) / 1e9


def matmul_rate(size: int, device: str) -> float:
    """TFLOP/s of a product of square random bf16 matrices. Multiplication and addition count as two operations."""
    left, right = torch.randn(2, size, size, device=device).to(torch.bfloat16)
    out = torch.empty_like(left)
    (seconds,) = clock.seconds([lambda: torch.mm(left, right, out=out)], device)
    return 2 * size**3 / seconds / 1e12


def clocks() -> str:
    """nvidia-smi's driver version, clocks, temperature, power and memory. Raises FileNotFoundError without it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        raise FileNotFoundError("nvidia-smi")
    wanted = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.memory,memory.used"
    asked = [command, f"--query-gpu={wanted}", "--format=csv"]
    return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
