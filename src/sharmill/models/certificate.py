"""Certificates: how far the codes of a codec, and the choices of a speaker encoder, depend on how they are computed.

Codes are compared on a probe, the same everywhere: a seeded set of made-up voices. Each way of computing (batches of
other sizes, other devices, other precision) is compared with one: each item alone, in fp32, on the first device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec
import numpy as np

from sharmill.config import Compile, Precision
from sharmill.models import load_codec, load_speaker_encoder
from sharmill.models.arithmetic import fit_batch_seconds
from sharmill.models.pieces import PIECE_SECONDS, find_pieces
from sharmill.models.protocols import Codec, SpeakerEncoder, pad, padded_batches
from sharmill.models.shapes import Batch, canonical_batches, fill_batch

PROBE_SEED: Final = 43377
_VOICES: Final = 4
_SECONDS: Final = (0.4, 0.9, 1.3, 2.0, 2.9, 4.1)
# Padded seconds of a batch: the probe in many small batches, and in few large ones. A codec also has those of its run,
# where they are more: kernels are chosen by the shape, so that nothing follows from small batches for larger ones.
_SIZES: Final = (4.0, 16.0)
# Of the probe in one: pieces as those of a run, and short ones, so that it is cut at many places.
_PIECES: Final = (2.0, PIECE_SECONDS)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One way of computing beside the first.

    Args:
        way: what differs, such as ``batches of 4 s`` or ``alone, bf16``.
        compared: the number of codes, or of choices.
        different: how many of them differ.
        items: the segments with at least one code that differs.
        largest_change: of an encoder, the largest change of a cosine similarity.
        device: ``cpu`` or ``cuda``.
        batch_seconds: of batches beside each item alone, or of pieces beside the whole, in fp32: the size of batches.
        piece_seconds: of pieces beside the whole, in fp32: their length.
    """

    way: str
    compared: int
    different: int
    items: int
    largest_change: float | None = None
    device: str
    batch_seconds: float | None = None
    piece_seconds: float | None = None

    @property
    def share(self) -> float:
        """The share of codes or choices that differ."""
        return self.different / max(1, self.compared)


class ModelCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """The comparisons of one model. ``name`` is that of the codes, or of the stage match."""

    kind: Literal["codec", "encoder"]
    name: str
    model: str
    identity: dict[str, str]
    comparisons: list[Comparison]


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate of a configuration's models, with the devices and versions that it holds for."""

    format_version: int = 2
    probe_seed: int = PROBE_SEED
    devices: list[str]
    versions: dict[str, str]
    models: list[ModelCertificate]


def make_probe(sampling_rate: int) -> list[np.ndarray]:
    """Return made-up voices, 24 items of 0.4 to 4.1 s, float32: harmonics of a gliding pitch, with noise and pauses."""
    rng = np.random.default_rng(PROBE_SEED)
    items = []
    for voice in range(_VOICES):
        timbre = rng.uniform(0.2, 1.0, 12) / np.arange(1, 13)
        for seconds in _SECONDS:
            time = np.arange(round(seconds * sampling_rate)) / sampling_rate
            pitch = (95 + 45 * voice) * (
                1 + 0.15 * np.sin(2 * np.pi * rng.uniform(0.4, 1.2) * time + rng.uniform(0, 6))
            )
            phase = 2 * np.pi * np.cumsum(pitch) / sampling_rate
            harmonics = [weight * np.sin((n + 1) * phase) for n, weight in enumerate(timbre)]
            syllables = np.clip(np.sin(2 * np.pi * rng.uniform(2.5, 4.5) * time) + 0.4, 0, None)
            noise = rng.standard_normal(len(time)) * 0.02
            items.append((0.08 * syllables * np.sum(harmonics, axis=0) + noise).astype(np.float32))
    return items


def certify_codec(
    model: str, devices: Sequence[str] = ("cpu",), allow_targets: Sequence[str] = (), batch_seconds: float = 0.0,
    compile_mode: Compile = "none",
) -> Iterator[Comparison]:  # fmt: skip
    """Yield the comparisons of a codec, with the fp32 codes of each item alone, on the first device, unless they say.

    Args:
        batch_seconds: of the batches of a run.
        compile_mode: as ``encode.compile``, to be compared with the codec as it is.

    Raises:
        ConfigError: the codec cannot be loaded, or not compiled.
    """
    reference: list[np.ndarray] = []
    for device in devices:
        for precision in _precisions(device):
            codec = load_codec(model, device, allow_targets, precision)
            probe = make_probe(codec.sampling_rate)
            frames = [-(-len(item) // codec.samples_per_frame) for item in probe]
            where = f"{device}, {precision}"
            alone = _encode(codec, probe, frames, [Batch([i], n, 1) for i, n in enumerate(frames)])
            if not reference:
                reference = alone
            else:
                yield _compare_codes(f"alone, {where}", reference, alone, device)
            if precision == "fp32":
                used = fit_batch_seconds(batch_seconds, device)
                sizes = (*_SIZES, used) if used > _SIZES[-1] else _SIZES
                yield from _compare_batches(codec, probe, frames, alone, device, sizes)
                yield from _compare_pieces(codec, np.concatenate(probe), device, used)
                if compile_mode != "none":
                    most = 0.0 if device == "cpu" else used * codec.sampling_rate / codec.samples_per_frame
                    canonical = canonical_batches(frames, most, equal_only=codec.equal_lengths_only)
                    compiled = load_codec(model, device, allow_targets, precision, compile_mode)
                    yield _compare_codes(
                        f"canonical shapes, compiled ({compile_mode}) beside not, {where}",
                        _encode(codec, probe, frames, canonical),
                        _encode(compiled, probe, frames, canonical),
                        device,
                    )


def _compare_batches(
    codec: Codec,
    probe: list[np.ndarray],
    frames: list[int],
    alone: list[np.ndarray],
    device: str,
    sizes: Sequence[float],
) -> Iterator[Comparison]:
    where = f"{device}, fp32"
    in_one_batch = [n for n in frames if n == max(frames)] if codec.equal_lengths_only else frames
    for seconds in sizes:
        most = seconds * codec.sampling_rate / codec.samples_per_frame
        # As often as it takes to fill a batch.
        times = math.ceil(most / sum(in_one_batch)) if seconds > _SIZES[-1] else 1
        batches = [
            Batch(items, (frames * times)[items[0]], len(items))
            for items in padded_batches(frames * times, most, equal_only=codec.equal_lengths_only)
        ]
        together = _encode(codec, probe * times, frames * times, batches)
        way = f"batches of {seconds:g} s beside alone, {where}"
        yield _compare_codes(way, alone * times, together, device, seconds)
    most = _SIZES[-1] * codec.sampling_rate / codec.samples_per_frame
    canonical = canonical_batches(frames, most, equal_only=codec.equal_lengths_only)
    single = [Batch([i], batch.num_frames, batch.num_rows, True) for batch in canonical for i in batch.items]
    yield _compare_codes(
        f"canonical shapes, neighbours beside silence, {where}",
        _encode(codec, probe, frames, canonical),
        _encode(codec, probe, frames, single),
        device,
    )


def _compare_pieces(codec: Codec, samples: np.ndarray, device: str, batch_seconds: float) -> Iterator[Comparison]:
    """Yield comparisons of a long item (samples,) in pieces with the whole, where the codec may be given pieces.

    Args:
        samples: repeated until the pieces of a run fill a batch, and one is left over.
        batch_seconds: of the batches that pieces share.
    """
    longest = find_pieces(codec)
    if longest is None:
        return
    most = batch_seconds * codec.sampling_rate / codec.samples_per_frame
    num_frames = longest.length + longest.rows(most) * (longest.length - longest.before - longest.after)
    samples = np.resize(samples, num_frames * codec.samples_per_frame)
    whole = _encode(codec, [samples], [num_frames], [Batch([0], num_frames, 1)])
    for seconds in _PIECES:
        pieces = find_pieces(codec, seconds)
        if pieces is None:
            continue
        cut = [pieces.encode(codec, samples, most)]
        way = f"pieces of {seconds:g} s beside the whole, {device}, fp32"
        compared = _compare_codes(way, whole, cut, device, batch_seconds)
        yield msgspec.structs.replace(compared, piece_seconds=seconds)


def _encode(codec: Codec, probe: list[np.ndarray], frames: list[int], batches: list[Batch]) -> list[np.ndarray]:
    codes: list[np.ndarray] = [np.empty(0)] * len(probe)
    for batch in batches:
        encoded = codec.encode(*fill_batch(batch, [probe[i] for i in batch.items], codec.samples_per_frame)).numpy()
        for index, row in zip(batch.items, encoded, strict=False):
            codes[index] = row[:, : frames[index]]
    return codes


def _compare_codes(
    way: str, reference: list[np.ndarray], codes: list[np.ndarray], device: str, batch_seconds: float | None = None
) -> Comparison:
    different = [int(np.count_nonzero(one != other)) for one, other in zip(reference, codes, strict=True)]
    return Comparison(
        way=way,
        compared=sum(one.size for one in reference),
        different=sum(different),
        items=sum(count > 0 for count in different),
        device=device,
        batch_seconds=batch_seconds,
    )


def certify_encoder(
    model: str, devices: Sequence[str] = ("cpu",), allow_targets: Sequence[str] = ()
) -> Iterator[Comparison]:
    """Yield the comparisons of a speaker encoder: choices of contexts among the probe's items, and similarities.

    Raises:
        ConfigError: the encoder cannot be loaded.
    """
    reference: np.ndarray | None = None
    for device in devices:
        for precision in _precisions(device):
            encoder = load_speaker_encoder(model, device, allow_targets, precision)
            probe = make_probe(encoder.sampling_rate)
            alone = _embed(encoder, probe, [[index] for index in range(len(probe))])
            if reference is None:
                reference = alone
            else:
                yield _compare_choices(f"alone, {device}, {precision}", reference, alone, device)
            if precision != "fp32":
                continue
            for seconds in _SIZES:
                batches = padded_batches([len(item) / encoder.sampling_rate for item in probe], seconds)
                together = _embed(encoder, probe, batches)
                way = f"batches of {seconds:g} s beside alone, {device}, fp32"
                yield _compare_choices(way, alone, together, device, seconds)


def _embed(encoder: SpeakerEncoder, probe: list[np.ndarray], batches: list[list[int]]) -> np.ndarray:
    rows = np.empty((len(probe), encoder.embedding_size), np.float32)
    for batch in batches:
        rows[batch] = encoder.embed(*pad([probe[index] for index in batch])).float().cpu().numpy()
    return rows


def _compare_choices(
    way: str, reference: np.ndarray, embeddings: np.ndarray, device: str, batch_seconds: float | None = None
) -> Comparison:
    one, other = reference @ reference.T, embeddings @ embeddings.T
    change = float(np.abs(one - other).max())
    for similarity in (one, other):
        np.fill_diagonal(similarity, -np.inf)
    different = int(np.count_nonzero(one.argmax(axis=1) != other.argmax(axis=1)))
    return Comparison(
        way=way, compared=len(reference), different=different, items=different, largest_change=change,
        device=device, batch_seconds=batch_seconds,
    )  # fmt: skip


def _precisions(device: str) -> tuple[Precision, ...]:
    return ("fp32", "bf16") if device == "cpu" else ("fp32", "tf32", "bf16")
