"""Other processes that tests start."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run(command: Sequence[str], cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process with its output as text."""
    variables: Mapping[str, str] = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=500, check=False)
