"""Small Levanter models, with sizes that all differ so that no axis can be taken for another."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jrandom
import numpy as np
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from levanter.models.mixtral import MixtralConfig
from levanter.models.qwen3_moe import Qwen3MoeConfig

GPT2 = Gpt2Config(num_layers=3, hidden_dim=8, num_heads=2, max_seq_len=16, gradient_checkpointing=False)
LLAMA = LlamaConfig(
    num_layers=3,
    hidden_dim=8,
    num_heads=4,
    num_kv_heads=2,
    intermediate_dim=20,
    max_seq_len=16,
    tie_word_embeddings=False,
    gradient_checkpointing=False,
)
MIXTRAL = MixtralConfig(
    num_layers=2, hidden_dim=8, num_heads=4, num_kv_heads=2, intermediate_dim=20, max_seq_len=16, n_routed_experts=5, num_experts_per_tok=2
)
QWEN3_MOE = Qwen3MoeConfig(
    num_layers=2,
    hidden_dim=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_dim=20,
    moe_intermediate_dim=12,
    num_experts=5,
    num_experts_per_tok=2,
    max_seq_len=16,
)


def shapes(config: LmConfig, vocab: int = 11) -> eqx.Module:
    """The model with ShapeDtypeStructs for weights; `gaussian_like` fills it faster than its own initializers compile."""
    return eqx.filter_eval_shape(config.build, hax.Axis("vocab", vocab), key=jrandom.PRNGKey(0))


def gaussian_like(tree, *, seed: int, scale: float = 1.0):
    """A tree of normal arrays of standard deviation `scale`, as a stand-in for weights and gradients."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(scale * rng.standard_normal(x.shape), x.dtype), tree)


def weights_like(model_shapes, *, seed: int):
    """A model of real, random weights from one of shapes; what is no array stays."""
    arrays, rest = eqx.partition(model_shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return eqx.combine(gaussian_like(arrays, seed=seed), rest)
