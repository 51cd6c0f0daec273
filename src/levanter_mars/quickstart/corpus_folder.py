"""A folder with a corpus as Levanter reads it: JSON lines, a byte-level BPE tokenizer, and a manifest that says what they are."""

import hashlib
import json
import platform
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from levanter_mars.quickstart.standard_library import Corpus, standard_library_corpus

END_OF_TEXT = "<|endoftext|>"
TRAIN = "train.jsonl"
VALIDATION = "validation.jsonl"
TOKENIZER = "tokenizer"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a corpus folder holds. Token counts are of the training documents, without the end-of-text tokens."""

    digest: str
    python: str
    vocab_size: int
    train_documents: int
    validation_documents: int
    train_tokens: int
    unigram_entropy: float
    """Entropy of single tokens in the training documents, in nats a token: the loss of the best model that sees no context."""


def ensure_corpus(folder: Path, vocab_size: int) -> Manifest:
    """Builds the standard-library corpus in `folder`, unless it is there already for this Python and vocabulary.

    The corpus is built beside `folder` and moved there when it is whole, so a killed build is never taken for a corpus.

    Raises:
        ValueError: `folder` exists and is no corpus, so that replacing it would destroy something else.
    """
    manifest = _read_manifest(folder)
    if manifest is None and folder.exists():
        raise ValueError(f"{folder} exists and holds no {MANIFEST}, so it is not a corpus made here: remove it or name another folder")
    if manifest is not None and (manifest.python, manifest.vocab_size) == (platform.python_version(), vocab_size):
        return manifest
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    manifest = write_corpus(unfinished, standard_library_corpus(), vocab_size)
    # Moved away before it is removed: what a killed removal left would be taken for something that is not ours.
    outdated = folder.with_name(folder.name + ".outdated")
    shutil.rmtree(outdated, ignore_errors=True)
    if folder.exists():
        folder.rename(outdated)
    unfinished.rename(folder)
    shutil.rmtree(outdated, ignore_errors=True)
    return manifest


def write_corpus(folder: Path, corpus: Corpus, vocab_size: int) -> Manifest:
    """Writes train.jsonl, validation.jsonl, tokenizer/ and the manifest into an existing `folder`."""
    for name, documents in ((TRAIN, corpus.train), (VALIDATION, corpus.validation)):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in documents.values()))
    tokenizer = train_tokenizer(corpus.train.values(), vocab_size)
    save_tokenizer(tokenizer, folder / TOKENIZER)
    counts = count_tokens(tokenizer, corpus.train)
    manifest = Manifest(
        digest=_digest(folder),
        python=platform.python_version(),
        vocab_size=vocab_size,
        train_documents=len(corpus.train),
        validation_documents=len(corpus.validation),
        train_tokens=sum(counts.values()),
        unigram_entropy=unigram_entropy(counts),
    )
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer, as GPT-2's: every text can be encoded, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Saves a folder that Levanter and transformers load as a tokenizer."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def count_tokens(tokenizer: Tokenizer, documents: Mapping[str, str]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for encoding in tokenizer.encode_batch(list(documents.values())):
        counts.update(encoding.ids)
    return counts


def unigram_entropy(counts: Mapping[int, int]) -> float:
    """−Σ p·ln p of the counted tokens' distribution, in nats a token."""
    p = np.array(list(counts.values()), dtype=np.float64)
    p /= p.sum()
    return float(-(p * np.log(p)).sum())


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_manifest(folder: Path) -> Manifest | None:
    path = folder / MANIFEST
    return Manifest(**json.loads(path.read_text())) if path.exists() else None
