"""Kernels written in the language, one a file, and the dispatchers that choose among them by the type of their config."""
