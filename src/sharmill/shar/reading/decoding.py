"""Decoding of cuts' audio ahead of its use, by libraries that work without Python's lock, so that threads serve."""

import hashlib
import os

import numpy as np
import soundfile as sf
from lhotse import Recording
from lhotse.audio import AudioLoadingError, DurationMismatchError
from lhotse.cut import Cut
from lhotse.utils import compute_num_samples
from miniaudio import ffi, lib

from sharmill.audio.decoder import MAX_SAMPLES_PER_BYTE, to_float
from sharmill.audio.flac import flac_header
from sharmill.errors import one_line
from sharmill.shar.reading.cuts import make, set_field, with_id
from sharmill.shar.reading.in_memory import SafeSource
from sharmill.shar.reading.open_shard import OpenShard


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
                raise shard.damage(f"{name} of {cut.id!r} cannot be decoded: {one_line(error)}") from error
        set_field(cut, name, with_id(decoded[source], recording.id))
    return cut


class _DecodedSource(SafeSource):
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
    # For others than FLAC and WAV lhotse chooses among decoders, and resamples what Opus gives.
    if source.source[:4] in (b"fLaC", b"RIFF"):
        if isinstance(source, SafeSource):
            source.check()
        samples = decode_samples(source.source)
    else:
        samples = source.load_audio(force_opus_sampling_rate=recording.sampling_rate)
    attributes = {**source.__dict__, "samples": samples, "sampling_rate": recording.sampling_rate}
    return make(Recording, {**recording.__dict__, "sources": [make(_DecodedSource, attributes)]})


def decode_samples(data: bytes) -> np.ndarray:
    """Return samples (channels, num_samples) of FLAC or WAV, int16 or float32, in less time than libsndfile.

    dr_flac takes 70 % of the time of libFLAC, which libsndfile has, but passes over damage. What it decodes is taken if
    its MD5 sum is the one in the file; all else is left to libsndfile.
    """
    samples = _decode_flac(data)
    if samples is None:
        # A file of the system libsndfile reads by itself; else each read would wait for Python.
        with os.fdopen(os.memfd_create("sharmill"), "w+b") as file:
            file.write(data)
            file.seek(0)
            with sf.SoundFile(file.fileno(), closefd=False) as sound:
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
        # The rest of the array may be old memory, with samples from an earlier decoding of the same recording.
        return None
    # STREAMINFO, the first block, has the MD5 sum of the samples.
    return samples if hashlib.md5(samples.data, usedforsecurity=False).digest() == data[26:42] else None
