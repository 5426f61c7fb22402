"""The stage behind ``sharmill manifest``, which makes a NeMo manifest from folders, tables, manifests or a corpus.

Durations are taken from audio headers.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from sharmill.audio.files import choose_channel, probe
from sharmill.audio.roots import AudioRoots
from sharmill.collect.recipes import RECIPE_LOG, RecipeResult, run_recipe
from sharmill.engine.executor import Listener
from sharmill.engine.rejects import describe_rejects
from sharmill.engine.run import merge_files
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import Advance, Processor, Stage, StageRun, versions
from sharmill.engine.unit import Commit, Output, Totals, Unit, add_up, make_unit
from sharmill.errors import ConfigError, FatalError, RejectRecord, refuse
from sharmill.executors.local import run_alone
from sharmill.files.atomic import make_folder, remove, remove_temp_files, require_writable, write_atomic, write_new
from sharmill.files.location import is_url
from sharmill.files.staging import Staging
from sharmill.files.stored import load_record
from sharmill.manifest import TYPED_KEYS, Reject, transcript_of, write_lines
from sharmill.prepare.check import PrepareConfig, check_fields, parse_record, segment_times
from sharmill.registry import require_package
from sharmill.sources import Source, notes_of, record_text
from sharmill.sources.files import check_text, expand_home, find_files, names_several, unpacked_name
from sharmill.sources.folder import FolderSource
from sharmill.sources.lhotse import LhotseSource
from sharmill.sources.nemo import NemoSource
from sharmill.sources.speakers import UNDETERMINED, find_tag
from sharmill.sources.table import TableSource, delimiter_of

if TYPE_CHECKING:
    from sharmill.collect.utterances import UtteranceLimits

# Largest accepted difference in seconds between a record's duration and that of its audio.
_TOLERANCE: Final = PrepareConfig().duration_tolerance
# Results are cached, since consecutive segments usually belong to the same recording.
_probe = lru_cache(maxsize=16)(probe)
_TYPES: Final[dict[str, type[Source]]] = {
    ".csv": TableSource, ".tsv": TableSource, ".json": NemoSource, ".jsonl": NemoSource,
}  # fmt: skip
# Suffixes of the companion files of a manifest: rejects, the recipe's warnings, and a description, which is written
# last.
REJECTS: Final = ".rejects.jsonl"
LOG: Final = ".recipe.log"
INFO: Final = ".info.yaml"
# File with the result of a recipe, in the folder of the plan.
_FOUND: Final = "found.json"
# Properties of records that the description counts.
_COUNTS: Final = ("with_text", "with_speaker", "of_several_channels")


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """Options for creating a manifest.

    Attributes:
        audio_root: folder that paths are relative to; None for the common folder of the sources.
        keys: keys of the sources, as in a configuration; each source uses the keys that it knows.
        corpus: name of the corpus in the only source, or None.
        recipe_options: further arguments of the corpus's recipe.
        splits: names or patterns of the corpus's splits; empty for all.
        segment: ``vad`` cuts recordings into utterances by voice activity; None keeps them whole.
        min_segment: shortest utterance of ``segment`` in seconds, by default 1; or join utterances of the corpus until
            they last this many seconds, by default not at all.
        max_segment: longest utterance of ``segment`` in seconds, by default 20.
        download: let lhotse download the corpus into the folder first.
        vocabulary: path for the vocabulary of the texts, or None.
        word_vocabulary: True for a vocabulary of words rather than characters.
        force: replace an existing manifest, its companion files and the vocabulary.
        restart: discard the state of an interrupted ``segment`` instead of resuming it.
    """

    audio_root: str | None = None
    keys: dict[str, Any] = field(default_factory=dict)
    corpus: str | None = None
    recipe_options: dict[str, Any] = field(default_factory=dict)
    splits: tuple[str, ...] = ()
    segment: Literal["vad"] | None = None
    min_segment: float | None = None
    max_segment: float | None = None
    download: bool = False
    vocabulary: str | None = None
    word_vocabulary: bool = False
    force: bool = False
    restart: bool = False

    def limits(self) -> "UtteranceLimits":
        """Return the limits of utterances; raise ConfigError if they contradict each other."""
        from sharmill.collect.utterances import UtteranceLimits  # imports torch

        given = {"shortest": self.min_segment, "longest": self.max_segment}
        return UtteranceLimits(**{key: value for key, value in given.items() if value is not None})


@dataclass(frozen=True)
class Destination:
    """The files of a manifest.

    Attributes:
        path: path of the manifest. Each split has its own file, such as ``manifest.train.json`` for ``manifest.json``.
        root: folder that all paths in the manifest are relative to.
        vocabulary: path of the vocabulary of the texts, or None.
    """

    path: Path
    root: Path
    vocabulary: Path | None = None

    def of_split(self, split: str) -> Path:
        """Return the path of a split's manifest; "" stands for the only split."""
        return self.beside(f".{split}{self.path.suffix}") if split else self.path

    def beside(self, end: str) -> Path:
        """Return the path of the companion file with the suffix ``end``."""
        return self.path.with_name(self.path.stem + end)

    def files(self, splits: Iterable[str] = ("",)) -> list[Path]:
        """Return the paths of all files that may be written."""
        vocabulary = [self.vocabulary] if self.vocabulary else []
        return [*map(self.of_split, splits), *map(self.beside, (INFO, REJECTS, LOG)), *vocabulary]


class Input(NamedTuple):
    """One input of a manifest.

    Attributes:
        source: reader of the records, with the audio root and the rules for speakers and channels.
        split: name of a corpus's split; "" if there is only one.
        defaults: keys and values for records that lack the keys.
    """

    source: Source
    split: str
    defaults: dict[str, str]


def make_manifest(
    sources: Sequence[str], output: str, options: ManifestOptions, *, workers: int | Literal["auto"] = "auto",
    listener: Listener | None = None,
) -> tuple[Destination, Totals]:  # fmt: skip
    """Create a manifest from folders, tables, manifests or a corpus; its bytes do not depend on ``workers``.

    Args:
        sources: paths of folders and files.
        output: path of the manifest.
        workers: number of processes, or ``auto`` for all cores.

    Returns:
        The files of the manifest, and the totals of the stage, which count the records of the sources; the fact
        ``records`` is the number of records of the manifest.

    Raises:
        ConfigError: the sources, options or output cannot be used, or another process is creating the manifest.
        FatalError: no record can be used, or the disk fails.
    """
    given = _make_sources(sources, options)
    vocabulary = Path(options.vocabulary) if options.vocabulary else None
    roots = [str(source.audio_root) for source in given]
    root = Path(os.path.commonpath(roots))
    if options.audio_root is not None:
        root = _absolute(expand_home(options.audio_root))
        refuse((not root.is_dir(), f"--audio-root {options.audio_root} is not a folder"), code="missing_input")
        refuse(
            *(
                (
                    not Path(inner).is_relative_to(root),
                    f"{inner} is not below --audio-root {options.audio_root}; name a folder that contains all sources",
                )
                for inner in roots
            ),
            code="bad_usage",
        )
    destination = Destination(Path(output), root, vocabulary)
    path, beside = destination.path, vocabulary or destination.path
    is_source = any(Path(source).exists() and path.exists() and path.samefile(source) for source in sources)
    refuse(
        (is_url(output), f"--output {output} is a URL; name a local file"),
        (path.is_dir(), f"--output {path} is a folder; name a file in it"),
        (beside.is_dir(), f"--vocabulary {beside} is a folder; name a file"),
        (is_source, f"--output {path} is one of the sources; name another file"),
        code="bad_usage",
    )
    run_dir = RunDir(path.with_name(f".{path.name}.manifest"))
    # A resumed command may have been killed while it published the files.
    if not options.force and not (options.segment and run_dir.path.exists()):
        _refuse_existing(destination.files())
    if options.segment:
        require_package("silero_vad")
        options.limits()
    require_writable(path.parent)
    require_writable(beside.parent)
    with run_alone(
        ManifestStage(destination, given, options), run_dir, workers=workers, listener=listener,
        restart=options.restart, resumes=options.segment is not None,
    ) as (_, result):  # fmt: skip
        assert result.totals is not None
        return destination, result.totals


class ManifestStage(Stage):
    """The stage that completes records. A unit is a piece of an input; the run directory is beside the manifest."""

    kind = "manifest"
    cost_unit = "records"

    def __init__(self, destination: Destination, given: Sequence[Source], options: ManifestOptions) -> None:
        self.destination = destination
        self.given = given
        self.options = options

    def identity(self, run: StageRun) -> dict[str, Any]:
        options, root = self.options, self.destination.root
        if options.segment is None:
            return {"versions": versions()}
        return {
            "versions": versions("numpy", "silero-vad", "soxr", "torch"),
            "limits": asdict(options.limits()),
            "words": options.vocabulary is not None and options.word_vocabulary,
            "sources": [[source.settings(), source.identity()] for source in self.given],
            "paths": [root.name, *(os.path.relpath(str(source.audio_root), root) for source in self.given)],
        }

    def plan(self, run: StageRun) -> Iterator[Unit]:
        folder = run.plan_folder
        if self.options.corpus is not None:
            options = self.options
            found = run_recipe(
                self.options.corpus, Path(str(self.given[0].audio_root)), options.recipe_options, options.splits,
                folder, min_segment=options.min_segment, download=options.download,
            )  # fmt: skip
            write_new(folder / _FOUND, msgspec.json.encode(found))
        inputs = self.inputs(folder)
        if not self.options.force:
            _refuse_existing(map(self.destination.of_split, {entry.split for entry in inputs}))
        index = 0
        for number, entry in enumerate(inputs):
            before = index
            # A recording takes minutes if its speech has to be found.
            for piece in entry.source.pieces(1 if self.options.segment else 1000):
                yield make_unit(
                    index, cost=float(piece.num_records), size=piece.num_records,
                    params={"input": number, "piece": piece.params},
                )  # fmt: skip
                index += 1
            if index == before:
                names = ", ".join(path for key, path in entry.source.paths().items() if key in entry.source.file_keys)
                raise ConfigError(f"{names} has no records; name a file with records", code="bad_manifest")

    def inputs(self, folder: Path) -> list[Input]:
        """Return the inputs to read; ``folder`` is the folder of the plan, which contains the splits of a corpus."""
        if self.options.corpus is None:
            return [Input(source, "", {}) for source in self.given]
        found = load_record(folder / _FOUND, RecipeResult)
        keys = {entry.name: getattr(self.given[0], entry.name) for entry in fields(Source) if entry.name != "type"}
        keys["dataset"] = keys["dataset"] or found.dataset
        inputs = []
        for split, names in found.splits.items():
            files: dict[str, Any] = {key: str(folder / name) for key, name in names.items()}
            source = (
                LhotseSource(keep_ids=True, **files, **keys) if "recordings" in files else NemoSource(**files, **keys)
            )
            inputs.append(Input(source, split, found.defaults))
        return inputs

    def open(self, run: StageRun, device: str) -> Processor:
        return Completion(self.inputs(run.plan_folder), self.options, self.destination.root)

    def finalize(self, run: StageRun) -> Totals:
        """Publish the manifest and its companion files, the description last; return the totals with notes."""
        totals, commits = add_up(run.commits), run.commits
        inputs = self.inputs(run.plan_folder)
        parts: dict[str, list[Commit]] = {entry.split: [] for entry in inputs}
        for unit, commit in zip(run.units, commits, strict=True):
            parts[inputs[unit.params["input"]].split].append(commit)
        destination, log = self.destination, run.plan_folder / RECIPE_LOG
        # Sort the warnings, since recipes read files in the file system's order, which may differ between machines.
        warnings = sorted(log.read_text("utf-8").splitlines()) if log.exists() else []
        for file in destination.files(parts):
            # Remove leftovers of killed processes.
            remove_temp_files(file.parent, {file.name})
        _replace(destination.beside(REJECTS), [run.dir.rejects] if totals.rejects else [])
        remove(destination.beside(LOG))
        if warnings:
            write_atomic(destination.beside(LOG), "".join(f"{line}\n" for line in warnings).encode())
        if not totals.num_out:
            # With --segment, --force alone would keep the rejects of the first attempt.
            again = "--restart" if self.options.segment else "--force"
            raise FatalError(
                f"none of the {totals.num_in} records can be used, so {destination.path} is not written; correct the "
                f"input, then run the same command with {again}. The most frequent reasons (full list: "
                f"{destination.beside(REJECTS)}):",
                code="too_many_rejects",
                details=describe_rejects(run.ranks.rejects, totals.rejects),
            )
        for split, made in parts.items():
            _replace(destination.of_split(split), [run.root / commit.files[0].name for commit in made])
        if destination.vocabulary is not None:
            write_atomic(destination.vocabulary, _vocabulary(run.root, parts))
        by_reason = dict(sorted(totals.rejects.items()))
        numbers = {destination.of_split(split).name: _add_up_counts(made) for split, made in parts.items()}
        write_atomic(destination.beside(INFO), msgspec.yaml.encode({
            "audio_root": str(destination.root), "manifests": numbers, "rejects": by_reason,
        }))  # fmt: skip
        total = _add_up_counts(commits)
        lacking = {
            "have no text; to keep them in a dataset, set prepare.require_text=false": total["records"]
            - total["with_text"],
            "have no speaker; --speaker can take it from the path, such as {path[0]}": total["records"]
            - total["with_speaker"],
            "have several channels; --channel selects one, or their mean with downmix": total["of_several_channels"],
        }
        noted = Counter(note for commit in commits for note in Counter(commit.stats["notes"]).elements())
        notes = [
            *(f"{count:,} {note}" for note, count in sorted(noted.items())),
            *(f"{count} records {what}" for what, count in lacking.items() if count),
        ]
        if warnings:
            notes.append(
                f"the recipe gave {len(warnings)} warnings; the first: {warnings[0]} (see {destination.beside(LOG)})"
            )
        if self.options.segment:
            notes.insert(0, f"{total['records']:,} utterances in {totals.num_out:,} recordings")
        return msgspec.structs.replace(totals, rejects=by_reason, notes=notes, facts={"records": total["records"]})


def _vocabulary(root: Path, parts: dict[str, list[Commit]]) -> bytes:
    """Return the content of the vocabulary file, made from the training splits, or from all splits if there are none.

    The file has one entry per line, the most frequent first.
    """
    counts: Counter[str] = Counter()
    for split in [split for split in parts if "train" in split] or parts:
        for commit in parts[split]:
            counts.update(load_record(root / commit.files[1].name, dict[str, int]))
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "".join(f"{entry}\n" for entry, _ in ordered).encode()


class Completion(Processor):
    """Adds durations from audio headers to records, and makes paths relative to the root of all inputs."""

    def __init__(self, inputs: Sequence[Input], options: ManifestOptions, root: Path) -> None:
        self._inputs = inputs
        self._options = options
        self._roots = AudioRoots.of(entry.source.audio_root for entry in inputs)
        self._prefixes = [os.path.relpath(str(entry.source.audio_root), root) for entry in inputs]
        dataset = "_".join(root.name.split()) or "audio"
        self._rules = [entry.source.speaker_rule(dataset) for entry in inputs]
        self._root = root
        self._cutter = None
        if options.segment:
            from sharmill.collect.utterances import UtteranceCutter  # imports torch

            self._cutter = UtteranceCutter(options.limits())

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        number = unit.params["input"]
        # A corpus counts as one source, however many splits it has.
        source = number if self._options.corpus is None else 0
        lines: list[bytes] = []
        rejects: list[Reject] = []
        counts = Counter[str](dict.fromkeys(("records", "seconds", *_COUNTS), 0))
        vocabulary = Counter[str]()
        notes = Counter[str]()
        for raw in self._inputs[number].source.read(unit.params["piece"]):
            notes.update(notes_of(raw))
            found: Any = record_text(raw).decode("utf-8", "replace")
            try:
                found = parse_record(raw)
                record, channels = self._complete(found, number)
                records = self._cut(record, notes, advance)
            except RejectRecord as reject:
                rejects.append(Reject(ManifestStage.kind, reject.reason, reject.detail, found, source))
                continue
            for record in records:
                lines.append(msgspec.json.encode(record))
                counts.update({
                    "records": 1,
                    "seconds": record["duration"],
                    "with_text": bool(record.get("text")),
                    "with_speaker": self._rules[number].origin(record) != "none",
                    "of_several_channels": channels > 1 and "channel" not in record,
                })  # fmt: skip
                words = record.get("text", "").split()
                vocabulary.update(words if self._options.word_vocabulary else "".join(words))
        part = f"parts/{unit.index:06d}"
        write_lines(staging.path(f"{part}.jsonl"), lines)
        write_new(staging.path(f"{part}.vocabulary.json"), msgspec.json.encode(vocabulary))
        return Output(
            files=[f"{part}.jsonl", f"{part}.vocabulary.json"],
            num_out=unit.size - len(rejects),
            rejects=rejects,
            stats=counts | {"notes": notes},
        )

    def _cut(self, record: dict[str, Any], notes: Counter[str], advance: Advance) -> list[dict[str, Any]]:
        """Return the records of the utterances of a completed record, or the record itself without ``segment``."""
        if self._cutter is None:
            advance(1.0)
            return [record]
        records, found = self._cutter.cut(record, self._root / record["audio_filepath"], advance)
        notes.update(found)
        return records

    def _complete(self, found: dict[str, Any], number: int) -> tuple[dict[str, Any], int]:
        """Return the completed record, and the number of channels of its audio.

        Raises:
            RejectRecord: the record, its file or its header cannot be used.
        """
        entry, rule = self._inputs[number], self._rules[number]
        record = entry.defaults | found
        check_fields(record)
        root, below = self._roots.place(number, record["audio_filepath"])
        path = os.path.normpath(f"{self._prefixes[number]}/{below}")
        tag = rule.make_tag(record, path)
        info = _probe(self._roots.roots[root].path / below, whole=record.get("offset") is None)
        offset, duration = segment_times(record, info, _TOLERANCE)
        made: dict[str, Any] = {"audio_filepath": path}
        if record.get("offset") is None:
            made["duration"] = info.num_samples / info.sampling_rate  # exact, unlike the record's own duration
        elif duration <= 0:
            raise RejectRecord("empty_audio", "the segment has no duration")
        else:
            made |= {"offset": offset, "duration": duration}
        if text := transcript_of(record):
            made["text"] = text
        if tag is not None:
            made["speaker"] = str(tag)
        elif find_tag(record.get("speaker")):
            # Keep a tag that names no speaker, since it has other parts.
            made["speaker"] = record["speaker"]
        elif rule.language != UNDETERMINED:
            # If there is no tag, the language needs a key of its own.
            made["lang"] = rule.language
        made |= {key: value for key, value in record.items() if key not in TYPED_KEYS}
        own = record.get("channel")
        channel = entry.source.channel if own is None else own
        if info.channels > 1 and channel is not None:
            made["channel"] = choose_channel(channel, info.channels)
        return made, info.channels


def _replace(path: Path, parts: Sequence[Path]) -> None:
    """Publish the concatenated parts as ``path``; if there are no parts, remove the file."""
    if parts:
        merge_files(parts, path)
    else:
        remove(path)


def _add_up_counts(commits: Iterable[Commit]) -> dict[str, Any]:
    """Return the number of records, the hours, and the number of records with each property in ``_COUNTS``."""
    counts = Counter[str]()
    for commit in commits:
        counts.update({key: commit.stats[key] for key in ("records", "seconds", *_COUNTS)})
    return {
        "records": counts["records"], "hours": round(counts["seconds"] / 3600, 6),
        **{name: counts[name] for name in _COUNTS},
    }  # fmt: skip


def _make_sources(sources: Sequence[str], options: ManifestOptions) -> list[Source]:
    """Return a source for each path, with those option keys that it knows."""
    of_corpus = options.corpus is not None
    refuse(
        (of_corpus and len(sources) > 1, "--from needs exactly one folder, the folder of the corpus"),
        (of_corpus and options.segment, "--segment does not apply to a corpus; leave out --from or --segment"),
        (
            not of_corpus and (options.splits or options.recipe_options or options.download),
            "--splits, --recipe-option, --remove-noises and --download need a corpus; add --from",
        ),
        (
            not (of_corpus or options.segment) and options.min_segment is not None,
            "--min-segment needs --segment vad, or a corpus (--from)",
        ),
        (
            options.segment is None and (options.max_segment is not None or options.restart),
            "--max-segment and --restart need --segment vad",
        ),
        code="bad_usage",
    )
    made = [_make_source(source, options) for source in sources]
    known = {entry.name for source in made for entry in fields(Source if of_corpus else source)}
    unused = sorted(options.keys.keys() - known)
    folders = [Path(str(source.audio_root)) for source in made if isinstance(source, FolderSource)]
    refuse(
        (unused, f"none of the sources supports {', '.join(unused)}; leave it out"),
        *(
            (one.is_relative_to(other), f"{one} is inside {other}; name only the outer folder")
            for one, other in itertools.permutations(folders, 2)
        ),
        code="bad_usage",
    )
    if not of_corpus:
        for source in made:
            source.check()
            source.check_keys()
    return made


def _make_source(source: str, options: ManifestOptions) -> Source:
    """Return the source for a path.

    Its audio root is the path itself if this is a folder, otherwise the option ``audio_root`` or the folder of the
    file.
    """
    path = expand_home(source)
    if options.download and not path.exists():
        make_folder(path)
    if not path.exists() and (options.corpus is not None or not names_several(source)):
        raise ConfigError(f"{path} does not exist; correct the path", code="missing_input")
    own: dict[str, Any] = {}
    if path.is_dir():
        kind: type[Source] = FolderSource
        root = path
    elif options.corpus is not None:
        raise ConfigError(f"{path} is not a folder; name the folder of the corpus", code="bad_usage")
    else:
        file = Path(str(find_files([source])[0]))
        name = unpacked_name(file.name)
        suffix = Path(name).suffix.lower()
        kind = _TYPES.get(suffix, TableSource)
        if suffix not in _TYPES and check_text(file, "source").lstrip().startswith(b"{"):
            kind = NemoSource
        root = expand_home(options.audio_root) if options.audio_root else file.parent
        own = {"manifest": source}
        if kind is TableSource:
            own = {"table": source, "delimiter": delimiter_of(name)}
    known = {entry.name for entry in fields(kind)}
    keys = {key: value for key, value in options.keys.items() if key in known}
    try:
        return msgspec.convert(own | keys | {"audio_root": str(_absolute(root))}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {str(error).partition(' - at ')[0]}", code="bad_usage") from error


def _refuse_existing(files: Iterable[Path]) -> None:
    there = sorted(str(file) for file in files if file.exists())
    if there:
        raise ConfigError(
            f"{', '.join(there)} already exists; name another file, or add --force to replace it", code="foreign_output"
        )


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))
