"""Kernels that ship with the project, installed as `mosaic_gpu.kernels`; one kernel a file, one folder a GPU generation."""
