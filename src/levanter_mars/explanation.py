"""What an optimizer will do with a model, from shapes alone: nothing here allocates a weight or touches a device."""

from collections import defaultdict
from dataclasses import dataclass, field

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.tracker
from haliax.quantization import partition_for_grad_overwrite, quantize_linear_layers
from jaxtyping import PyTree
from levanter.main.train_lm import TrainLmConfig
from levanter.optim.config import OptimizerConfig
from levanter.tracker import NoopTracker
from levanter.trainer_state import cast_params_by_trainability, trainables_only

from levanter_mars.configs import MarsOptimizerConfig, Rule
from levanter_mars.parameters import Parameter, describe


@dataclass
class Explanation:
    rows: list[tuple[Parameter, Rule | None]]
    """Every trainable parameter and what it gets; None where the optimizer is not of this package."""
    parameter_count: int
    state_bytes: dict[str, int] = field(default_factory=dict)
    """The optimizer state's bytes by the name of its part (mu, nu, last_gradient, …)."""

    def table(self) -> str:
        header = ("parameter", "kind", "stack", "tensor", "rule", "learning rate", "weight decay")
        lines = [header, *(_cells(parameter, rule) for parameter, rule in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)

    def summary(self) -> str:
        total = sum(self.state_bytes.values())
        parts = [
            f"  {part:18} {size:>15,} bytes   {size / self.parameter_count:6.2f} a parameter" for part, size in self.state_bytes.items()
        ]
        return "\n".join(
            [
                f"{self.parameter_count:,} trainable parameters in {len(self.rows)} arrays",
                "optimizer state",
                *parts,
                f"  {'total':18} {total:>15,} bytes   {total / self.parameter_count:6.2f} a parameter",
            ]
        )


def explain(params: PyTree, optimizer: OptimizerConfig, num_train_steps: int) -> Explanation:
    """Explains `optimizer` on `params`, the trainable part of a model or its shapes.

    Raises:
        ValueError: if an optimizer of Levanter's own does not start from shapes alone.
    """
    parameters = jax.tree.leaves(describe(params))
    rules: list[Rule | None] = [None] * len(parameters)
    with levanter.tracker.current_tracker(NoopTracker()):
        if isinstance(optimizer, MarsOptimizerConfig):
            rules = jax.tree.leaves(optimizer.rules(params), is_leaf=lambda x: isinstance(x, Rule))
            state = eqx.filter_eval_shape(optimizer.build(num_train_steps).init, params)
        else:
            try:
                state = eqx.filter_eval_shape(optimizer.build(num_train_steps).init, params)
            except Exception as error:  # of somebody else's code, which may need a mesh, or not know the model
                name = optimizer.get_choice_name(type(optimizer))
                raise ValueError(
                    f"optimizer.type {name} does not start from shapes of this model: {type(error).__name__} {error}"
                ) from error
    count = sum(x.size for x in jax.tree.leaves(params))
    return Explanation(list(zip(parameters, rules, strict=True)), count, bytes_by_part(state, parameters))


def trainable_shapes(config: TrainLmConfig, vocab_size: int) -> PyTree:
    """The shapes of what `levanter.main.train_lm` would train, before it rounds the vocabulary to the mesh."""
    trainer = config.trainer

    def build(key):
        model = config.model.build(hax.Axis("vocab", vocab_size), key=key)
        return config.adapter.apply(model, key=key)

    model = eqx.filter_eval_shape(build, jax.ShapeDtypeStruct((2,), jnp.uint32))
    is_trainable = config.adapter.trainable_filter(model)

    def prepare(model):
        model = cast_params_by_trainability(model, trainer.mp, is_trainable)
        if trainer.quantization is not None:
            model = quantize_linear_layers(model, trainer.quantization)
        return partition_for_grad_overwrite(trainables_only(model, is_trainable))[1]

    return eqx.filter_eval_shape(prepare, model)


def bytes_by_part(state: PyTree, parameters: list[Parameter]) -> dict[str, int]:
    """The bytes of an optimizer's state, or of its shapes, by the name of its part (mu, nu, last_gradient, …), the largest first.

    A state's leaf that belongs to a parameter ends in that parameter's path; the key before it names the part.
    """
    paths = {parameter.path for parameter in parameters}
    parts: dict[str, int] = defaultdict(int)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, hax.NamedArray)):
        array = leaf.array if isinstance(leaf, hax.NamedArray) else leaf
        begin = next((i for i in range(1, len(keys)) if jax.tree_util.keystr(keys[i:], simple=True, separator=".") in paths), None)
        part = "counts and rates" if begin is None else jax.tree_util.keystr(keys[begin - 1 : begin], simple=True)
        parts[part] += array.size * array.dtype.itemsize
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def _cells(parameter: Parameter, rule: Rule | None) -> tuple[str, ...]:
    names = parameter.axis_names or tuple(f"axis {i}" for i in range(len(parameter.shape)))
    stack = " × ".join(f"{names[i]} {parameter.shape[i]}" for i in parameter.stack)
    tensor = " × ".join(map(str, parameter.tensor_shape))
    described = ("–", "–", "–") if rule is None else (rule.name, f"× {rule.learning_rate_factor:g}", f"{rule.weight_decay:g}")
    return (parameter.path, parameter.kind, stack or "–", tensor, *described)
