"""Splits of a corpus: finding them in the results of recipes, selecting them by name, and writing them as manifests."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import msgspec

from sharmill.collect.own_recipes import LEFT_OUT
from sharmill.errors import ConfigError, refuse
from sharmill.manifest import write_lines
from sharmill.sources.stretches import split_runs

# Names of languages in lhotse's recipes, and their codes in speaker tags.
_LANGUAGES: Final = {
    "arabic": "ar", "bengali": "bn", "cantonese": "yue", "chinese": "zh", "czech": "cs", "dutch": "nl", "english": "en",
    "french": "fr", "german": "de", "italian": "it", "japanese": "ja", "korean": "ko", "mandarin": "zh", "polish": "pl",
    "portuguese": "pt", "russian": "ru", "spanish": "es",
}  # fmt: skip


def _join_utterances(utterances: list[Any], least: float) -> list[Any]:
    """Join consecutive utterances of one speaker and channel until they and their pauses last ``least`` seconds.

    A shorter remainder is dropped with a warning, whether it ends before another speaker, before ``LEFT_OUT`` or at the
    end of the recording.
    """

    def turn(utterance: Any) -> tuple[str, str, str, bool]:
        return utterance.recording_id, str(utterance.channel), str(utterance.speaker), utterance.text == LEFT_OUT

    by_time = sorted(utterances, key=lambda part: (*turn(part)[:2], part.start, part.end))
    joined, num_left = [], sum(part.text != LEFT_OUT for part in by_time)
    for (*_, is_left), parts in itertools.groupby(by_time, turn):
        for run in () if is_left else split_runs(parts, enough=least):
            seconds = max(part.end for part in run) - run[0].start
            if seconds >= least:
                text = " ".join(part.text for part in run if part.text)
                # Drop the alignment of the first utterance, which would be taken for an alignment of the joined text.
                whole = run[0] if len(run) == 1 else replace(run[0], alignment=None)
                joined.append(replace(whole, duration=round(seconds, 8), text=text))
                num_left -= len(run)
    if num_left:
        logging.warning("%d utterances are left out: even joined, they last less than %g s", num_left, least)
    return joined


def choose_splits(names: Sequence[str], splits: tuple[str, ...]) -> list[str]:
    """Return the names of the splits that match any of the patterns ``splits``; all if there are no patterns."""
    there = ", ".join(names) if any(names) else "none"
    refuse(
        *(
            (
                not any(fnmatchcase(name, pattern) for name in names),
                f"--splits {pattern}: the corpus has no such split; its splits: {there}",
            )
            for pattern in splits
        ),
        code="bad_usage",
    )
    return [name for name in names if not splits or any(fnmatchcase(name, pattern) for pattern in splits)]


def write_split(part: Any, path: Path, min_segment: float | None) -> dict[str, str]:
    """Write the manifests of a split, sorted so that they do not depend on the order of the file system.

    Args:
        part: list of records, or (recordings, supervisions).
        path: path of the manifests without a suffix.
        min_segment: join utterances until they last this many seconds; None to leave them unchanged.

    Returns:
        Names of the files, by the key of the source under which each is used; empty if there are no records.
    """
    files: dict[str, list[Any]] = {}
    if min_segment is not None and (isinstance(part, list) or part[1] is None or len(part[1]) <= len(part[0])):
        raise ConfigError(
            "--min-segment joins utterances of long recordings, but the corpus has none; leave the option out",
            code="bad_usage",
        )
    if isinstance(part, list):
        files["manifest"] = sorted(part, key=lambda record: record["audio_filepath"])
    else:
        files["recordings"] = sorted(part[0], key=_paths)
        if part[1] is not None:
            paths = {recording.id: _paths(recording) for recording in files["recordings"]}
            utterances = list(part[1]) if min_segment is None else _join_utterances(list(part[1]), min_segment)
            files["supervisions"] = sorted(
                (utterance for utterance in utterances if utterance.text != LEFT_OUT),
                key=lambda entry: (paths[entry.recording_id], entry.start, str(entry.channel), entry.text or ""),
            )
            for entry in files["supervisions"]:
                entry.language = _LANGUAGES.get(str(entry.language).lower(), entry.language)
    if not all(files.values()):
        return {}
    for kind, records in files.items():
        found = (record if isinstance(record, dict) else record.to_dict() for record in records)
        write_lines(path.with_suffix(f".{kind}"), map(msgspec.json.encode, found))
    return {kind: path.with_suffix(f".{kind}").name for kind in files}


def _paths(recording: Any) -> list[str]:
    return [str(source.source) for source in recording.sources]


def find_splits(result: Any, name: str = "") -> dict[str, Any]:
    """Return the splits in the result of a recipe, by name.

    The result is a list of records, or nested mappings that end in recordings and supervisions. The name of a split
    consists of the keys that lead to it, joined by hyphens.
    """
    if isinstance(result, list):
        return {name: result}
    if not isinstance(result, dict):
        raise ValueError(f"it returned {type(result).__name__} instead of recordings and supervisions")
    if "recordings" in result:
        return {name: (result["recordings"], result.get("supervisions"))}
    parts: dict[str, Any] = {}
    for key, value in result.items():
        parts |= find_splits(value, f"{name}-{key}" if name else str(key))
    return parts
