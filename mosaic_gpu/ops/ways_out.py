"""What to do instead of JAX's primitives that no kernel has."""

from __future__ import annotations

from ..layouts.shared import instead_of

OUTSIDE = "compute it outside of the kernel ({}) and hand the result over"
MATRICES = OUTSIDE.format("jnp.linalg and jax.scipy.linalg")
GROUPS: dict[str, tuple[str, ...]] = {
    f"factorizations and inverses of matrices are not for one block: {MATRICES}": (
        "cholesky",
        "cholesky_update",
        "eig",
        "eigh",
        "geqrf",
        "geqp3",
        "hessenberg",
        "householder_product",
        "lu",
        "lu_pivots_to_permutation",
        "ormqr",
        "qr",
        "schur",
        "svd",
        "symmetric_product",
        "triangular_solve",
        "tridiagonal",
        "tridiagonal_solve",
    ),
    OUTSIDE.format("jnp.fft"): ("fft",),
    OUTSIDE.format("jax.scipy.special"): ("igamma_grad_a", "regularized_incomplete_beta"),
    OUTSIDE.format("jax.random"): ("random_gamma", "random_gamma_grad"),
    "draw by jax.random, of a key that is made or folded in the kernel": ("rng_bit_generator", "rng_uniform"),
    "the products of the groups are one jnp.dot each, of the rows that plgpu.ds(start, size) takes": (
        "ragged_dot_general",
    ),
    "the gradient of a pooling: give the function a jax.custom_vjp": (
        "select_and_gather_add",
        "select_and_scatter",
        "select_and_scatter_add",
    ),
    "products of windows are running sums: jnp.exp of a difference of jnp.cumsum(jnp.log(x))": ("reduce_window_prod",),
    "a kernel cannot call Python; debug_print and debug_check look inside": (
        "debug_callback",
        "io_callback",
        "pure_callback",
    ),
    "a kernel runs on one device: call the collective around it, under jax.shard_map": (
        "all_gather",
        "all_to_all",
        "pmax",
        "pmin",
        "ppermute",
        "psum",
        "psum_invariant",
        "psum_scatter",
        "reduce_scatter",
    ),
    instead_of("complex64"): ("complex", "conj", "imag", "real"),
    "a kernel has no kernels in it: call one after the other, or one's body as a function": (
        "mosaic_gpu_kernel",
        "pallas_call",
    ),
}
WAYS_OUT = {name: way for way, names in GROUPS.items() for name in names}


def way_out(name: str) -> str:
    """For a primitive without a rule anywhere."""
    return WAYS_OUT.get(name, "rewrite it with the operations that docs/ops.md lists")
