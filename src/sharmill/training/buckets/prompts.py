"""Tokenizers in the form that NeMo's prompt formats ask for, and the tokens of speech under one example prompt."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, Final

from nemo.collections.common.tokenizers.aggregate_tokenizer import AggregateTokenizer
from nemo.collections.common.tokenizers.canary_tokenizer import (
    CANARY_SPECIAL_TOKENIZER,
    CanaryBPETokenizer,
    CanaryTokenizer,
)
from nemo.collections.common.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

from sharmill.errors import ConfigError
from sharmill.training.nemo.setting_values import resolve_format
from sharmill.training.tokenizers import PromptTokenizer, Tokenizer, load_tokenizers, tokenize

_CANARY: Final = "canary"


def load_nemo_tokenizer(names: Sequence[str], prompt_format: str | None) -> Any:
    """Load what ``load_tokenizers`` does as a tokenizer of NeMo.

    Several languages make an AggregateTokenizer; with ``spl_tokens`` among them, a CanaryTokenizer.

    Raises:
        ConfigError: see ``load_tokenizers``; or Canary's special tokens are missing.
    """
    loaded = load_tokenizers(names)
    canary = prompt_format is not None and prompt_format.startswith(_CANARY)
    if not isinstance(loaded, Mapping):
        (name,) = names
        if name.endswith(".model"):
            return (CanaryBPETokenizer if canary else SentencePieceTokenizer)(name)
        if canary:
            raise _no_special_tokens(str(prompt_format))
        return PromptTokenizer(loaded)
    paths = dict(name.split("=", 1) for name in names)
    if canary and CANARY_SPECIAL_TOKENIZER not in paths:
        raise _no_special_tokens(str(prompt_format))
    if not all(path.endswith(".model") for path in paths.values()):
        if canary:
            raise ConfigError(f"{prompt_format} needs SentencePiece .model files", code="bad_tokenizer")
        return _ByLanguage(loaded)
    aggregate = CanaryTokenizer if CANARY_SPECIAL_TOKENIZER in paths else AggregateTokenizer
    return aggregate({language: SentencePieceTokenizer(path) for language, path in paths.items()})


def _no_special_tokens(prompt_format: str) -> ConfigError:
    return ConfigError(
        f"{prompt_format} has special tokens: give --tokenizer {CANARY_SPECIAL_TOKENIZER}=tokenizer.model beside those "
        "of the languages, or one SentencePiece .model that has all of them",
        code="bad_tokenizer",
    )


class _ByLanguage(AggregateTokenizer):
    """Tokenizers of any kind by language, which NeMo asks as it asks an aggregate."""

    def __init__(self, tokenizers: Mapping[str, Tokenizer]) -> None:
        self._by_language = tokenizers

    def text_to_ids(self, text: str, lang_id: str) -> list[int]:
        return tokenize(self._by_language, text, lang_id, "?")


class ExamplePrompt:
    """One prompt for all speech: the turns before the answer, which is the text of a cut.

    Args:
        prompt_format: a name of NeMo's ``PromptFormatter``.
        text: the turns as a list, ``[{'role': 'user', 'slots': {...}}]``.
        tokenizer: of ``load_nemo_tokenizer``.

    Raises:
        ConfigError: there is no such format, or it cannot be filled in with these turns.
    """

    def __init__(self, prompt_format: str, text: str, tokenizer: Any) -> None:
        self._formatter = resolve_format(prompt_format, "--prompt-format")(tokenizer)
        self._turns = self._parse(text, prompt_format)
        slots = [turn["slots"] for turn in self._turns]
        self._language = next((one["target_lang"] for one in slots if "target_lang" in one), None)

    def _parse(self, text: str, prompt_format: str) -> list[dict[str, Any]]:
        try:
            turns = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            turns = None
        if not isinstance(turns, list) or not all(
            isinstance(turn, dict) and isinstance(turn.get("slots"), dict) for turn in turns
        ):
            raise ConfigError(
                f"--prompt is {text!r}; it is a list of turns: [{{'role': 'user', 'slots': {{...}}}}]",
                code="bad_config_value",
            )
        roles = self._formatter.get_roles()
        for turn in turns:
            if turn.get("role") not in roles:
                raise ConfigError(
                    f"--prompt: {prompt_format} has no role {turn.get('role')!r}; its roles are {', '.join(roles)}",
                    code="bad_config_value",
                )
            slots = list(self._formatter.get_slots(turn["role"]))
            if missing := [slot for slot in slots if slot not in turn["slots"]]:
                raise ConfigError(
                    f"--prompt: the role {turn['role']} of {prompt_format} lacks {', '.join(missing)}",
                    code="bad_config_value",
                )
        return turns

    def count(self, text: str, language: str | None) -> int:
        """Return the tokens of the prompt and of a text, with all special tokens."""
        answer: dict[str, Any] = dict.fromkeys(self._formatter.get_slots(self._formatter.OUTPUT_ROLE), text)
        answer[self._formatter.PROMPT_LANGUAGE_SLOT] = language or self._language
        turn = {"role": self._formatter.OUTPUT_ROLE, "slots": answer}
        return len(self._formatter.encode_dialog([*self._turns, turn])["input_ids"])
