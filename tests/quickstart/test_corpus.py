import json
import math

import pytest
from levanter.tokenizers import load_tokenizer
from tokenizers import Tokenizer

from levanter_mars.quickstart.corpus_folder import (
    END_OF_TEXT,
    MANIFEST,
    TRAIN,
    ensure_corpus,
    save_tokenizer,
    train_tokenizer,
    unigram_entropy,
    write_corpus,
)
from levanter_mars.quickstart.standard_library import Corpus, split, standard_library_corpus

SMALL = Corpus(train={"a": "the owl watches the fox", "b": "the fox sleeps"}, validation={"c": "an owl"})


def test_the_corpus_is_the_same_every_time_and_the_held_out_set_is_apart():
    first, second = standard_library_corpus(), standard_library_corpus()
    assert first == second
    assert list(first.train) == sorted(first.train)
    assert not first.train.keys() & first.validation.keys()
    assert not set(first.train.values()) & set(first.validation.values())
    assert 3e6 < sum(map(len, first.train.values())) < 2e7
    assert 0.02 < len(first.validation) / (len(first.train) + len(first.validation)) < 0.12


def test_what_is_held_out_depends_on_the_name_alone():
    documents = {f"modules/{i}.py": str(i) for i in range(200)}
    few = dict(list(documents.items())[:50])
    assert split(few).validation == {name: text for name, text in split(documents).validation.items() if name in few}


def test_tokenizer_round_trip_and_levanter_loads_it(tmp_path):
    tokenizer = train_tokenizer(SMALL.train.values(), vocab_size=300)
    text = "the fox\n\tñ 漢 \x00 sleeps"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    loaded = load_tokenizer(str(tmp_path / "tokenizer"))
    assert len(loaded) == tokenizer.get_vocab_size()
    assert loaded.eos_token_id == Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json")).token_to_id(END_OF_TEXT)
    assert loaded.decode(loaded.encode(text, add_special_tokens=False)) == text


def test_unigram_entropy_by_hand():
    assert unigram_entropy({0: 2, 1: 1, 2: 1}) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    assert unigram_entropy({7: 5}) == 0


def test_a_written_corpus(tmp_path):
    manifest = write_corpus(tmp_path, SMALL, vocab_size=300)
    texts = [json.loads(line)["text"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert texts == list(SMALL.train.values())
    assert (manifest.train_documents, manifest.validation_documents) == (2, 1)
    other = tmp_path / "other"
    other.mkdir()
    assert write_corpus(other, SMALL._replace(validation={"c": "a fox"}), vocab_size=300).digest != manifest.digest


def test_a_half_written_or_outdated_corpus_is_made_anew(tmp_path):
    folder = tmp_path / "corpus"
    unfinished = tmp_path / "corpus.unfinished"
    unfinished.mkdir()
    (unfinished / TRAIN).write_text('{"text": "cut sho')
    manifest = ensure_corpus(folder, vocab_size=300)
    assert not unfinished.exists()
    assert json.loads((folder / TRAIN).read_text().splitlines()[0])["text"] != "cut sho"
    assert ensure_corpus(folder, vocab_size=300) == manifest
    # One of another Python is replaced, and what was made from it goes with it.
    stale = json.loads((folder / MANIFEST).read_text()) | {"python": "3.0"}
    (folder / MANIFEST).write_text(json.dumps(stale))
    (folder / "cache").mkdir()
    assert ensure_corpus(folder, vocab_size=300) == manifest
    assert not (folder / "cache").exists()


def test_a_folder_that_is_no_corpus_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("four years")
    with pytest.raises(ValueError, match="holds no manifest.json, so it is not a corpus made here"):
        ensure_corpus(tmp_path, vocab_size=300)
    assert (tmp_path / "thesis.txt").read_text() == "four years"
