"""Audio that is decoded before it is used: by libraries that work without Python's lock, so that threads serve."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import soundfile as sf
from lhotse import Recording
from lhotse.audio import AudioLoadingError, DurationMismatchError
from lhotse.cut import Cut
from lhotse.utils import compute_num_samples
from miniaudio import ffi, lib

from sharmill.audio.decoder import MAX_SAMPLES_PER_BYTE
from sharmill.audio.samples import to_float
from sharmill.shar.reading.cuts import set_field, with_id
from sharmill.shar.reading.memory_audio import MemorySource, flac_header
from sharmill.shar.reading.shard import OpenShard

# FLAC and WAV. For others lhotse chooses among decoders, and resamples what Opus gives.
_PLAIN = (b"fLaC", b"RIFF")
# Where STREAMINFO, the first block of a FLAC, has the MD5 sum of the samples.
_MD5 = slice(26, 42)


def decode_audio(cut: Cut, shard: OpenShard) -> Cut:
    """Decode the audio that a cut holds in memory, and return the cut.

    Raises:
        DamagedShard: it cannot be decoded.
    """
    decoded: dict[int, Recording] = {}
    for name, recording in list(cut.iter_data()) if hasattr(cut, "iter_data") else ():
        if not isinstance(recording, Recording) or not recording.is_in_memory:
            continue
        source = id(recording.sources[0])
        if source not in decoded:
            try:
                decoded[source] = _decode_recording(recording)
            except (AudioLoadingError, DurationMismatchError, RuntimeError, ValueError, OSError) as error:
                reason = str(error).strip().splitlines()
                raise shard.damage(
                    f"{name} of {cut.id!r} cannot be decoded: {reason[0] if reason else error!r}"
                ) from error
        set_field(cut, name, with_id(decoded[source], recording.id))
    return cut


class _DecodedSource(MemorySource):
    """An audio source in memory that has been decoded once: loading takes a slice.

    Everything of lhotse works on it as on any other (``resample``, ``truncate``, saving), since it holds the encoded
    bytes as well. A copy made by ``dataclasses.replace`` decodes again.
    """

    samples: np.ndarray
    sampling_rate: int

    def load_audio(
        self, offset: float = 0.0, duration: float | None = None, force_opus_sampling_rate: int | None = None
    ) -> np.ndarray:
        """Return a copy of the samples (channels, num_samples) that lhotse would decode."""
        if not hasattr(self, "samples"):
            return super().load_audio(offset, duration, force_opus_sampling_rate)
        if offset == 0.0 and duration is None:
            return as_floats(self.samples)
        first = compute_num_samples(offset, self.sampling_rate) if offset > 0 else 0
        if duration is None:
            return as_floats(self.samples[..., first:])
        end = first + compute_num_samples(duration, self.sampling_rate)
        if end > self.samples.shape[-1]:
            # lhotse decides how much too short audio may be.
            return super().load_audio(offset, duration, force_opus_sampling_rate)
        return as_floats(self.samples[..., first:end])


def _decode_recording(recording: Recording) -> Recording:
    """Return the same Recording with its audio decoded.

    Raises:
        Exception: whatever lhotse raises for audio that cannot be decoded.
    """
    (source,) = recording.sources
    if source.source[:4] in _PLAIN:
        if isinstance(source, MemorySource):
            source.check()
        samples = decode_samples(source.source)
    else:
        samples = source.load_audio(force_opus_sampling_rate=recording.sampling_rate)
    decoded = object.__new__(_DecodedSource)
    decoded.__dict__.update(source.__dict__, samples=samples, sampling_rate=recording.sampling_rate)
    made = object.__new__(Recording)
    made.__dict__.update(recording.__dict__, sources=[decoded])
    return made


def decode_samples(data: bytes) -> np.ndarray:
    """Return samples (channels, num_samples) of FLAC or WAV, int16 or float32, in less time than libsndfile.

    dr_flac takes 70 % of the time of libFLAC, which libsndfile has, but passes over damage. What it decodes is taken if
    its MD5 sum is the one in the file; all else is left to libsndfile.
    """
    samples = _decode_flac(data)
    if samples is None:
        with _as_file(data) as file, sf.SoundFile(file, closefd=False) as sound:
            samples = sound.read(dtype="float32", always_2d=True)
    return np.ascontiguousarray(samples.T)


def as_floats(samples: np.ndarray) -> np.ndarray:
    """Return a copy as float32 in [-1, 1), the same values as of lhotse's ``soundfile_load``."""
    floats = to_float(samples)
    return floats.copy() if floats is samples else floats


def _decode_flac(data: bytes) -> np.ndarray | None:
    """Return int16 samples (num_samples, channels) of FLAC of 16 bits; None without the MD5 sum that it states."""
    num_samples, channels, sampling_rate = flac_header(data) or (0, 0, 0)
    if not 0 < num_samples <= len(data) * MAX_SAMPLES_PER_BYTE:
        return None
    flac = lib.ma_dr_flac_open_memory(data, len(data), ffi.NULL)
    if not flac:
        return None
    try:
        if (flac.channels, flac.sampleRate, flac.bitsPerSample) != (channels, sampling_rate, 16):
            return None
        samples = np.empty((num_samples, channels), np.int16)
        address = ffi.cast("short *", samples.ctypes.data)
        num_decoded = lib.ma_dr_flac_read_pcm_frames_s16(flac, num_samples, address)
    finally:
        lib.ma_dr_flac_close(flac)
    if num_decoded != num_samples:
        # What is missing may stand there from an earlier decoding of the same recording: memory is given out again.
        return None
    return samples if hashlib.md5(samples.data, usedforsecurity=False).digest() == data[_MD5] else None


@contextmanager
def _as_file(data: bytes) -> Iterator[int | io.BytesIO]:
    """Open bytes as a file of the system, which libsndfile reads by itself; else each read would wait for Python."""
    if not hasattr(os, "memfd_create"):
        yield io.BytesIO(data)
        return
    descriptor = os.memfd_create("sharmill")
    try:
        with open(descriptor, "wb", closefd=False) as stream:
            stream.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
