"""What a finished run shows: a few lines and a picture of its loss."""

from pathlib import Path

from matplotlib.figure import Figure

from levanter_mars.quickstart.training_log import TrainingLog


def report(log: TrainingLog, *, untrained: float, unigram_entropy: float, checkpoint: Path | str, curve: Path) -> str:
    """The closing lines of a run, in nats a token where they speak of loss."""
    last = max(log.held_out_loss)
    return "\n".join(
        [
            f"held-out loss before    {untrained:6.3f}   nats a token, the untrained model",
            f"held-out loss after     {log.held_out_loss[last]:6.3f}   after {last + 1} steps",
            f"unigram entropy         {unigram_entropy:6.3f}   the best loss without looking at context",
            f"speed                   {log.median_tokens_per_second:6,.0f}   tokens a second, the median step",
            f"training                {sum(log.step_seconds.values()) / 60:6.1f}   minutes, compilation included",
            f"checkpoint              {checkpoint}",
            f"loss curve              {curve}",
        ]
    )


def draw_loss_curve(log: TrainingLog, *, untrained: float, unigram_entropy: float, title: str, path: Path) -> None:
    """Draws training and held-out loss over steps, and the unigram entropy they must fall below."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    steps = sorted(log.train_loss)
    axes.plot(steps, [log.train_loss[step] for step in steps], color="tab:blue", alpha=0.45, linewidth=1, label="training, a batch")
    # What is logged at step i belongs to the model before its update if it is a training loss, after it if it is held-out.
    held_out = {0: untrained} | {step + 1: loss for step, loss in sorted(log.held_out_loss.items())}
    axes.plot(
        list(held_out), list(held_out.values()), color="tab:orange", marker="o", label=f"held-out, {held_out[max(held_out)]:.2f} at the end"
    )
    axes.axhline(unigram_entropy, color="gray", linestyle="--", label=f"unigram entropy, {unigram_entropy:.2f}")
    axes.set(xlabel="step", ylabel="loss, nats a token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
