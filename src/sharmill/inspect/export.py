"""What is stored of a cut as files of its own, and audio made from its codes."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from sharmill.audio.encoding import encode
from sharmill.audio.resample import resampled_length
from sharmill.errors import ConfigError, DamagedShard
from sharmill.files.storage import write_atomic
from sharmill.inspect.stored import StoredCut, read_codes
from sharmill.models.protocols import DecodingCodec
from sharmill.models.recorded import load_recorded_codec
from sharmill.shar.index import CodecRecord, DatasetRecord

_FORMATS: Final = {".wav": "wav", ".flac": "flac", ".mp3": "mp3", ".opus": "opus"}
# Names of fields and formats come from the dataset, and must not lead out of the folder.
_OTHER_CHARACTERS: Final = re.compile(r"[^\w-]+")


def export_cut(stored: StoredCut, folder: Path) -> list[Path]:
    """Write ``cut.json``, the audio as it is stored, arrays as ``.npy`` and values into a folder; return the files.

    Raises:
        ConfigError: the folder has files already.
        FatalError: it cannot be written to.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder: name another one", code="foreign_output")
    contents = {"cut.json": msgspec.json.format(msgspec.json.encode(stored.cut), indent=2) + b"\n"}
    for field, item in stored.items.items():
        if item.metadata is not None:
            name, extension = (_OTHER_CHARACTERS.sub("_", part) for part in (field, item.extension))
            value = msgspec.json.encode(item.metadata) + b"\n"
            contents[f"{name}.{extension}"] = value if item.data is None else item.data
    for name, data in contents.items():
        write_atomic(folder / name, data)
    return [folder / name for name in contents]


def choose_codec(record: DatasetRecord, name: str | None) -> CodecRecord:
    """Return the codec of this name, or the only one.

    Raises:
        ConfigError: there is none, or several to choose from.
    """
    names = [codec.name for codec in record.codecs]
    if name is None and len(names) == 1:
        return record.codecs[0]
    if name not in names:
        wanted = "several codecs" if name is None and names else f"no codec {name!r}" if name else "no codes"
        listed = f": choose one of {', '.join(names)} with --codec" if names else ""
        raise ConfigError(f"the dataset has {wanted}{listed}", code="unknown_codec")
    return next(codec for codec in record.codecs if codec.name == name)


def load_decoder(codec: CodecRecord, model: str | None = None) -> DecodingCodec:
    """Return the codec that made codes, loaded, to turn them into audio.

    Args:
        codec: one of the dataset's.
        model: the model to load, where the codec is none of sharmill's own.

    Raises:
        ConfigError: the codec cannot be loaded or cannot decode.
    """
    loaded = load_recorded_codec(codec, model)
    if not isinstance(loaded, DecodingCodec) or loaded.decoded_sampling_rate is None:
        raise ConfigError(f"the codec {codec.name!r} ({codec.model}) cannot turn codes into audio", code="no_decoder")
    return loaded


def decode_stored_codes(
    stored: StoredCut,
    dataset: DatasetRecord,
    codec: CodecRecord,
    decoder: DecodingCodec,
    *,
    context: bool = False,
    most_seconds: float = math.inf,
) -> tuple[np.ndarray, int]:
    """Decode the codes of a cut.

    Args:
        dataset: the record of its dataset.
        codec: whose codes; one of the dataset's.
        decoder: the same codec, loaded.
        context: those of the context, instead of the target.
        most_seconds: about how much of it, from the beginning.

    Returns:
        Samples (samples,), as long as the audio that was encoded, or as ``most_seconds``, and their rate.

    Raises:
        ConfigError: there are no such codes.
        DamagedShard: the codes are damaged.
    """
    import torch

    field = codec.fields[context].name
    item = stored.items.get(field)
    if item is None or item.data is None:
        raise ConfigError(f"the cut has no {field}", code="unknown_field")
    codes = read_codes(item)
    if most_seconds < math.inf:
        codes = codes[:, : math.ceil(most_seconds * codec.sampling_rate / codec.samples_per_frame)]
    rate = decoder.decoded_sampling_rate
    assert rate is not None  # as load_decoder has seen
    try:
        audio = decoder.decode(torch.from_numpy(codes.astype(np.int64))[None], torch.tensor([codes.shape[1]]))[0]
    except ValueError as error:
        raise DamagedShard(f"{field} of {item.cut_id}: {error}") from error
    source = stored.items.get(dataset.audio_fields[context])
    if source is not None and source.metadata is not None:
        audio = audio[: resampled_length(source.metadata["num_samples"], source.metadata["sampling_rate"], rate)]
    return audio.numpy(), rate


def export_audio(path: Path, samples: np.ndarray, sampling_rate: int) -> None:
    """Write audio in the format that the suffix of ``path`` names.

    Raises:
        ConfigError: it names none, or one that cannot have this rate.
        FatalError: the file cannot be written.
    """
    if (format := _FORMATS.get(path.suffix.lower())) is None:
        raise ConfigError(f"{path}: the name must end in one of {', '.join(_FORMATS)}", code="bad_usage")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file", code="bad_usage")
    write_atomic(path, encode(samples, sampling_rate, format))
