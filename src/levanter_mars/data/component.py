"""`type: bin`, a component of Levanter's `data` that reads token files. Importing this module registers it."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import jax
import numpy as np
from draccus.utils import ParsingError
from haliax import Axis
from jax.experimental.multihost_utils import process_allgather
from levanter.data.dataset import AsyncDataset
from levanter.data.text.datasets import CausalLmDataset, DatasetComponentBase, DirectDatasetComponent
from levanter.data.text.examples import GrugLmExample

from levanter_mars.data.token_files import Format, TokenFile, bad_token, first_bad_piece, open_token_files, pieces
from levanter_mars.data.windows import ConsecutiveWindows, RandomExamples, RandomWindows

Split = Literal["train", "validation"]


@DatasetComponentBase.register_subclass("bin")
@dataclass(frozen=True)
class TokenFilesComponent(DirectDatasetComponent):
    """Files of uint16 tokens as nanoGPT and modded-nanogpt write them.

    Nothing is opened before training asks for a split; then all of its files are checked first.

    Levanter shows a component like this neither the model nor the rest of `data`, so what it needs of them is stated here a second time.
    """

    # Levanter takes the datasets from here. In its own class it is a field, which no YAML could give.
    datasets: ClassVar[Mapping[str, AsyncDataset[GrugLmExample]]]

    train: list[str] = field(default_factory=list)
    """Paths, globs or fsspec URLs."""
    validation: list[str] = field(default_factory=list)
    format: Format = "nanogpt"
    """`nanogpt`: tokens and nothing else. `fineweb`: shards with a header of 256 int32."""
    seq_len: int = 1024
    """Tokens of a sequence: the model's max_seq_len, or train_seq_len. Levanter refuses another number at the first sequence it reads."""
    vocab_size: int = 50257
    """Every token must be below it: the tokenizer's size."""
    block_cross_document_attention: bool = field(kw_only=True)
    """Whether attention stays within documents. `data.block_cross_document_attention` is for components that Levanter tokenizes."""
    eos_id: int | None = None
    """The token at the ends (or begins) of documents, 50256 of GPT-2's. Needed where attention stays within documents."""
    check_tokens: bool = True
    """Read all files once before training, to find tokens that are not below vocab_size. The processes of a run share that work."""
    windows: Literal["consecutive", "random"] = "consecutive"
    """Of training. `consecutive`: in the order that data.shuffle makes. `random`: drawn with replacement, as the published scripts do."""

    def __post_init__(self):
        for name in ("seq_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ParsingError(f"{name} of a bin component is {getattr(self, name)}, but must be at least 1")
        if self.vocab_size > 1 << 16:
            raise ParsingError(f"vocab_size of a bin component is {self.vocab_size}, but its tokens are uint16: at most {1 << 16}")
        if not self.train and not self.validation:
            raise ParsingError("a bin component names no files: give train, validation or both")
        if self.eos_id is None and self.block_cross_document_attention:
            raise ParsingError("block_cross_document_attention of a bin component is true, for which it needs an eos_id, but has none")
        if self.eos_id is not None and not 0 <= self.eos_id < self.vocab_size:
            raise ParsingError(f"eos_id of a bin component is {self.eos_id}, but must be from 0 to below its vocab_size, {self.vocab_size}")

    @functools.cached_property
    def datasets(self) -> Mapping[str, AsyncDataset[GrugLmExample]]:  # pyrefly: ignore
        return _Splits(self)

    def open(self, split: Split) -> CausalLmDataset:
        """
        Raises:
            ValueError, FileNotFoundError: a file is bad or missing; the sentence has the file and the byte.
        """
        files = open_token_files(self.train if split == "train" else self.validation, self.format)
        Pos = Axis("position", self.seq_len)
        attention = {"eos_id": self.eos_id, "block_cross_document_attention": self.block_cross_document_attention}
        if split == "train" and self.windows == "random":
            examples = RandomExamples(RandomWindows(files, self.seq_len, seed=np.zeros(2, np.uint32)), Pos, **attention)
        else:
            examples = CausalLmDataset(ConsecutiveWindows(files, self.seq_len), Pos, **attention)
        if self.check_tokens:
            check_tokens(files, self.vocab_size)
        return examples


def check_tokens(files: Sequence[TokenFile], vocab_size: int) -> None:
    """Reads all tokens, each process of the run a share of them, with a progress bar. To be called in every process.

    Raises:
        ValueError: in every process, if a token is not below `vocab_size`. The sentence has the file and the byte.
    """
    none = len(pieces(files))
    bad = first_bad_piece(files, vocab_size, share=jax.process_index(), shares=jax.process_count())
    first = int(np.min(process_allgather(np.int32(none if bad is None else bad))))
    if first < none:
        raise bad_token(pieces(files)[first], vocab_size)


class _Splits(Mapping[str, AsyncDataset[GrugLmExample]]):
    """The splits of a component, each opened when it is first asked for."""

    def __init__(self, component: TokenFilesComponent):
        self.names: list[Split] = [name for name in ("train", "validation") if getattr(component, name)]
        self.open = functools.cache(component.open)

    def __getitem__(self, split: str) -> AsyncDataset[GrugLmExample]:
        if split not in self.names:
            raise KeyError(split)
        return self.open(split)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
