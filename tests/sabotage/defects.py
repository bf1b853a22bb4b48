"""The tables: which sabotages there are, and which changes break nothing."""

from . import defects_handwritten, defects_sm90, defects_sm100  # noqa: F401, they fill the tables
from .tables import BENIGN, SABOTAGES

__all__ = ["BENIGN", "SABOTAGES"]
