"""Sentences for the demo corpus, made from the grammar in ``sentences.txt``."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Final

# Half of the sentences are long: a context for a zero-shot model should last three seconds or more.
_LENGTHS: Final = ("long", "medium", "longest", "medium", "long", "short", "long", "medium")
_MAX_WORDS: Final = 30
_SLOT: Final = re.compile(r"\{(\w+)\}")


def sentences(*, seed: int) -> Iterator[str]:
    """Yield distinct sentences of 3 to 30 words without end, the same for the same seed.

    >>> first = list(itertools.islice(sentences(seed=1), 100))
    >>> len(set(first)), first[0].endswith(".")
    (100, True)
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    for length in itertools.cycle(_LENGTHS):
        sentence = _expand(f"{{{length}}}", rng)
        while sentence in seen or len(sentence.split()) > _MAX_WORDS:
            sentence = _expand(f"{{{length}}}", rng)
        seen.add(sentence)
        yield sentence[0].upper() + sentence[1:]


@functools.cache
def _rules() -> dict[str, list[str]]:
    """Return the alternatives of each rule, in the order of the file."""
    rules: dict[str, list[str]] = {}
    alternatives: list[str] = []
    for line in (files("sharmill.demo") / "sentences.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            alternatives = rules.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            alternatives.append(line)
    return rules


def _expand(template: str, rng: random.Random) -> str:
    used: set[str] = set()
    # No phrase twice in one sentence: "Rosa and Rosa waited" is not what people say.
    while slot := _SLOT.search(template):
        alternatives = [text for text in _rules()[slot[1]] if text not in used]
        text = rng.choice(alternatives)
        used.add(text)
        template = template[: slot.start()] + text + template[slot.end() :]
    return template
