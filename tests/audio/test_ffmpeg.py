"""Formats that FFmpeg decodes: headers, samples and segments; damage, tricks, and files that are something else."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from support.audio import read, reason_of, speech_like, write
from support.compressed import FORMS, Form, encode, film, some_samples

from sharmill.audio import ffmpeg
from sharmill.audio.files import decode_bytes, probe, probe_bytes
from sharmill.errors import RejectRecord

pytest.importorskip("av")
FORM = {form.name: form for form in FORMS}
REJECTED = {"unreadable_audio", "duration_mismatch", "empty_audio"}


def detail_of(function, *arguments) -> str:
    with pytest.raises(RejectRecord) as caught:
        function(*arguments)
    assert caught.value.reason == "unreadable_audio"
    return caught.value.detail


def outcome(data: bytes) -> str:
    """The reason of the reject, or "read"."""
    try:
        decode_bytes(data)
    except RejectRecord as reject:
        return reject.reason
    return "read"


@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
def test_header_and_segments_are_those_of_the_whole(tmp_path, form):
    path = write(tmp_path / "a.wav", encode(form))
    info = probe(path)
    assert (info.format, info.channels, info.exact_seeks, info.common) == (form.format, form.channels, False, False)
    assert info.sampling_rate == form.rate
    channel = None if form.channels == 1 else 1
    whole, rate = read(path, channel=channel)
    assert (whole.dtype, len(whole), rate) == (np.float32, info.num_samples, info.sampling_rate)
    seconds = len(some_samples(form)) / form.rate
    assert seconds - 0.05 <= len(whole) / rate <= seconds + 0.15
    if form.error is not None:
        np.testing.assert_allclose(whole, some_samples(form), rtol=0, atol=form.error)
    for start, count in [(0, 500), (len(whole) - 37, 37), (4321, 15000)]:
        np.testing.assert_array_equal(read(path, start, count, channel)[0], whole[start : start + count])
    np.testing.assert_array_equal(decode_bytes(path.read_bytes(), 777, channel=channel)[0], whole[777:])


def test_several_channels_need_a_choice():
    data = encode(FORM["m4a of two channels"])
    assert reason_of(decode_bytes, data) == "unsupported_channels"
    both = [decode_bytes(data, channel=channel)[0] for channel in (0, 1)]
    assert np.abs(both[0] - both[1]).max() > 0.1
    np.testing.assert_allclose(decode_bytes(data, channel="downmix")[0], (both[0] + both[1]) / 2, atol=1e-7)


def test_of_several_audio_streams_the_first_is_taken():
    form = FORM["alac"]
    np.testing.assert_array_equal(decode_bytes(encode(form, streams=2))[0], decode_bytes(encode(form))[0])


def test_without_pyav_the_reject_says_what_to_install(monkeypatch):
    data = encode(FORM["m4a"], speech_like(22222, 16000))
    monkeypatch.setitem(sys.modules, "av", None)
    assert 'pip install "sharmill[formats]"' in detail_of(probe_bytes, data)


@pytest.mark.parametrize(
    ("name", "share"),
    [("m4a", 0.5), ("m4a in fragments", 0.6), ("webm", 0.5), ("wma 2", 0.5), ("mka of flac", 0.9)],
)
def test_what_is_cut_off_is_rejected(name, share):
    data = encode(FORM[name])
    reason = reason_of(decode_bytes, data[: int(len(data) * share)])
    assert reason in ("unreadable_audio", "duration_mismatch")


@pytest.mark.parametrize("name", ["m4a", "adts", "webm", "3gp"])
def test_damage_in_the_middle_is_no_other_error(name):
    data = encode(FORM[name])
    middle = len(data) // 2
    for seed in range(5):
        noise = np.random.default_rng(seed).bytes(400)
        assert outcome(data[:middle] + noise + data[middle + 400 :]) in {"read", *REJECTED}


def test_film_without_sound():
    assert "no audio" in detail_of(probe_bytes, film())


@pytest.mark.parametrize("codec", [b"drms", b"enca"])
def test_encrypted_audio(codec):
    data = encode(FORM["m4a"])
    begin, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
    scrambled = data[:begin] + bytes(byte ^ 0x5A for byte in data[begin:end]) + data[end:]
    assert data.count(b"mp4a") == 1
    assert outcome(scrambled.replace(b"mp4a", codec)) in REJECTED


def test_unknown_codec():
    data = encode(FORM["m4a"])
    place = data.index(b"\x40\x15", data.index(b"esds"))  # MPEG-4 audio, in a stream of audio
    data = data[:place] + b"\xd0" + data[place + 1 :]
    assert "codec" in detail_of(probe_bytes, data.replace(b"mp4a", b"xxxx"))


def test_no_bytes_and_no_samples():
    assert reason_of(probe_bytes, b"") == "empty_audio"
    assert reason_of(probe_bytes, b"#!AMR\n") in ("empty_audio", "unreadable_audio")
    assert reason_of(probe_bytes, encode(FORM["m4a"])[:40]) == "unreadable_audio"


PLAYLISTS = {
    "hls": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{path}\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile '{path}'\n",
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
    "dash": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>{path}</BaseURL></MPD>',
    "text": b"not audio at all\n" * 100,
}


@pytest.mark.parametrize("kind", PLAYLISTS)
@pytest.mark.parametrize("disguise", [b"", b"\0\0\0\x20ftypM4A \0\0\0\0", b"#!AMR\n", b"\x1a\x45\xdf\xa3"])
def test_playlists_and_texts_reach_no_other_file(tmp_path, kind, disguise):
    song = write(tmp_path / "song.m4a", encode(FORM["m4a"]))
    text = disguise + PLAYLISTS[kind].replace(b"{path}", str(song).encode())
    for name in ("list.m4a", "list.m3u8", "list.ffconcat"):
        assert reason_of(probe, write(tmp_path / name, text)) in ("unreadable_audio", "empty_audio")


def test_samples_in_another_file_are_not_fetched(tmp_path):
    """A QuickTime file may say that its samples lie elsewhere."""
    song = write(tmp_path / "song.mov", encode(FORM["mov of 16 bits"]))
    data = encode(FORM["mov of 16 bits"], np.zeros(48077, dtype=np.float32))
    place = data.index(b"url \0\0\0\x01") - 4
    assert data[place : place + 4] == struct.pack(">I", 12)
    data = data[: place + 11] + b"\0" + data[place + 12 :]
    for kind in (b"url ", b"alis"):
        path = write(tmp_path / "a.mov", data[: place + 4] + kind + data[place + 8 :])
        found = outcome(path.read_bytes())
        assert found in {"read", *REJECTED}
        if found == "read":
            assert not read(path)[0].any()
    assert read(song)[0].any()


def test_samples_that_are_not_finite():
    form = FORM["mka of floats"]
    data = bytearray(encode(form))
    sound = np.float32(some_samples(form)[20000:20100])
    place = data.find((np.round(sound * 32767).astype(np.float32) / 32768)[:4].tobytes())
    assert place > 0
    data[place : place + 4] = struct.pack("<f", np.nan)
    assert reason_of(decode_bytes, bytes(data)) == "non_finite_audio"


@pytest.mark.xdist_group("memory, threads, descriptors")
@pytest.mark.parametrize("box", [b"stsz", b"stts", b"stsc", b"stco"])
def test_huge_tables_take_no_memory_and_no_time(box):
    data = bytearray(encode(FORM["m4a"]))
    place = data.index(box) + (12 if box == b"stsz" else 8)
    data[place : place + 4] = struct.pack(">I", 0x7FFFFFFF)
    # The peak begins anew: that of other tests of this process would hide the one of this.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_of_memory()
    assert outcome(bytes(data)) in {"read", *REJECTED}
    assert peak_of_memory() - before < 64 << 10


def peak_of_memory() -> int:
    """Return the highest resident memory of this process, in KiB."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def test_more_samples_than_bytes_can_hold(monkeypatch):
    monkeypatch.setattr(ffmpeg, "_ALWAYS_ALLOWED_SAMPLES", 0)
    monkeypatch.setattr(ffmpeg, "_MAX_SAMPLES_PER_BYTE", 1)
    assert "cannot hold" in detail_of(probe_bytes, encode(FORM["amr"], speech_like(8000 * 20, 8000)))


def test_names_do_not_matter(tmp_path):
    data = encode(Form("m4a", "ipod", "aac", "aac"))
    expected = probe_bytes(data)
    for name in ("a.mp3", "a.raw", "a.sph", "a"):
        assert probe(write(tmp_path / name, data)) == expected
