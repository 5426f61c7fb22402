"""Tokenizers by name."""

from __future__ import annotations

import pickle
import sys

import pytest
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.training.tokenizers import load_tokenizer, load_tokenizers, tokenize


def test_those_built_in():
    assert load_tokenizer("bytes")("aé") == [97, 195, 169]
    assert load_tokenizer("chars")("aé") == [97, 233]


def test_a_tokenizer_json(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({"good": 3, "day": 4, "[CLS]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 0)])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    loaded = load_tokenizer(str(path))
    assert loaded("good good day sir") == [3, 3, 4, 1]
    assert pickle.loads(pickle.dumps(loaded))("day") == [4]


def test_a_sentencepiece_model(tmp_path):
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("good day sir\nthe day is good\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "small"), vocab_size=16, minloglevel=2
    )
    loaded = load_tokenizer(str(tmp_path / "small.model"))
    ids = loaded("good day")
    assert pickle.loads(pickle.dumps(loaded))("good day") == ids
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "small.model"))
    assert len(ids) > 1
    assert processor.decode(ids) == "good day"


def test_a_function_of_a_module_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "mine_for_tests.py").write_text("def words(text):\n    return [len(w) for w in text.split()]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load_tokenizer("mine_for_tests:words")("good day") == [4, 3]


def test_each_language_has_its_own():
    both = load_tokenizers(["en=bytes", "de-at=chars"])
    assert tokenize(both, "é", "en", "c") == [195, 169]
    assert tokenize(both, "é", "de-at", "c") == [233]
    with raises(ConfigError, "bad_tokenizer", "None", "'c'", "en, de-at"):
        tokenize(both, "é", None, "c")
    with raises(ConfigError, "bad_tokenizer"):
        load_tokenizers(["en=bytes", "en=chars"])
    with raises(ConfigError, "bad_tokenizer", "LANGUAGE=NAME"):
        load_tokenizers(["bytes", "chars"])


@pytest.mark.parametrize(
    ("name", "code", "what"),
    [
        ("words", "bad_tokenizer", "it is 'bytes', 'chars', a tokenizer.json"),
        ("missing.json", "bad_tokenizer", "missing.json"),
        ("missing.model", "bad_tokenizer", "missing.model"),
        ("no_such_module:f", "bad_callable", "No module named"),
        ("json:f", "bad_callable", "module 'json' has no attribute 'f'"),
        ("json:__name__", "bad_callable", "str"),
        (":f", "bad_callable", "module:callable"),
    ],
)
def test_what_is_wrong_is_named(name, code, what):
    with raises(ConfigError, code, name, what):
        load_tokenizer(name)


@pytest.mark.parametrize("given", [{"input_ids": [1, 2]}, ["a", "b"], [0.5], 7])
def test_what_a_tokenizer_gives_must_be_ids(given):
    with raises(ConfigError, "bad_tokenizer", "'c'"):
        tokenize(lambda text: given, "good day", "en", "c")


@pytest.mark.parametrize("suffix", ["json", "model"])
def test_a_damaged_file_is_named(tmp_path, suffix):
    path = tmp_path / f"bad.{suffix}"
    path.write_text("{}")
    with raises(ConfigError, "bad_tokenizer", f"bad.{suffix}"):
        load_tokenizer(str(path))
