"""Text tokenizers by name, for the command line and for worker processes."""

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
# One for all text, or one for each language.
Tokenizers = Tokenizer | Mapping[str, Tokenizer]


def load_tokenizers(names: Sequence[str]) -> Tokenizers:
    """Load one tokenizer, or one for each language where the names are ``LANGUAGE=NAME``.

    Raises:
        ConfigError: see ``load_tokenizer``; or there are several names without their languages.
    """
    if len(names) == 1 and not _language(names[0]):
        return load_tokenizer(names[0])
    by_language = {_language(name): load_tokenizer(name.partition("=")[2]) for name in names if _language(name)}
    refuse(
        (len(by_language) != len(names),
         f"several tokenizers are given as LANGUAGE=NAME, each language once, not {' '.join(names)}"),
        code="bad_tokenizer",
    )  # fmt: skip
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
    if name in ("bytes", "chars"):
        return _encode_bytes if name == "bytes" else _encode_chars
    path = Path(name)
    in_file = path.suffix in (".json", ".model")
    if ":" in name and not in_file:
        return load_callable(name, "tokenizer")
    refuse(
        (not in_file,
         f"there is no tokenizer {name!r}; it is 'bytes', 'chars', a tokenizer.json, a SentencePiece .model, or "
         "module:callable"),
        (not path.is_file(), f"there is no tokenizer {name}"),
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
    """A tokenizer in the form that NeMo's prompt formats ask for, of a function from text to ids."""

    def __init__(self, tokenizer: Tokenizer, *, bos: int = 1, eos: int = 2) -> None:
        self.text_to_ids = tokenizer
        self.bos, self.eos = bos, eos

    def __call__(self, text: str, language: str | None = None) -> Sequence[int]:
        return self.text_to_ids(text)


def load_callable(name: str, what: str) -> Callable[..., Any]:
    """Load what ``module:attribute`` names; ``what`` it is for stands in the message of an error.

    Raises:
        ConfigError: there is no such module or attribute, or it is nothing to call.
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
    """Return the token ids of a text in its language, between the ids of its begin and end that are not None.

    Raises:
        ConfigError: there are tokenizers by language, and none for this one; or what the tokenizer gives are no ids.
    """
    if isinstance(tokenizers, Mapping):
        if language is None or language not in tokenizers:
            raise ConfigError(
                f"there is no tokenizer for the language {language!r} of cut {cut_id!r}; there is "
                f"{', '.join(tokenizers)}",
                code="bad_tokenizer",
            )
        tokenizers = tokenizers[language]
    found: Any = tokenizers(text)
    bos, eos = ([] if mark is None else [mark] for mark in marks)
    try:
        # Called by themselves, the tokenizers of transformers give a mapping, whose keys are no ids.
        return [*bos, *(operator.index(token) for token in found), *eos]
    except TypeError:
        raise ConfigError(
            f"the tokenizer gave {type(found).__name__} for the text of cut {cut_id!r}: it must be a function from "
            "text to a list of ids, such as the encode of a tokenizer of transformers",
            code="bad_tokenizer",
        ) from None


def check_tokenizers(tokenizers: Tokenizers) -> None:
    """Raise ConfigError unless these are functions."""
    listed = tokenizers.values() if isinstance(tokenizers, Mapping) else [tokenizers]
    refuse(
        *(
            (not callable(one),
             f"the tokenizer is {one!r}, which cannot be called: use load_tokenizer, or its encode")
            for one in listed
        ),
        code="bad_tokenizer",
    )  # fmt: skip


def _language(name: str) -> str:
    language, equals, _ = name.partition("=")
    return language if equals and language.replace("-", "").replace("_", "").isalnum() else ""


# Functions rather than lambdas, which do not reach worker processes that are not forked.


def _encode_bytes(text: str) -> list[int]:
    return list(text.encode())


def _encode_chars(text: str) -> list[int]:
    return [ord(character) for character in text]


def _encode_json(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
