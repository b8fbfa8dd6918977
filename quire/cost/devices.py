"""Devices by name: memory, peak rates and their sources, for plans about machines that are not at hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from quire.errors import ConfigError, nearest

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two memories."""

    name: str
    bytes_per_second: float  # peak of one direction
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The share of its peak rates that a device reaches, and the time of a step that follows no rate.

    The defaults are those of quire's kernels on an H100 with a model of 8B parameters, from the file RECORD: prompts of
    2048 and 8192 tokens, decode steps of 1 to 256 rows. Other devices are assumed to reach the same shares. link:
    25 GB/s of 31.5 over PCIe 4 (document 001). `quire calibrate` measures all of this instead.
    """

    compute: float = 0.61  # of the arithmetic, in products with weights; 0.54 with 256 tokens, 0.65 with 8192
    attention: float = 0.45  # of the arithmetic, in attention of prompts
    memory: float = 0.9
    link: float = 0.8
    layer_seconds: float = 44e-6  # of kernels that start one after the other


RECORD = "benchmarks/results/gpu.json"  # of `make gpu-check`: step times of quire on one device


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device with its peak rates, dense (without structured sparsity)."""

    name: str
    memory_bytes: int
    bytes_per_second: float  # of its memory
    flops: Mapping[str, float]  # operations per second by type: float32, bfloat16 (also float16), fp8_e4m3, int8
    host_link: Link
    source: str
    efficiency: Efficiency = field(default_factory=Efficiency)
    record: str = ""  # result file with step times of quire on this device; empty: no step has been measured

    def peak_flops(self, dtype: str) -> float:
        """Operations per second in a type. A type that the device does not compute runs in bfloat16."""
        return self.flops.get("bfloat16" if dtype == "float16" else dtype, self.flops["bfloat16"])


_PCIE = "PCI-SIG: 16 lanes of 16, 32 GT/s with 128b/130b coding"
_PCIE_4 = Link("PCIe 4", 31.5e9, _PCIE)
_PCIE_5 = Link("PCIe 5", 63e9, _PCIE)

_A100 = {"float32": 19.5e12, "bfloat16": 312e12, "int8": 624e12}
_H100 = {"float32": 67e12, "bfloat16": 989e12, "fp8_e4m3": 1979e12, "int8": 1979e12}
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                name="A100-40GB",
                memory_bytes=40 * GIB,
                bytes_per_second=1.555e12,
                flops=_A100,
                host_link=_PCIE_4,
                source="NVIDIA A100 data sheet, SXM4 40 GB",
            ),
            Device(
                name="A100-80GB",
                memory_bytes=80 * GIB,
                bytes_per_second=2.039e12,
                flops=_A100,
                host_link=_PCIE_4,
                source="NVIDIA A100 data sheet, SXM4 80 GB",
            ),
            Device(
                name="H100",
                memory_bytes=80 * GIB,
                bytes_per_second=3.35e12,
                flops=_H100,
                host_link=_PCIE_5,
                source="NVIDIA H100 data sheet, SXM5",
                record=RECORD,
            ),
            Device(
                name="H200",
                memory_bytes=141 * GIB,
                bytes_per_second=4.8e12,
                flops=_H100,
                host_link=_PCIE_5,
                source="NVIDIA H200 data sheet, SXM",
            ),
            Device(
                name="B200",
                memory_bytes=180 * GIB,
                bytes_per_second=8e12,
                flops={"float32": 75e12, "bfloat16": 2250e12, "fp8_e4m3": 4500e12, "int8": 4500e12},
                host_link=_PCIE_5,
                source="NVIDIA HGX B200 data sheet, per GPU",
            ),
            Device(
                name="L4",
                memory_bytes=24 * GIB,
                bytes_per_second=300e9,
                flops={"float32": 30.3e12, "bfloat16": 121e12, "fp8_e4m3": 242e12, "int8": 242e12},
                host_link=_PCIE_4,
                source="NVIDIA L4 data sheet",
            ),
            Device(
                name="RTX-4090",
                memory_bytes=24 * GIB,
                bytes_per_second=1.008e12,
                flops={"float32": 82.6e12, "bfloat16": 165.2e12, "fp8_e4m3": 330.3e12, "int8": 660.6e12},
                host_link=_PCIE_4,
                source="NVIDIA Ada architecture white paper, table of the RTX 4090, sums in float32",
            ),
            Device(
                name="MI300X",
                memory_bytes=192 * GIB,
                bytes_per_second=5.3e12,
                flops={"float32": 163.4e12, "bfloat16": 1307.4e12, "fp8_e4m3": 2614.9e12, "int8": 2614.9e12},
                host_link=_PCIE_5,
                source="AMD Instinct MI300X data sheet",
            ),
        )
    }
)


def find_device(name: str) -> Device:
    """The device of a name, in any spelling of case, blanks and hyphens. Raises ConfigError with the nearest name."""
    spelled = {_plain(known): device for known, device in DEVICES.items()}
    found = spelled.get(_plain(name))
    if found is not None:
        return found
    known = ", ".join(DEVICES)
    starts = [device.name for plain, device in spelled.items() if _plain(name) and plain.startswith(_plain(name))]
    hint = f" (did you mean {' or '.join(starts)}?)" if starts else nearest(name.upper(), DEVICES)
    missing = f"there is no device {name!r:.60}{hint}" if name else "name a device"
    raise ConfigError(f"{missing}; known: {known}, or a file that `quire calibrate` wrote")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
