"""SPHERE files compressed with shorten, as telephone corpora have them: 16-bit PCM and mu-law.

The format is that of Tony Robinson's "SHORTEN: Simple lossless and near-lossless waveform compression" (1994), versions
1 and 2. FFmpeg reads the PCM among them, and no library the mu-law.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from sharmill.audio.decoder import (
    MAX_SAMPLES_PER_BYTE,
    MAX_SAMPLING_RATE,
    MIN_SAMPLING_RATE,
    SAMPLES_IN_ANY_SIZE,
    AudioBytes,
    AudioInfo,
)
from sharmill.errors import RejectRecord

_SPHERE: Final = b"NIST_1A\n"
_MAGIC: Final = b"ajkg"
_MAX_HEADER_BYTES: Final = 1 << 16
_MAX_CHANNELS: Final = 64
_MAX_BLOCK: Final = 1 << 16
_MAX_LPC: Final = 64
_MAX_MEANS: Final = 256
# By the names of the original program: mu-law in two orders of the codes, and 16 bits with either byte first.
_AU1, _S16_HIGH, _S16_LOW, _AU2 = 0, 3, 5, 8
_MU_LAW: Final = (_AU1, _AU2)
_SHIFTS: Final = 13


def is_shortened_sphere(source: AudioBytes) -> bool:
    """Return True if a file is SPHERE whose samples are compressed with shorten."""
    return source.read(0, len(_SPHERE)) == _SPHERE and b"embedded-shorten" in source.read(0, 1 << 12)


class ShortenedSphereDecoder:
    """A shortened SPHERE file; it is decompressed as a whole when its first samples are wanted.

    Raises:
        RejectRecord: unreadable_audio (damage, another coding), empty_audio.
    """

    def __init__(self, source: AudioBytes) -> None:
        self._source = source
        fields = self._read_fields()
        rate, self._count, channels = (fields[key] for key in ("sample_rate", "sample_count", "channel_count"))
        if self._count == 0:
            raise RejectRecord("empty_audio", f"{source.name} has no samples")
        most = max(SAMPLES_IN_ANY_SIZE, source.size * MAX_SAMPLES_PER_BYTE)
        if not 1 <= channels <= _MAX_CHANNELS or self._count * channels > most:
            raise self._damaged("its header claims more than it can have")
        if not MIN_SAMPLING_RATE <= rate <= MAX_SAMPLING_RATE:
            raise self._damaged(f"it claims a sampling rate of {rate} Hz")
        self.info = AudioInfo(rate, self._count, channels, "shn", common=False)
        self._samples = np.empty((0, 0), np.int16)
        self._position = 0

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, num_samples: int) -> np.ndarray:
        if not self._samples.size:
            self._samples = self._decompress()
        block = self._samples[:, self._position : self._position + num_samples].T.astype(np.float32) / 32768
        self._position += len(block)
        return block[:, 0] if self.info.channels == 1 else block

    def check_end(self) -> None:
        """Do nothing: a file that is cut off has fewer samples than its header says."""

    def close(self) -> None:
        self._samples = np.empty((0, 0), np.int16)

    def _read_fields(self) -> dict[str, int]:
        """Return the numbers of the header."""
        head = self._source.read(0, _MAX_HEADER_BYTES)
        size = re.fullmatch(rb" *(\d{1,6})", head[8:15])
        if size is None or int(size[1]) > _MAX_HEADER_BYTES:
            raise self._damaged("its header has no size")
        self._begin = int(size[1])
        found = dict(re.findall(rb"^(\w+) -i (\d{1,18})\s*$", head[: self._begin], re.MULTILINE))
        names = ("sample_rate", "sample_count", "channel_count")
        if missing := [name for name in names if name.encode() not in found]:
            raise self._damaged(f"its header has no {missing[0]}")
        return {name: int(found[name.encode()]) for name in names}

    def _decompress(self) -> np.ndarray:
        """Return all samples, int16 (channels, samples)."""
        data = self._source.read(self._begin)
        version = data[4] if len(data) > 4 else 0
        if not data.startswith(_MAGIC) or version not in (1, 2):
            raise self._damaged("its samples are not those of shorten 1 or 2")
        # Compiled where it is first needed.
        from sharmill.audio.shorten_blocks import read_number, unpack_blocks

        bits = np.frombuffer(data, np.uint8)
        header, position = [], 8 * (len(_MAGIC) + 1)
        for _ in range(6):
            value, position = read_number(bits, position)
            if position < 0:
                raise self._damaged("its samples are cut off")
            header.append(value)
        kind, channels, block_size, max_lpc, num_means, skipped = header
        if kind not in (*_MU_LAW, _S16_HIGH, _S16_LOW):
            raise self._damaged(f"shorten's type {kind} of samples is not read; decompress it with sph2pipe")
        limits = ((channels, _MAX_CHANNELS), (block_size, _MAX_BLOCK), (max_lpc, _MAX_LPC), (num_means, _MAX_MEANS))
        if channels != self.info.channels or block_size < 1 or skipped or any(not 0 <= v <= most for v, most in limits):
            raise self._damaged("its samples are not what its header says")
        samples = np.zeros((channels, self._count), np.int16)
        table = _mu_law_table(kind) if kind in _MU_LAW else np.zeros((1, 1), np.int16)
        found = unpack_blocks(bits, position, version, block_size, max(3, max_lpc), num_means, table, samples)
        if found < 0:
            raise self._damaged("its samples are damaged")
        return samples[:, :found]

    def _damaged(self, what: str) -> RejectRecord:
        return RejectRecord("unreadable_audio", f"{self._source.name}: {what}")


def _mu_law_table(kind: int) -> np.ndarray:
    """Return the linear samples, int16 (shifts, 256), of what is stored for mu-law, plus 128, at each shift.

    At shift n only the codes of multiples of 2^(n + 3) are usual, and lie next to zero in the order of their loudness;
    the others lie beyond them. Minus zero lies at the end of all (AU1), or before the other negative codes (AU2).
    """
    codes = np.arange(256)
    inverted = 255 - codes
    magnitudes = (((inverted & 15) << 3) + 132 << (inverted >> 4 & 7)) - 132
    linear = np.where(codes < 128, -magnitudes, magnitudes).astype(np.int16)
    rows = []
    for shift in range(_SHIFTS):
        # -32768 is a multiple, too, and has the code of the loudest.
        quiet, loud = _codes_of(np.arange(0, 32768, 1 << (shift + 3)))
        positive = [255, *(255 - quiet), *(255 - loud)]
        quiet, loud = _codes_of(np.arange(0, 32769, 1 << (shift + 3)))
        negative = [*(127 - loud[::-1]), 127, *(127 - quiet[::-1])]
        rows.append(linear[(negative if kind == _AU1 else [*negative[1:], 127]) + positive])
    return np.array(rows)


def _codes_of(multiples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes above zero, inverted and without sign, that linear samples have in mu-law, and the others."""
    biased = np.minimum(multiples, 32635) + 132
    segments = np.log2(biased).astype(int) - 7
    usual = np.unique(segments << 4 | (biased >> (segments + 3)) & 15)
    return usual[usual > 0], np.setdiff1d(np.arange(1, 128), usual)
