"""The version of flash_ext: setup.py, CMake and the package read it here and nowhere else."""

__version__ = "0.1.0.dev0"
