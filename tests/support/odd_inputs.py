"""The kinds of odd and bad records and audio, and how each must end: the one table of them.

An outcome is ``output``, or the stage that rejects the record and its reason. Every kind makes its own files and
records; all go into one corpus with good utterances, through the real stages.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from support import odd_audio as odd
from support.manifests import speaker_tag
from support.odd_kinds import OUTPUT, Kind, Record, audio, entry, later, line, named, pair, place, record, slug
from support.shar import voice


def _good(root: Path, kind: str) -> list[Record]:
    """Four segments of four seconds of one recording: the contexts of all that is shorter."""
    (root / "good.wav").write_bytes(odd.container(samples=voice(16.0, seed=3)))
    return [record(kind, audio_filepath="good.wav", offset=4.0 * n, duration=4.0, text=f"Good {n}.") for n in range(4)]


def _context_vanishes(root: Path, kind: str) -> list[Record]:
    """Two utterances of one voice, each the other's context; the file of the first vanishes after ``match``."""
    names = [f"{slug(kind)}.wav", "stays.wav"]
    for number, name in enumerate(names):
        (root / name).write_bytes(odd.container(samples=voice(4.0, seed=number)))
    return [record(kind, audio_filepath=name, duration=4.0, speaker=speaker_tag("berta")) for name in names]


def _three_hours(root: Path, kind: str) -> list[Record]:
    odd.three_hours(str(root / "three_hours.flac"))
    whole = record(kind, audio_filepath="three_hours.flac", duration=10800.0)
    return [whole, record(kind, audio_filepath="three_hours.flac", offset=10745.0, duration=2.0)]


def _not_utf8_on_disk(path: Path) -> None:
    """A link with a plain name to a file whose name is Latin-1."""
    target = os.fsencode(path.parent) + b"/caf\xe9.wav"
    Path(os.fsdecode(target)).write_bytes(odd.wav())
    path.symlink_to(os.fsdecode(target))


def _put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _outside(path: Path) -> Path:
    """A good file beside the audio root."""
    return _put(path.parent.parent / "outside.wav", odd.wav())


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _lock(path: Path) -> None:
    """Nobody may read it; whoever runs the stages must not be beyond permissions."""
    _put(path, odd.wav()).chmod(0)


def _lock_folder(path: Path) -> None:
    _put(path.parent / "locked/a.wav", odd.wav())
    (path.parent / "locked").chmod(0)


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def _with_key(key: bytes) -> Callable[[bytes], bytes]:
    return lambda good: good[:-1] + b", " + key + b"}"


GOOD = Kind("good utterances", (OUTPUT,) * 4, _good)

AUDIO = [
    audio("WAV of 24 bits", OUTPUT, lambda: odd.container(subtype="PCM_24")),
    audio("WAV of 32 bits", OUTPUT, lambda: odd.container(subtype="PCM_32")),
    audio("WAV of 8 bits", OUTPUT, lambda: odd.container(subtype="PCM_U8")),
    audio("WAV of floats", OUTPUT, odd.floats),
    audio("WAV of doubles", OUTPUT, lambda: odd.container(subtype="DOUBLE")),
    audio("floats far beyond 1", OUTPUT, lambda: odd.floats(gain=1e6)),
    audio("mu-law", OUTPUT, lambda: odd.container(subtype="ULAW")),
    audio("A-law", OUTPUT, lambda: odd.container(subtype="ALAW")),
    audio("IMA ADPCM", OUTPUT, lambda: odd.container(subtype="IMA_ADPCM")),
    audio("Microsoft ADPCM", OUTPUT, lambda: odd.container(subtype="MS_ADPCM")),
    audio("WAVE_FORMAT_EXTENSIBLE", OUTPUT, lambda: odd.container("WAVEX")),
    audio("RF64", OUTPUT, lambda: odd.container("RF64")),
    audio("RIFX, the big end first", OUTPUT, lambda: odd.container(endian="BIG")),
    audio("Wave64", OUTPUT, lambda: odd.container("W64")),
    audio("AIFF", OUTPUT, lambda: odd.container("AIFF")),
    audio("Sun AU", OUTPUT, lambda: odd.container("AU")),
    audio("NIST SPHERE", OUTPUT, lambda: odd.container("NIST")),
    audio("FLAC called .wav", OUTPUT, lambda: odd.container("FLAC")),
    audio("MP3", OUTPUT, lambda: odd.container("MP3", "MPEG_LAYER_III")),
    audio("MP3 without its length", OUTPUT, odd.mp3_without_info),
    audio("MP3 behind a large ID3 tag", OUTPUT, odd.mp3_with_picture),
    audio("Vorbis", OUTPUT, lambda: odd.container("OGG", "VORBIS")),
    audio("Opus", OUTPUT, lambda: odd.container("OGG", "OPUS")),
    *[audio(f"{rate} Hz", OUTPUT, lambda rate=rate: odd.container(rate=rate))
      for rate in (8000, 11025, 22050, 32000, 44100, 48000, 96000, 192000)],
    audio("44101 Hz", "match/unsupported_rate", lambda: odd.container(rate=44101)),
    audio("65664 Hz, which FLAC cannot hold", "write/unsupported_rate", lambda: odd.container(rate=65664)),
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
    Kind("3 h, whole and a segment of its last minute", ("prepare/too_long", OUTPUT), _three_hours),
]  # fmt: skip

DAMAGED = [
    audio("half a WAV", "prepare/duration_mismatch", lambda: odd.cut_off(odd.wav())),
    audio("a WAV without its last 1%", "match/duration_mismatch", lambda: odd.cut_off(odd.wav(), 0.99)),
    audio("a segment before the end of a cut WAV", OUTPUT, lambda: odd.cut_off(odd.wav()), offset=0.25, duration=0.5),
    audio("a WAV cut in its header", "prepare/unreadable_audio", lambda: odd.wav()[:30]),
    audio("half a FLAC", "match/unreadable_audio", lambda: odd.cut_off(odd.container("FLAC"))),
    audio("half an MP3", "match/duration_mismatch", lambda: odd.cut_off(odd.container("MP3", "MPEG_LAYER_III"))),
    audio("half a Vorbis", "prepare/empty_audio", lambda: odd.cut_off(odd.container("OGG", "VORBIS"))),
    audio("half an Opus", "prepare/unreadable_audio", lambda: odd.cut_off(odd.container("OGG", "OPUS"))),
    audio("a damaged FLAC", "match/unreadable_audio", lambda: odd.damaged(odd.container("FLAC"))),
    audio("a damaged MP3", "match/duration_mismatch", lambda: odd.damaged(odd.container("MP3", "MPEG_LAYER_III"))),
    audio("a damaged Vorbis", "prepare/duration_mismatch", lambda: odd.damaged(odd.container("OGG", "VORBIS"))),
    audio("a damaged Opus", "prepare/unreadable_audio", lambda: odd.damaged(odd.container("OGG", "OPUS"))),
    audio("a WAV that claims 60 s", "prepare/duration_mismatch", lambda: odd.wav(data_size=60 * 32000), duration=60.0),
    audio("a WAV that claims 1 s", "prepare/duration_mismatch", lambda: odd.wav(data_size=32000)),
    audio("a WAV from a pipe, of unknown size", OUTPUT, lambda: odd.wav(data_size=0xFFFFFFFF)),
    audio("a FLAC that claims 60 s", "match/duration_mismatch", lambda: odd.flac_claiming(960_000), duration=60.0),
    audio("a FLAC that claims 2^36 samples", "prepare/duration_mismatch", lambda: odd.flac_claiming(2**36 - 1)),
    audio("a FLAC of unknown length", "prepare/unreadable_audio", lambda: odd.flac_claiming(0)),
    audio("a text file", "prepare/unreadable_audio", lambda: b"this is no audio\n" * 100),
    audio("an HTML page", "prepare/unreadable_audio", lambda: b"<!DOCTYPE html><title>404</title>" * 20),
    audio("a zip archive", "prepare/unreadable_audio", odd.zip_archive),
    audio("a WAV in gzip", "prepare/unreadable_audio", odd.gzipped),
    audio("an MP4", "prepare/unreadable_audio", odd.mp4),
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
    place("a link within the root", OUTPUT, lambda path: path.symlink_to(_put(path.parent / "to/here.wav", odd.wav()))),
    place("a link out of the root", "prepare/outside_root", lambda path: path.symlink_to(_outside(path))),
    place("a linked folder out of the root", "prepare/outside_root",
          lambda path: (path.parent / "out").symlink_to(_outside(path).parent), audio_filepath="out/outside.wav"),
    place("a link to /dev/zero", "prepare/outside_root", lambda path: path.symlink_to("/dev/zero")),
    place("a FIFO", "prepare/unreadable_audio", os.mkfifo),
    place("a socket", "prepare/unreadable_audio", lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)),
    place("a device", "prepare/unreadable_audio", lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))),
    place("a file that may not be read", "prepare/unreadable_audio", _lock),
    place("a folder that may not be entered", "prepare/unreadable_audio", _lock_folder, audio_filepath="locked/a.wav"),
    place("a link to a name that is not UTF-8", OUTPUT, _not_utf8_on_disk),
    place("a file below a file", "prepare/missing_audio", lambda path: _put(path, odd.wav()),
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
    Kind("an absolute path within the root", (OUTPUT,), lambda root, kind: [
        record(kind, audio_filepath=str(_put(root / "absolute.wav", odd.wav())))]),
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
    entry("no speaker", "prepare/missing_field", speaker=...),
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
    entry("90 levels of lists", OUTPUT, nested=_nested(90)),
    entry("101 levels of lists", "prepare/malformed", nested=_nested(101)),
    line("100,000 levels of lists", "prepare/malformed", _with_key(b'"n":' + b"[" * 100_000 + b"]" * 100_000)),
    line("the same key twice: the last one counts", OUTPUT, _with_key(b'"text": "the last one"')),
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
    line("a record of 17 MiB", "prepare/malformed", _with_key(b'"long": "' + b"x" * (17 << 20) + b'"')),
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

LATER = [
    later("vanishes after prepare", "match/missing_audio", "prepare", Path.unlink),
    later("loses its end after prepare", "match/duration_mismatch", "prepare",
          lambda path: os.truncate(path, 40_000)),
    later("becomes a text after prepare", "match/unreadable_audio", "prepare", lambda path: path.write_text("x" * 99)),
    later("becomes a directory after prepare", "match/unreadable_audio", "prepare",
          lambda path: _replace(path, Path.mkdir)),
    later("becomes a FIFO after prepare", "match/unreadable_audio", "prepare", lambda path: _replace(path, os.mkfifo)),
    later("becomes a link out of the root after prepare", "match/outside_root", "prepare",
          lambda path: _replace(path, lambda new: new.symlink_to(_outside(new)))),
    later("gets another rate after prepare", "match/changed_audio", "prepare",
          lambda path: path.write_bytes(odd.container(rate=22050))),
    later("vanishes after match", "write/missing_audio", "match", Path.unlink),
    later("becomes empty after match", "write/empty_audio", "match", lambda path: os.truncate(path, 0)),
    later("gets two channels after match", "write/unsupported_channels", "match",
          lambda path: path.write_bytes(odd.several_channels(2))),
    later("becomes a link out of the root after match", "write/outside_root", "match",
          lambda path: _replace(path, lambda new: new.symlink_to(_outside(new)))),
    Kind("the file of a context vanishes after match", ("write/missing_audio",) * 2, _context_vanishes,
         "match", Path.unlink),
    later("vanishes after write", OUTPUT, "write", Path.unlink),
]  # fmt: skip

KINDS = [GOOD, *RECORDS, *AUDIO, *DAMAGED, *PLACES, *PAIRS, *LATER]
