"""The Newton–Schulz iteration that replaces a matrix's singular values by numbers near 1. Knows nothing of models and meshes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

try:
    from levanter.optim.util import NEWTON_SCHULZ_COEFFICIENTS
except ImportError:  # a Levanter from before it had sets
    NEWTON_SCHULZ_COEFFICIENTS = {}

COEFFICIENTS: dict[str, list[tuple[float, float, float]]] = {
    # Keller Jordan's, as the MARS release has them. They do not converge: singular values end up between about 0.7 and 1.2.
    "jordan": [(3.4445, -4.7750, 2.0315)],
    **NEWTON_SCHULZ_COEFFICIENTS,
}
"""(a, b, c) of every step, by name; a set shorter than the steps starts over, as Levanter's Muon uses it."""

_EPSILON = 1e-7


def newton_schulz(
    matrices: Float[Array, "*batch m n"],
    *,
    steps: int | Int[Array, ""] = 5,
    coefficients: str = "jordan",
    dtype: jnp.dtype | str = "bfloat16",
    sum_of_parts: Callable[[Array], Array] | None = None,
) -> Float[Array, "*batch m n"]:
    """Orthogonalizes every matrix of a batch: X ← aX + (bA + cA²)X with A = XXᵀ, from X = G/(‖G‖_F + ε).

    (Jordan et al., Muon, 2024; the quintic iteration of Björck & Bowie.) Works on the transpose where a matrix is tall, because A then
    has the short side.

    Args:
        matrices: any number of matrices in front of the last two axes.
        steps: iterations.
        coefficients: a name in COEFFICIENTS.
        dtype: of the iteration; the Frobenius norm is taken in float32.
        sum_of_parts: the sum of an array over those who hold the other columns, where `matrices` are some columns of matrices that are not
            tall, even if these columns are; None where they are whole.

    Returns:
        UVᵀ of each matrix's singular value decomposition, approximately, in `dtype`.
    """
    tall = sum_of_parts is None and matrices.shape[-2] > matrices.shape[-1]
    whole = sum_of_parts or (lambda part: part)
    x = jnp.swapaxes(matrices, -2, -1) if tall else matrices
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    norm = jnp.sqrt(whole(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)))
    x = (x / (norm + _EPSILON)).astype(dtype)
    # Full precision of float32 where that is asked for: TPUs and GPUs would multiply in less.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def iterate(x: Array, a, b, c) -> Array:
        gram = whole(jnp.matmul(x, jnp.swapaxes(x, -2, -1), precision=precision))
        return a * x + jnp.matmul(b * gram + c * jnp.matmul(gram, gram, precision=precision), x, precision=precision)

    sets = COEFFICIENTS[coefficients]
    if isinstance(steps, jax.Array):  # as optax.inject_hyperparams makes it
        table = jnp.array(sets, x.dtype)
        x = jax.lax.fori_loop(0, steps, lambda step, x: iterate(x, *table[step % len(sets)]), x)
    else:
        for step in range(steps):
            x = iterate(x, *sets[step % len(sets)])
    return jnp.swapaxes(x, -2, -1) if tall else x


def newton_schulz_flops(m: int, n: int, steps: int) -> int:
    """Of `newton_schulz` for one m × n matrix, m ≤ n: three products a step, with XᵀX and (bA + cA²)X of 2m²n and A² of 2m³."""
    return steps * (4 * m * m * n + 2 * m**3)
