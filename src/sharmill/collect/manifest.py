"""``sharmill manifest`` as a function: one pass over folders, tables, manifests or a corpus, written aside first."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from sharmill.collect.complete import Chunk, Completed, Completion, Input, Raw, read_input
from sharmill.collect.corpora import RECIPE_LOG, read_corpus
from sharmill.collect.workers import map_in_order
from sharmill.engine.rejects import describe_rejects
from sharmill.engine.unit import Totals
from sharmill.errors import ConfigError, FatalError
from sharmill.files.host import usable_cores
from sharmill.files.storage import (
    PROBE,
    disk_errors,
    fsync_directory,
    fsync_file,
    path_aside,
    remove_asides,
    remove_tree,
    require_writable,
    write_atomic,
)
from sharmill.manifest import write_lines
from sharmill.sources import FileSource, Source
from sharmill.sources.files import find_files, names_several, read_ends
from sharmill.sources.folder import FolderSource
from sharmill.sources.nemo import NemoSource
from sharmill.sources.table import TableSource

# Enough that sending them costs little beside the work, and few enough that Ctrl-C is answered soon.
_RECORDS_PER_CHUNK: Final = 500
# Ends of the names of files beside a manifest: rejects, warnings of the recipe, and the description, written last.
REJECTS: Final = ".rejects.jsonl"
LOG: Final = ".recipe.log"
INFO: Final = ".info.yaml"
_REJECTS: Final = "rejects/all.jsonl"


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
    keys: dict[str, Any] = field(default_factory=dict)
    corpus: str | None = None
    recipe_options: dict[str, Any] = field(default_factory=dict)
    splits: tuple[str, ...] = ()
    vocabulary: str | None = None
    of_words: bool = False


@dataclass(frozen=True)
class Destination:
    """The files of a manifest.

    Attributes:
        path: of the manifest; with splits each has its own, ``manifest.train.json`` for ``manifest.json``.
        root: the folder that all paths in it are relative to.
        vocabulary: of the vocabulary of the texts, or None.
    """

    path: Path
    root: Path
    vocabulary: Path | None = None

    def of_split(self, split: str) -> Path:
        """Return the path of the manifest of a split; "" is the only one."""
        return self.beside(f".{split}{self.path.suffix}") if split else self.path

    def beside(self, end: str) -> Path:
        """Return the path of a companion, whose name has this end."""
        return self.path.with_name(self.path.stem + end)


def make_manifest(
    sources: Sequence[str], output: str, options: ManifestOptions, *, workers: int | str = "auto",
    force: bool = False, progress: Callable[[int, int], None] = lambda records, rejects: None,
) -> tuple[Destination, Totals]:  # fmt: skip
    """Make a manifest of folders, tables, manifests or a corpus, whose bytes do not depend on ``workers``.

    Args:
        sources: paths of folders and files.
        output: path of the manifest.
        workers: processes, a number or ``auto`` for all cores.
        force: replace a manifest that is there, its companions and the vocabulary.
        progress: called with the numbers of records that were read, and rejected, so far.

    Raises:
        ConfigError: the sources, the options or the output cannot be used.
        FatalError: no record can be used, a worker process was killed, or the disk fails.
    """
    roots = _find_roots(sources, options)
    vocabulary = Path(options.vocabulary) if options.vocabulary else None
    destination = Destination(Path(output), _common_root(roots, options.audio_root), vocabulary)
    inputs = _make_inputs(sources, roots, destination.root, options)
    _check_destination(destination, sources, force=force)
    number = usable_cores() if workers == "auto" else int(workers)
    with disk_errors(destination.path.parent), _folder_aside(destination) as folder:
        if options.corpus is None:
            parts = [("", number, read_input(entry.source, {})) for number, entry in enumerate(inputs)]
        else:
            found = read_corpus(options.corpus, roots[0], options.recipe_options, options.splits,
                                inputs[0].source.channel, folder)  # fmt: skip
            inputs = [dataclasses.replace(inputs[0], dataset=found.dataset)]
            parts = [(split, 0, read_input(source, found.defaults)) for split, source in found.splits.items()]
        splits = list(dict.fromkeys(split for split, _, _ in parts))
        if not force:
            _refuse_existing(map(destination.of_split, splits))
        complete = Completion(inputs, of_words=options.of_words)
        with closing(map_in_order(complete, _cut(parts), number if number > 1 else 0)) as results:
            rows, rejects = _write(results, splits, folder, progress)
        return destination, _publish(rows, rejects, folder, destination)


def _cut(parts: Iterable[tuple[str, int, Iterable[Raw]]]) -> Iterator[Chunk]:
    for split, number, records in parts:
        left = iter(records)
        while chunk := list(itertools.islice(left, _RECORDS_PER_CHUNK)):
            yield Chunk(split, number, chunk)


def _write(
    results: Iterable[Completed], splits: Sequence[str], folder: Path, progress: Callable[[int, int], None]
) -> tuple[dict[str, Completed], Counter[str]]:
    """Write the manifest of each split, and the rejects, into a folder.

    Return the sums of the results of each split, without their lines and rejects, and the number of rejects by reason.
    """
    rows = {split: Completed(split) for split in splits}
    rejects: Counter[str] = Counter()
    num_in = 0
    (folder / _REJECTS).parent.mkdir()
    with ExitStack() as stack:
        rejected = stack.enter_context((folder / _REJECTS).open("wb"))
        files = {split: stack.enter_context((folder / str(n)).open("wb")) for n, split in enumerate(splits)}
        for completed in results:
            files[completed.split].writelines(line + b"\n" for line in completed.lines)
            rejected.writelines(reject.to_json() + b"\n" for reject in completed.rejects)
            rows[completed.split].add(completed)
            rejects.update(reject.reason for reject in completed.rejects)
            num_in += completed.num_in
            progress(num_in, rejects.total())
    return rows, rejects


def _publish(rows: dict[str, Completed], rejects: Counter[str], folder: Path, destination: Destination) -> Totals:
    """Publish what was written into a folder, the description last; return the accounts with notes for the user."""
    # Recipes look at files in the order of the file system.
    warnings = sorted((folder / RECIPE_LOG).read_text("utf-8").splitlines()) if (folder / RECIPE_LOG).exists() else []
    write_lines(folder / RECIPE_LOG, map(str.encode, warnings))
    examples = describe_rejects((folder / _REJECTS).parent, rejects)
    for end, file, is_any in ((REJECTS, _REJECTS, rejects), (LOG, RECIPE_LOG, warnings)):
        if is_any:
            _move(folder / file, destination.beside(end))
        else:
            remove_tree(destination.beside(end))
    num_in, num_out = sum(row.num_in for row in rows.values()), sum(row.counts["records"] for row in rows.values())
    if not num_out:
        raise FatalError(
            f"none of the {num_in} records can be used, so {destination.path} is not written; mend the input, then run "
            f"the same command with --force. The commonest reasons (all: {destination.beside(REJECTS)}):",
            code="too_many_rejects",
            details=examples,
        )
    for number, split in enumerate(rows):
        _move(folder / str(number), destination.of_split(split))
    if destination.vocabulary is not None:
        write_atomic(destination.vocabulary, _vocabulary_lines(rows))
    by_reason = dict(sorted(rejects.items()))
    numbers = {destination.of_split(split).name: _numbers(row) for split, row in rows.items()}
    info = {"audio_root": str(destination.root), "manifests": numbers, "rejects": by_reason}
    write_atomic(destination.beside(INFO), msgspec.yaml.encode(info))
    notes = _notes(rows.values())
    if warnings:
        notes.append(f"the recipe warns {len(warnings)} times, first: {warnings[0]} (see {destination.beside(LOG)})")
    hours = sum(row.seconds for row in rows.values()) / 3600
    totals = Totals(num_in=num_in, num_out=num_out, rejects=by_reason, hours=hours, notes=notes)
    totals.check("manifest", num_in)
    return totals


def _move(file: Path, final: Path) -> None:
    """Publish a file that was written aside on the same disk."""
    fsync_file(file)
    file.replace(final)
    fsync_directory(final.parent)


def _vocabulary_lines(rows: dict[str, Completed]) -> bytes:
    """Return the vocabulary of the splits for training, or of all if none is; the commonest first, one a line."""
    counts: Counter[str] = Counter()
    for split in [split for split in rows if "train" in split] or rows:
        counts.update(rows[split].vocabulary)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "".join(f"{entry}\n" for entry, _ in ordered).encode()


def _numbers(row: Completed) -> dict[str, Any]:
    """Return the numbers of a manifest: records, hours, and how many have a text, a speaker, an unchosen channel."""
    return {"records": row.counts["records"], "hours": round(row.seconds / 3600, 6)} | {
        name: row.counts[name] for name in ("with_text", "with_speaker", "of_several_channels")
    }


def _notes(rows: Iterable[Completed]) -> list[str]:
    """Return sentences about what the records lack that a dataset may need."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row.counts)
    notes = []
    if without := total["records"] - total["with_text"]:
        notes.append(f"{without} records have no text: a dataset takes them with prepare.require_text=false")
    if without := total["records"] - total["with_speaker"]:
        notes.append(f"{without} records have no speaker: --speaker makes one of the path, as {{path[0]}}")
    if several := total["of_several_channels"]:
        notes.append(f"{several} records are audio of several channels: --channel chooses one, or downmix their mean")
    return notes


@contextmanager
def _folder_aside(destination: Destination) -> Iterator[Path]:
    """Provide a folder beside the manifest to write into; remove what killed processes have left of theirs."""
    for file in (destination.path, destination.beside(INFO), destination.vocabulary or destination.path):
        remove_asides(file.parent, {PROBE, file.name})
    folder = path_aside(destination.path)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    except FileNotFoundError as error:
        if folder.exists():
            raise
        raise FatalError(f"another process makes {destination.path}; run one at a time", code="locked") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


def _check_destination(destination: Destination, sources: Sequence[str], *, force: bool) -> None:
    path, vocabulary = destination.path, destination.vocabulary or destination.path
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; name a file in it", code="bad_usage")
    if vocabulary.is_dir():
        raise ConfigError(f"--vocabulary {vocabulary} is a folder; name a file", code="bad_usage")
    if any(Path(source).exists() and path.exists() and path.samefile(source) for source in sources):
        raise ConfigError(f"--output {path} is one of the sources; name another file", code="bad_usage")
    if not force:
        _refuse_existing({path, vocabulary, *map(destination.beside, (INFO, REJECTS, LOG))})
    require_writable(path.parent)
    require_writable(vocabulary.parent)


def _refuse_existing(files: Iterable[Path]) -> None:
    if there := sorted(str(file) for file in files if file.exists()):
        raise ConfigError(
            f"there is already {', '.join(there)}; name another file, or replace with --force", code="foreign_output"
        )


def _make_inputs(sources: Sequence[str], roots: Sequence[Path], root: Path, options: ManifestOptions) -> list[Input]:
    inputs = []
    unused = set(options.keys)
    for source, audio_root in zip(sources, roots, strict=True):
        kind = _kind_of(source)
        fields = {field.name for field in dataclasses.fields(Source if options.corpus is not None else kind)}
        unused -= fields
        keys = {key: value for key, value in options.keys.items() if key in fields}
        prefix = os.path.relpath(audio_root, root)
        dataset = "_".join(root.name.split()) or "audio"
        made = _make_source(kind, source, keys | {"audio_root": str(audio_root)})
        inputs.append(Input(source=made, prefix="" if prefix == "." else prefix, dataset=dataset))
    if unused:
        raise ConfigError(f"{', '.join(sorted(unused))}: none of the sources has such a setting", code="bad_usage")
    if options.corpus is None and (options.splits or options.recipe_options):
        raise ConfigError("--splits and --recipe-option are for a corpus, which --from names", code="bad_usage")
    for entry in inputs:
        if isinstance(entry.source, FileSource):
            entry.source.check()
            entry.source.check_speaker()
    return inputs


def _kind_of(source: str) -> type[Source]:
    """Return the type of a source: by its ending, else by its first letter."""
    path = _expanded(source)
    if path.is_dir():
        return FolderSource
    known: dict[str, type[Source]] = {
        ".csv": TableSource,
        ".tsv": TableSource,
        ".json": NemoSource,
        ".jsonl": NemoSource,
    }
    if kind := known.get(path.suffix.lower()):
        return kind
    head, _ = read_ends(find_files([source])[0], "source")
    return NemoSource if head.lstrip().startswith(b"{") else TableSource


def _make_source(kind: type[Source], source: str, keys: dict[str, Any]) -> Source:
    if kind is TableSource:
        keys = {"delimiter": "\t" if source.lower().endswith(".tsv") else ",", "table": source} | keys
    elif kind is NemoSource:
        keys = {"manifest": source} | keys
    try:
        return msgspec.convert(keys, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {str(error).partition(' - at ')[0]}", code="bad_usage") from error


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path raises where there is no such user)


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))
