"""Kernels that use tile registers (AMX) where the processor has none: the registers are emulated in memory."""

import os
import shutil
import subprocess
import sys

import pytest
from built_extension import ROOT, build

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)

TESTS = [f"tests/kernels/cpu/test_cpu_{name}.py" for name in ("matmul", "code_products", "low_rank", "paged_attention")]
ROW_BY_ROW = "(int6 or factors or fp8)"  # schemes without tile registers
CODES = f"(products_are_those_of_plain_torch or row_alone or experts_are and int8) and not {ROW_BY_ROW}"
OTHERS = (
    "not strict and not (amx_emulated-1 or amx_emulated-3) and (product or rows or experts or bfloat16 or mixed_chunks)"
)
WITH_TILES = f"cpu_code_products and {CODES} or not cpu_code_products and {OTHERS}"
RUN = """
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
import torch
import pytest

name, path, *arguments = sys.argv[1:]
spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
sys.modules[name] = module_from_spec(spec)  # in place of the installed one
spec.loader.exec_module(sys.modules[name])
sys.exit(pytest.main(arguments))
"""


@pytest.mark.skipif("amx_emulated" in _C.builds(), reason="the other tests use the emulation already")
@pytest.mark.skipif("avx512_bf16" not in _C.builds(), reason="the emulation needs AVX-512 BF16")
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="there is no C++ compiler")
@pytest.mark.cpu_seconds(60, reason="half of it is the compiler on code products, at its lowest optimization as well")
def test_kernels_with_tile_registers_pass_the_tests_of_the_others(tmp_path):
    done = build(tmp_path / "temp", tmp_path / "lib", QUIRE_BUILDS="amx_emulated", QUIRE_CXXFLAGS="-Og")
    extensions = list((tmp_path / "lib").glob("**/_C*.so"))
    assert extensions, done.stderr[-3000:]
    command = [sys.executable, "-c", RUN, "quire.kernels.cpu._C", extensions[0], "-x", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "-k", WITH_TILES, *TESTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
