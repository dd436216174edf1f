"""Build the C sources as one extension module, or nothing where there is no suitable compiler."""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDER = Path("src", "pyg_dynbatch", "native")
FLAGS = [
    *("-O3", "-g0", "-std=c11", "-Wno-psabi"),
    # Not -ffast-math, which would change rounding for the whole process.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=fast"),
    # Linked without OpenMP, to use the runtime that torch has loaded: two thread pools would
    # compete for the cores.
    *(("-Xclang", "-fopenmp") if sys.platform == "darwin" else ("-fopenmp",)),
]


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


extension = Extension(
    "pyg_dynbatch._native",
    sources=sorted(path.as_posix() for path in FOLDER.glob("*.c")),
    depends=sorted(path.as_posix() for path in FOLDER.glob("*.h")),
    extra_compile_args=FLAGS,
    py_limited_api=True,
    optional=True,
)
# The kernels use extensions of GCC and Clang.
setup(
    ext_modules=[] if sys.platform == "win32" else [extension],
    cmdclass={"build_py": BuildConfigs, "bdist_wheel": BuildWheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
