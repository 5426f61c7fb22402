"""Files whose headers cover only a part of the audio: all of it is read, or the record is rejected."""

import io
import struct

import numpy as np
import pytest
from support.audio import FORMS, chunk, container, encode, flac_claiming, pcm, read, reason_of, recording, wav, write
from support.project import make_record, run_sharmill, voice, write_config, write_lines

from sharmill.audio.files import decode_bytes, probe, probe_bytes
from sharmill.audio.ogg import with_serial
from sharmill.errors import RejectRecord
from sharmill.shar import open_shar

ID3V2 = b"ID3\x03\0\0\0\0\x07\x76" + bytes(7 * 128 + 0x76)
TAGS = b"APETAGEX\xd0\x07\0\0\x25\0\0\0" + bytes(16) + b"a" * 37 + b"TAG" + b"b" * 125
MP3 = ("MP3", "MPEG_LAYER_III")
OPUS = ("OGG", "OPUS")
FORM = {form.name: form for form in FORMS}


def mp3(seconds: float = 2.0, rate: int = 16000, seed: int = 0) -> bytes:
    """An MP3 with variable bit rate, whose Xing frame states its length."""
    options = {"bitrate_mode": "VARIABLE", "compression_level": 0.5}
    return container(voice(seconds, rate, seed=seed), rate, *MP3, **options)


def without_xing(data: bytes, tag: bytes = b"") -> bytes:
    """An MP3 without the first frame, or with another tag in it."""
    size = data.index(data[:2], 4)
    return (data[:36] + tag).ljust(size, b"\0") * bool(tag) + data[size:]


def patched(data: bytes, place: int, value: bytes) -> bytes:
    return data[:place] + value + data[place + len(value) :]


def opus_of_rate(rate: int) -> bytes:
    data = recording(*OPUS)
    return with_serial(patched(data, data.index(b"OpusHead") + 12, struct.pack("<I", rate)), 1)


def wav_of_sizes(riff: int, size: int) -> bytes:
    return patched(wav(data_size=size), 4, struct.pack("<I", riff))


def two_streams() -> bytes:
    """A Matroska file with two audio streams."""
    import av

    stream = io.BytesIO()
    with av.open(stream, "w", format="matroska") as out:
        tracks = [out.add_stream("pcm_s16le", rate=16000, layout="mono") for _ in range(2)]
        for track in tracks:
            frame = av.AudioFrame.from_ndarray(np.frombuffer(pcm(), "<i2")[None], format="s16", layout="mono")
            frame.sample_rate, frame.pts = 16000, 0
            for packet in [*track.encode(frame), *track.encode(None)]:
                out.mux(packet)
    return stream.getvalue()


# Files of 2 s, or concatenations of 2 s and 3 s.
JOINED = {
    "mp3": lambda: mp3() + mp3(3.0),
    "mp3 with tags between": lambda: ID3V2 + mp3() + TAGS + ID3V2 + mp3(3.0) + TAGS,
    "mp3 without Xing": lambda: without_xing(mp3()) + ID3V2 + without_xing(mp3(3.0)),
    "opus": lambda: with_serial(recording(*OPUS), 1) + with_serial(container(voice(3.0), 16000, *OPUS), 2),
    "vorbis": lambda: recording("OGG", "VORBIS") + container(voice(3.0), 16000, "OGG", "VORBIS"),
}
# Formats that omit the sizes or the number of samples.
UNSTATED = {
    "flac": lambda: flac_claiming(0),
    "mp3 of variable bit rate": lambda: without_xing(mp3()),
    "mp3 with VBRI": lambda: without_xing(mp3(), b"VBRI"),
    "wav of sizes 0": lambda: wav_of_sizes(0, 0),
    "wav of data size 0": lambda: wav_of_sizes(64036, 0),
    "rf64": lambda: patched(recording("RF64"), 20, bytes(24)),
    "rf64 of a pipe": lambda: patched(recording("RF64"), 20, b"\xff" * 16),
    "au": lambda: patched(recording("AU"), 8, bytes(4)),
    "aiff": lambda: patched(recording("AIFF"), recording("AIFF").index(b"SSND") + 4, struct.pack(">I", 8)),
    "caf of a pipe": lambda: patched(recording("CAF"), recording("CAF").index(b"data") + 4, b"\xff" * 8),
    "opus without a rate": lambda: opus_of_rate(0),
    "opus of 22050 Hz": lambda: opus_of_rate(22050),
}


WHOLE = [*((make, 5.0) for make in JOINED.values()), *((make, 2.0) for make in UNSTATED.values())]


@pytest.mark.parametrize(("make", "seconds"), WHOLE, ids=[*JOINED, *UNSTATED])
def test_all_audio_is_read_if_headers_state_less(tmp_path, make, seconds):
    pytest.importorskip("av")
    data = make()
    info = probe(write(tmp_path / "a", data))
    whole, rate = decode_bytes(data)
    assert (rate, len(whole)) == (info.sampling_rate, info.num_samples)
    assert seconds - 0.01 <= len(whole) / rate <= seconds + 0.2
    assert np.abs(whole[-rate // 2 :]).max() > 0.2
    np.testing.assert_array_equal(read(tmp_path / "a", rate, rate // 2)[0], whole[rate : rate + rate // 2])


@pytest.mark.parametrize("rate", [0, 11025, 22050, 44100])
def test_opus_of_an_odd_rate_decodes_at_48_khz(rate):
    info = probe_bytes(opus_of_rate(rate))
    assert (info.sampling_rate, info.num_samples) == (48000, 96000)


# Files that no decoder reads completely, with the reason of the reject.
REFUSED = {
    "wav behind wav": (lambda: wav() + wav(), "duration_mismatch"),
    "wav that states less": (lambda: wav(data_size=20000), "duration_mismatch"),
    "wav of two chunks of samples": (lambda: wav(after=chunk(b"data", pcm())), "duration_mismatch"),
    "gsm behind gsm": (lambda: recording("WAV", "GSM610", rate=8000) * 2, "duration_mismatch"),
    "rf64 behind rf64": (lambda: recording("RF64") * 2, "duration_mismatch"),
    "aiff behind aiff": (lambda: recording("AIFF") * 2, "duration_mismatch"),
    "au behind au": (lambda: recording("AU") * 2, "duration_mismatch"),
    "caf behind caf": (lambda: recording("CAF") * 2, "duration_mismatch"),
    "flac behind flac": (lambda: recording("FLAC") * 2, "duration_mismatch"),
    "flac that states less": (lambda: flac_claiming(31999), "duration_mismatch"),
    "ogg of one serial number": (lambda: recording(*OPUS) * 2, "unreadable_audio"),
    "mp3 of two rates": (lambda: mp3() + mp3(2.0, 24000), "unreadable_audio"),
    "mp4 behind mp4": (lambda: encode(FORM["m4a"]) * 2, "duration_mismatch"),
    "wma behind wma": (lambda: encode(FORM["wma 2"]) * 2, "duration_mismatch"),
    "two streams": (two_streams, "unreadable_audio"),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_an_incompletely_readable_file_is_rejected(make, reason):
    pytest.importorskip("av")
    assert reason_of(decode_bytes, make()) == reason


def test_bytes_after_the_audio_are_reported():
    with pytest.raises(RejectRecord, match="has 44,000 bytes after the audio that its header states"):
        probe_bytes(wav(data_size=20000))


@pytest.mark.parametrize("format", ["WAV", "RF64", "AIFF", "AU", "CAF", "FLAC", "MP3", "OGG"])
@pytest.mark.parametrize(
    "behind", [bytes(3000), b"TAG" + b"a" * 125, TAGS, ID3V2], ids=["zeros", "ID3v1", "APE", "ID3v2"]
)
def test_tags_and_padding_do_not_count_as_audio(format, behind):
    data = recording(format, {"MP3": "MPEG_LAYER_III", "OGG": "OPUS"}.get(format, "PCM_16"))
    info = probe_bytes(data + behind)
    assert (info, info.common) == (probe_bytes(data), True)
    assert len(decode_bytes(data + behind)[0]) == 32000


@pytest.mark.parametrize(
    "after", [chunk(b"LIST", b"INFO" + bytes(9)), chunk(b"bext", bytes(602)), b"LIST\xff\0\0\0abc"]
)
def test_chunks_after_the_samples_do_not_count_as_audio(after):
    info = probe_bytes(wav(after=after))
    assert (info.num_samples, info.common) == (32000, True)
    assert reason_of(probe_bytes, wav(b"", after=after)) == "empty_audio"


def test_sizes_wrapped_around_at_4_gib(tmp_path):
    path, frames = tmp_path / "a.wav", 1 << 30
    with path.open("wb") as file:
        file.write(wav(b"", channels=2, data_size=4 * (frames + 16000) & 0xFFFFFFFF))
        file.truncate(44 + 4 * frames)  # a sparse file
        file.seek(44 + 4 * frames)
        file.write(np.repeat(np.frombuffer(pcm(1.0), "<i2"), 2).tobytes())
    assert (probe(path).num_samples, probe(path).exact_seeks) == (frames + 16000, True)
    np.testing.assert_array_equal(read(path, frames, 16000, 1)[0] * 32768, np.frombuffer(pcm(1.0), "<i2"))


@pytest.mark.parametrize("duration", [..., 11.0])
def test_a_dataset_contains_all_of_concatenated_files(tmp_path, duration):
    pytest.importorskip("av")
    audio = tmp_path / "audio"
    audio.mkdir()
    write(audio / "a.mp3", mp3(4.0, 24000) + mp3(4.0, 24000) + mp3(3.0, 24000))
    manifest = write_lines(tmp_path / "a.json", [make_record(audio_filepath="a.mp3", duration=duration)])
    config = write_config(
        tmp_path, manifest, audio, match=None, encode={"codecs": []}, write={"audio_format": "original"}
    )
    run_sharmill("run", config)
    (cut,) = open_shar(tmp_path / "dataset")
    assert 11.0 <= cut.duration <= 11.2
    samples = cut.load_audio()[0]
    assert len(samples) == cut.num_samples
    assert np.abs(samples[-16000:]).max() > 0.2
