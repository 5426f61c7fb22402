"""Decoding of audio ahead of its use. Threads decode in parallel, since the libraries release Python's global lock."""

import os

import numpy as np
import soundfile as sf
from lhotse import Recording
from lhotse.audio import AudioLoadingError, DurationMismatchError
from lhotse.cut import Cut
from lhotse.utils import compute_num_samples

from sharmill.audio.decoder import to_float
from sharmill.audio.flac import decode_flac
from sharmill.errors import one_line
from sharmill.shar.reading.cuts import make, set_field, with_id
from sharmill.shar.reading.in_memory import SafeSource
from sharmill.shar.reading.open_shard import OpenShard


def decode_audio(cut: Cut, shard: OpenShard) -> Cut:
    """Decode the audio that a cut holds in memory, and return the cut.

    Raises:
        DamagedShard: the audio cannot be decoded.
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
    """An audio source in memory that has already been decoded, so that loading only copies a slice of the samples.

    It still holds the encoded bytes, so all of lhotse's operations work on it (``resample``, ``truncate``, saving). A
    copy made by ``dataclasses.replace`` is decoded again when it is loaded.
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
            # Let lhotse decide how much shorter the audio may be.
            return super().load_audio(offset, duration, force_opus_sampling_rate)
        return as_floats(self.samples[..., first:end])


def _decode_recording(recording: Recording) -> Recording:
    """Return the same Recording with its audio decoded.

    Raises:
        Exception: any exception that lhotse raises for audio that cannot be decoded.
    """
    (source,) = recording.sources
    # Leave all formats but FLAC and WAV to lhotse, which chooses the decoder and resamples Opus.
    if source.source[:4] in (b"fLaC", b"RIFF"):
        if isinstance(source, SafeSource):
            source.check()
        samples = decode_samples(source.source)
    else:
        samples = source.load_audio(force_opus_sampling_rate=recording.sampling_rate)
    attributes = {**source.__dict__, "samples": samples, "sampling_rate": recording.sampling_rate}
    return make(Recording, {**recording.__dict__, "sources": [make(_DecodedSource, attributes)]})


def decode_samples(data: bytes) -> np.ndarray:
    """Decode FLAC or WAV data, and return samples (channels, num_samples) of type int16 or float32.

    libsndfile decodes only data that the faster ``decode_flac`` does not support.
    """
    samples = decode_flac(data)
    if samples is None:
        # libsndfile reads from a file descriptor without Python's help; each read from a Python object would take the
        # global lock.
        with os.fdopen(os.memfd_create("sharmill"), "w+b") as file:
            file.write(data)
            file.seek(0)
            with sf.SoundFile(file.fileno(), closefd=False) as sound:
                samples = sound.read(dtype="float32", always_2d=True)
    return np.ascontiguousarray(samples.T)


def as_floats(samples: np.ndarray) -> np.ndarray:
    """Return a copy of the samples as float32 in [-1, 1), with the same values as lhotse's ``soundfile_load``."""
    floats = to_float(samples)
    return floats.copy() if floats is samples else floats
