"""Bundles: kernels compiled on one machine, launched, checked and timed on another that has the GPU.

`cases` says what is compiled, how inputs are drawn and results judged, `make` compiles it, `files` reads and writes the file,
`verify` runs it in processes of its own and reports.
"""
