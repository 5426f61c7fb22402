"""The run of ``sharmill manifest``: from folders, files and options to inputs, and through the one stage."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from sharmill.collect.corpora import Corpus, find_corpus
from sharmill.collect.inputs import CorpusInput, FileInput, FolderInput, Input
from sharmill.collect.stage import Destination, ManifestStage
from sharmill.engine.identity import find_changes
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import StageResult
from sharmill.engine.plan import remove_run
from sharmill.engine.run import locked, run_stage
from sharmill.engine.stored import decode_stored, read_stored
from sharmill.errors import ConfigError
from sharmill.executors.local.executor import LocalExecutor
from sharmill.sources import SpeechSource
from sharmill.sources.files import find_files, names_several, read_ends
from sharmill.sources.folder import FolderSource
from sharmill.sources.nemo import NemoSource
from sharmill.sources.table import TableSource
from sharmill.storage import PROBE, disk_errors, refuse_strangers, remove_asides, remove_if_empty, require_writable

_OF_CORPUS: Final = ("speaker", "language", "dataset", "channel")
_SOURCES: Final[dict[str, type[SpeechSource]]] = {"folder": FolderSource, "table": TableSource, "nemo": NemoSource}


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """Options of a manifest.

    Attributes:
        audio_root: the folder that paths are relative to; None for that of the sources.
        keys: keys of the sources, as a configuration has them; a source takes those that it has.
        corpus: the name of a corpus, or None.
        recipe_options: further arguments of its recipe.
        splits: names or patterns of its splits, none for all.
        vocabulary: where to write the vocabulary of the texts, or None.
        of_words: it is one of words, not of characters.
    """

    audio_root: str | None = None
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    corpus: str | None = None
    recipe_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    splits: tuple[str, ...] = ()
    vocabulary: str | None = None
    of_words: bool = False


def make_manifest(
    sources: Sequence[str], output: str, options: ManifestOptions, listener: Listener, *,
    workers: int | str = "auto", restart: bool = False,
) -> tuple[Destination, StageResult]:  # fmt: skip
    """Make a manifest of folders, tables, manifests or a corpus, or go on where an interrupted run of it stopped.

    Args:
        sources: paths of folders and files.
        output: path of the manifest.
        workers: ranks, a number or ``auto``.
        restart: replace a manifest that is there, and forget what an interrupted run has done.

    Raises:
        ConfigError: the sources, the options or the output cannot be used.
        FatalError: no record can be used, or the disk fails.
    """
    roots = _find_roots(sources, options)
    root = _common_root(roots, options.audio_root)
    destination = Destination(
        path=Path(output), root=root, vocabulary=Path(options.vocabulary) if options.vocabulary else None,
        of_words=options.of_words,
    )  # fmt: skip
    _check_destination(destination, sources, restart=restart)
    stage = ManifestStage(_make_inputs(sources, roots, root, options), destination)
    try:
        with disk_errors(destination.state), locked(stage.run_dir):
            _remove_leftovers(destination)
            if not restart:
                _refuse_other_arguments(stage)
            result = run_stage(stage, LocalExecutor(workers), listener, max_reject_fraction=1.0, restart=restart)
    except ConfigError:
        # Where nothing was begun, and no other process is at it.
        remove_if_empty(stage.dir.path / "ranks", stage.dir.path, destination.state)
        raise
    if result.ok:
        remove_run(stage)
    return destination, result


def _find_roots(sources: Sequence[str], options: ManifestOptions) -> list[Path]:
    """Return the audio root of each source: a folder itself, the folder of a file, or the one that is given."""
    if options.corpus is not None and len(sources) > 1:
        raise ConfigError("--from is for one folder, that of the corpus", code="bad_usage")
    roots, folders = [], []
    for source in sources:
        path = _expanded(source)
        if not path.exists() and (options.corpus is not None or not names_several(source)):
            raise ConfigError(f"there is no file or folder {path}; correct its path", code="missing_input")
        if path.is_dir():
            folders.append(_absolute(path))
        elif options.corpus is not None:
            raise ConfigError(f"{path} is not a folder; name that of the corpus", code="bad_usage")
        own = path if path.is_dir() else _expanded(options.audio_root or str(find_files([source])[0].parent))
        roots.append(_absolute(own))
    for one, other in itertools.permutations(folders, 2):
        if one.is_relative_to(other):
            raise ConfigError(f"{one} lies within {other}; name the outer one only", code="bad_usage")
    return roots


def _common_root(roots: Sequence[Path], given: str | None) -> Path:
    if given is None:
        return Path(os.path.commonpath(roots))
    root = _absolute(_expanded(given))
    if not root.is_dir():
        raise ConfigError(f"--audio-root {given} is not a folder", code="missing_input")
    for inner in roots:
        if not inner.is_relative_to(root):
            raise ConfigError(f"{inner} does not lie below --audio-root {given}; name a folder that holds all sources",
                              code="bad_usage")  # fmt: skip
    return root


def _check_destination(destination: Destination, sources: Sequence[str], *, restart: bool) -> None:
    path = destination.path
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; name a file in it", code="bad_usage")
    if any(Path(source).exists() and path.exists() and path.samefile(source) for source in sources):
        raise ConfigError(f"--output {path} is one of the sources; name another file", code="bad_usage")
    if not destination.state.exists():
        # No other process is at work on it.
        _remove_leftovers(destination)
    if not restart and not destination.state.exists():
        named = (path, destination.info, destination.rejects, destination.recipe_log, destination.vocabulary)
        there = next((file for file in named if file is not None and file.exists()), None)
        if there is not None:
            # Nothing says that these are of a manifest, and --restart leaves them alone too.
            kept = there in (destination.rejects, destination.recipe_log) and not destination.info.exists()
            advice = "move it away, or name another file" if kept else "name another file, or replace it with --restart"
            raise ConfigError(f"{there} is there already; {advice}", code="foreign_output")
    require_writable(path.parent)
    refuse_strangers(path.parent, [destination.state])
    if destination.vocabulary is not None:
        if destination.vocabulary.is_dir():
            raise ConfigError(f"--vocabulary {destination.vocabulary} is a folder; name a file", code="bad_usage")
        require_writable(destination.vocabulary.parent)


def _remove_leftovers(destination: Destination) -> None:
    """Remove what killed processes have left aside of a manifest, of its companions and of its state."""
    files = (destination.path, destination.info, destination.rejects, destination.recipe_log, destination.state)
    remove_asides(destination.path.parent, {PROBE, *(path.name for path in files)})
    if destination.vocabulary is not None:
        remove_asides(destination.vocabulary.parent, {PROBE, destination.vocabulary.name})


def _refuse_other_arguments(stage: ManifestStage) -> None:
    """Raise ConfigError where an interrupted run was begun with other arguments."""
    if not stage.dir.identity.exists():
        return
    before = decode_stored(stage.dir.identity, read_stored(stage.dir.identity), dict[str, Any])
    now = msgspec.json.decode(msgspec.json.encode(stage.identity()))
    if changes := find_changes(before, now):
        raise ConfigError(
            f"a run that makes {stage.destination.path} was interrupted, and was begun differently: "
            f"{'; '.join(changes[:4])}. Give its arguments again, or begin anew with --restart",
            code="changed_plan",
        )


def _make_inputs(sources: Sequence[str], roots: Sequence[Path], root: Path, options: ManifestOptions) -> list[Input]:
    corpus = None if options.corpus is None else find_corpus(options.corpus)
    inputs: list[Input] = []
    taken: set[str] = set()
    for source, audio_root in zip(sources, roots, strict=True):
        kind = "corpus" if corpus is not None else _kind_of(source)
        made = _make_source(source, kind, audio_root, options.keys)
        taken |= _valid_keys(kind)
        prefix = os.path.relpath(audio_root, root)
        place = {"prefix": "" if prefix == "." else prefix, "dataset": _dataset_name(corpus, root)}
        if corpus is not None:
            inputs.append(CorpusInput(source=made, corpus=corpus, options=options.recipe_options,
                                      splits=options.splits, **place))  # fmt: skip
        elif isinstance(made, FolderSource):
            inputs.append(FolderInput(source=made, **place))
        else:
            inputs.append(FileInput(source=made, **place))
    if unused := sorted(options.keys.keys() - taken):
        raise ConfigError(f"{', '.join(unused)}: none of the sources has such a setting", code="bad_usage")
    if corpus is None and (options.splits or options.recipe_options):
        raise ConfigError("--splits and --recipe-option are for a corpus, which --from names", code="bad_usage")
    return inputs


def _dataset_name(corpus: Corpus | None, root: Path) -> str:
    return corpus.dataset if corpus is not None else "_".join(root.name.split()) or "audio"


def _kind_of(source: str) -> str:
    """Return the type of a source: by its ending, else by its first letter."""
    path = _expanded(source)
    if path.is_dir():
        return "folder"
    ending = path.suffix.lower()
    if ending in (".csv", ".tsv"):
        return "table"
    if ending in (".json", ".jsonl"):
        return "nemo"
    head, _ = read_ends(find_files([source])[0], "source")
    return "nemo" if head.lstrip().startswith(b"{") else "table"


def _valid_keys(kind: str) -> set[str]:
    if kind == "corpus":
        return set(_OF_CORPUS)
    return {field.name for field in dataclasses.fields(_SOURCES[kind])}


def _make_source(source: str, kind: str, audio_root: Path, keys: dict[str, Any]) -> Any:
    own = {key: value for key, value in keys.items() if key in _valid_keys(kind)}
    own["audio_root"] = str(audio_root)
    if kind == "table":
        own = {"delimiter": "\t" if source.lower().endswith(".tsv") else ",", **own, "table": source}
    elif kind == "nemo":
        own["manifest"] = source
    try:
        return msgspec.convert(own, _SOURCES.get(kind, FolderSource))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {str(error).partition(' - at ')[0]}", code="bad_usage") from error


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path raises where there is no such user)


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))
