"""A state that was saved under another configuration is refused: nothing is read for what it is not, and nothing kept in another precision.

Levanter restores arrays by their paths, in the dtype and the shape in which they were stored. It refuses a checkpoint that lacks a path,
so that a state in which something means something else has another path for it. What it does not see is compared here.
"""

import jax
import optax
from jaxtyping import PyTree


def refuse_other_states(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Has `inner.update` refuse a state in which something has not the shape and dtype that `inner.init` gives it.

    It costs nothing at run time: shapes are compared when the update is traced.

    Raises:
        ValueError: in `update`, before anything is computed, naming what differs.
    """

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args):
        if params is not None:
            _compare(_forms(state), _forms(jax.eval_shape(inner.init, params)))
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _forms(state: PyTree) -> dict[str, str]:
    """`float32[4, 2]` and the like, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _compare(found: dict[str, str], expected: dict[str, str]) -> None:
    differ = [path for path in {**expected, **found} if found.get(path) != expected.get(path)]
    if not differ:
        return
    first = differ[0]
    raise ValueError(
        f"the optimizer's state is not one of this configuration: {first} is {found.get(first, 'absent')} and would be "
        f"{expected.get(first, 'absent')} ({len(differ)} of {len(expected)} arrays differ); configure the optimizer as it was "
        f"when the state was saved (momentum_dtype, last_gradient_dtype, skip_bad_steps, …), or start anew from the weights alone, in "
        f"train_lm by initialize_model_from_checkpoint_path"
    )
