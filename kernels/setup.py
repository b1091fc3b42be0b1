"""Builds paceline-kernels from the C sources beside it, in src/paceline/native.

One library for each level, and not one library with a choice in C: the sources need no macros for
it, each file has the same code as a compilation on first use, and one that the processor cannot
run is not even loaded.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from paceline.compilation import compile_command, library_name
from paceline.processor import GENERIC, LEVELS, compile_flags
from paceline.version import __version__


class Compile(build_py):
    """Adds the libraries to the package."""

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib, "paceline_kernels")

        def compile_level(level: str) -> None:
            command = compile_command(compile_flags(level), folder / library_name(level))
            subprocess.run(command, check=True)

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_level, (GENERIC, *LEVELS)))


class AnyPython(bdist_wheel):
    """A wheel for this system and every Python, since ctypes loads the libraries."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class WithLibraries(Distribution):
    """A distribution that is not for every system."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    version=__version__,
    distclass=WithLibraries,
    cmdclass={"build_py": Compile, "bdist_wheel": AnyPython},
)
