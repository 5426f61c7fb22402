"""Audio that libsndfile does not read, decoded by FFmpeg or, for some SPHERE files, by sph2pipe."""

import io
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from support.audio import FORMS, encode, read, reason_of, some_samples, speech_like, wav, write
from support.project import raises

from sharmill.audio.audio_bytes import AudioBytes
from sharmill.audio.ffmpeg import Sph2pipeDecoder
from sharmill.audio.files import decode_bytes, probe, probe_bytes
from sharmill.errors import RejectRecord

pytest.importorskip("av")


FORM = {form.name: form for form in FORMS}


def film() -> bytes:
    """An MP4 with video only."""
    import av

    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as out:
        track = out.add_stream("mpeg4", rate=10)
        track.width = track.height = 32
        track.pix_fmt = "yuv420p"
        for number in range(20):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), number, dtype=np.uint8), format="rgb24")
            out.mux(track.encode(frame))
        out.mux(track.encode(None))
    return stream.getvalue()


def sphere(samples: np.ndarray, rate: int, coding: str) -> bytes:
    """A SPHERE file (NIST) with values (n, channels), compressed like by version 2 of shorten.

    The encoder is minimal: it writes a single block of differences in Rice code.
    """
    channels, num_bytes = samples.shape[1], 1 if coding == "ulaw" else 2
    coding += ",embedded-shorten-v2.00"
    header = (
        f"NIST_1A\n   1024\nchannel_count -i {channels}\nsample_count -i {len(samples)}\nsample_rate -i {rate}\n"
        f"sample_n_bytes -i {num_bytes}\nsample_byte_format -s{num_bytes} {'10'[2 - num_bytes :]}\n"
        f"sample_sig_bits -i {8 * num_bytes}\nsample_coding -s{len(coding)} {coding}\nend_head\n"
    )
    bits = "".join(_number(value) for value in (8 if num_bytes == 1 else 3, channels, len(samples), 0, 0, 0))
    for channel in samples.astype(np.int64).T:
        differences = np.diff(channel, prepend=0)
        bits += _rice(1, 2) + _rice(9, 3)
        bits += "".join(_rice(2 * value if value >= 0 else -2 * value - 1, 10) for value in differences.tolist())
    bits += _rice(4, 2)
    bits += "0" * (-len(bits) % 32)
    return header.encode().ljust(1024) + b"ajkg\x02" + int(bits, 2).to_bytes(len(bits) // 8, "big")


def _rice(value: int, bits: int) -> str:
    low = f"{value & ((1 << bits) - 1):0{bits}b}" if bits else ""
    return "0" * (value >> bits) + "1" + low


def _number(value: int) -> str:
    return _rice(value.bit_length(), 2) + _rice(value, value.bit_length())


REJECTED = {"unreadable_audio", "duration_mismatch", "empty_audio"}


def outcome(data: bytes) -> str:
    """Return the reason of the reject, or "read"."""
    try:
        decode_bytes(data)
    except RejectRecord as reject:
        return reject.reason
    return "read"


@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
def test_header_and_samples_match_the_whole_file(tmp_path, form):
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
    np.testing.assert_array_equal(decode_bytes(path.read_bytes(), 777, channel=channel)[0], whole[777:])


def test_without_pyav_the_reject_names_the_package(monkeypatch):
    data = encode(FORM["m4a"], speech_like(22222, 16000))
    monkeypatch.setitem(sys.modules, "av", None)
    with raises(RejectRecord, "unreadable_audio", 'pip install "sharmill[formats]"'):
        probe_bytes(data)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("m4a", 0.5),
        ("m4a in fragments", 0.6),
        ("webm", 0.5),
        ("wma 2", 0.5),
        ("mka of flac", 0.9),
        ("wav of g722", 0.5),
    ],
)
def test_truncated_files_are_rejected(name, share):
    data = encode(FORM[name])
    reason = reason_of(decode_bytes, data[: int(len(data) * share)])
    assert reason in ("unreadable_audio", "duration_mismatch")


@pytest.mark.parametrize(
    "header", [{"channels": 0, "block": 2}, {"bits": 0, "block": 2}, {"rate": 0}, {"kind": 0x9999}]
)
def test_a_wav_unknown_to_ffmpeg_gets_the_error_of_libsndfile(header):
    data = wav(**header)
    with pytest.raises(sf.LibsndfileError) as said:
        sf.info(io.BytesIO(data))
    with pytest.raises(RejectRecord, match=re.escape(f"a.wav: {said.value.error_string}")) as caught:
        decode_bytes(data, name="a.wav")
    assert caught.value.reason == "unreadable_audio"


@pytest.mark.parametrize("name", ["m4a", "adts", "webm", "3gp"])
def test_damage_in_the_middle_gives_a_reject_or_samples(name):
    data = encode(FORM[name])
    middle = len(data) // 2
    for seed in range(5):
        noise = np.random.default_rng(seed).bytes(400)
        assert outcome(data[:middle] + noise + data[middle + 400 :]) in {"read", *REJECTED}


def test_a_video_without_sound_is_rejected():
    with raises(RejectRecord, "unreadable_audio", "no audio"):
        probe_bytes(film())


@pytest.mark.parametrize("codec", [b"drms", b"enca"])
def test_encrypted_audio_is_rejected(codec):
    data = encode(FORM["m4a"])
    begin, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
    scrambled = data[:begin] + bytes(byte ^ 0x5A for byte in data[begin:end]) + data[end:]
    assert data.count(b"mp4a") == 1
    assert outcome(scrambled.replace(b"mp4a", codec)) in REJECTED


def test_an_unknown_codec_is_rejected():
    data = encode(FORM["m4a"])
    place = data.index(b"\x40\x15", data.index(b"esds"))  # MPEG-4 audio in an audio stream
    data = data[:place] + b"\xd0" + data[place + 1 :]
    with raises(RejectRecord, "unreadable_audio", "codec"):
        probe_bytes(data.replace(b"mp4a", b"xxxx"))


PLAYLISTS = {
    "hls": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{path}\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile '{path}'\n",
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
    "dash": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>{path}</BaseURL></MPD>',
    "text": b"not audio at all\n" * 100,
}


@pytest.mark.parametrize("kind", PLAYLISTS)
@pytest.mark.parametrize("disguise", [b"", b"\0\0\0\x20ftypM4A \0\0\0\0", b"#!AMR\n", b"\x1a\x45\xdf\xa3"])
def test_playlists_and_texts_open_no_other_file(tmp_path, kind, disguise):
    song = write(tmp_path / "song.m4a", encode(FORM["m4a"]))
    text = disguise + PLAYLISTS[kind].replace(b"{path}", str(song).encode())
    for name in ("list.m4a", "list.m3u8", "list.ffconcat"):
        assert reason_of(probe, write(tmp_path / name, text)) in ("unreadable_audio", "empty_audio")


def test_samples_in_another_file_are_not_fetched(tmp_path):
    """A QuickTime file may refer to samples in another file."""
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


@pytest.mark.parametrize("box", [b"stsz", b"stts", b"stsc", b"stco"])
def test_huge_tables_take_no_memory_and_no_time(box):
    data = bytearray(encode(FORM["m4a"]))
    place = data.index(box) + (12 if box == b"stsz" else 8)
    data[place : place + 4] = struct.pack(">I", 0x7FFFFFFF)
    # Reset the peak, which earlier tests in this process may have raised.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_of_memory()
    assert outcome(bytes(data)) in {"read", *REJECTED}
    assert peak_of_memory() - before < 64 << 10


def peak_of_memory() -> int:
    """Return the peak resident memory of this process in KiB."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


RATE, COUNT = 8000, 20077


STAND_IN = """#!/bin/sh
# A stand-in for sph2pipe, which copies a WAV and records its arguments.
echo "$@" > {folder}/arguments
[ "$1 $2 $3" = "-p -f wav" ] && [ -f "$4" ] || exit 9
{does}
"""


@pytest.fixture
def mu_law() -> bytes:
    """A SPHERE file with mu-law in shorten's type 8; the stand-in ignores its content."""
    return sphere(np.zeros((COUNT, 1)), RATE, "ulaw")


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Return a function that puts a stand-in for sph2pipe with shell commands on PATH, and returns its samples."""
    samples = (speech_like(COUNT, RATE) * 32767).astype(np.int16)
    sf.write(tmp_path / "decompressed.wav", samples, RATE)

    def make(does: str = "cat {folder}/decompressed.wav") -> np.ndarray:
        program = tmp_path / "bin/sph2pipe"
        program.parent.mkdir(exist_ok=True)
        program.write_text(STAND_IN.format(folder=tmp_path, does=does.format(folder=tmp_path)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        return samples.astype(np.float32) / 32768

    return make


def test_mu_law_is_decoded_by_sph2pipe(mu_law, stand_in, tmp_path):
    expected = stand_in()
    info = probe_bytes(mu_law)
    assert (info.sampling_rate, info.num_samples, info.channels, info.format) == (RATE, COUNT, 1, "shn")
    assert not (tmp_path / "arguments").exists()
    np.testing.assert_array_equal(decode_bytes(mu_law)[0], expected)
    np.testing.assert_array_equal(decode_bytes(mu_law, 5000, 4001)[0], expected[5000:9001])


def test_the_name_of_a_file_is_not_passed_as_an_argument(mu_law, stand_in, tmp_path, monkeypatch):
    expected = stand_in()
    monkeypatch.chdir(tmp_path)
    for name in ("-f.sph", "$(touch x).sph", "a b;c.sph"):
        np.testing.assert_array_equal(read(write(Path(name), mu_law))[0], expected)
        assert name not in (tmp_path / "arguments").read_text()
    assert not (tmp_path / "x").exists()


def test_without_sph2pipe_the_reject_names_the_remedy(mu_law, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(RejectRecord, "unreadable_audio", "install sph2pipe"):
        decode_bytes(mu_law)


@pytest.mark.parametrize(
    ("does", "reason", "said"),
    [
        ("echo cannot read >&2; exit 3", "unreadable_audio", "failed with status 3: cannot read"),
        ("echo no audio", "unreadable_audio", "decompressed by sph2pipe"),
        ("true", "unreadable_audio", "decompressed by sph2pipe"),
        ("head -c 30000 {folder}/decompressed.wav", "duration_mismatch", f"of {COUNT} samples"),
    ],
)
def test_errors_of_sph2pipe_reject_the_record(mu_law, stand_in, does, reason, said):
    stand_in(does)
    with raises(RejectRecord, reason, said):
        decode_bytes(mu_law)


def test_a_hanging_sph2pipe_is_killed(mu_law, stand_in):
    stand_in("exec sleep 60")
    decoder = Sph2pipeDecoder(AudioBytes("a.sph", mu_law), timeout=0.5)
    with pytest.raises(RejectRecord, match=r"within 0\.5 s"):
        decoder.read(COUNT)


@pytest.mark.parametrize("channels", [1, 2])
def test_pcm_in_sphere_is_decoded_by_ffmpeg(channels):
    pcm = (speech_like(COUNT, RATE) * 32767).astype(np.int16)
    pcm = np.stack([pcm, pcm[::-1]][:channels], axis=1)
    data = sphere(pcm, RATE, "pcm")
    info = probe_bytes(data)
    assert (info.sampling_rate, info.num_samples, info.channels, info.format) == (RATE, COUNT, channels, "shn")
    channel = None if channels == 1 else 1
    expected = pcm[:, -1].astype(np.float32) / 32768
    np.testing.assert_array_equal(decode_bytes(data, channel=channel)[0], expected)
    np.testing.assert_array_equal(decode_bytes(data, 5000, 4001, channel)[0], expected[5000:9001])
