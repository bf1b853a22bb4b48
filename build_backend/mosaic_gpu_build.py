"""scikit-build-core, except that an editable install puts no folder on `sys.path`.

Its import hook alone finds every module.  The folders that it also lists in a `.pth` file are the top of the
repository, where `kernels` would become a second module next to `mosaic_gpu.kernels`, and the folder above, where any
neighbour could pass for a package of its name.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import scikit_build_core.build
from scikit_build_core.build import *  # noqa: F403 (the other hooks of the build interface)


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Builds the editable wheel and keeps only the imports in its `.pth` files."""
    with tempfile.TemporaryDirectory() as scratch:
        name: str = scikit_build_core.build.build_editable(scratch, config_settings, metadata_directory)
        _wheel("unpack", "--dest", f"{scratch}/files", f"{scratch}/{name}")
        (root,) = pathlib.Path(scratch, "files").iterdir()
        for path in root.glob("*.pth"):
            imports = [line for line in path.read_text().splitlines() if line.startswith("import ")]
            path.write_text("".join(f"{line}\n" for line in imports))
        _wheel("pack", "--dest-dir", wheel_directory, str(root))
    return name


def _wheel(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "wheel", *arguments], check=True, stdout=sys.stderr)
