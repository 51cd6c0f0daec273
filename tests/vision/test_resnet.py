"""The ResNet: its size, its logits beside a PyTorch ResNet-18's of the same weights, and its sizes on small images."""

import subprocess
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jrandom
import numpy as np
import pytest
from draccus.utils import ParsingError
from haliax import Axis
from levanter.utils.jax_utils import parameter_count
from torch_python import python_with_torch

from levanter_mars.vision.batch_norm import BatchNorm, measured, with_statistics
from levanter_mars.vision.resnet import ResNet, ResNetConfig

COLORS, CLASSES = Axis("color", 3), Axis("classes", 10)


def build(classes: int = 10) -> ResNet:
    return ResNetConfig().build(COLORS, Axis("classes", classes), key=jrandom.PRNGKey(0))


@pytest.mark.parametrize("classes, count", [(10, 11_173_962), (100, 11_220_132)])
def test_parameter_count(classes, count):
    assert parameter_count(eqx.filter_eval_shape(lambda: build(classes))) == count


def randomized(model: ResNet) -> ResNet:
    """With weights of batch normalizations that are neither 1 nor 0, so that each matters."""
    rng = np.random.default_rng(1)

    def shake(norm):
        if not isinstance(norm, BatchNorm):
            return norm
        draw = [hax.named(jnp.asarray(rng.normal(mean, 0.2, norm.Channels.size), jnp.float32), norm.Channels) for mean in (1, 0)]
        return eqx.tree_at(lambda n: (n.weight, n.bias), norm, draw)

    return jax.tree.map(shake, model, is_leaf=lambda x: isinstance(x, BatchNorm))


def state_dict(model: ResNet) -> dict[str, np.ndarray]:
    """The weights and population statistics under the names of torch_resnet.py."""
    found = {}

    def conv(name, layer):
        found[f"{name}.weight"] = layer.weight.rearrange(("channels", "in_channels", "height", "width")).array

    def norm(name, layer):
        values = (layer.weight, layer.bias, layer.statistics.mean, layer.statistics.variance)
        found.update({f"{name}.{key}": x.array for key, x in zip(("weight", "bias", "running_mean", "running_var"), values, strict=True)})

    conv("0", model.stem)
    norm("1", model.norm)
    for i, block in enumerate(model.blocks, start=3):
        conv(f"{i}.conv1", block.conv1)
        norm(f"{i}.bn1", block.norm1)
        conv(f"{i}.conv2", block.conv2)
        norm(f"{i}.bn2", block.norm2)
        if block.shortcut is not None:
            conv(f"{i}.shortcut.0", block.shortcut)
            norm(f"{i}.shortcut.1", block.shortcut_norm)
    head = {"13.weight": model.head.weight.rearrange(("classes", "channels")).array, "13.bias": model.head.bias.array}
    return {name: np.asarray(value) for name, value in (found | head).items()}


@pytest.mark.slow
def test_logits_are_those_of_a_pytorch_resnet(tmp_path):
    python = python_with_torch()
    images = {split: np.random.default_rng(i).normal(size=(8, 32, 32, 3)).astype(np.float32) for i, split in enumerate(("train", "test"))}
    named = {split: hax.named(jnp.asarray(x), ("batch", "height", "width", "color")) for split, x in images.items()}
    apply = eqx.filter_jit(lambda model, x: model(x))
    model = randomized(build())
    train_logits, used = apply(model, named["train"])
    evaluated = with_statistics(model, measured(used))
    test_logits, _ = apply(evaluated, named["test"])

    source, target = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, **state_dict(evaluated), **{f"images/{split}": x.transpose(0, 3, 1, 2) for split, x in images.items()})
    script = Path(__file__).parent / "torch_resnet.py"
    done = subprocess.run([python, str(script), str(source), str(target)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = np.load(target)
    assert expected["count"] == 11_173_962
    for split, logits in (("train", train_logits), ("test", test_logits)):
        ours = np.asarray(logits.rearrange(("batch", "classes")).array)
        assert np.ptp(ours, axis=0).min() > 0.1  # logits that images have a part in
        np.testing.assert_allclose(ours, expected[split], atol=1e-4, rtol=0)


def test_a_small_one_on_small_gray_images():
    images = hax.zeros(hax.make_axes(batch=3, height=8, width=8, color=1))

    def run():
        model = ResNetConfig(width=8, blocks=[1, 2]).build(Axis("color", 1), Axis("classes", 4), key=jrandom.PRNGKey(0))
        return model, *model(images)

    model, logits, used = eqx.filter_eval_shape(run)
    assert {axis.name: axis.size for axis in logits.axes} == {"batch": 3, "classes": 4}
    assert [s.mean.axes[0].size for s in measured(used)] == [8, 8, 8, 16, 16, 16, 16, 16]
    assert measured(model) == []


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"width": 0}, "model.width is 0; it must be at least 1"),
        ({"blocks": []}, "model.blocks is []; it must hold at least one number"),
        ({"batch_statistics": "local"}, "model.batch_statistics is 'local'; it must be global or per_device"),
        ({"batch_norm_epsilon": 0.0}, "model.batch_norm_epsilon is 0.0; it must be a finite number above 0"),
    ],
)
def test_values_out_of_range(fields, sentence):
    with pytest.raises(ParsingError, match=sentence.replace("[", r"\[").replace("]", r"\]")):
        ResNetConfig(**fields)
