"""Loading of text tokenizers by name, for the command line and for worker processes."""

import importlib
import operator
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sharmill.errors import ConfigError, refuse
from sharmill.registry import add_current_folder

Tokenizer = Callable[[str], Sequence[int]]
# A single tokenizer for all text, or one tokenizer per language.
Tokenizers = Tokenizer | Mapping[str, Tokenizer]


def load_tokenizers(names: Sequence[str]) -> Tokenizers:
    """Load one tokenizer, or one per language if the names have the form ``LANGUAGE=NAME``.

    Raises:
        ConfigError: a tokenizer cannot be loaded, or several names are given without languages.
    """
    if len(names) == 1 and not _language(names[0]):
        return load_tokenizer(names[0])
    by_language = {_language(name): load_tokenizer(name.partition("=")[2]) for name in names if _language(name)}
    refuse(
        (len(by_language) != len(names),
         f"several tokenizers must be given as LANGUAGE=NAME, with each language once, not as {' '.join(names)}"),
        code="bad_tokenizer",
    )  # fmt: skip
    return by_language


def load_tokenizer(name: str) -> Tokenizer:
    """Load a function that converts text to token ids, without the ids of BOS and EOS.

    Args:
        name: ``bytes`` (UTF-8), ``chars`` (Unicode code points), the path of a ``tokenizer.json`` (needs the package
            tokenizers) or of a SentencePiece ``.model`` (needs sentencepiece), or ``module:callable``. The module may
            also be in the current folder.

    Raises:
        ConfigError: the tokenizer does not exist or cannot be loaded.
    """
    if name in ("bytes", "chars"):
        return _encode_bytes if name == "bytes" else _encode_chars
    path = Path(name)
    in_file = path.suffix in (".json", ".model")
    if ":" in name and not in_file:
        return load_callable(name, "tokenizer")
    refuse(
        (not in_file,
         f"unknown tokenizer {name!r}: use 'bytes', 'chars', a tokenizer.json, a SentencePiece .model, or "
         "module:callable"),
        (not path.is_file(), f"the tokenizer file {name} does not exist"),
        code="bad_tokenizer",
    )  # fmt: skip
    package = "tokenizers" if path.suffix == ".json" else "sentencepiece"
    try:
        module = importlib.import_module(package)
        if path.suffix == ".json":
            return partial(_encode_json, module.Tokenizer.from_file(str(path)))
        return module.SentencePieceProcessor(model_file=str(path)).encode
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package {package}: pip install {package}", code="missing_package"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{path} is not a tokenizer of the package {package}: {error}", code="bad_tokenizer"
        ) from error


class PromptTokenizer:
    """A tokenizer for NeMo's prompt formats that calls a function from text to token ids."""

    def __init__(self, tokenizer: Tokenizer, *, bos: int = 1, eos: int = 2) -> None:
        self.text_to_ids = tokenizer
        self.bos, self.eos = bos, eos

    def __call__(self, text: str, language: str | None = None) -> Sequence[int]:
        return self.text_to_ids(text)


def load_callable(name: str, what: str) -> Callable[..., Any]:
    """Load the callable that ``name`` specifies as ``module:attribute``.

    Args:
        what: purpose of the callable, for error messages.

    Raises:
        ConfigError: the module or attribute does not exist, or it is not callable.
    """
    add_current_folder()
    try:
        found: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot load the {what} {name!r} as module:callable: {error}", code="bad_callable"
        ) from error
    no_function = f"the {what} {name!r} is {type(found).__name__}, which cannot be called"
    refuse((not callable(found), no_function), code="bad_callable")
    return found


def tokenize(
    tokenizers: Tokenizers,
    text: str,
    language: str | None,
    cut_id: str,
    marks: tuple[int | None, int | None] = (None, None),
) -> list[int]:
    """Return the token ids of a text, between the ids of BOS and EOS.

    Args:
        tokenizers: one tokenizer, or one per language.
        language: language of the text; selects the tokenizer.
        cut_id: id of the text's cut, for error messages.
        marks: ids of BOS and EOS; None adds no id.

    Raises:
        ConfigError: there is no tokenizer for the language, or the tokenizer returns something other than ids.
    """
    if isinstance(tokenizers, Mapping):
        if language is None or language not in tokenizers:
            raise ConfigError(
                f"there is no tokenizer for the language {language!r} of cut {cut_id!r}: add one (only "
                f"{', '.join(tokenizers)} have one)",
                code="bad_tokenizer",
            )
        tokenizers = tokenizers[language]
    found: Any = tokenizers(text)
    bos, eos = ([] if mark is None else [mark] for mark in marks)
    try:
        # Tokenizers of transformers return a mapping when called, and iterating over it yields keys instead of ids.
        return [*bos, *(operator.index(token) for token in found), *eos]
    except TypeError:
        raise ConfigError(
            f"the tokenizer returned {type(found).__name__} for the text of cut {cut_id!r}: it must be a function from "
            "text to a list of ids, such as the encode method of a tokenizer of transformers",
            code="bad_tokenizer",
        ) from None


def check_tokenizers(tokenizers: Tokenizers) -> None:
    """Raise ConfigError unless all tokenizers are callable."""
    listed = tokenizers.values() if isinstance(tokenizers, Mapping) else [tokenizers]
    refuse(
        *(
            (not callable(one),
             f"the tokenizer is {one!r}, which cannot be called: use load_tokenizer, or its encode method")
            for one in listed
        ),
        code="bad_tokenizer",
    )  # fmt: skip


def _language(name: str) -> str:
    language, equals, _ = name.partition("=")
    return language if equals and language.replace("-", "").replace("_", "").isalnum() else ""


# The tokenizers below are functions, because lambdas cannot be pickled for spawned workers.


def _encode_bytes(text: str) -> list[int]:
    return list(text.encode())


def _encode_chars(text: str) -> list[int]:
    return [ord(character) for character in text]


def _encode_json(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
