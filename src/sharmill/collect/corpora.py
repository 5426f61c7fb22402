"""Names of corpora, and the recipes of lhotse or sharmill that read each corpus in its published layout."""

import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from sharmill.collect.own_recipes import read_an4, read_fisher, read_hifitts, read_hub5
from sharmill.errors import ConfigError
from sharmill.registry import nearest

_LIBRI_PARTS: Final = (
    "dev-clean", "dev-other", "test-clean", "test-other", "train-clean-100", "train-clean-360", "train-other-500",
)  # fmt: skip
# Alternative names of corpora, as in NeMo's documentation and elsewhere, in lower case without spaces or punctuation.
_ALIASES: Final = {
    "aishell1": "aishell",
    "fisher": "fisher_english",
    "fisherenglish": "fisher_english",
    "fisherenglishtrainingspeech": "fisher_english",
    "hub5": "eval2000",
    "2000hub5": "eval2000",
    "2000hub5englishevaluationspeech": "eval2000",
    "an4dataset": "an4",
}


def _existing_libritts_parts(directory: Path) -> dict[str, Any]:
    """Return the recipe argument for the existing parts of LibriTTS, since by default the recipe requires all parts."""
    found = [name for name in _LIBRI_PARTS if (directory / name).is_dir()]
    if not found:
        raise ConfigError(f"{directory} has none of {', '.join(_LIBRI_PARTS)}; name the folder that contains them",
                          code="missing_input")  # fmt: skip
    return {"dataset_parts": found}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus that a recipe reads.

    Attributes:
        recipe: name of the recipe, which belongs to lhotse or sharmill.
        dataset: name of the corpus in speaker tags.
        language, speaker: values for records if the recipe provides none.
        parts: names of the parts that lhotse can download separately, which are also names of splits; may be empty.
        folder: subfolder with the corpus, in the folder that lhotse's download function returns.
        adapt: function that returns further recipe arguments for the corpus in a given folder.
        read: sharmill's own recipe; None if lhotse's recipe is used.
    """

    recipe: str
    dataset: str
    language: str | None = None
    speaker: str | None = None
    parts: tuple[str, ...] = ()
    folder: str = ""
    adapt: Callable[[Path], dict[str, Any]] | None = field(default=None, compare=False)
    read: Callable[..., dict[str, Any]] | None = field(default=None, compare=False)


_libritts = partial(Corpus, language="en", adapt=_existing_libritts_parts, parts=_LIBRI_PARTS)
# Corpora by the names of their recipes.
CORPORA: Final = {
    corpus.recipe: corpus
    for corpus in (
        Corpus(recipe="librispeech", dataset="LibriSpeech", language="en", parts=_LIBRI_PARTS),
        _libritts(recipe="libritts", dataset="LibriTTS", folder="LibriTTS"),
        _libritts(recipe="librittsr", dataset="LibriTTS-R", folder="LibriTTS_R"),
        Corpus(recipe="hifitts", dataset="HiFiTTS", language="en", read=read_hifitts),
        Corpus(
            recipe="vctk",
            dataset="VCTK",
            language="en",
            # Version 0.92 has this folder, with FLAC files from two microphones.
            adapt=lambda directory: {"use_edinburgh_vctk_url": (directory / "wav48_silence_trimmed").is_dir()},
        ),
        Corpus(recipe="ljspeech", dataset="LJSpeech", language="en", speaker="LJ"),
        Corpus(recipe="aishell", dataset="AISHELL-1", language="zh"),
        Corpus(recipe="aishell2", dataset="AISHELL-2", language="zh"),
        Corpus(recipe="fisher_english", dataset="Fisher", language="en", read=read_fisher),
        Corpus(recipe="eval2000", dataset="HUB5", language="en", read=read_hub5),
        Corpus(recipe="an4", dataset="AN4", language="en", read=read_an4),
    )
}


def find_corpus(name: str) -> Corpus:
    """Return the corpus that a name stands for: a key of ``CORPORA``, an alternative name, or any recipe of lhotse.

    >>> find_corpus("lhotse:librispeech").dataset, find_corpus("HUB5").recipe
    ('LibriSpeech', 'eval2000')

    Raises:
        ConfigError: the name is unknown.
    """
    short = _normalise(name.removeprefix("lhotse:"))
    known = {_normalise(recipe): recipe for recipe in CORPORA} | _ALIASES
    if short in known:
        return CORPORA[known[short]]
    import lhotse.recipes

    modules = [module.name for module in pkgutil.iter_modules(lhotse.recipes.__path__) if module.name != "utils"]
    functions = [name.removeprefix("prepare_") for name in dir(lhotse.recipes) if name.startswith("prepare_")]
    recipes_of_lhotse = {_normalise(recipe): recipe for recipe in dict.fromkeys([*functions, *modules])}
    if short not in recipes_of_lhotse:
        raise ConfigError(
            f"--from {name}: unknown corpus{nearest(short, [*CORPORA, *recipes_of_lhotse.values()])}",
            code="unknown_name",
        )
    recipe = recipes_of_lhotse[short]
    return Corpus(recipe=recipe, dataset=recipe)


def _normalise(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
