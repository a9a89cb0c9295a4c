"""Builds the wheel: setuptools packs, CMake and Ninja compile (cmake/native_build.py). Metadata: pyproject.toml."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

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


class CleanBuild(build):
    """``build`` without files that an earlier build left: setuptools would pack modules that are long deleted."""

    def run(self) -> None:
        """Empty the folder that becomes the wheel, then fill it."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class NativeWheel(bdist_wheel):
    """``bdist_wheel`` whose tag says what FLASH_EXT_PYTHONS put into it."""

    def get_tag(self) -> tuple[str, str, str]:
        """Of one Python; or of any Python 3, if there are several modules: then Requires-Python says of which."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if PYTHONS else (python, abi, platform)


class SourceDistribution(sdist):
    """``sdist`` that keeps the commit it was made from."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Add the file that `native_build.read_commit` reads."""
        super().make_release_tree(base_dir, files)
        Path(base_dir, native_build.COMMIT_FILE).write_text(native_build.read_commit() + "\n", encoding="utf-8")


try:
    PYTHONS = toolchain.read_pythons()
except toolchain.BuildError as error:
    sys.exit(f"flash_ext: {error}")

setup(
    python_requires=toolchain.requires_python(PYTHONS),
    version=native_build.read_version(),
    # Tells setuptools that the wheel is of one platform and one Python; NativeBuild does the work.
    ext_modules=[Extension("flash_ext._C", sources=[])],
    cmdclass={
        "bdist_wheel": NativeWheel,
        "build": CleanBuild,
        "build_ext": NativeBuild,
        "sdist": SourceDistribution,
    },
)
