"""Runs of stock Levanter, `python -m levanter.main.train_lm`, in processes of their own on a corpus and a tokenizer made here."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

STEPS = 20
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "owls", "watch"]


def write_workspace(folder: Path) -> None:
    """Writes corpus.jsonl and a byte-level BPE tokenizer of 300 tokens, as a Hugging Face tokenizer folder."""
    texts = [" ".join(WORDS[(i * j + j * j) % len(WORDS)] for j in range(1, 120)) for i in range(40)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet))
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))


def pad_tokenizer(folder: Path, size: int) -> None:
    """Writes `padded` beside `tokenizer`: the same with tokens that no text has, so many that there are `size`."""
    from transformers import AutoTokenizer  # not above: importing it takes seconds

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.add_tokens([f"<|padding_{i}|>" for i in range(size - len(tokenizer))])
    tokenizer.save_pretrained(folder / "padded")


def config(optimizer: dict) -> dict:
    """A GPT-2 of two layers. All sizes divide by 8, so that 8 devices can share them."""
    return {
        "data": {
            "tokenizer": "tokenizer",
            "cache_dir": "cache",
            "shuffle": False,
            "components": {"corpus": {"source": {"type": "url", "train_urls": ["corpus.jsonl"]}}},
        },
        "model": {
            "type": "gpt2",
            "hidden_dim": 32,
            "num_heads": 2,
            "num_layers": 2,
            "max_seq_len": 32,
            "gradient_checkpointing": False,
            "tokenizer": "tokenizer",
        },
        "trainer": {
            "seed": 0,
            "num_train_steps": STEPS,
            "train_batch_size": 16,
            "require_accelerator": False,
            "log_jaxprs": False,
            "log_xla_hlo": False,
            "tracker": {"type": "json_logger"},
            "checkpointer": {"base_path": "checkpoints", "save_interval": "1h"},
            "mp": "f32",
            "watch": {"watch_targets": []},
        },
        "optimizer": optimizer,
    }


def start(
    folder: Path,
    config: dict,
    *arguments: str,
    devices: int = 1,
    name: str = "run",
    module: str = "levanter.main.train_lm",
    program: str | None = None,
) -> subprocess.Popen:
    """Starts train_lm (or another module, or a Python program that does) in `folder` with so many CPU devices; it writes NAME.out and
    NAME.err."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.err").open("w") as err:
        return subprocess.Popen(
            [sys.executable, *(["-c", program] if program else ["-m", module]), "--config", f"{name}.yaml", *arguments],
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=err,
        )


def finish(*processes: subprocess.Popen, timeout: float = 900) -> list[int]:
    """Waits for the processes and returns their exit codes; none outlives the call."""
    try:
        return [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()


def metrics(folder: Path, name: str = "run") -> list[dict]:
    """What the tracker logged at each step, in order."""
    by_step: dict[int, dict] = {}
    for line in ((folder / f"{name}.out").read_text() + (folder / f"{name}.err").read_text()).splitlines():
        start = line.find('{"tracker": "json_logger", "event": "log"')
        if start >= 0:
            record = json.loads(line[start:])
            if record["step"] is None:  # logged from inside the compiled step, as Levanter's skip_bad_steps does
                continue
            by_step.setdefault(record["step"], {}).update(record["metrics"])
    return [by_step[step] for step in sorted(by_step) if "train/loss" in by_step[step]]


def losses(folder: Path, name: str = "run") -> list[float]:
    """The training loss of every step, in order."""
    return [step["train/loss"] for step in metrics(folder, name)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
