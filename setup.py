"""Build the C sources as one extension module, or nothing where there is no suitable compiler."""

import hashlib
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

FOLDER = Path("src", "pyg_dynbatch", "native")
WINDOWS = sys.platform == "win32"
GCC_FLAGS = [
    *("-O3", "-g0", "-std=c11", "-Wno-psabi"),
    # Not -ffast-math, which would change rounding for the whole process.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=fast"),
    # Linked without OpenMP, to use the runtime that torch has loaded: two thread pools would
    # compete for the cores.
    *(("-Xclang", "-fopenmp") if sys.platform == "darwin" else ("-fopenmp",)),
]

FLAGS = ["/O2", "/std:c11"] if WINDOWS else GCC_FLAGS
FLAGS += shlex.split(os.environ.get("CFLAGS", ""))  # the last ones win
# The kernels are compiled once per kind of processor; the extension chooses when it is imported.
# They use extensions of GCC and Clang, so on Windows the extension holds the schedulers alone.
VARIANTS: dict[str, list[str]] = {} if WINDOWS else {"baseline": []}
MACROS = [("NO_KERNELS", "1")] if WINDOWS else []
LEFT_OUT = ("kernels", "tree_lstm") if WINDOWS else ("kernels",)
if not WINDOWS and sysconfig.get_platform().endswith("x86_64"):
    VARIANTS["avx2"] = ["-mavx2", "-mfma"]
    VARIANTS["avx512"] = ["-mfma", *(f"-mavx512{each}" for each in ("f", "vl", "bw", "dq"))]
    MACROS.append(("X86_VARIANTS", "1"))


class BuildVariants(build_ext):
    """Compile the kernels for every kind of processor."""

    def build_extension(self, ext: Extension) -> None:
        """Remove what an earlier build left, so that a failed build leaves nothing, and build."""
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        if self.inplace or self.editable_mode:
            Path("src", *ext.name.split(".")).with_suffix(".abi3.so").unlink(missing_ok=True)
        objects = []
        for name, flags in VARIANTS.items():
            objects += self.compiler.compile(
                [(FOLDER / "kernels.c").as_posix()],
                output_dir=str(Path(self.build_temp, name)),
                macros=[("VARIANT", name)],
                extra_postargs=FLAGS + flags,
                depends=ext.depends,
            )
        ext.extra_objects = objects
        super().build_extension(ext)


class BuildConfigs(build_py):
    """Put the configurations into the package."""

    def run(self) -> None:
        """Copy the modules, and the configurations unless the installation is editable."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "pyg_dynbatch", "configs")
            shutil.copytree("configs", target, dirs_exist_ok=True)


class BuildWheel(bdist_wheel):
    """Tag the wheel for all platforms if the extension could not be built."""

    def run(self) -> None:
        """Build the extension first."""
        self.run_command("build_ext")
        built = self.get_finalized_command("build_ext")
        if not any(Path(built.get_ext_fullpath(each.name)).exists() for each in built.extensions):
            self.distribution.ext_modules = []
            self.root_is_pure, self.py_limited_api = True, False
        super().run()


files = sorted(FOLDER.iterdir())
digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
extension = Extension(
    "pyg_dynbatch._native",
    sources=[
        path.as_posix() for path in files if path.suffix == ".c" and path.stem not in LEFT_OUT
    ],
    depends=[path.as_posix() for path in files],
    define_macros=[*MACROS, ("SOURCES", f'"{digest}"')],
    extra_compile_args=FLAGS,
    py_limited_api=True,
    optional=True,
)
setup(
    ext_modules=[extension],
    cmdclass={"build_ext": BuildVariants, "build_py": BuildConfigs, "bdist_wheel": BuildWheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
