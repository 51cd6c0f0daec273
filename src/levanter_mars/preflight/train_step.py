"""The train step that `levanter.main.train_lm` would run with a config, lowered from shapes for a mesh of given devices."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.tracker
import optax
import transformers
from haliax.partitioning import ResourceMapping, infer_resource_partitions, physical_axis_size, round_axis_for_partitioning
from haliax.util import is_named_array
from jaxtyping import PyTree
from levanter.compat.hf_checkpoints import RepoRef
from levanter.data.text.examples import GrugLmExample, named_lm_example_from_grug
from levanter.main.train_lm import TrainLmConfig
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.schedule import distinct_values
from levanter.tracker import NoopTracker
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import TrainerState
from levanter.utils.types import ComputeLossFunction

from levanter_mars.preflight.absent_devices import absent_devices, jax_settings

OPTIMIZER_SCOPE = "preflight_optimizer"
"""The named scope of everything that the optimizer's update computes. It is a part of `op_name` in the compiled program."""


@dataclass(frozen=True)
class LoweredStep:
    lowered: jax.stages.Lowered
    state: TrainerState
    """Shapes, each with its sharding."""
    example: LmExample
    """A batch, likewise."""
    trainer: TrainerConfig
    """With the defaults that Levanter sets once it knows the devices."""
    parameter_count: int
    batch_size: int
    sequence_length: int
    vocab_size: int
    """Rounded up to the mesh, as train_lm rounds it."""
    notes: list[str]
    """Where what is lowered differs from the run's step, and why."""


def lower_train_step(config: TrainLmConfig, devices: Sequence[Any], vocab_size: int) -> LoweredStep:
    """Levanter's own jitted step of a `Trainer` built from `config`, donation and output shardings included.

    Raises:
        ValueError: what Levanter itself finds wrong with the config on so many devices.
    """
    config, notes = _as_train_lm_completes(config)
    # A copy: Levanter sets defaults in it and remembers the mesh.
    trainer_config = dataclasses.replace(config.trainer)
    noop = levanter.tracker.current_tracker(NoopTracker())
    with absent_devices(devices) as answers, jax_settings(trainer_config.jax_config), noop:
        trainer_config._validate_and_set_defaults()
        optimizer = _in_scope(config.optimizer.build(trainer_config.num_train_steps))

        def loss_function(model: LmHeadModel, example: LmExample, *, key=None) -> Any:
            return model.compute_next_token_loss(example, key=key, logsumexp_weight=config.z_loss_weight)

        with Trainer(trainer_config, optimizer, cast(ComputeLossFunction, loss_function), add_default_hooks=False) as trainer:
            vocab = round_axis_for_partitioning(hax.Axis("vocab", vocab_size), trainer.parameter_axis_mapping)
            batch_size = max(distinct_values(trainer_config.train_batch_size))
            state = _with_shardings(_state_shapes(config, trainer, vocab), trainer.parameter_axis_mapping)
            example = _with_shardings(_example_shapes(config, trainer, batch_size), trainer.compute_axis_mapping)
            step: Any = trainer._jit_train_step_fn_no_hook
            lowered = step.lower(state, (example,), {})
    return LoweredStep(
        lowered=lowered,
        state=state,
        example=example,
        trainer=trainer_config,
        parameter_count=sum(x.size for x in jax.tree.leaves(state.trainable_model)),
        batch_size=batch_size,
        sequence_length=_position_axis(config).size,
        vocab_size=vocab.size,
        notes=notes + answers,
    )


def parallelisms(config: TrainLmConfig, devices: Sequence[Any]) -> list[int]:
    """Every `per_device_parallelism` by which the config's batch can be processed on so many devices, the smallest first."""
    trainer = dataclasses.replace(config.trainer)
    with absent_devices(devices):
        trainer._validate_and_set_defaults()
        per_device = math.gcd(*distinct_values(trainer.train_batch_size)) // trainer.data_axis_size
    return [n for n in range(1, per_device + 1) if per_device % n == 0]


def _as_train_lm_completes(config: TrainLmConfig) -> tuple[TrainLmConfig, list[str]]:
    """The config with the model that train_lm would train, after the checks that train_lm makes itself; and what is not as in the run."""
    sources = {
        "initialize_from_hf": config.initialize_from_hf,
        "initialize_from_checkpoint_path": config.initialize_from_checkpoint_path,
        "initialize_model_from_checkpoint_path": config.initialize_model_from_checkpoint_path,
    }
    given = [name for name, source in sources.items() if source]
    if config.trainer.initialize_from is not None and (
        config.initialize_from_hf or config.initialize_model_from_checkpoint_path is not None
    ):
        given.append("trainer.initialize_from")
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} say where the weights come from; only one may")
    notes = []
    if config.initialize_from_hf and config.use_hf_model_config:
        config = dataclasses.replace(config, model=_hub_model(config))
    elif given:
        notes.append(f"the model is the one that the config's model block describes; the weights that {given[0]} names are not read")
    length = _position_axis(config).size
    if not 0 < length <= config.model.max_seq_len:
        raise ValueError(f"train_seq_len is {length}; it must be from 1 to the model's max_seq_len, {config.model.max_seq_len}")
    return config, notes


def _hub_model(config: TrainLmConfig) -> Any:
    """The model that a checkpoint in the hub's format says it is."""
    model: Any = config.model
    name = config.initialize_from_hf
    try:
        checkpoint = RepoRef.from_string(str(model.hf_checkpoint_converter().reference_checkpoint if name is True else name))
        # Not by the converter, which wants the tokenizer, too.
        return model.from_hf_config(transformers.AutoConfig.from_pretrained(checkpoint.model_name_or_path, revision=checkpoint.revision))
    except Exception as error:  # the hub's client, its parser and the model each have their own
        named = "the model's default checkpoint" if name is True else name
        raise ValueError(f"use_hf_model_config wants the config of {named}, which cannot be read: {error}") from error


def _state_shapes(config: TrainLmConfig, trainer: Trainer, vocab: hax.Axis) -> TrainerState:
    def init(key):
        model = config.adapter.apply(config.model.build(vocab, key=key), key=key)
        return TrainerState.init(
            trainer.optimizer,
            model,
            key=key,
            is_trainable=config.adapter.trainable_filter(model),
            mp=trainer.mp,
            quantization=trainer.config.quantization,
            model_averaging=trainer.config.model_averaging,
        )

    return eqx.filter_eval_shape(init, jax.ShapeDtypeStruct((2,), jnp.uint32))


def _example_shapes(config: TrainLmConfig, trainer: Trainer, batch_size: int) -> LmExample:
    """A batch as Levanter's data loader makes one, with a tokenizer that has an end-of-text token, by which attention can tell
    documents apart."""
    Pos = _position_axis(config)

    def example():
        tokens = jnp.zeros(Pos.size, jnp.int32)
        one = GrugLmExample.causal(tokens, eos_id=0, block_cross_document_attention=config.data.block_cross_document_attention)
        return named_lm_example_from_grug(one, Pos)

    Batch = hax.Axis(trainer.config.batch_axis_name or "batch", batch_size)

    def batched(leaf) -> Any:
        if is_named_array(leaf):
            return hax.NamedArray(batched(leaf.array), (Batch, *leaf.axes))
        return jax.ShapeDtypeStruct((batch_size, *leaf.shape), leaf.dtype)

    return jax.tree.map(batched, eqx.filter_eval_shape(example), is_leaf=is_named_array)


def _position_axis(config: TrainLmConfig) -> hax.Axis:
    length = config.model.max_seq_len if config.train_seq_len is None else config.train_seq_len
    return config.model.max_Pos.resize(length)


def _with_shardings(shapes: PyTree, mapping: ResourceMapping) -> PyTree:
    def attach(leaf, sharding) -> Any:
        if is_named_array(leaf):
            for axis in leaf.axes:
                _check_divides(axis, mapping)
            return hax.NamedArray(attach(leaf.array, sharding), leaf.axes)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return leaf

    return jax.tree.map(attach, shapes, infer_resource_partitions(shapes, mapping), is_leaf=is_named_array)


def _check_divides(axis: hax.Axis, mapping: ResourceMapping) -> None:
    devices = physical_axis_size(axis, mapping)
    if devices and axis.size % devices:
        raise ValueError(
            f"trainer.mesh maps the axis {axis.name}, of size {axis.size}, to {mapping[axis.name]}, which is {devices} devices: "
            f"the size must be a multiple of {devices}"
        )


def _in_scope(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    return optimizer._replace(update=jax.named_scope(OPTIMIZER_SCOPE)(optimizer.update))
