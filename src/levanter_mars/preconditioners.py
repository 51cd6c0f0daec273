"""From corrected gradients to update directions: Adam's preconditioner, as MARS-AdamW uses it on c̃_t."""

import jax
import jax.numpy as jnp
import optax


def scale_by_adam(beta1: float, beta2: float, epsilon: float, *, amsgrad: bool = False) -> optax.GradientTransformation:
    """m̂ / (√v̂ + ε), m̂ = m/(1 − β1^t), v̂ = v/(1 − β2^t) (MARS, arXiv 2411.10438, Algorithm 2).

    Args:
        beta1: decay rate of the momentum m.
        beta2: decay rate of the second moment v.
        epsilon: ε, added to √v̂.
        amsgrad: divide by the running maximum of v instead of v.
    """
    return _scale_by_amsgrad(beta1, beta2, epsilon) if amsgrad else optax.scale_by_adam(beta1, beta2, epsilon)


def _scale_by_amsgrad(beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """PyTorch's AMSGrad, which the authors' release follows: the maximum is over v, where optax takes it over v̂."""

    def init(params: optax.Params) -> optax.ScaleByAmsgradState:
        zeros = optax.tree.zeros_like
        return optax.ScaleByAmsgradState(jnp.zeros([], jnp.int32), zeros(params), zeros(params), zeros(params))

    def update(updates: optax.Updates, state: optax.ScaleByAmsgradState, params: optax.Params | None = None):
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, beta2, 2)
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, nu)
        mu_hat = optax.tree.bias_correction(mu, beta1, count)
        nu_hat = optax.tree.bias_correction(nu_max, beta2, count)
        direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mu_hat, nu_hat)
        return direction, optax.ScaleByAmsgradState(count, mu, nu, nu_max)

    return optax.GradientTransformation(init, update)
