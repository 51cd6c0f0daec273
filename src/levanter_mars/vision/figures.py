"""Pictures of a run: its curves, and what its model says of some test images."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from levanter_mars.vision.classification import Evaluation
from levanter_mars.vision.images import ImageSet

COLUMNS = 10
SAMPLE_ROWS = 3


def draw_curves(history: Mapping[str, Mapping[int, float]], *, title: str, path: Path) -> None:
    """Draws loss and accuracy over steps: of training batches, smoothed over a fiftieth of the run, and of the test images."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    for axes, metric in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        train, test = (dict(sorted(history[f"{split}/{metric}"].items())) for split in ("train", "eval"))
        values = np.array(list(train.values()))
        width = max(1, len(values) // 50)
        if len(values):
            means = np.convolve(values, np.ones(width) / width, mode="valid")
            axes.plot(list(train)[width - 1 :], means, color="tab:blue", alpha=0.7, label=f"training, mean of {width} batches")
        if test:
            # What is logged at step i belongs to the model before its update if it is a batch's, after it if it is the test's.
            steps = [step + 1 for step in test]
            last = list(test.values())[-1]
            axes.plot(steps, list(test.values()), color="tab:orange", marker=".", label=f"test, {last:.4f} at the end")
        axes.set(xlabel="step", ylabel="cross-entropy, nats" if metric == "loss" else metric)
        if metric == "loss" and len(values):
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def draw_predictions(test: ImageSet, evaluation: Evaluation, classes: Sequence[str], *, scale: float, path: Path) -> None:
    """Draws test images at equal distances, then the mistakes that the model is surest of; a title in red is a mistake.

    Args:
        scale: the largest value of a pixel.
    """
    sample = np.linspace(0, len(test) - 1, min(COLUMNS * SAMPLE_ROWS, len(test))).astype(int)
    wrong = np.flatnonzero(evaluation.predictions != evaluation.labels)
    sureness = evaluation.log_probabilities[wrong].max(axis=1)
    mistakes = wrong[np.argsort(-sureness, kind="stable")][:COLUMNS]
    shown = [*sample, *[None] * (-len(sample) % COLUMNS), *mistakes]
    rows = -(-len(shown) // COLUMNS)
    figure = Figure(figsize=(1.3 * COLUMNS, 1.65 * rows), layout="constrained")
    figure.suptitle(f"{len(sample)} of {len(test)} test images, then the {len(mistakes)} surest of {len(wrong)} mistakes")
    grid = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes in grid:
        axes.axis("off")
    for axes, index in zip(grid, shown, strict=False):
        if index is not None:
            _draw(axes, index, test, evaluation, classes, scale)
    figure.savefig(path, dpi=130)


def _draw(axes: Axes, index: int, test: ImageSet, evaluation: Evaluation, classes: Sequence[str], scale: float) -> None:
    image = test.images[index] / scale
    axes.imshow(image[..., 0] if image.shape[-1] == 1 else image, cmap="gray_r", vmin=0, vmax=1)
    predicted, label = int(evaluation.predictions[index]), int(evaluation.labels[index])
    probability = np.exp(evaluation.log_probabilities[index, predicted])
    right = predicted == label
    said = classes[predicted] if right else f"{classes[predicted]}, is {classes[label]}"
    axes.set_title(f"{said}\n{probability:.2f}", fontsize=8, color="black" if right else "tab:red")
