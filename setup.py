"""Builds the wheel: setuptools packs, CMake and Ninja compile (cmake/native_build.py). Metadata is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "cmake"))

import native_build
import toolchain


class NativeBuild(build_ext):
    """``build_ext`` that builds flash_ext._C and the libraries of FLASH_EXT_PATHS."""

    def run(self) -> None:
        """Build, then copy into the package: the source folder's for --inplace and editable installs."""
        try:
            results = native_build.build(toolchain.read_options(), force=bool(self.force))
        except toolchain.BuildError as error:
            raise SystemExit(f"flash_ext: {error}") from None
        package = Path("flash_ext") if self.inplace else Path(self.build_lib) / "flash_ext"
        package.mkdir(parents=True, exist_ok=True)
        # A library that this build did not make is of another build: it must not be loaded beside the new ones.
        for stale in package.glob("libflash_ext_*.so"):
            if stale.name not in results:
                stale.unlink()
        for name, file in results.items():
            native_build.replace_file(file, package / name)
        self.results = results

    def get_outputs(self) -> list[str]:
        """What an installation holds of this command."""
        return [str(Path(self.build_lib) / "flash_ext" / name) for name in getattr(self, "results", {})]

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing to map: an editable build writes into the source folder."""
        return {}


setup(
    version=native_build.read_version(),
    # Tells setuptools that the wheel is of one platform and one Python; NativeBuild does the work.
    ext_modules=[Extension("flash_ext._C", sources=[])],
    cmdclass={"build_ext": NativeBuild},
)
