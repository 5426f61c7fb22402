"""Text tokenizers by name, for the command line and for worker processes."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharmill.errors import ConfigError

Tokenizer = Callable[[str], Sequence[int]]
# One for all text, or one for each language.
Tokenizers = Tokenizer | Mapping[str, Tokenizer]

KINDS = "'bytes', 'chars', a tokenizer.json, a SentencePiece .model, or module:callable"


def load_tokenizers(names: Sequence[str]) -> Tokenizers:
    """Load one tokenizer, or one for each language where the names are ``LANGUAGE=NAME``.

    Raises:
        ConfigError: see ``load_tokenizer``; or there are several names without their languages.
    """
    if len(names) == 1 and not _language(names[0]):
        return load_tokenizer(names[0])
    by_language = {_language(name): load_tokenizer(name.partition("=")[2]) for name in names if _language(name)}
    if len(by_language) != len(names):
        raise ConfigError(
            f"several tokenizers are given as LANGUAGE=NAME, each language once, not {' '.join(names)}",
            code="bad_tokenizer",
        )
    return by_language


def load_tokenizer(name: str) -> Tokenizer:
    """Load a function from text to token ids, without ids for begin or end.

    Args:
        name: ``bytes`` (UTF-8), ``chars`` (Unicode code points), the path of a ``tokenizer.json`` (needs tokenizers) or
            of a SentencePiece ``.model`` (needs sentencepiece), or ``module:callable``, where the module is looked for
            in the current folder too.

    Raises:
        ConfigError: there is no such tokenizer, or it cannot be loaded.
    """
    if name == "bytes":
        return _bytes
    if name == "chars":
        return _chars
    path = Path(name)
    if path.suffix in (".json", ".model"):
        if not path.is_file():
            raise ConfigError(f"there is no tokenizer {name}", code="bad_tokenizer")
        return _from_json(path) if path.suffix == ".json" else _from_sentencepiece(path)
    if ":" in name:
        return load_callable(name, "tokenizer")
    raise ConfigError(f"there is no tokenizer {name!r}; it is {KINDS}", code="bad_tokenizer")


def load_callable(name: str, what: str) -> Callable[..., Any]:
    """Load what ``module:attribute`` names; ``what`` it is for stands in the message of an error.

    Raises:
        ConfigError: there is no such module or attribute, or it is nothing to call.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"the {what} {name!r} is not of the form module:callable", code="bad_callable")
    if "" not in sys.path:
        # A script that was installed does not look where the user stands; ``python -m`` does.
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load the {what} {name!r}: {error}", code="bad_callable") from error
    if not callable(found):
        raise ConfigError(f"the {what} {name!r} is {type(found).__name__}, which cannot be called", code="bad_callable")
    return found


def tokenize(tokenizers: Tokenizers, text: str, language: str | None, cut_id: str) -> list[int]:
    """Return the token ids of a text in its language.

    Raises:
        ConfigError: see ``choose_tokenizer``; or what the tokenizer gives are no ids.
    """
    found: Any = choose_tokenizer(tokenizers, language, cut_id)(text)
    try:
        # Called by themselves, the tokenizers of transformers give a mapping, whose keys are no ids.
        return [operator.index(token) for token in found]
    except TypeError:
        raise ConfigError(
            f"the tokenizer gave {type(found).__name__} for the text of cut {cut_id!r}: it must be a function from "
            "text to a list of ids, such as the encode of a tokenizer of transformers",
            code="bad_tokenizer",
        ) from None


def check_tokenizers(tokenizers: Tokenizers) -> None:
    """Raise ConfigError where these are no functions."""
    for one in tokenizers.values() if isinstance(tokenizers, Mapping) else [tokenizers]:
        if not callable(one):
            raise ConfigError(
                f"the tokenizer is {one!r}, which cannot be called: use load_tokenizer, or its encode",
                code="bad_tokenizer",
            )


def choose_tokenizer(tokenizers: Tokenizers, language: str | None, cut_id: str) -> Tokenizer:
    """Return the tokenizer of the language.

    Raises:
        ConfigError: there are tokenizers by language, and none for this one.
    """
    if not isinstance(tokenizers, Mapping):
        return tokenizers
    if language is None or language not in tokenizers:
        have = ", ".join(tokenizers)
        raise ConfigError(
            f"there is no tokenizer for the language {language!r} of cut {cut_id!r}; there is {have}",
            code="bad_tokenizer",
        )
    return tokenizers[language]


def _language(name: str) -> str:
    language, equals, _ = name.partition("=")
    return language if equals and language.replace("-", "").replace("_", "").isalnum() else ""


def _bytes(text: str) -> list[int]:
    return list(text.encode())


def _chars(text: str) -> list[int]:
    return [ord(character) for character in text]


def _from_json(path: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package tokenizers: pip install tokenizers", code="missing_package"
        ) from error
    try:
        tokenizer = Loaded.from_file(str(path))
    except Exception as error:
        raise ConfigError(f"{path} is not a tokenizer: {error}", code="bad_tokenizer") from error
    return _JsonTokenizer(tokenizer)


def _from_sentencepiece(path: Path) -> Tokenizer:
    try:
        import sentencepiece
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package sentencepiece: pip install sentencepiece", code="missing_package"
        ) from error
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"{path} is not a SentencePiece model: {error}", code="bad_tokenizer") from error
    return _SentencePiece(processor)


# Classes rather than lambdas, which do not reach worker processes that are not forked.


@dataclass(frozen=True)
class _JsonTokenizer:
    tokenizer: Any

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@dataclass(frozen=True)
class _SentencePiece:
    processor: Any

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self.processor.encode(text)
        return ids
