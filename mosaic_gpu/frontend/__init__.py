"""From Python functions to Programs.  The only package (with `runtime/`) that imports JAX, and only its public parts."""
