"""Kernels written in the language, one a file, and dispatchers that choose among them by the type of their config."""

if __name__ != "mosaic_gpu.kernels":
    # A second copy of the config classes would break the dispatch by type.
    raise ImportError(f"import this package as mosaic_gpu.kernels, not as {__name__} (is `pip install -e .` done?)")
