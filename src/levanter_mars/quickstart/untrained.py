"""The held-out loss of the model that a run starts from."""

import haliax as hax
import jax
import jax.numpy as jnp
import levanter.eval
import levanter.tracker
from haliax.partitioning import named_jit, round_axis_for_partitioning
from levanter.main.train_lm import TrainLmConfig
from levanter.tracker import NoopTracker
from levanter.utils.tree_utils import inference_mode


def untrained_loss(config: TrainLmConfig) -> float:
    """Builds the weights that `levanter.main.train_lm` starts from, by the same seed, and evaluates them as it does.

    Returns:
        The mean loss of the held-out set, in nats a token.
    """
    trainer = config.trainer
    Pos = config.model.max_Pos
    # What Levanter's trainer takes for evaluation when the config does not say.
    EvalBatch = trainer.TrainBatch
    _, _, model_key, _ = jax.random.split(jax.random.PRNGKey(trainer.seed), 4)

    def loss(model, batch):
        model = trainer.mp.cast_to_compute(inference_mode(model, True))
        losses = model.compute_next_token_loss(batch, reduction=None, reduction_axis=()).array
        return losses, batch.loss_weight.array, jnp.roll(batch.tokens.array, -1, axis=-1)

    with trainer.use_device_mesh(), hax.axis_mapping(trainer.parameter_axis_mapping), levanter.tracker.current_tracker(NoopTracker()):
        Vocab = round_axis_for_partitioning(hax.Axis("vocab", len(config.data.the_tokenizer)), trainer.parameter_axis_mapping)
        model = named_jit(config.model.build, trainer.parameter_axis_mapping)(Vocab, key=model_key)
        evaluator = levanter.eval.TaggedEvaluator(
            EvalBatch=EvalBatch,
            tagged_eval_sets=config.data.tagged_eval_sets(Pos),
            loss_fn=loss,
            device_mesh=trainer.device_mesh,
            axis_mapping=trainer.compute_axis_mapping,
            max_examples_per_dataset=None if trainer.max_eval_batches is None else trainer.max_eval_batches * EvalBatch.size,
        )
        return float(evaluator.evaluate(model).micro_avg_loss)
