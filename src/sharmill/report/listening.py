"""The listening table: pairs of target and context with players, pictures and text, and both made from codes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from markupsafe import Markup

from sharmill.audio.encoding import encode
from sharmill.audio.resample import resample
from sharmill.errors import ConfigError, DamagedShard, RejectRecord
from sharmill.inspect.export import decode_stored_codes, load_decoder
from sharmill.inspect.stored import as_mapping, first_supervision, read_stored_audio
from sharmill.models.protocols import DecodingCodec
from sharmill.report.facts import Facts
from sharmill.report.sample import Pair
from sharmill.report.section import Section, render, shorten
from sharmill.report.sound import mel_picture, spectrogram, wave_path
from sharmill.shar.index import CodecRecord, DatasetRecord
from sharmill.shar.layout import CONTEXT_AUDIO

# Of the clips together, as text in the page: it is to stay below 15 MB.
_MAX_BYTES: Final = 12_000_000
_MAX_SECONDS: Final = 12.0
_RATES: Final = (16000, 24000)


@dataclass(frozen=True)
class Clip:
    """A player: audio as a ``data:`` address, pictures of it, and its length before it was cut to be played."""

    role: str
    audio: str
    wave: str
    mel: str
    seconds: float
    is_cut: bool


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    cut_id: str
    reasons: list[str]
    speaker: str
    text: str
    context_text: str
    values: dict[str, float]
    clips: list[Clip]


def make_listening(facts: Facts) -> Markup | None:
    """Return the table, or None where there is no dataset."""
    if facts.sample is None or facts.record is None:
        return None
    decoders, problems = _load_decoders(facts)
    if unreadable := facts.sample.unreadable:
        problems.insert(0, f"{sum(unreadable.values())} items could not be read, the first: {next(iter(unreadable))}")
    rows: list[Row] = []
    size = left_out = 0
    for pair in facts.sample.pairs:
        try:
            row = _make_row(pair, facts.record, decoders)
        except (DamagedShard, RejectRecord) as error:
            problems.append(f"{pair.stored.cut.get('id')}: {error}")
            continue
        size += sum(len(clip.audio) + len(clip.mel) + len(clip.wave) for clip in row.clips)
        if size > _MAX_BYTES:
            left_out += 1
            continue
        rows.append(row)
    reasons = list(dict.fromkeys(reason for row in rows for reason in row.reasons))
    return render("listening.html", rows=rows, reasons=reasons, problems=problems, left_out=left_out,
                  max_seconds=_MAX_SECONDS, has_contexts=facts.record.has_contexts)  # fmt: skip


def _load_decoders(facts: Facts) -> tuple[list[tuple[CodecRecord, DecodingCodec]], list[str]]:
    """Return the codecs that can decode, and a sentence about each that cannot."""
    decoders, problems = [], []
    assert facts.record is not None
    if facts.record.codecs and not facts.decode:
        problems.append("Codes are not decoded in a job of a cluster; sharmill report makes the page with them.")
    for codec in facts.record.codecs if facts.decode else ():
        if not codec.trained:
            problems.append(f"The codec {codec.name} is untrained: its codes are noise, and are not decoded.")
            continue
        try:
            decoders.append((codec, load_decoder(codec, facts.models.get(codec.name))))
        except (ConfigError, DamagedShard) as error:
            problems.append(f"Codes of {codec.name} are not decoded: {error}")
    return decoders, problems


def _make_row(pair: Pair, record: DatasetRecord, decoders: list[tuple[CodecRecord, DecodingCodec]]) -> Row:
    supervision = first_supervision(pair.stored.cut)
    custom = as_mapping(supervision.get("custom"))
    return Row(
        cut_id=shorten(str(pair.stored.cut.get("id"))),
        reasons=pair.reasons,
        speaker=shorten(str(supervision.get("speaker") or "")),
        text=shorten(str(supervision.get("text") or "")),
        context_text=shorten(str(custom.get("context_audio_text") or "")),
        values=pair.values,
        clips=list(_clips(pair, record, decoders)),
    )


def _clips(pair: Pair, record: DatasetRecord, decoders: list[tuple[CodecRecord, DecodingCodec]]) -> Iterator[Clip]:
    seconds: dict[str, float] = {}
    for field in record.audio_fields:
        role = "context" if field == CONTEXT_AUDIO else "target"
        seconds[role] = 0.0
        item = pair.stored.items.get(field)
        if item is not None and item.data is not None:
            samples, rate = read_stored_audio(item)
            seconds[role] = len(samples) / rate
            yield _make_clip(role, samples, rate, seconds[role])
    for codec, decoder in decoders:
        for role, of_audio in seconds.items():
            of_context = role == "context"
            try:
                samples, rate = decode_stored_codes(
                    pair.stored, record, codec, decoder, context=of_context, most_seconds=_MAX_SECONDS
                )
            except ConfigError:
                # A field of a foreign dataset may have nothing for this cut.
                continue
            yield _make_clip(f"{role} decoded from {codec.name}", samples, rate, of_audio or len(samples) / rate)


def _make_clip(role: str, samples: np.ndarray, rate: int, seconds: float) -> Clip:
    wanted = next((known for known in _RATES if rate <= known), _RATES[-1])
    heard = resample(samples[: round(_MAX_SECONDS * rate)].astype(np.float32), rate, wanted)
    power = spectrogram(heard, wanted)
    data = base64.b64encode(encode(heard, wanted, "mp3")).decode()
    return Clip(
        role, f"data:audio/mpeg;base64,{data}", wave_path(heard), mel_picture(power, wanted), seconds,
        is_cut=seconds > _MAX_SECONDS,
    )  # fmt: skip


SECTION = Section("listening", "Listen", 20, make_listening)
