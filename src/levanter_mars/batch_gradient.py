"""The gradient of a step's batch at parameters of our choice, which the exact form of MARS takes at the previous ones."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
from haliax.quantization import partition_for_grad_overwrite
from jaxtyping import PyTree

NO_OBJECTIVE = (
    "exact: true takes a second gradient of every batch and needs the loss of the step as a function of the parameters: call update with "
    "obj_fn=..., as Levanter's Trainer does, or use exact: false"
)


def batch_gradient(obj_fn: Callable[[PyTree], Any] | None, params: PyTree) -> PyTree:
    """The gradient of this step's loss at `params`.

    `levanter.trainer.Trainer` hands optimizers an objective that takes the whole batch at once, whatever `per_device_parallelism` says,
    and that asks the model for metrics which `train_lm`'s does not give. So of that objective only what it refers to is used, the
    trainer and the batch, and the trainer computes the gradient the way it computed the step's own: by microbatches, with the same
    dropout keys. Any other objective is differentiated as it is.

    Args:
        obj_fn: the loss of the step, a function of the parameters alone.
        params: a tree in the form of the step's parameters.

    Raises:
        ValueError: if `obj_fn` is None, or that of a Levanter whose trainer is not as it was when this was written.
    """
    if obj_fn is None:
        raise ValueError(NO_OBJECTIVE)
    refers_to = inspect.getclosurevars(obj_fn).nonlocals if inspect.isfunction(obj_fn) else {}
    # Imported late: only training needs it, and it is slow to import.
    from levanter.trainer import Trainer
    from levanter.trainer_state import trainables_only
    from levanter.utils.tree_utils import inference_mode

    match refers_to:
        case {"self": Trainer() as trainer, "state": state, "batch": batch, "batch_kwargs": batch_kwargs, "key": key}:
            model = inference_mode(eqx.combine(params, state.model), False)
            _, gradient, _ = trainer._compute_gradients_microbatched(trainer.loss_fn, model, *batch, **batch_kwargs, key=key)
            return partition_for_grad_overwrite(trainables_only(gradient, state.is_trainable))[1]
        case {"self": Trainer()}:
            raise ValueError(f"exact: true does not know the trainer of this Levanter, whose objective refers to {', '.join(refers_to)}")
    return eqx.filter_grad(obj_fn)(params)
