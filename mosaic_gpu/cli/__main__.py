"""`python -m mosaic_gpu.cli`, for when the script `mosaic-gpu` is not on the path."""

from . import main

main()
