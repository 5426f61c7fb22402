"""Files of the formats that FFmpeg is there for, encoded in memory by PyAV."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import numpy as np

from support.audio import speech_like


@dataclass(frozen=True)
class Form:
    """A container and a codec.

    Attributes:
        format: that ``AudioInfo`` names.
        rate: that it is encoded at; Opus always decodes to 48 kHz.
        error: largest difference from what was encoded, of samples in [-1, 1]; None for codecs that keep no samples.
    """

    name: str
    muxer: str
    codec: str
    format: str
    rate: int = 16000
    channels: int = 1
    error: float | None = None
    options: dict[str, str] = field(default_factory=dict)


FORMS = [
    Form("m4a", "ipod", "aac", "aac"),
    Form("m4a in fragments", "ipod", "aac", "aac", rate=44100, options={"movflags": "frag_keyframe+empty_moov"}),
    Form("m4a of two channels", "ipod", "aac", "aac", channels=2),
    Form("alac", "ipod", "alac", "alac", rate=48000, error=4e-5),
    Form("adts", "adts", "aac", "aac"),
    Form("wma 2", "asf", "wmav2", "wma", rate=22050),
    Form("wma 1", "asf", "wmav1", "wma", rate=44100, channels=2),
    Form("webm", "webm", "libopus", "opus", rate=48000),
    Form("amr", "amr", "libopencore_amrnb", "amr", rate=8000),
    Form("3gp", "3gp", "libopencore_amrnb", "amr", rate=8000),
    Form("mp4 of mp3", "mp4", "libmp3lame", "mp3"),
    Form("mov of 16 bits", "mov", "pcm_s16le", "pcm_s16le", error=4e-5),
    Form("mov of 24 bits", "mov", "pcm_s24le", "pcm_s24le", rate=96000, error=4e-5),
    Form("mka of flac", "matroska", "flac", "flac", rate=192000, error=4e-5),
    Form("mka of floats", "matroska", "pcm_f32le", "pcm_f32le", error=4e-5),
]


def encode(form: Form, samples: np.ndarray | None = None, *, streams: int = 1) -> bytes:
    """Encode samples (n,) or (n, channels), by default three seconds and a bit; each further stream is shifted."""
    import av

    samples = some_samples(form) if samples is None else samples
    pcm = np.round(samples.reshape(len(samples), -1) * 32767).astype("<i2")
    layout = "stereo" if form.channels == 2 else "mono"
    stream = io.BytesIO()
    with av.open(stream, "w", format=form.muxer, options=form.options) as out:
        tracks = [out.add_stream(form.codec, rate=form.rate, layout=layout) for _ in range(streams)]
        for track in tracks:
            if form.codec.startswith("wma"):
                track.bit_rate = 64000
        for number, track in enumerate(tracks):
            frame = av.AudioFrame.from_ndarray(
                np.roll(pcm, 1000 * number, 0).reshape(1, -1), format="s16", layout=layout
            )
            frame.sample_rate, frame.pts = form.rate, 0
            for packet in [*track.encode(frame), *track.encode(None)]:
                out.mux(packet)
    return stream.getvalue()


def some_samples(form: Form) -> np.ndarray:
    channels = [speech_like(3 * form.rate + 77, form.rate, seed) for seed in range(form.channels)]
    return channels[0] if form.channels == 1 else np.stack(channels, axis=1)


def film() -> bytes:
    """An MP4 that has pictures and no sound."""
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
