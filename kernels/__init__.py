"""Kernels that ship with the project, installed as `mosaic_gpu.kernels`: one a file, a folder a GPU generation."""

if __name__ != "mosaic_gpu.kernels":
    # A second copy of the config classes would break the dispatch by type.
    raise ImportError(f"import this package as mosaic_gpu.kernels, not as {__name__} (is `pip install -e .` done?)")
