"""Listening table: pairs of target and context with players, pictures and text, and with audio decoded from codes.

The pictures of a clip are its waveform as an SVG path and its log-mel spectrogram as a PNG.
"""

import base64
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from markupsafe import Markup
from torchaudio.transforms import MelSpectrogram

from sharmill.audio.encoding import encode
from sharmill.audio.files import decode_bytes
from sharmill.audio.resample import resample
from sharmill.errors import ConfigError, DamagedShard, RejectRecord
from sharmill.inspect.cuts import StoredCut, decode_stored_codes, load_decoder
from sharmill.models import DecodingCodec
from sharmill.report.facts import RANDOM, Facts, read_cuts_at
from sharmill.report.section import Section, render
from sharmill.shar.fields import CONTEXT_AUDIO
from sharmill.shar.histograms import supervision_of
from sharmill.shar.index import CodecRecord, DatasetRecord

# Limit on the encoded size of all clips, to keep the page below 4 MB, of which the chart library takes 1.2 MB.
_MAX_BYTES: Final = 2_600_000
# The same for the clips of another section.
_MAX_SECTION_BYTES: Final = 800_000
_MAX_SECONDS: Final = 8.0
_RATES: Final = (16000, 24000)
# libsndfile's compression level for Opus at 24 kbit/s: level 0 is 256 kbit/s, level 1 is 6 kbit/s.
_COMPRESSION: Final = (256 - 24) / (256 - 6)

_WINDOW: Final = 0.032
_HOP: Final = 0.010
_NUM_MELS: Final = 64
_PICTURE_WIDTH: Final = 200
_WAVE_COLUMNS: Final = 100
# Colours of the spectrogram from dark to bright, the same in both themes.
_PALETTE: Final = ((13, 17, 43), (59, 31, 107), (140, 41, 99), (221, 81, 58), (252, 165, 53), (252, 244, 190))

# The template's values for a player: role, audio and pictures as ``data:`` URLs, and length before shortening.
Clip = dict[str, Any]


def _wave_path(samples: np.ndarray) -> str:
    """Return the outline of audio (samples,) as an SVG path in a box of 100 by 20, scaled to its peak.

    >>> _wave_path(np.array([0.0, 1.0]))
    'M0 10V10M1 10V0'
    """
    parts = np.array_split(samples, min(_WAVE_COLUMNS, max(1, len(samples))))
    peak = max(float(np.abs(samples).max(initial=0.0)), 1e-9)
    scale = _WAVE_COLUMNS / len(parts) if len(parts) > 2 else 1
    return "".join(
        f"M{number * scale:.3g} {10 - 10 * min(0.0, float(part.min())) / peak:.3g}"
        f"V{10 - 10 * max(0.0, float(part.max())) / peak:.3g}"
        for number, part in enumerate(parts)
    )


def mel_picture(samples: np.ndarray, sampling_rate: int) -> str:
    """Return the log-mel spectrogram of audio (samples,) as a ``data:`` URL of a PNG, low frequencies at the bottom."""
    size = round(_WINDOW * sampling_rate)
    # The FFT is twice as long as the window, so that the narrowest filter covers at least one bin.
    transform = MelSpectrogram(
        sampling_rate, n_fft=2 * size, win_length=size, hop_length=round(_HOP * sampling_rate), n_mels=_NUM_MELS,
        pad_mode="constant",
    )  # fmt: skip
    frames = transform(torch.from_numpy(samples)).numpy().T
    mels = np.stack([part.mean(axis=0) for part in np.array_split(frames, min(_PICTURE_WIDTH, len(frames)))])
    levels = 10 * np.log10(np.maximum(mels, 1e-9))
    shades = np.clip((levels - (float(levels.max()) - 70.0)) / 70.0, 0.0, 1.0)
    # Sixteen shades look good enough, and take a third of the bytes of 256 shades.
    pixels = (np.rint(shades * 15) * 17).astype(np.uint8).T[::-1]
    steps = np.linspace(0, len(_PALETTE) - 1, 256)
    colors = [np.interp(steps, range(len(_PALETTE)), channel) for channel in zip(*_PALETTE, strict=True)]
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", pixels.shape[1], len(pixels), 8, 3, 0, 0, 0),
        b"PLTE": np.stack(colors, axis=1).astype(np.uint8).tobytes(),
        b"IDAT": zlib.compress(rows, 9),
        b"IEND": b"",
    }
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    )
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def make_listening(facts: Facts) -> Markup | None:
    """Return the listening table; None without cuts."""
    if facts.sample is None or facts.record is None:
        return None
    decoders, problems = _load_decoders(facts, facts.record.codecs)
    if unreadable := facts.sample.unreadable:
        problems.insert(0, f"{sum(unreadable.values())} items could not be read; the first: {next(iter(unreadable))}")
    rows = []
    size = left_out = 0
    for pair in facts.sample.pairs:
        try:
            # Decode codes only for random pairs, since the other pairs were chosen for reasons unrelated to codes.
            clips = list(_clips(pair.stored, facts.record, decoders if RANDOM in pair.reasons else []))
        except (DamagedShard, RejectRecord) as error:
            problems.append(f"{pair.stored.cut.get('id')}: {error}")
            continue
        size += sum(len(clip["audio"]) + len(clip["mel"]) + len(clip["wave"]) for clip in clips)
        if size <= _MAX_BYTES:
            rows.append((pair, clips))
        else:
            left_out += 1
    reasons = list(dict.fromkeys(reason for pair, _ in rows for reason in pair.reasons))
    return render("listening.html", rows=rows, reasons=reasons, problems=problems, left_out=left_out,
                  max_seconds=_MAX_SECONDS, has_contexts=facts.record.has_contexts,
                  supervision_of=supervision_of)  # fmt: skip


def _load_decoders(
    facts: Facts, codecs: Sequence[CodecRecord]
) -> tuple[list[tuple[CodecRecord, DecodingCodec]], list[str]]:
    """Return the codecs of the dataset that can decode, and a sentence about each codec that cannot."""
    decoders, problems = [], []
    if codecs and not facts.decode:
        problems.append("Codes are not decoded in cluster jobs; run sharmill report to include decoded audio.")
    for codec in codecs if facts.decode else ():
        if not codec.trained:
            problems.append(f"The codec {codec.name} is untrained: its codes are noise and are not decoded.")
            continue
        try:
            decoders.append((codec, load_decoder(codec, facts.models.get(codec.name))))
        except (ConfigError, DamagedShard) as error:
            problems.append(f"Codes of {codec.name} are not decoded: {error}")
    return decoders, problems


def _clips(
    stored: StoredCut, record: DatasetRecord, decoders: list[tuple[CodecRecord, DecodingCodec]]
) -> Iterator[Clip]:
    seconds: dict[str, float] = {}
    for field in record.audio_fields:
        role = "context" if field == CONTEXT_AUDIO else "target"
        seconds[role] = 0.0
        item = stored.items.get(field)
        if item is not None and item.data is not None:
            samples, rate = decode_bytes(item.data)
            seconds[role] = len(samples) / rate
            yield _make_clip(role, samples, rate, seconds[role])
    for codec, decoder in decoders:
        for role, of_audio in seconds.items():
            try:
                samples, rate = decode_stored_codes(
                    stored, record, codec, decoder, context=role == "context", most_seconds=_MAX_SECONDS
                )
            except ConfigError:
                # In datasets from other tools, a field may lack an item for this cut.
                continue
            yield _make_clip(f"{role} decoded from {codec.name}", samples, rate, of_audio or len(samples) / rate)


def make_players(facts: Facts, places: Iterable[tuple[int, int]]) -> Iterator[tuple[StoredCut, Clip]]:
    """Yield the cuts at these places, in order of place, each with a player of its target, until a size is reached."""
    sample, record, size = facts.sample, facts.record, 0
    assert sample is not None
    assert record is not None
    shards = {shard.index: shard for shard in facts.shards}
    for stored in read_cuts_at(sample, facts.dataset_dir, shards, sorted(places)):
        item = stored.items.get(record.audio_fields[0])
        if item is None or item.data is None or size > _MAX_SECTION_BYTES:
            continue
        with sample.counting_damage(f"{item.cut_id}: "):
            samples, rate = decode_bytes(item.data)
            clip = _make_clip("target", samples, rate, len(samples) / rate)
            size += sum(len(clip[part]) for part in ("audio", "mel", "wave"))
            yield stored, clip


def _make_clip(role: str, samples: np.ndarray, rate: int, seconds: float) -> Clip:
    """Return the values of a player for audio (samples,), shortened to eight seconds.

    Args:
        role: the name of the audio.
        seconds: its length before shortening.
    """
    wanted = next((known for known in _RATES if rate <= known), _RATES[-1])
    heard = resample(samples[: round(_MAX_SECONDS * rate)].astype(np.float32), rate, wanted)
    data = base64.b64encode(encode(heard, wanted, "opus", _COMPRESSION)).decode()
    return {
        "role": role, "audio": f"data:audio/ogg;base64,{data}", "wave": _wave_path(heard),
        "mel": mel_picture(heard, wanted), "seconds": seconds, "is_cut": seconds > _MAX_SECONDS,
    }  # fmt: skip


LISTENING = Section("listening", "Listen", 20, make_listening)
