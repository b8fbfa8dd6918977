"""Build of the CPU kernels: one extension with the same sources compiled for each instruction set.

If it cannot be built, quire is installed without it and uses the kernels in plain torch.
"""

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

FOLDER = Path("quire/kernels/cpu/csrc")
ONCE = ("team.cpp", "tiles.cpp")
PER_BUILD = sorted(path.name for path in FOLDER.glob("*.cpp") if path.name not in (*ONCE, "module.cpp"))
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
AVX512_BF16 = (*AVX512, "-mavx512bf16", "-mavx512vnni")
X86_BUILDS = {  # the fastest first
    "amx": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512_bf16": AVX512_BF16,
    "avx512": AVX512,
    "avx2": AVX2,
    "generic": (),
}
X86_TEST_BUILDS = {"amx_emulated": (*AVX512_BF16, "-DEMULATED_TILES")}
IS_X86 = platform.machine() in ("x86_64", "AMD64")
BUILDS = X86_BUILDS if IS_X86 else {"generic": ()}
if only := os.environ.get("QUIRE_BUILDS"):  # for tests: names of some of them, or "all" with those for tests
    BUILDS = {**BUILDS, **(X86_TEST_BUILDS if IS_X86 else {})}
    BUILDS = BUILDS if only == "all" else {name: BUILDS[name] for name in only.split(",")}
WIDE_MOVES = ("-mmove-max=256", "-mstore-max=256")  # or GCC moves vectors of two registers piece by piece
FLAGS = (
    *("-O3", "-g0", "-std=c++17", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"),
    *(
        "-fno-exceptions",
        "-fno-rtti",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
        "-Wno-unused-function",
        "-Wno-maybe-uninitialized",
        "-Wno-uninitialized",
    ),
    *os.environ.get("QUIRE_CXXFLAGS", "").split(),  # sanitizers
)


class BuildKernels(build_ext):
    """Compiles PER_BUILD for each of BUILDS, in parallel, before the module itself."""

    def finalize_options(self) -> None:
        """Keep the object files of an editable installation: a test reads their symbols."""
        super().finalize_options()
        if self.editable_mode:
            self.build_temp = "build/temp"

    def build_extension(self, ext: Extension) -> None:
        """Build the extension if a source is newer than it, or if it is forced."""
        if not self.force and not newer_group(ext.depends, self.get_ext_fullpath(ext.name)):
            return
        builds = ("QUIRE_BUILDS", " ".join(f"BUILD({name})" for name in BUILDS))
        wide = WIDE_MOVES if self._understands(WIDE_MOVES) else ()
        jobs = [(name, "", (), []) for name in ONCE]
        jobs += [
            (name, isa, (*flags, *(wide if flags == AVX2 else ())), [("ISA", isa)])
            for isa, flags in BUILDS.items()
            for name in PER_BUILD
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: self._compile(*job), jobs))
        ext.extra_objects = [one for some in objects for one in some]
        ext.define_macros = [*ext.define_macros, builds]
        super().build_extension(ext)

    def _understands(self, flags: tuple[str, ...]) -> bool:
        command = [*self.compiler.compiler_cxx[:1], *flags, "-E", "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _compile(self, name: str, isa: str, flags: tuple[str, ...], macros: list[tuple[str, str]]) -> list[str]:
        target = Path(self.build_temp) / "kernels" / isa
        return self.compiler.compile(
            [str(FOLDER / name)],
            output_dir=str(target),
            macros=macros,
            extra_postargs=[*FLAGS, *flags],
        )


setup(
    ext_modules=[
        Extension(
            "quire.kernels.cpu._C",
            [str(FOLDER / "module.cpp")],
            py_limited_api=True,
            optional=True,
            depends=sorted(str(path) for path in FOLDER.iterdir()),
            define_macros=[("Py_LIMITED_API", "0x030b0000")],
            extra_compile_args=list(FLAGS),
            extra_link_args=["-fopenmp", *os.environ.get("QUIRE_CXXFLAGS", "").split()],
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
