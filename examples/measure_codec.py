"""Measure how well codecs preserve speech, compared with Opus at 6 kbit/s.

python examples/measure_codec.py SPEECH CODEC... [--limit N] [--wav FOLDER]

SPEECH is a folder with ``manifest.json`` and ``audio/``. CODEC is a model as in ``encode.codecs``, such as ``builtin``
or ``nemo:model.nemo``. This needs ``pip install 'sharmill[codec-quality]'``. The output is a Markdown table of means
over the utterances:

- STOI: intelligibility, from 0 to 1 (pystoi, standard variant). PESQ: quality, from 1 to 4.6 (wide band).
- Mel: mean difference of 80 logarithmic mel bands (25 ms windows every 10 ms), in dB.
- Voice: cosine similarity of resemblyzer embeddings of the original and the decoded utterance.
- Used and entropy: share of used codes, and bits per code, averaged over the codebooks.
- Speed: seconds of audio encoded per second of one core.
"""

import io
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import av
import click
import numpy as np
import soundfile
import torch
from pesq import pesq
from pystoi import stoi
from torchaudio.functional import melscale_fbanks

from sharmill.audio.resample import resample
from sharmill.errors import ConfigError
from sharmill.models import Codec, DecodingCodec, SpeakerEncoder, load_codec, load_speaker_encoder
from sharmill.models.batches import pad

RATE = 16000
OPUS_BIT_RATE = 6000


@dataclass
class Measured:
    """Results of one codec over all utterances."""

    name: str
    bit_rate: float = 0.0
    scores: dict[str, list[float]] = field(default_factory=dict)
    counts: np.ndarray | None = None
    audio_seconds: float = 0.0
    core_seconds: float = 0.0

    def row(self) -> str:
        scores = [f"{np.mean(self.scores[name]):.3f}" if self.scores.get(name) else "-"
                  for name in ("stoi", "pesq", "mel", "voice")]  # fmt: skip
        usage = ["-", "-"]
        if self.counts is not None:
            shares = self.counts / self.counts.sum(axis=1, keepdims=True)
            bits = -(shares * np.log2(np.maximum(shares, 1e-12))).sum(axis=1)
            usage = [f"{(self.counts > 0).mean():.1%}", f"{bits.mean():.2f}"]
        speed = f"{self.audio_seconds / self.core_seconds:.0f}" if self.core_seconds else "-"
        return f"| {' | '.join([self.name, f'{self.bit_rate / 1000:.1f}', *scores, *usage, speed])} |"


def code(codec: Codec, audio: np.ndarray, measured: Measured) -> np.ndarray | None:
    """Encode and decode audio (samples,) at RATE; return audio at RATE, or None if the codec cannot decode."""
    own = resample(audio, RATE, codec.sampling_rate)
    began = time.process_time()
    codes = codec.encode(*pad([own]))
    measured.core_seconds += time.process_time() - began
    measured.audio_seconds += len(audio) / RATE
    if measured.counts is None:
        measured.counts = np.zeros((codec.num_codebooks, codec.codebook_size), np.int64)
    for counts, row in zip(measured.counts, codes[0].numpy(), strict=True):
        counts += np.bincount(row, minlength=codec.codebook_size)
    if not isinstance(codec, DecodingCodec) or codec.decoded_sampling_rate is None:
        return None
    decoded = codec.decode(codes, torch.tensor([codes.shape[2]]))[0].numpy()
    return resample(decoded, codec.decoded_sampling_rate, RATE)[: len(audio)]


def code_with_opus(audio: np.ndarray) -> np.ndarray:
    """Encode and decode audio (samples,) at RATE with Opus, in its mode for telephone calls."""
    stream = io.BytesIO()
    with av.open(stream, "w", format="ogg") as container:
        output = container.add_stream("libopus", rate=RATE, bit_rate=OPUS_BIT_RATE, layout="mono",
                                      options={"application": "voip", "vbr": "constrained"})  # fmt: skip
        samples = (np.clip(audio, -1, 1) * 32767).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        for packet in [*output.encode(frame), *output.encode(None)]:
            container.mux(packet)
    stream.seek(0)
    with av.open(stream) as container:
        frames = [frame.to_ndarray().mean(axis=0) for frame in container.decode(audio=0)]
        rate = container.streams.audio[0].rate
    return resample(np.concatenate(frames).astype(np.float32), rate, RATE)[: len(audio)]


def mel_distance(original: np.ndarray, decoded: np.ndarray) -> float:
    """Return the mean difference in dB between the mel bands of two signals (samples,), with a floor of -80 dB."""
    filters = melscale_fbanks(257, 0.0, RATE / 2, 80, RATE)
    spectra = [
        torch.stft(torch.from_numpy(item), 512, 160, 400, window=torch.hann_window(400), return_complex=True).abs().T
        for item in (original, decoded)
    ]
    first, second = (20 * torch.log10((spectrum @ filters).clamp(min=1e-4)) for spectrum in spectra)
    return float((first - second).abs().mean())


def compare(measured: Measured, original: np.ndarray, decoded: np.ndarray, encoder: SpeakerEncoder) -> None:
    decoded = np.pad(decoded, (0, len(original) - len(decoded)))
    first, second = encoder.embed(*pad([original, decoded]))
    scores = {
        "stoi": float(stoi(original, decoded, RATE)),
        "pesq": float(pesq(RATE, original, decoded, "wb")),
        "mel": mel_distance(original, decoded),
        "voice": float(first @ second),
    }
    for name, score in scores.items():
        measured.scores.setdefault(name, []).append(score)


@click.command()
@click.argument("speech", type=click.Path(path_type=Path))
@click.argument("names", metavar="CODEC...", nargs=-1, required=True)
@click.option("--limit", type=int, help="Number of utterances, spread over the manifest.")
@click.option("--wav", type=click.Path(path_type=Path), help="Folder for decoded audio.")
def main(speech: Path, names: tuple[str, ...], limit: int | None, wav: Path | None) -> None:
    """Measure how well codecs preserve speech, compared with Opus at 6 kbit/s."""
    torch.set_num_threads(1)
    lines = (speech / "manifest.json").read_text().splitlines()
    if limit is not None:
        lines = lines[:: max(1, len(lines) // limit)][:limit]
    encoder = load_speaker_encoder("resemblyzer")
    codecs = {name: load_codec(name) for name in names}
    results = {name: Measured(name, c.num_codebooks * np.log2(c.codebook_size) * c.sampling_rate / c.samples_per_frame)
               for name, c in codecs.items()}  # fmt: skip
    opus = Measured("Opus", OPUS_BIT_RATE)
    for line in lines:
        name = json.loads(line)["audio_filepath"]
        audio, rate = soundfile.read(speech / "audio" / name, dtype="float32")
        if rate != RATE:
            raise ConfigError(f"{name} has a sampling rate of {rate} Hz; resample it to {RATE} Hz", code="bad_usage")
        compare(opus, audio, code_with_opus(audio), encoder)
        for codec_name, codec in codecs.items():
            if (decoded := code(codec, audio, results[codec_name])) is None:
                continue
            compare(results[codec_name], audio, decoded, encoder)
            if wav is not None:
                wav.mkdir(parents=True, exist_ok=True)
                soundfile.write(wav / f"{codec_name.split(':')[0]}_{Path(name).stem}.wav", decoded, RATE)
    columns = "| codec | kbit/s | STOI | PESQ | mel dB | voice | used | entropy | speed |"
    rows = [measured.row() for measured in (*results.values(), opus)]
    print(f"{len(lines)} utterances", columns, "|---" * 9 + "|", *rows, sep="\n")


if __name__ == "__main__":
    main()
