"""Functions for chains on speech: decoding, resampling and padding audio, Kaldi features, and batches in WeNet's form.

Each function takes an example and returns a new one. Pass it to ``map`` or ``parallel_map``, with settings bound by
``functools.partial``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import xxhash

from sharmill.audio.audio_bytes import AudioBytes
from sharmill.audio.files import open_bytes, open_recording
from sharmill.audio.resample import resample, segment_bounds
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import Channel

# The value that pads labels, as in WeNet; loss functions ignore it.
LABEL_PADDING: Final = -1


def decode_wav(example: Mapping[str, Any], channel: Channel = None) -> dict[str, Any]:
    """Decode ``wav`` (a path or the bytes of a file) into ``waveform`` (float32, shape (1, samples)) and
    ``sample_rate``.

    If the example has ``end``, only the part from ``start`` to ``end`` seconds is decoded. The format is detected from
    the content: all formats of libsndfile, and AAC, WMA and similar formats through FFmpeg.

    Args:
        channel: channel of multichannel audio, or "downmix" for the mean of all channels.

    Raises:
        RejectRecord: the file is missing, damaged or not audio, or it has several channels and none is chosen.
    """
    wav, name = example["wav"], f"audio of {str(example.get('key'))[:200]!r}"
    with open_recording(wav) if isinstance(wav, str) else open_bytes(AudioBytes(name, wav)) as recording:
        rate = recording.info.sampling_rate
        start, num_samples = 0, None
        if example.get("end") is not None:
            offset = float(example.get("start", 0.0))
            start, num_samples = segment_bounds(offset, float(example["end"]) - offset, rate)
        audio = recording.read(start, num_samples, channel)
    rest = {name: value for name, value in example.items() if name != "wav"}
    return rest | {"waveform": torch.from_numpy(audio)[None], "sample_rate": rate}


def resample_wav(example: Mapping[str, Any], sample_rate: int) -> dict[str, Any]:
    """Resample ``waveform`` to ``sample_rate`` Hz like lhotse and torchaudio."""
    audio = resample(example["waveform"][0].numpy(), example["sample_rate"], sample_rate)
    return {**example, "waveform": torch.from_numpy(audio)[None], "sample_rate": sample_rate}


def pad_wav(example: Mapping[str, Any], seconds: float = 30.0, *, trim: bool = False) -> dict[str, Any]:
    """Pad ``waveform`` with zeros to a duration of ``seconds``; the default is the length of Whisper's input.

    ``num_samples`` of the new example is the length without the padding.

    Args:
        trim: trim longer audio instead of rejecting it.

    Raises:
        RejectRecord: the audio is longer than ``seconds``, and ``trim`` is False.
    """
    waveform = example["waveform"]
    found, wanted = waveform.shape[1], round(seconds * example["sample_rate"])
    if found > wanted and not trim:
        raise RejectRecord("too_long", f"the audio has {found / example['sample_rate']:.2f} s, more than {seconds:g} s")
    padded = torch.nn.functional.pad(waveform, (0, wanted - found))  # negative padding trims
    return {**example, "waveform": padded, "num_samples": min(found, wanted)}


def kaldi_fbank(
    example: Mapping[str, Any],
    num_mel_bins: int = 23,
    frame_length: float = 25.0,
    frame_shift: float = 10.0,
    dither: float = 0.0,
) -> dict[str, Any]:
    """Add ``feat``, float32 (frames, mels): Kaldi's log mel energies, computed by torchaudio from 16-bit amplitudes.

    Args:
        num_mel_bins: 23 as in Kaldi's recipes, or 80 as in WeNet's.
        frame_length, frame_shift: in milliseconds.
        dither: standard deviation of the noise that is added to the samples. The noise depends only on the ``key``, so
            it is the same with any number of workers. Kaldi instead draws new noise for each frame.

    Raises:
        RejectRecord: the audio is shorter than a frame.
    """
    from torchaudio.compliance import kaldi

    waveform = example["waveform"] * (1 << 15)
    if waveform.shape[1] < int(example["sample_rate"] * frame_length * 0.001):
        raise RejectRecord("too_short", f"the audio has {waveform.shape[1]} samples, less than a frame")
    if dither:
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(str(example["key"]).encode()) >> 1)
        waveform = waveform + dither * torch.randn(waveform.shape, generator=generator)
    feat = kaldi.fbank(
        waveform,
        num_mel_bins=num_mel_bins,
        frame_length=frame_length,
        frame_shift=frame_shift,
        energy_floor=0.0,
        sample_frequency=example["sample_rate"],
    )
    return {**example, "feat": feat}


def collate(batch: Sequence[Mapping[str, Any]], num_frames: int | None = None) -> dict[str, Any]:
    """Collate examples with ``key``, ``feat`` (frames, mels) and, except for inference, ``label`` (ids) into a batch.

    Args:
        batch: at least one example.
        num_frames: pad ``feats`` to this number of frames instead of to the longest example.

    Returns:
        The batch, longest example first: ``keys``; ``feats``, float32 (batch, frames, mels), padded with 0;
        ``feats_lengths``, int32 (batch,). If there are labels, also ``target``, int64 (batch, labels), padded with
        ``LABEL_PADDING``, and ``target_lengths``, int32 (batch,).

    Raises:
        ConfigError: only some examples have labels.
        RejectRecord: an example has more than ``num_frames`` frames.
    """
    batch = sorted(batch, key=lambda example: len(example["feat"]), reverse=True)
    feats = [example["feat"] for example in batch]
    if num_frames is not None:
        if len(feats[0]) > num_frames:
            raise RejectRecord("too_long", f"{batch[0]['key']!r} has {len(feats[0])} frames, more than {num_frames}")
        feats[0] = torch.nn.functional.pad(feats[0], (0, 0, 0, num_frames - len(feats[0])))
    made = {
        "keys": [example["key"] for example in batch],
        "feats": torch.nn.utils.rnn.pad_sequence(feats, batch_first=True),
        "feats_lengths": torch.tensor([len(example["feat"]) for example in batch], dtype=torch.int32),
    }
    labels = [torch.as_tensor(example["label"], dtype=torch.int64) for example in batch if "label" in example]
    if not labels:
        return made
    if len(labels) < len(batch):
        without = next(example["key"] for example in batch if "label" not in example)
        raise ConfigError(
            f"{without!r} has no label, but other examples of its batch have one", code="bad_config_value"
        )
    target = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=LABEL_PADDING)
    lengths = torch.tensor([len(label) for label in labels], dtype=torch.int32)
    return made | {"target": target, "target_lengths": lengths}
