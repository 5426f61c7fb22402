"""Every kind of odd or bad input through the real stages in one run: in the dataset, or in the rejects with its reason.

Every kind makes its own file and records; all go into one corpus with good utterances, and how each must end is in the
tables here.
"""

import functools
import gzip
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
from support import audio as odd
from support.project import (
    command,
    lines,
    put,
    read_with_lhotse,
    run_sharmill,
    speaker_tag,
    voice,
    write_config,
    write_lines,
)
from support.reported import Elements

from sharmill.config.loading import load_for_display
from sharmill.engine.order import make_stages
from sharmill.errors import REASONS
from sharmill.report.facts import read_run_facts
from sharmill.report.page import make_page
from sharmill.shar import open_shar

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_STAGES = (["prepare"], ["match"], ["write"], ["encode", "validate"])
_PREFIX = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
# Nothing may hang, and a FIFO would.
_SECONDS = 400


OUTPUT = "output"
Record = dict[str, Any] | bytes


def put_file(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def good_file(path: Path) -> Path:
    return put_file(path, odd.wav())


@dataclass(frozen=True)
class Kind:
    """One kind of odd or bad input.

    Attributes:
        outcomes: one a record: ``output``, or the stage that rejects it and its reason.
        make: makes the file of the kind, given its path.
        changes: of each record, in keys of a good one; those to ``...`` are removed.
        line: makes the line of the manifest of the line of a good record.
        spoil: is done to the file after the stage ``after``, so that a later one does not find it as it was.
    """

    name: str
    outcomes: Sequence[str]
    make: Callable[[Path], object] = good_file
    changes: Sequence[dict[str, Any]] = ({},)
    line: Callable[[bytes], bytes] | None = None
    after: str = ""
    spoil: Callable[[Path], object] = good_file

    def file(self, root: Path) -> Path:
        return root / (re.sub(r"\W+", "_", self.name) + ".wav")

    def records(self, root: Path) -> list[Record]:
        """Make the file below the audio root, and return the records."""
        path = self.file(root)
        self.make(path)
        # The kind comes first, so that it is in the kept part of a long record.
        good = {"kind": self.name, "audio_filepath": path.name, "duration": 2.0, "text": f"Text of {path.stem}.",
                "speaker": speaker_tag("anna")}  # fmt: skip
        made = [{key: value for key, value in (good | one).items() if value is not ...} for one in self.changes]
        return made if self.line is None else [self.line(json.dumps(record).encode()) for record in made]


def audio(name: str, outcome: str, make: Callable[[], bytes], **changes: Any) -> Kind:
    """Return a kind of audio file, with the record of a good file."""
    return Kind(name, [outcome], lambda path: path.write_bytes(make()), [changes])


def entry(name: str, outcome: str, **changes: Any) -> Kind:
    """Return a kind of record, with a good file."""
    return Kind(name, [outcome], changes=[changes])


def line(name: str, outcome: str, make: Callable[[bytes], bytes]) -> Kind:
    """Return a kind of line, derived from the line of a good record."""
    return Kind(name, [outcome] if outcome else [], line=make)


def named(name: str, outcome: str, path: str) -> Kind:
    """Return a kind of file name, with a good file of that name."""
    return Kind(name, [outcome], lambda own: good_file(own.parent / path), [{"audio_filepath": path}])


def place(name: str, outcome: str, make: Callable[[Path], object], **changes: Any) -> Kind:
    """Return a kind of thing in the file system; ``make`` gets the path that the record names."""
    return Kind(name, [outcome], make, [changes])


def pair(name: str, outcomes: tuple[str, str], *changes: dict[str, Any]) -> Kind:
    """Return two records that have to do with each other."""

    def make(path: Path) -> None:
        for one in changes:
            samples = voice(one.get("duration", 2.0) + one.get("offset", 0.0))
            put_file(path.parent / one.get("audio_filepath", path.name), odd.container(samples, 16000, "WAV"))

    return Kind(name, outcomes, make, changes)


def later(name: str, outcome: str, after: str, spoil: Callable[[Path], object]) -> Kind:
    """Return a good file that changes when a stage has seen it."""
    return Kind(name, [outcome], after=after, spoil=spoil)


def two_of_a_voice(path: Path) -> None:
    """Create two utterances of one voice, each being the context of the other one."""
    for seed, name in enumerate((path.name, "stays.wav")):
        put(path.parent / name, voice(4.0, seed=seed))


def three_hours(path: Path) -> None:
    """Write three hours of FLAC in less than a megabyte, a minute at a time; in the last one somebody speaks."""
    silence = np.zeros(60 * 8000, dtype=np.float32)
    with sf.SoundFile(path, "w", 8000, 1, "PCM_16", format="FLAC") as sound:
        for _ in range(179):
            sound.write(silence)
        sound.write(np.concatenate([voice(10.0, 8000), silence[: 50 * 8000]]))


def cut_off(data: bytes, share: float = 0.5) -> bytes:
    return data[: int(len(data) * share)]


def damaged(data: bytes) -> bytes:
    """Return a file with other bytes in its middle."""
    middle = len(data) // 2
    return data[:middle] + np.random.default_rng(1).bytes(1500) + data[middle + 1500 :]


def mp3_without_info() -> bytes:
    """Return an MP3 of constant bit rate without the frame that states its length."""
    data = odd.recording("MP3", "MPEG_LAYER_III", bitrate_mode="CONSTANT", compression_level=0.5)
    return data[data.find(data[:3], 4) :]


def mp3_with_picture() -> bytes:
    """Return an MP3 behind an ID3 tag of 300 kB."""
    coded = bytes((300_000 >> shift) & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x04\0\0" + coded + bytes(300_000) + odd.recording("MP3", "MPEG_LAYER_III")


def not_utf8_on_disk(path: Path) -> None:
    """Make a link with a plain name to a file whose name is Latin-1."""
    target = os.fsdecode(os.fsencode(path.parent) + b"/caf\xe9.wav")
    path.symlink_to(good_file(Path(target)))


def outside(path: Path) -> Path:
    """Make a good file beside the audio root."""
    return good_file(path.parent.parent / "outside.wav")


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def lock_folder(path: Path) -> None:
    good_file(path.parent / "locked/a.wav")
    (path.parent / "locked").chmod(0)


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "0" + "]" * depth)


def with_key(key: bytes) -> Callable[[bytes], bytes]:
    return lambda good: good[:-1] + b", " + key + b"}"


# Four segments of four seconds of one recording: the contexts of all that is shorter.
GOOD = Kind(
    "good utterances", (OUTPUT,) * 4, lambda path: put(path, voice(16.0, seed=3)),
    [{"offset": 4.0 * n, "duration": 4.0, "text": f"Good {n}."} for n in range(4)],
)  # fmt: skip

AUDIO = [
    audio("WAV of 24 bits", OUTPUT, lambda: odd.recording(subtype="PCM_24")),
    audio("WAV of 32 bits", OUTPUT, lambda: odd.recording(subtype="PCM_32")),
    audio("WAV of 8 bits", OUTPUT, lambda: odd.recording(subtype="PCM_U8")),
    audio("WAV of floats", OUTPUT, odd.floats),
    audio("WAV of doubles", OUTPUT, lambda: odd.recording(subtype="DOUBLE")),
    audio("floats far beyond 1", "match/over_full_scale", lambda: odd.floats(gain=1e6)),
    audio("mu-law", OUTPUT, lambda: odd.recording(subtype="ULAW")),
    audio("A-law", OUTPUT, lambda: odd.recording(subtype="ALAW")),
    audio("IMA ADPCM", OUTPUT, lambda: odd.recording(subtype="IMA_ADPCM")),
    audio("Microsoft ADPCM", OUTPUT, lambda: odd.recording(subtype="MS_ADPCM")),
    audio("WAVE_FORMAT_EXTENSIBLE", OUTPUT, lambda: odd.recording("WAVEX")),
    audio("RF64", OUTPUT, lambda: odd.recording("RF64")),
    audio("RIFX, the big end first", OUTPUT, lambda: odd.recording(endian="BIG")),
    audio("Wave64", OUTPUT, lambda: odd.recording("W64")),
    audio("AIFF", OUTPUT, lambda: odd.recording("AIFF")),
    audio("Sun AU", OUTPUT, lambda: odd.recording("AU")),
    audio("NIST SPHERE", OUTPUT, lambda: odd.recording("NIST")),
    audio("FLAC called .wav", OUTPUT, lambda: odd.recording("FLAC")),
    audio("MP3", OUTPUT, lambda: odd.recording("MP3", "MPEG_LAYER_III")),
    audio("MP3 without its length", OUTPUT, mp3_without_info),
    audio("MP3 behind a large ID3 tag", OUTPUT, mp3_with_picture),
    audio("Vorbis", OUTPUT, lambda: odd.recording("OGG", "VORBIS")),
    audio("Opus", OUTPUT, lambda: odd.recording("OGG", "OPUS")),
    *[audio(f"{rate} Hz", OUTPUT, lambda rate=rate: odd.recording(rate=rate))
      for rate in (8000, 11025, 22050, 32000, 44100, 48000, 96000, 192000)],
    audio("44101 Hz", "match/unsupported_rate", lambda: odd.recording(rate=44101)),
    audio("65664 Hz, which FLAC cannot hold", "write/unsupported_rate", lambda: odd.recording(rate=65664)),
    audio("1 Hz", "prepare/unreadable_audio", lambda: odd.wav(bytes(4), rate=1)),
    audio("a rate of zero", "prepare/unreadable_audio", lambda: odd.wav(rate=0)),
    audio("a rate of 4 GHz", "prepare/unreadable_audio", lambda: odd.wav(rate=2**32 - 1)),
    audio("no channels", "prepare/unreadable_audio", lambda: odd.wav(channels=0, block=2)),
    audio("a block of zero bytes", OUTPUT, lambda: odd.wav(block=0)),
    audio("samples of 3 bits", "prepare/duration_mismatch", lambda: odd.wav(bits=3)),
    audio("an unknown coding", "prepare/unreadable_audio", lambda: odd.wav(kind=0x1234)),
    audio("two channels", "prepare/unsupported_channels", lambda: odd.several_channels(2)),
    audio("six channels", "prepare/unsupported_channels", lambda: odd.several_channels(6, "WAVEX")),
    audio("Opus with two channels", "prepare/unsupported_channels", lambda: odd.several_channels(2, "OGG", "OPUS")),
    audio("65535 channels", "prepare/unreadable_audio", lambda: odd.wav(channels=65535)),
    audio("an odd chunk", OUTPUT, lambda: odd.wav(before=odd.chunk(b"LIST", b"INFO!"))),
    audio("a chunk of 1 MB", OUTPUT, lambda: odd.wav(before=odd.chunk(b"junk", bytes(1 << 20)))),
    audio("an unknown chunk after the samples", OUTPUT, lambda: odd.wav(after=odd.chunk(b"\xff\0<>", b"x" * 99))),
    audio("a chunk that claims 4 GB", "prepare/unreadable_audio",
          lambda: odd.wav(before=odd.chunk(b"LIST", b"INFO", 2**32 - 9))),
    audio("garbage after the samples", OUTPUT, lambda: odd.wav() + b"garbage" * 50),
    audio("zero bytes", "prepare/empty_audio", bytes),
    audio("one byte", "prepare/unreadable_audio", lambda: b"R"),
    audio("a header and no samples", "prepare/empty_audio", lambda: odd.wav(b"")),
    audio("0.01 s", OUTPUT, lambda: odd.wav(odd.pcm(0.01)), duration=0.01),
    audio("one sample", "prepare/too_short", lambda: odd.wav(b"\1\0"), duration=1 / 16000),
    audio("silence", "match/silent_audio", lambda: odd.wav(bytes(64000))),
    audio("a constant at full scale", OUTPUT, lambda: odd.wav(b"\xff\x7f" * 32000)),
    audio("a square wave that clips", OUTPUT, lambda: odd.wav((b"\xff\x7f" * 40 + b"\0\x80" * 40) * 400)),
    audio("NaN samples", "match/non_finite_audio", lambda: odd.floats(bad=np.nan)),
    audio("infinite samples", "match/non_finite_audio", lambda: odd.floats(bad=np.inf)),
    Kind(
        "3 h, whole and a segment of its last minute", ("prepare/too_long", OUTPUT), three_hours,
        ({"duration": 10800.0}, {"offset": 10745.0, "duration": 2.0}),
    ),
]  # fmt: skip

DAMAGED = [
    audio("half a WAV", "prepare/duration_mismatch", lambda: cut_off(odd.wav())),
    audio("a WAV without its last 1%", "match/duration_mismatch", lambda: cut_off(odd.wav(), 0.99)),
    audio("a segment before the end of a cut WAV", OUTPUT, lambda: cut_off(odd.wav()), offset=0.25, duration=0.5),
    audio("a WAV cut in its header", "prepare/unreadable_audio", lambda: odd.wav()[:30]),
    audio("half a FLAC", "match/unreadable_audio", lambda: cut_off(odd.recording("FLAC"))),
    audio("half an MP3", "match/duration_mismatch", lambda: cut_off(odd.recording("MP3", "MPEG_LAYER_III"))),
    audio("half a Vorbis", "prepare/empty_audio", lambda: cut_off(odd.recording("OGG", "VORBIS"))),
    audio("half an Opus", "prepare/unreadable_audio", lambda: cut_off(odd.recording("OGG", "OPUS"))),
    audio("a damaged FLAC", "match/unreadable_audio", lambda: damaged(odd.recording("FLAC"))),
    audio("a damaged MP3", "match/duration_mismatch", lambda: damaged(odd.recording("MP3", "MPEG_LAYER_III"))),
    audio("a damaged Vorbis", "prepare/duration_mismatch", lambda: damaged(odd.recording("OGG", "VORBIS"))),
    audio("a damaged Opus", "prepare/unreadable_audio", lambda: damaged(odd.recording("OGG", "OPUS"))),
    audio("a WAV that claims 60 s", "prepare/duration_mismatch", lambda: odd.wav(data_size=60 * 32000), duration=60.0),
    audio("a WAV that claims 1 s", "prepare/duration_mismatch", lambda: odd.wav(data_size=32000)),
    audio("a WAV from a pipe, of unknown size", OUTPUT, lambda: odd.wav(data_size=0xFFFFFFFF)),
    audio("a FLAC that claims 60 s", "match/duration_mismatch", lambda: odd.flac_claiming(960_000), duration=60.0),
    audio("a FLAC that claims 2^36 samples", "prepare/duration_mismatch", lambda: odd.flac_claiming(2**36 - 1)),
    audio("a FLAC of unknown length", OUTPUT, lambda: odd.flac_claiming(0)),
    audio("a text file", "prepare/unreadable_audio", lambda: b"this is no audio\n" * 100),
    audio("an HTML page", "prepare/unreadable_audio", lambda: b"<!DOCTYPE html><title>404</title>" * 20),
    audio("a zip archive", "prepare/unreadable_audio", lambda: b"PK\3\4" + odd.wav()),
    audio("a WAV in gzip", "prepare/unreadable_audio", lambda: gzip.compress(odd.wav(), mtime=0)),
    audio("an MP4", "prepare/unreadable_audio", lambda: b"\0\0\0\x20ftypisom\0\0\x02\0isomiso2avc1mp41" + bytes(4000)),
    audio("random bytes", "prepare/unreadable_audio", lambda: np.random.default_rng(7).bytes(64000)),
    audio("zeros in place of a file", "prepare/unreadable_audio", lambda: bytes(64044)),
    audio("a Git LFS pointer", "prepare/unreadable_audio",
          lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 64044\n"),
]  # fmt: skip

PLACES = [
    place("no file", "prepare/missing_audio", lambda path: None),
    place("a directory", "prepare/unreadable_audio", Path.mkdir),
    place("a broken link", "prepare/missing_audio", lambda path: path.symlink_to("nowhere.wav")),
    place("a link to itself", "prepare/missing_audio", lambda path: path.symlink_to(path.name)),
    place("a link within the root", OUTPUT, lambda path: path.symlink_to(good_file(path.parent / "to/here.wav"))),
    place("a link out of the root", "prepare/outside_root", lambda path: path.symlink_to(outside(path))),
    place("a linked folder out of the root", "prepare/outside_root",
          lambda path: (path.parent / "out").symlink_to(outside(path).parent), audio_filepath="out/outside.wav"),
    place("a link to /dev/zero", "prepare/outside_root", lambda path: path.symlink_to("/dev/zero")),
    place("a FIFO", "prepare/unreadable_audio", os.mkfifo),
    place("a socket", "prepare/unreadable_audio", lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)),
    place("a device", "prepare/unreadable_audio", lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))),
    place("a file that may not be read", "prepare/unreadable_audio", lambda path: good_file(path).chmod(0)),
    place("a folder that may not be entered", "prepare/unreadable_audio", lock_folder, audio_filepath="locked/a.wav"),
    place("a link to a name that is not UTF-8", OUTPUT, not_utf8_on_disk),
    place("a file below a file", "prepare/missing_audio", good_file,
          audio_filepath="a_file_below_a_file.wav/b.wav"),
    named("a name with blanks", OUTPUT, "a name  with blanks .wav"),
    named("a name with a newline", OUTPUT, "new\nline.wav"),
    named("a name with quotes", OUTPUT, "quo'te\"s`.wav"),
    named("a name with a backslash", OUTPUT, "back\\slash.wav"),
    named("a name for a shell", OUTPUT, "$(touch ran);touch ran&.wav"),
    named("a name for a pattern", OUTPUT, "[a]*?{b}%s.wav"),
    named("a name with terminal escapes", OUTPUT, "\x1b[2J\x1b]0;title\x07.wav"),
    named("a name with HTML", OUTPUT, "<script>alert(1)<&script>.wav"),
    named("a name like an option", OUTPUT, "-rf.wav"),
    named("a hidden name", OUTPUT, ".wav"),
    named("a name without extension", OUTPUT, "plain"),
    named("a name in other scripts", OUTPUT, "日本/größe/🎤.wav"),
    named("a name of 250 letters", OUTPUT, "n" * 246 + ".wav"),
    named("a name that ends with a slash", OUTPUT, "slash.wav/".rstrip("/")),
    place("a name of 300 letters", "prepare/missing_audio", lambda path: None, audio_filepath="n" * 300 + ".wav"),
    place("a path of 5,000 letters", "prepare/missing_audio", lambda path: None, audio_filepath="n/" * 2500 + "a.wav"),
    named("a path of 30 folders", OUTPUT, "deep/" * 30 + "a.wav"),
    entry("'..' within the root", OUTPUT, audio_filepath="deep/../_within_the_root.wav"),
    entry("'..' out of the root", "prepare/outside_root", audio_filepath="../outside.wav"),
    entry("'..' out of the root on a detour", "prepare/outside_root", audio_filepath="deep/../../outside.wav"),
    entry("an absolute path", "prepare/outside_root", audio_filepath="/etc/passwd"),
    entry("pipe:", "prepare/outside_root", audio_filepath="pipe:touch ran"),
    entry("a command behind a bar", "prepare/outside_root", audio_filepath="sph2pipe a.sph |"),
    entry("a null byte in the path", "prepare/outside_root", audio_filepath="a.wav\0.txt"),
    entry("a URL", "prepare/outside_root", audio_filepath="https://example.org/a.wav"),
    entry("a file URL", "prepare/outside_root", audio_filepath="file:///etc/passwd"),
    entry("a home directory", "prepare/missing_audio", audio_filepath="~/a.wav"),
    entry("the root itself", "prepare/unreadable_audio", audio_filepath="."),
]  # fmt: skip

RECORDS = [
    entry("text of 100,000 characters", OUTPUT, text="wort " * 20_000),
    entry("text with terminal escapes", OUTPUT, text="\x1b[31mred\x1b[0m\x07\x9b2J\b\r"),
    entry("text with HTML", OUTPUT, text="<script>alert('x')</script>&amp;"),
    entry("text with null characters and newlines", OUTPUT, text="a\0b\nc\u2028d"),
    entry("text with half an emoji", "prepare/malformed", text="\ud83d"),
    entry("no text", "prepare/missing_field", text=...),
    entry("text of blanks", "prepare/empty_text", text=" \t\n"),
    entry("text that is a list", "prepare/malformed", text=["a"]),
    entry("a duration as text", "prepare/malformed", duration="2.0"),
    entry("a duration of true", "prepare/malformed", duration=True),
    entry("a duration of null: that of the header", OUTPUT, duration=None),
    entry("no duration: that of the header", OUTPUT, duration=...),
    entry("a duration of NaN", "prepare/malformed", duration=float("nan")),
    entry("an infinite duration", "prepare/malformed", duration=float("inf")),
    line("a duration of 1e999", "prepare/malformed", lambda good: good.replace(b"2.0", b"1e999", 1)),
    entry("a duration of 10^400", "prepare/malformed", duration=10**400),
    line("a duration of 5,000 digits", "prepare/malformed", lambda good: good.replace(b"2.0", b"9" * 5000, 1)),
    entry("a negative duration", "prepare/malformed", duration=-2.0),
    entry("a duration of zero", "prepare/too_short", duration=0),
    entry("a negative offset", "prepare/malformed", offset=-0.5),
    entry("an offset at the end", "prepare/duration_mismatch", offset=2.0, duration=0.05),
    entry("an offset far beyond the end", "prepare/duration_mismatch", offset=500.0),
    entry("a segment that goes beyond the end", "prepare/duration_mismatch", offset=1.0),
    entry("an offset as text", "prepare/malformed", offset="0"),
    entry("a path that is a number", "prepare/malformed", audio_filepath=3),
    entry("no path", "prepare/missing_field", audio_filepath=...),
    entry("a speaker that is an object", "prepare/malformed", speaker={"id": 3}),
    entry("no speaker", "prepare/bad_speaker", speaker=...),
    entry("a speaker tag of another form", "prepare/bad_speaker", speaker="| Speaker:anna |"),
    entry("a speaker without companion", "match/single_utterance_speaker", speaker=speaker_tag("alone")),
    entry("_skipme", "prepare/skipped", _skipme=True),
    entry("keys of sharmill's own", OUTPUT, _index=7, _cut_id="../../x", _source=99, _whole_file="no",
          _recording_id="x", context_audio_filepath="/etc/passwd", context_speaker_similarity="high"),
    entry("keys that lhotse takes for arrays", OUTPUT, a={"array": 1, "shape": [1]}, b=[{"width": 1}]),
    entry("keys of a lhotse recording of a command", OUTPUT,
          r={"id": "x", "sources": [{"type": "command", "source": "touch ran", "channels": [0]}], "sampling_rate": 1}),
    entry("a lhotse recording of a command within a key", "prepare/malformed",
          r={"x": {"id": "x", "sources": [{"type": "command", "source": "touch ran"}], "sampling_rate": 1}}),
    entry("a lhotse recording without sources within a list", "prepare/malformed",
          r=[{"id": "x", "sources": ["x"], "sampling_rate": 1}]),
    entry("10,000 further keys", OUTPUT, **{f"key{number}": number for number in range(10_000)}),
    entry("huge numbers in further keys", OUTPUT, big=10**30, small=-(10**30), real=1e308, tiny=5e-324),
    entry("an empty key", OUTPUT, **{"": "nothing"}),
    entry("a language of its own that is no text", OUTPUT, language={"en": 1}),
    entry("90 levels of lists", OUTPUT, nested=nested(90)),
    entry("101 levels of lists", "prepare/malformed", nested=nested(101)),
    line("100,000 levels of lists", "prepare/malformed", with_key(b'"n":' + b"[" * 100_000 + b"]" * 100_000)),
    line("the same key twice: the last one counts", OUTPUT, with_key(b'"text": "the last one"')),
    line("a line that ends as in Windows", OUTPUT, lambda good: good + b"\r"),
    line("blanks around the line", OUTPUT, lambda good: b" \t" + good + b"  "),
    line("empty lines", "", lambda good: b"\n  \n\r"),
    line("a byte order mark within the manifest", "prepare/malformed", lambda good: b"\xef\xbb\xbf" + good),
    line("a path that is not UTF-8", "prepare/malformed", lambda good: good.replace(b".wav", b"\xe9.wav")),
    line("half a line", "prepare/malformed", lambda good: good[:-20]),
    line("two records on one line", "prepare/malformed", lambda good: good + good),
    line("a list", "prepare/malformed", lambda good: b"[" + good + b"]"),
    line("text", "prepare/malformed", lambda good: b'"kind: text"'),
    line("null bytes, as after a power cut", "prepare/malformed", lambda good: good + bytes(512)),
    line("JSON in single quotes", "prepare/malformed", lambda good: good.replace(b'"', b"'")),
    line("a comma too many", "prepare/malformed", lambda good: good[:-1] + b",}"),
    line("a record of 17 MiB", "prepare/malformed", with_key(b'"long": "' + b"x" * (17 << 20) + b'"')),
    line("a comment", "prepare/malformed", lambda good: b"# " + good),
]  # fmt: skip

PAIRS = [
    pair("the same record twice", (OUTPUT, "prepare/duplicate_id"), {}, {}),
    pair("the same segment with another text", (OUTPUT, "prepare/duplicate_id"), {}, {"text": "Another."}),
    pair("the same file by another path", (OUTPUT, "prepare/duplicate_id"),
         {"audio_filepath": "same.wav"}, {"audio_filepath": "./deep/..//same.wav"}),
    pair("a.b.wav and a_b.wav", (OUTPUT,) * 2, {"audio_filepath": "a.b.wav"}, {"audio_filepath": "a_b.wav"}),
    pair("a/b.wav and a-b.wav", (OUTPUT,) * 2, {"audio_filepath": "a/b.wav"}, {"audio_filepath": "a-b.wav"}),
    pair("x.wav and x.wave", (OUTPUT,) * 2, {"audio_filepath": "x.wav"}, {"audio_filepath": "x.wave"}),
    pair("names apart in case only", (OUTPUT,) * 2, {"audio_filepath": "Case.wav"}, {"audio_filepath": "case.wav"}),
    pair("names apart in Unicode form only", (OUTPUT,) * 2,
         {"audio_filepath": "u\u0308ber.wav"}, {"audio_filepath": "\u00fcber.wav"}),
    pair("segments 3 ms apart", (OUTPUT,) * 2, {"offset": 0.001, "duration": 1.0}, {"offset": 0.004, "duration": 1.0}),
]  # fmt: skip

BERTA = {"duration": 4.0, "speaker": speaker_tag("berta")}
LATER = [
    later("vanishes after prepare", "match/missing_audio", "prepare", Path.unlink),
    later("loses its end after prepare", "match/duration_mismatch", "prepare",
          lambda path: os.truncate(path, 40_000)),
    later("becomes a text after prepare", "match/unreadable_audio", "prepare", lambda path: path.write_text("x" * 99)),
    later("becomes a directory after prepare", "match/unreadable_audio", "prepare",
          lambda path: replace(path, Path.mkdir)),
    later("becomes a FIFO after prepare", "match/unreadable_audio", "prepare", lambda path: replace(path, os.mkfifo)),
    later("becomes a link out of the root after prepare", "match/outside_root", "prepare",
          lambda path: replace(path, lambda new: new.symlink_to(outside(new)))),
    later("gets another rate after prepare", "match/changed_audio", "prepare",
          lambda path: path.write_bytes(odd.recording(rate=22050))),
    later("vanishes after match", "write/missing_audio", "match", Path.unlink),
    later("becomes empty after match", "write/empty_audio", "match", lambda path: os.truncate(path, 0)),
    later("gets two channels after match", "write/unsupported_channels", "match",
          lambda path: path.write_bytes(odd.several_channels(2))),
    later("becomes a link out of the root after match", "write/outside_root", "match",
          lambda path: replace(path, lambda new: new.symlink_to(outside(new)))),
    Kind("the file of a context vanishes after match", ("write/missing_audio",) * 2, two_of_a_voice,
         [BERTA, BERTA | {"audio_filepath": "stays.wav"}],
         after="match", spoil=Path.unlink),
    later("vanishes after write", OUTPUT, "write", Path.unlink),
]  # fmt: skip

KINDS = [GOOD, *RECORDS, *AUDIO, *DAMAGED, *PLACES, *PAIRS, *LATER]


@dataclass(frozen=True)
class OddRun:
    """The finished run. ``absent`` has the kinds that cannot be made here, and why."""

    folder: Path
    absent: dict[str, str]
    endings: dict[str, list[tuple[str, Any]]]
    records: list[dict[str, Any] | bytes]
    processes: list[subprocess.CompletedProcess[str]]


@functools.cache
def without_privileges() -> list[str] | None:
    """Prefix of a command that makes permissions effective even for root; None if that is not allowed here."""
    with tempfile.TemporaryDirectory() as folder:
        locked = Path(folder, "locked")
        locked.touch()
        locked.chmod(0)
        for prefix in ([], _PREFIX if shutil.which(_PREFIX[0]) else ["false"]):
            works = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
            reads = subprocess.run([*prefix, "cat", locked], capture_output=True, check=False).returncode == 0
            if works and not reads:
                return prefix
    return None


def run_kinds(folder: Path) -> OddRun:
    """Makes the corpus of all kinds below ``folder`` and runs all stages over it."""
    root = folder / "audio"
    (root / "deep").mkdir(parents=True)
    absent: dict[str, str] = {}
    records: list[Record] = []
    for kind in KINDS:
        try:
            if "may not be" in kind.name and without_privileges() is None:
                raise PermissionError("root may read everything here")
            records += kind.records(root)
        except PermissionError as error:
            absent[kind.name] = str(error)
    config = write_config(
        folder, write_lines(folder / "odd.json", records), root, name="odd", max_reject_fraction=0.9,
        prepare={"min_duration": 0.01, "unit_records": 40}, match={"min_similarity": -1.0}, write={"shard_size": 30},
    )  # fmt: skip
    processes = []
    for stages in _STAGES:
        # Permissions count for it.
        run = [*(without_privileges() or []), *command("run", config, *stages)]
        processes.append(subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False))
        for kind in KINDS:
            if kind.after == stages[0]:
                kind.spoil(kind.file(root))
    return OddRun(folder, absent, _endings(folder), records, processes)


def _endings(folder: Path) -> dict[str, list[tuple[str, Any]]]:
    """By kind, how each of its records ended: the outcome, and the cut or the record of the reject."""
    endings: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for cut in read_cuts(folder / "dataset"):
        endings[cut["supervisions"][0]["custom"]["kind"]].append((OUTPUT, cut))
    for reject in lines(folder / "run/rejects.jsonl"):
        ending = f"{reject['stage']}/{reject['reason']}", reject["record"]
        endings[_kind_of(reject["record"])].append(ending)
    return dict(endings)


def read_cuts(dataset: Path) -> list[dict[str, Any]]:
    """The cuts of a dataset, without the help of sharmill."""
    return [cut for file in sorted((dataset / "cuts").iterdir()) for cut in lines(file)]


def _kind_of(record: Any) -> str:
    """The kind of a reject; of a line that is no record, the kind whose name is in it."""
    if isinstance(record, dict):
        return record["kind"]
    names = [kind.name for kind in KINDS if kind.name in record]
    return max(names, key=len)


# Reasons with tests of their own: they need different voices, a filter, a lone utterance, another source or a device.
ELSEWHERE = {
    "filtered", "no_similar_context", "no_long_context", "only_copies", "unsupported_cut", "overlapped_speech",
    "ambiguous_audio", "already_there", "bad_context", "too_long_for_device", "bad_codes",
    "wrong_voice", "mixed_voices", "no_speech",
}  # fmt: skip


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory) -> OddRun:
    return run_kinds(tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kind(kind: Kind, odd_run: OddRun):
    if kind.name in odd_run.absent:
        pytest.skip(f"cannot be made here: {odd_run.absent[kind.name]}")
    assert sorted(outcome for outcome, _ in odd_run.endings.get(kind.name, [])) == sorted(kind.outcomes)


def test_the_run_goes_on(odd_run: OddRun):
    assert [process.returncode for process in odd_run.processes] == [0] * 4
    assert all("Traceback" not in process.stderr for process in odd_run.processes)
    assert "validation: no findings" in odd_run.processes[-1].stdout


def test_the_sums_agree(odd_run: OddRun):
    """Stage by stage, and with the lines of the manifest."""
    totals = {}
    for stage in ("prepare", "match", "write", "encode/tiny", "encode.shards/tiny", "validate"):
        totals[stage] = json.loads((odd_run.folder / "run" / stage / "done.json").read_bytes())
    rejects = lines(odd_run.folder / "run/rejects.jsonl")
    came = sum(bool(line.strip()) if isinstance(line, bytes) else 1 for line in odd_run.records)
    # This stage counts segments, not records.
    segments = totals.pop("encode/tiny")
    assert segments["num_in"] == segments["num_out"] <= 2 * totals["write"]["num_out"]
    for stage, numbers in totals.items():
        assert numbers["num_in"] == came
        own = Counter(reject["reason"] for reject in rejects if reject["stage"] == stage)
        assert numbers["rejects"] == own
        came -= sum(own.values())
        assert numbers["num_out"] == came
    assert len(read_cuts(odd_run.folder / "dataset")) == came


def test_rejects_have_their_records_as_they_came(odd_run: OddRun):
    """Objects as objects, and lines that are none as text; a duplicate is named as its original is.

    Of large ones a part is kept: a text's begin, or what tells an object's audio.
    """
    written = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in odd_run.records]
    texts = {line.strip().decode("utf-8", "replace") for line in written}
    # NaN has become null.
    parse = json.JSONDecoder(parse_constant=lambda name: None).decode
    objects = [parse(json.dumps(record)) for record in odd_run.records if isinstance(record, dict)]
    endings = [ending for endings in odd_run.endings.values() for ending in endings]
    checked = [record for outcome, record in endings if outcome.startswith("prepare/") and "duplicate" not in outcome]
    assert len(checked) >= 90
    small = [record for record in checked if record in (texts if isinstance(record, str) else objects)]
    assert len(checked) - 10 <= len(small) < len(checked)
    for part in checked:
        if part in small:
            continue
        if isinstance(part, str):
            assert len(part) == 1024
            assert any(len(text) > 8192 and text.startswith(part) for text in texts)
        else:
            assert any(part.items() <= whole.items() for whole in objects)


def test_no_command_ran(odd_run: OddRun):
    assert not list(odd_run.folder.rglob("ran"))


def test_a_report_shows_all_of_it_as_text(odd_run: OddRun):
    config = load_for_display(odd_run.folder / "run/resolved_config.yaml")
    page = make_page(read_run_facts(config, make_stages(config), {}, decode=False))
    elements = Elements(page)
    # The scripts are plotly and the page's own.
    assert [len(elements.of(tag)) for tag in ("script", "style", "iframe", "object", "base")] == [2, 1, 0, 0, 0]
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    assert "<script>alert" not in page
    assert len(page) < 15_000_000


def test_every_reason_is_in_the_table():
    reasons = {outcome.split("/")[1] for kind in KINDS for outcome in kind.outcomes if outcome != OUTPUT}
    assert reasons == REASONS.keys() - ELSEWHERE


def test_text_and_names_are_kept_to_the_letter(odd_run: OddRun):
    cuts = {cut["supervisions"][0]["custom"]["kind"]: cut for cut in read_cuts(odd_run.folder / "dataset")}
    kept = [record for record in odd_run.records if isinstance(record, dict) and record["kind"] in cuts]
    texts = {record["kind"]: record["text"] for record in kept}
    for kind in ("text of 100,000 characters", "text with terminal escapes", "text with null characters and newlines"):
        assert cuts[kind]["supervisions"][0]["text"] == texts[kind]
    named = {record["kind"]: record["audio_filepath"] for record in kept if record["kind"].startswith("a name ")}
    assert len(named) >= 12
    for kind, path in named.items():
        assert cuts[kind]["recording"]["sources"][0]["source"] == path


def test_own_readers_and_plain_lhotse_read_every_cut(odd_run: OddRun):
    dataset = odd_run.folder / "dataset"
    ids = [cut["id"] for cut in read_cuts(dataset)]
    assert len(set(ids)) == len(ids)
    assert [cut.id for cut in open_shar(dataset)] == ids
    for cut, number in zip(read_with_lhotse(dataset, "tiny"), range(len(ids)), strict=True):
        assert cut.id == ids[number]
        for samples in (cut.load_target_audio(), cut.load_context_audio()):
            assert np.isfinite(samples).all()
        assert cut.target_codes.load().shape[1] > 0


def test_the_deep_check_finds_only_loud_or_silent_audio(odd_run: OddRun, tmp_path):
    found = tmp_path / "found.json"
    run_sharmill("validate", odd_run.folder / "dataset", "--deep", "--workers", "1", "--json", found)
    report = json.loads(found.read_text())
    assert report["errors"] == 0
    assert {kind["code"] for kind in report["kinds"]} <= {"silent_audio", "clipped_audio"}
