"""The command line, `mosaic-gpu VERB`: one file a verb, assembled in `app`.  What they share is in `common`."""

from __future__ import annotations


def main() -> None:
    """The entry point that pyproject.toml names."""
    from .app import app

    app(prog_name="mosaic-gpu")
