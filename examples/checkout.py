"""For programs that run as plain ``python`` from a checkout: finds fzero beside them, and says what is missing.

Import it before fzero.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("optree") is None:
    sys.exit(
        "fzero needs optree. With a network: python -m pip install optree. For a machine without one: fetch the wheel "
        "of its Python elsewhere (python -m pip download --no-deps --only-binary :all: --python-version 3.12 optree), "
        "unzip it into a folder there, and name that folder in PYTHONPATH. It needs typing_extensions, as torch does"
    )
if importlib.util.find_spec("fzero") is None:
    sys.path.insert(0, str(Path(__file__).parent.parent))


def version() -> str:
    """Return the version of fzero as it is installed, or say that it is not."""
    try:
        return importlib.metadata.version("fzero")
    except importlib.metadata.PackageNotFoundError:
        return "(a checkout, not installed)"
