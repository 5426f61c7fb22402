"""Tar archives as inputs: NeMo's tarred datasets, WebDataset archives of samples, and WeNet's lists.

Only files and hard links to them are read; folders, devices and sparse files are ignored. If an archive is truncated or
damaged, the members before the damage are used, and the damage is reported.
"""

import itertools
import os
import re
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Literal

import msgspec

from sharmill.audio.files import open_audio
from sharmill.audio.roots import AudioRoots
from sharmill.config import require
from sharmill.errors import ConfigError, RejectRecord, refuse, refuse_record
from sharmill.files.location import Location, is_remote, tell_version
from sharmill.files.similar import Names
from sharmill.manifest import Member
from sharmill.prefetch import prefetch
from sharmill.shar.tar import BLOCK, EMPTY, TarDamage, TarMember, Window, clean_name, has_right_checksum, walk
from sharmill.sources import (
    ColumnSource,
    ContainerSource,
    DescribedRecord,
    EncodedSource,
    LineSource,
    RawRecord,
    RunSource,
    UnreadableRecord,
)
from sharmill.sources.files import (
    Digest,
    check_text,
    decode_object,
    decode_text,
    encode_record,
    find_files,
    iterate_lines,
    read_head,
    refuse_compressed,
    refuse_file,
)
from sharmill.sources.nemo import NemoSource, skip_mark

# Number of archives that are scanned in parallel; remote storage can serve this many requests at once. The result of a
# scan takes 8 bytes per sample until it is used.
_ARCHIVES_AT_ONCE: Final = 16
# Number of samples in a run; reading a part of a run starts at the beginning of the run.
_SAMPLES_PER_RUN: Final = 1000
# Texts are read completely; a larger file is not the text of an utterance.
_MAX_TEXT_BYTES: Final = 16 << 20
_LOST_LINK: Final = "is a hard link to a file that does not precede it in the archive; pack both files into one archive"
# WeNet's keys and the record keys that they become.
_WENET_KEYS: Final = {"wav": "audio_filepath", "txt": "text"}


def walk_members(path: Location, begin: int = 0) -> Iterator[TarMember]:
    """Yield the regular files of an archive, starting with the header at ``begin``.

    Raises:
        RejectRecord: missing_audio or unreadable_audio if the archive does not exist or cannot be opened.
        TarDamage: the archive is truncated or damaged.
    """
    with open_audio(path) as stream:
        yield from map(TarMember._make, walk(Window(stream), begin, strict=False))


def _describe(path: Location, damage: TarDamage) -> str:
    return f"the archive {path.name} {damage}; copy it again"


@dataclass(frozen=True, kw_only=True)
class TarSource(ContainerSource):
    """A source of tar archives under its key ``tars``; they are identified by their sizes, without being read."""

    digests: ClassVar[dict[str, Digest]] = {"tars": "size"}

    def __post_init__(self) -> None:
        super().__post_init__()
        for pattern in self.named("tars"):
            is_command = pattern.startswith("pipe:")
            require(
                not is_command, f"tars {pattern!r} is a command, which is not run; copy the files, and name the copies"
            )

    @cached_property
    def tar_files(self) -> list[Location]:
        """The archives, in order."""
        return self.find("tars")

    def check(self) -> None:
        """Raise ConfigError if a file cannot be an archive, or is outside the audio root."""
        read = partial(read_head, kind="tars", size=BLOCK)
        heads = prefetch(read, self.tar_files, threads=_ARCHIVES_AT_ONCE, ahead=_ARCHIVES_AT_ONCE)
        for file, head in zip(self.tar_files, heads, strict=True):
            refuse_compressed(file, "tars", head)
            # A file shorter than a block is truncated; its records will report this.
            is_archive = len(head) < BLOCK or head == EMPTY or has_right_checksum(head)
            refuse_file(file, "tars", (not is_archive, "is not a tar archive"))
            self.container(file)


# The content of an archive: its members by clean name (None for an ambiguous name); a message if the archive is damaged
# after these members, otherwise None; and a function that returns the set of names.
MemberTable = tuple[dict[str, TarMember | None], str | None, Callable[[], Names]]


def read_table(path: Location) -> MemberTable:
    """Return the members of an archive, and the damage after them, if any.

    Raises:
        RejectRecord: missing_audio or unreadable_audio if the archive does not exist or cannot be opened.
    """
    members: dict[str, TarMember | None] = {}
    names = cache(lambda: Names(members))
    try:
        for member in walk_members(path):
            name = clean_name(member.name)
            if member.size >= 0:
                members[name] = None if name in members else member
    except TarDamage as damage:
        return members, _describe(path, damage), names
    return members, None, names


@dataclass(frozen=True, kw_only=True)
class NemoTarredSource(TarSource, NemoSource):
    """Records of NeMo's tarred datasets: manifests with tar archives, which are not unpacked."""

    file_keys: ClassVar[tuple[str, ...]] = ("manifest", "tars")
    type: str = "nemo_tarred"
    manifest: str | list[str]
    """Path of the manifest, or a list of paths, sharded like the archives: ``manifest__OP_0..63_CL_.json``,
    ``manifest_{0..63}.json``. If one manifest belongs to several archives, its records need ``shard_id``."""
    tars: str | list[str]
    """Path of the archive, or a list of paths: ``audio__OP_0..63_CL_.tar`` (``tarred_audio_filepaths`` in NeMo).
    Archives and manifests are paired by the last number in their names."""

    def check(self) -> None:
        """Raise ConfigError if a file is not a manifest or archive, or if manifests and archives cannot be paired."""
        NemoSource.check(self)
        TarSource.check(self)
        self._pairs  # noqa: B018 (raises if they do not pair)

    def check_keys(self) -> None:
        """Raise ConfigError if a key that the configuration names is missing from all first records of manifests."""
        keys = {key: getattr(self, key) for key in ("manifest", "audio_root", "speaker", "columns")}
        NemoSource(**keys).with_cache(self.cache).check_keys()

    def entries(self, place: list[Any], begin: int, end: int) -> Iterator[RawRecord]:
        """Yield the records of a run of lines in the order of the manifest; each archive is scanned once."""
        lines = list(super().entries(place, begin, end))
        found: list[RawRecord] = list(lines)
        named = []
        for number, line in enumerate(lines):
            try:
                if (of_member := self._parse(line, place[0])) is not None:
                    named.append((number, *of_member))
            except RejectRecord as reject:
                found[number] = UnreadableRecord(reject.reason, reject.detail, self.shown(line))
        for number, tar, name, record in sorted(named, key=lambda of_member: of_member[1]):
            file = self.tar_files[tar]
            try:
                member = _find(self._table(file), name, file)
                container = self.container(file)
                record["audio_filepath"] = f"{container}/{clean_name(member.name)}"
                text = encode_record(record, lines[number])
                found[number] = DescribedRecord(text, Member(container, "bytes", member.start, member.size))
            except RejectRecord as reject:
                found[number] = UnreadableRecord(reject.reason, reject.detail, self.shown(lines[number]))
        return iter(found)

    @cached_property
    def _table(self) -> Callable[[Location], MemberTable]:
        """The function that returns the members of an archive; the results for the most recent archives are cached."""
        return lru_cache(maxsize=4)(read_table)

    def _parse(self, line: bytes, manifest: int) -> tuple[int, str, dict[str, Any]] | None:
        """Return the number of the archive, the member's name, and the record of a line.

        Return None if the line names no member; the stage ``prepare`` then rejects the unchanged line.
        """
        record = self.name_keys(decode_object(line, "the line is not a JSON object"))
        name, shard = record.get("audio_filepath"), record.get("shard_id")
        if skip_mark(record) or not isinstance(name, str) or not name.strip():
            return None
        tars = self._pairs[manifest]
        if None in tars:
            return tars[None], name, record
        is_number = type(shard) is int  # excludes JSON's true, which equals 1
        refuse_record(
            (shard is None, "missing_field", "the record has no shard_id to select one of several archives; add it"),
            (
                not is_number or shard not in tars,
                "missing_audio",
                f"no archive in tars has the number of the record's shard_id, {str(shard)[:40]}",
            ),
        )
        return tars[shard], name, record

    @cached_property
    def _pairs(self) -> list[dict[int | None, int]]:
        """For each manifest, {shard_id: index of the archive}; the key is None if records need no shard_id."""
        manifests, tars = self.manifest, self.tars
        try:
            return _pair(self.files, self.tar_files, 0)
        except ConfigError:
            # Each bucket may use the same numbers, so pair the entries of both lists one by one.
            if not (isinstance(manifests, list) and isinstance(tars, list) and len(manifests) == len(tars) > 1):
                raise
        pairs, first = [], 0
        for manifest, tar in zip(manifests, tars, strict=True):
            files = find_files([tar], self.cache)
            pairs += _pair(find_files([manifest], self.cache), files, first)
            first += len(files)
        return pairs


def _find(table: MemberTable, name: str, file: Location) -> TarMember:
    """Return the member that a record names; a record may also name a numbered segment of a member."""
    members, damage, names = table
    wanted = clean_name(name)
    # The n-th segment of a recording is named like its member, followed by -sub<n>.
    segment = re.fullmatch(r"(.+)-sub[0-9]+(\.\w+)?", wanted)
    if wanted not in members and segment:
        wanted = segment[1] + (segment[2] or "")
    member = members.get(wanted)
    if member is not None:
        return member
    if wanted in members:
        raise RejectRecord("ambiguous_audio", f"the archive {file.name} has several members named {wanted[:200]!r}")
    if damage:
        raise RejectRecord("unreadable_audio", f"the member {wanted[:200]!r} was not found, and {damage}")
    hint = names().describe(wanted)
    raise RejectRecord("missing_audio", f"the archive {file.name} has no file named {wanted[:200]!r}{hint}")


def _pair(manifests: Sequence[Location], tars: Sequence[Location], first: int) -> list[dict[int | None, int]]:
    """Return {shard_id: index of the archive} for each manifest; the key is None if records need no shard_id.

    Manifests and archives are paired by the last number in their names.

    Args:
        first: index of ``tars[0]`` among all archives.

    Raises:
        ConfigError: a number is missing or occurs twice.
    """
    if len(manifests) == len(tars) == 1:
        return [{None: first}]
    numbers = _number_all(tars, "tars")
    if len(manifests) == 1:
        return [{shard: first + place for shard, place in numbers.items()}]
    wanted = _number_all(manifests, "manifest")
    missing = sorted(wanted.keys() ^ numbers.keys())
    refuse(
        (
            missing,
            f"only one of manifest and tars has files with the numbers {', '.join(map(str, missing[:10]))}; manifests "
            "and archives are paired by the last number in their names, so add the missing files",
        )
    )
    return [{None: first + numbers[shard]} for shard in wanted]


def _number_all(files: Sequence[Location], key: str) -> dict[int, int]:
    """Return the index of each file by the last number in its name."""
    places: dict[int, int] = {}
    for place, file in enumerate(files):
        stem = Path(file.name).stem
        found = re.findall(r"_([0-9]+)", stem) or re.findall(r"[0-9]+", stem)
        number = int(found[-1][:18]) if found else -1
        what = f"has the same number {number} as another file" if found else "has no number in its name"
        refuse(
            (
                not found or number in places,
                f"{key}: {file} {what}, but manifests and archives are paired by the last number in their names; "
                "rename the files, or list each bucket as a separate entry in manifest and tars",
            )
        )
        places[number] = place
    return places


@dataclass(frozen=True)
class _TarSample:
    """A sample, which consists of the members with one key; or the position from which an archive cannot be read.

    Attributes:
        key: common part of the members' names.
        header: position of the first member's header in bytes.
        members: (suffix of the name, member), in the order of the archive.
        damage: reject for the unreadable rest of an archive, with an empty key and no members; None for a sample.
    """

    key: str
    header: int
    members: list[tuple[str, TarMember]]
    damage: RejectRecord | None = None


@dataclass(frozen=True)
class Archive:
    """An archive of samples.

    Attributes:
        path: location of the archive.
        container: path relative to the audio root.
        named: path of the archive as written in a WeNet list, otherwise the same as ``container``. It is resolved below
            the audio root.
        reject: reject if the archive cannot be used, otherwise None.
    """

    path: Location
    container: str
    named: str
    reject: RejectRecord | None = None


@dataclass(frozen=True, kw_only=True)
class _SampleSource(RunSource, EncodedSource):
    """A source of archives in which files with a common name form a sample."""

    name_pattern: ClassVar[re.Pattern[str]]
    """Splits member names into key and suffix; members that do not match belong to no sample."""

    @property
    @abstractmethod
    def archives(self) -> Sequence[Archive]:
        """The archives, in order."""

    @property
    @abstractmethod
    def suffixes(self) -> Sequence[str]:
        """Suffixes of audio members, without the leading dot."""

    @abstractmethod
    def record_of(self, sample: _TarSample, stream: BinaryIO, path: str) -> bytes:
        """Return the record of a sample in the archive ``stream``; ``path`` is its ``audio_filepath``."""

    def runs(self, size: int) -> Iterator[tuple[list[Any], int]]:
        """Yield (location, number of samples) for each run, which requires scanning the headers of all archives.

        The location consists of the archive's number, the position of the run's first header, and the positions of the
        first headers of samples with a repeated key.
        """
        walked = prefetch(
            self._headers, range(len(self.archives)), threads=_ARCHIVES_AT_ONCE, ahead=2 * _ARCHIVES_AT_ONCE
        )
        for number, (headers, repeated) in enumerate(walked):
            for start in range(0, len(headers), _SAMPLES_PER_RUN):
                run = headers[start : start + _SAMPLES_PER_RUN].tolist()
                yield [number, run[0], [header for header in run if header in repeated]], len(run)

    def _headers(self, number: int) -> "tuple[array[int], set[int]]":
        """Return the positions of the first headers of an archive's samples, and of samples with a repeated key."""
        headers, repeated = array("Q"), set[int]()
        keys: set[str] = set()
        for sample in self.samples(number):
            headers.append(sample.header)
            if sample.damage is None and sample.key in keys:
                repeated.add(sample.header)
            keys.add(sample.key)
        return headers, repeated

    def entries(self, place: list[Any], begin: int, end: int) -> Iterator[Any]:
        """Yield the records of the samples of a run, and a reject for damage in the archive."""
        number, first, repeated = place
        archive = self.archives[number]
        for sample in itertools.islice(self.samples(number, first), begin, end):
            name = f"{archive.container}/{sample.key}" if sample.damage is None else archive.container
            shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            try:
                if sample.damage is not None:
                    raise sample.damage
                earlier = f"the archive has an earlier sample with the key {sample.key[:200]!r}"
                refuse_record(
                    (shown != name, "malformed", "the member's name is not valid UTF-8"),
                    (sample.header in repeated, "ambiguous_audio", earlier),
                )
                member = self.audio_of(sample)
                path = f"{archive.container}/{clean_name(member.name)}"
                text = self.record_of(sample, self._opened(archive.path), path)
                yield DescribedRecord(text, Member(archive.named, "bytes", member.start, member.size))
            except RejectRecord as reject:
                yield UnreadableRecord(reject.reason, reject.detail, shown)

    def samples(self, number: int, begin: int = 0) -> Iterator[_TarSample]:
        """Yield the samples of an archive from the header at ``begin`` on, and finally any damage to the archive."""
        archive = self.archives[number]
        sample: _TarSample | None = None
        damaged: _TarSample | None = None
        try:
            if archive.reject is not None:
                raise archive.reject
            for member in walk_members(archive.path, begin):
                match = self.name_pattern.fullmatch(clean_name(member.name))
                if match is None:
                    continue
                if sample is None or sample.key != match[1]:
                    if sample is not None:
                        yield sample
                    sample = _TarSample(match[1], member.header, [])
                sample.members.append((match[2].lower(), member))
        except RejectRecord as reject:
            damaged = _TarSample("", 0, [], reject)
        except TarDamage as damage:
            header = damage.header
            match = self.name_pattern.fullmatch(clean_name(damage.name))
            if sample is not None and match is not None and match[1] == sample.key:
                # The last sample is incomplete.
                header, sample = sample.header, None
            damaged = _TarSample("", header, [], RejectRecord("unreadable_audio", _describe(archive.path, damage)))
        yield from filter(None, (sample, damaged))

    @cached_property
    def _opened(self) -> Callable[[Location], BinaryIO]:
        return lru_cache(maxsize=1)(open_audio)

    def audio_of(self, sample: _TarSample) -> TarMember:
        """Return the audio of a sample; raise RejectRecord unless there is exactly one audio member and no suffix
        occurs twice.
        """
        ends = [suffix for suffix, _ in sample.members]
        again = next((suffix for suffix in ends if ends.count(suffix) > 1), "")
        audio = [(suffix, member) for suffix, member in sample.members if suffix in self.suffixes]
        shown = ", ".join(f".{suffix[:40]}" for suffix, _ in (audio or sample.members)[:5])
        refuse_record(
            (again, "ambiguous_audio", f"the sample has two members with the suffix .{again[:40]}"),
            (not audio, "missing_audio", f"the sample has no audio; the suffixes of its members are {shown}"),
            (
                len(audio) > 1,
                "ambiguous_audio",
                f"the sample has several audio files: {shown}",
            ),
            (any(member.size < 0 for _, member in audio), "missing_audio", f"the audio {_LOST_LINK}"),
        )
        return audio[0][1]


@dataclass(frozen=True, kw_only=True)
class WebDatasetSource(TarSource, _SampleSource, ColumnSource):
    """Records of WebDataset archives; each sample is an audio file with a JSON file, a text file or both."""

    file_keys: ClassVar[tuple[str, ...]] = ("tars",)
    # As in webdataset, the key ends at the first dot of the last path component; hidden files belong to no sample.
    name_pattern: ClassVar[re.Pattern[str]] = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
    type: str = "webdataset"
    tars: str | list[str]
    """Path of the archive, or a list of paths, such as ``speech-{000000..000063}.tar``."""
    audio_suffixes: list[str] = field(
        default_factory=lambda: ["flac", "wav", "mp3", "ogg", "opus", "m4a", "aac", "wma", "webm", "aiff", "sph", "au"]
    )
    """Suffixes of audio members after the first dot: ``flac``, or ``mic1.flac`` if a sample has several audio files."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(all(self.audio_suffixes or [""]), "audio_suffixes must not be empty")

    @cached_property
    def archives(self) -> list[Archive]:
        """The archives, in order."""
        return [Archive(file, name, name) for file in self.tar_files for name in [self.container(file)]]

    @cached_property
    def suffixes(self) -> list[str]:
        """Suffixes of audio members, without the leading dot."""
        return [suffix.lstrip(".").lower() for suffix in self.audio_suffixes]

    def record_of(self, sample: _TarSample, stream: BinaryIO, path: str) -> bytes:
        """Return a record with the sample's key and the keys of its JSON file; ``text`` may come from its text file."""
        parts = dict(sample.members)
        values: dict[str, Any] = {}
        written = b""
        if (member := parts.get("json")) is not None:
            written = read_part(stream, member).strip()
            values = decode_object(written, f"{member.name[-100:]!r} is not a JSON object")
        record = {"key": sample.key} | self.name_keys(values) | {"audio_filepath": path}
        if "txt" in parts and record.get("text") in (None, ""):
            record["text"] = _read_text(stream, parts["txt"], self.encoding)
        return encode_record(record, written)


@dataclass(frozen=True, kw_only=True)
class WenetSource(_SampleSource, LineSource):
    """Records of WeNet's lists of JSON lines (``raw``) or tar archives (``shard``)."""

    file_keys: ClassVar[tuple[str, ...]] = ("data_list",)
    # As in WeNet, the key ends at the last dot.
    name_pattern: ClassVar[re.Pattern[str]] = re.compile(r"((?:.*/)?[^./][^/]*)\.([^./]+)")
    suffixes: ClassVar[tuple[str, ...]] = ("flac", "mp3", "m4a", "ogg", "opus", "wav", "wma")
    type: str = "wenet"
    data_list: str | list[str]
    """Path of the list, ``data.list``, or a list of such paths; ranges and ``*`` work as in ``manifest`` of
    ``nemo``."""
    data_type: Literal["raw", "shard"] = "raw"
    """``raw``: JSON lines with ``key``, ``wav``, ``txt``, and ``start`` and ``end`` of segments. ``shard``: paths of
    tar archives below ``audio_root``, in which audio and its ``.txt`` have the same name."""
    key_pattern: str | None = None
    """Regular expression that is searched for in the key. Its named groups become keys of the record, such as
    ``speaker`` from ``BAC[0-9]+(?P<speaker>S[0-9]+)W``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            named = self.key_pattern is None or re.compile(self.key_pattern).groupindex
        except re.error as error:
            raise ValueError(f"key_pattern {self.key_pattern!r} is not a valid regular expression: {error}") from error
        require(bool(named), f"key_pattern {self.key_pattern!r} needs a named group, such as (?P<speaker>S[0-9]+)")

    def check(self) -> None:
        """Raise ConfigError if a file cannot be such a list, or an archive is compressed."""
        for file in self.files:
            first = check_text(file, "data_list").strip().splitlines()[0]
            has_records = first.startswith(b"{") and self.data_type == "shard"
            has_paths = first.endswith(b".tar") and self.data_type == "raw"
            refuse_file(
                file,
                "data_list",
                (has_records, "has records instead of paths of archives; set data_type: raw"),
                (has_paths, "has paths of archives instead of records; set data_type: shard"),
            )
        # Archives behind URLs are checked only when they are read.
        usable = [archive.path for archive in self.archives if archive.reject is None]
        found = [path for path in usable if not is_remote(path) and path.is_file()]
        refuse(
            (
                self.archives and not found and not any(map(is_remote, usable)),
                f"none of the {len(self.archives)} archives in data_list exists; set audio_root in sources to the "
                "folder that contains them",
            ),
            code="missing_input",
        )
        for path in found:
            refuse_compressed(path, "archive", read_head(path, "data_list", 8))

    def identity(self) -> dict[str, Any]:
        """Return the sizes and checksums of the lists and, for ``shard``, the sizes of archives by number and name."""
        lists = super().identity()
        if self.data_type == "raw":
            return lists
        return lists | {"tars": {f"{number} {name}": size for number, (name, size) in enumerate(self.sizes())}}

    def sizes(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, size) for each archive; size is [size, version] behind a URL, and None for a missing archive."""

        def measure(archive: Archive) -> Any:
            with suppress(FileNotFoundError):
                size, *tag = tell_version(archive.path)
                return [size, *tag] if tag else size
            return None

        paths = [archive.path.name for archive in self.archives]
        sizes = prefetch(measure, self.archives, threads=_ARCHIVES_AT_ONCE, ahead=_ARCHIVES_AT_ONCE)
        return zip(paths, sizes, strict=True)

    def runs(self, size: int) -> Iterator[tuple[list[Any], int]]:
        """Yield runs of lines or of samples."""
        kind = LineSource if self.data_type == "raw" else _SampleSource
        return kind.runs(self, size)

    def entries(self, place: list[Any], begin: int, end: int) -> Iterator[Any]:
        """Yield the lines of a run or the records of its samples."""
        kind = LineSource if self.data_type == "raw" else _SampleSource
        return kind.entries(self, place, begin, end)

    @cached_property
    def archives(self) -> list[Archive]:
        """The archives in the lists (only for ``shard``); an archive that cannot be used has a ``reject``."""
        if self.data_type == "raw":
            return []
        roots = AudioRoots.of([self.audio_root], self.cache)
        found = []
        for _, line in itertools.chain.from_iterable(iterate_lines(file, "data_list") for file in self.files):
            text = line.decode("utf-8", "replace")
            try:
                found.append(self.locate(roots, text))
            except RejectRecord as reject:
                found.append(Archive(Path(text), text, text, reject))
        return found

    def locate(self, roots: AudioRoots, text: str) -> Archive:
        """Return the archive that a line names; raise RejectRecord if it is outside the audio root."""
        number, container = roots.place(0, text)
        return Archive(roots.path_of(number, container), container, text)

    def record(self, entry: Any) -> RawRecord:
        """Return the record of a line, with WeNet's keys renamed."""
        if not isinstance(entry, bytes):
            return entry
        values = decode_object(entry, "the line is not a JSON object")
        start, end = values.pop("start", None), values.pop("end", None)
        record = {_WENET_KEYS.get(name, name): value for name, value in values.items()} | self._of_key(
            values.get("key")
        )
        if start is not None or end is not None:
            are_times = type(start) in (int, float) and type(end) in (int, float) and 0 <= start < end
            refuse_record(
                (not are_times, "malformed", "start and end must be times in seconds, and end must be later than start")
            )
            record |= {"offset": start, "duration": end - start}
        return encode_record(record, entry)

    def record_of(self, sample: _TarSample, stream: BinaryIO, path: str) -> bytes:
        """Return a record with the sample's key, the groups that ``key_pattern`` finds in it, and the sample's text."""
        record = {"audio_filepath": path, "key": sample.key} | self._of_key(sample.key)
        if (text := dict(sample.members).get("txt")) is not None:
            record["text"] = _read_text(stream, text, self.encoding)
        return msgspec.json.encode(record)

    def _of_key(self, key: Any) -> dict[str, str]:
        """Return the groups that ``key_pattern`` finds in a key."""
        match = re.search(self.key_pattern, key) if self.key_pattern and isinstance(key, str) else None
        return {name: value for name, value in match.groupdict().items() if value is not None} if match else {}


def read_part(stream: BinaryIO, member: TarMember, most: int = _MAX_TEXT_BYTES) -> bytes:
    """Return the content of a member of an archive.

    Raises:
        RejectRecord: ``malformed`` if it has more than ``most`` bytes, or is a hard link without a target.
    """
    detail = f"{member.name[-100:]!r} is larger than {most >> 20} MiB, too large for a text or an utterance"
    refuse_record(
        (member.size > most, "malformed", detail),
        (member.size < 0, "malformed", f"{member.name[-100:]!r} {_LOST_LINK}"),
    )
    return os.pread(stream.fileno(), member.size, member.start)


def _read_text(stream: BinaryIO, member: TarMember, encoding: str) -> str:
    """Return a text from an archive; raise RejectRecord ``malformed`` if it is not in ``encoding``."""
    return decode_text(read_part(stream, member), encoding, repr(member.name[-100:])).strip()
