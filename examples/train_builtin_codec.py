"""Train the codec ``builtin`` that ships with sharmill, on one CPU core or a GPU.

python examples/train_builtin_codec.py SPEECH OUT.nemo [--from WEIGHTS.nemo] [--max-steps 20000] [--minutes 70]

SPEECH is a folder with ``manifest.json`` and ``audio/``; about 50 minutes of speech from many voices are enough. The
espeak-ng voices of ``sharmill demo`` are added. The checkpoint is selected on 30 held-out voices.

The weights are averaged over the last steps, and saved in 16 bits whenever they are the best so far. ``--from`` starts
another run, with its own warm-up, from such weights. The learning rate falls to zero at the last step or when
``--minutes`` are over. Two runs on the same machine produce the same weights only without ``--minutes``.
"""

import json
import math
import random
import tarfile
import time
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path

import click
import numpy as np
import soundfile
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional
from torchaudio.functional import melscale_fbanks

from sharmill.audio.resample import resample
from sharmill.demo.corpus import VOICES, make_speakers, sentences
from sharmill.demo.espeak import Espeak
from sharmill.models.checkpoints import read_nemo_config
from sharmill.models.nemo_models import quiet_nemo

with quiet_nemo():
    from nemo.collections.tts.models import AudioCodecModel
    from nemo.collections.tts.modules import audio_codec_modules
    from nemo.core.classes.common import typecheck

CONFIG = Path(__file__).with_suffix("").with_name("builtin_codec.yaml")
RATE = 16000
# (window, hop, mel bands)
RESOLUTIONS = ((1024, 256, 80), (512, 192, 64), (256, 96, 40))
SYNTHETIC_SHARE = 0.15
SENTENCES_PER_VOICE = 12
NUM_HELD_OUT = 30
HELD_OUT_SECONDS = 3
BATCH, SECONDS = 4, 1.0
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 100
AVERAGING = 0.998


def read_speech(folder: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the utterances of the training voices and of the held-out voices, each (samples,) float32."""
    records = [json.loads(line) for line in (folder / "manifest.json").read_text().splitlines()]
    voices = sorted({record["speaker"] for record in records})
    held_out = set(voices[:: max(1, len(voices) // NUM_HELD_OUT)][:NUM_HELD_OUT])
    train, held = [], []
    for record in records:
        audio, rate = soundfile.read(folder / "audio" / record["audio_filepath"], dtype="float32")
        if rate != RATE:
            raise SystemExit(f"{record['audio_filepath']} has a sampling rate of {rate} Hz; resample it to {RATE} Hz")
        (held if record["speaker"] in held_out else train).append(audio)
    return train, held


def speak_sentences(seed: int) -> list[np.ndarray]:
    """Return utterances (samples,) float32 of the demo's synthetic voices, with sentences that are not in the demo."""
    espeak = Espeak()
    texts = sentences(seed=seed)
    spoken = []
    for speaker in make_speakers(espeak, num_voices=len(VOICES), seed=seed):
        for text in islice(texts, SENTENCES_PER_VOICE):
            if (samples := speaker.say(text)) is not None:
                spoken.append(resample(samples.astype(np.float32) / 32768, speaker.sampling_rate, RATE))
    return spoken


def batches(speech: list[np.ndarray], synthetic: list[np.ndarray], seed: int) -> Iterator[Tensor]:
    """Yield batches (BATCH, samples) of random pieces at random levels, without end."""
    rng = random.Random(seed)
    length = int(SECONDS * RATE)
    sources = [(items, [max(1, len(item) - length) for item in items]) for items in (speech, synthetic)]
    while True:
        batch = np.zeros((BATCH, length), np.float32)
        for row in batch:
            items, weights = sources[rng.random() < SYNTHETIC_SHARE]
            item = rng.choices(items, weights)[0]
            start = rng.randrange(max(1, len(item) - length))
            piece = item[start : start + length] * 10 ** (rng.uniform(-12, 6) / 20)
            row[: len(piece)] = piece / max(1.0, np.abs(piece).max())
        yield torch.from_numpy(batch)


class SpectralLoss(nn.Module):
    """Distance between two signals: of log mel spectra, of square roots of spectra, and of the spectra themselves.

    The last term is the spectral convergence of Yamamoto et al., "Parallel WaveGAN" (2020). It emphasizes loud parts,
    so that decoded speech keeps its loudness.
    """

    def __init__(self) -> None:
        super().__init__()
        for window, _, bands in RESOLUTIONS:
            self.register_buffer(f"window_{window}", torch.hann_window(window))
            filters = melscale_fbanks(window // 2 + 1, 0.0, RATE / 2, bands, RATE, norm="slaney", mel_scale="slaney")
            self.register_buffer(f"mel_{window}", filters)

    def forward(self, audio: Tensor, target: Tensor) -> Tensor:
        """Return the mean distance between two batches of signals, each of shape (batch, samples)."""
        total = audio.new_zeros(())
        for window, hop, _ in RESOLUTIONS:
            with torch.no_grad():
                wanted, wanted_mel = self._spectra(target, window, hop)
            spectrum, mel = self._spectra(audio, window, hop)
            total = total + functional.l1_loss(mel, wanted_mel)
            total = total + 2 * functional.l1_loss(spectrum, wanted) / wanted.mean().clamp(min=1e-2)
            difference = torch.linalg.vector_norm(spectrum.square() - wanted.square(), dim=(1, 2))
            scale = torch.linalg.vector_norm(wanted.square(), dim=(1, 2)).clamp(min=1e-1)
            total = total + (difference / scale).mean()
        return total / len(RESOLUTIONS)

    def _spectra(self, audio: Tensor, window: int, hop: int) -> tuple[Tensor, Tensor]:
        spectrum = torch.stft(audio, window, hop, window=getattr(self, f"window_{window}"), return_complex=True)
        power = spectrum.real.square() + spectrum.imag.square() + 1e-8
        mel = power.sqrt().transpose(1, 2) @ getattr(self, f"mel_{window}")
        return power.sqrt().sqrt(), torch.log(mel + 1e-4)


def reconstruct(model: AudioCodecModel, audio: Tensor) -> Tensor:
    """Encode and decode audio (batch, samples) that consists of whole frames, and return the decoded audio."""
    num_samples = torch.full((len(audio),), audio.shape[1], device=audio.device)
    encoded, num_frames = model.audio_encoder(audio=audio, audio_len=num_samples)
    quantized, _ = model.vector_quantizer(inputs=encoded.float(), input_len=num_frames)
    decoded, _ = model.audio_decoder(inputs=quantized, input_len=num_frames)
    return decoded.float()


@torch.no_grad()
def held_out_loss(model: AudioCodecModel, loss: SpectralLoss, held_out: Tensor) -> float:
    """Return the mean loss over pieces (items, samples) of the held-out voices."""
    model.eval()
    values = [float(loss(reconstruct(model, piece), piece)) for piece in held_out.split(8)]
    model.train()
    return sum(values) / len(values)


def save(model: AudioCodecModel, path: Path) -> None:
    """Write a .nemo file: a tar with the configuration and the 16-bit weights of encoder and decoder."""
    weights = BytesIO()
    torch.save({key: value.half() if value.is_floating_point() else value
                for key, value in model.state_dict().items() if "_loss_fn" not in key}, weights)  # fmt: skip
    members = {"model_config.yaml": CONFIG.read_bytes(), "model_weights.ckpt": weights.getvalue()}
    with tarfile.open(path.with_suffix(".part"), "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            archive.addfile(info, BytesIO(content))
    path.with_suffix(".part").replace(path)


def make_model(weights: Path | None) -> AudioCodecModel:
    """Return the model with random weights, or with the weights of a .nemo file."""
    with quiet_nemo():
        if weights is not None:
            # NeMo itself would instantiate any class that the configuration names, so check it first.
            read_nemo_config(weights)
            return AudioCodecModel.restore_from(str(weights), map_location="cpu").float()
        return AudioCodecModel(cfg=OmegaConf.load(CONFIG))


@click.command()
@click.argument("speech_folder", metavar="SPEECH", type=click.Path(path_type=Path))
@click.argument("output", metavar="OUT.nemo", type=click.Path(path_type=Path))
@click.option("--from", "weights", type=click.Path(path_type=Path))
@click.option("--max-steps", default=20000)
@click.option("--minutes", default=math.inf)
@click.option("--check-every", default=250)
@click.option("--seed", default=0)
@click.option("--threads", default=1)
@click.option("--device", default="cpu")
def train(
    speech_folder: Path, output: Path, weights: Path | None, max_steps: int, minutes: float, check_every: int,
    seed: int, threads: int, device: str,
) -> None:  # fmt: skip
    """Train the codec builtin, which ships with sharmill, on one CPU core or a GPU."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    # All items of a batch have the same length, so masks and type checks would only cost time.
    audio_codec_modules.mask_sequence_tensor = lambda tensor, lengths: tensor
    typecheck.set_typecheck_enabled(False)
    speech, held = read_speech(speech_folder)
    end = (1 + HELD_OUT_SECONDS) * RATE
    held_out = torch.stack([torch.from_numpy(item[RATE:end]) for item in held if len(item) >= end]).to(device)
    data = batches(speech, speak_sentences(seed + 1), seed)
    model = make_model(weights).to(device).train()
    average = make_model(weights).to(device).eval()
    average.load_state_dict(model.state_dict())
    loss = SpectralLoss().to(device)
    parameters = [*model.audio_encoder.parameters(), *model.audio_decoder.parameters()]
    averages = [*average.audio_encoder.parameters(), *average.audio_decoder.parameters()]
    print(f"{sum(p.numel() for p in parameters) / 1e6:.2f} M parameters, {len(speech)} utterances", flush=True)
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    best, mean, began = math.inf, 0.0, time.monotonic()
    for step in range(max_steps + 1):
        elapsed = (time.monotonic() - began) / 60
        progress = max(step / max_steps, elapsed / minutes)
        if step % check_every == 0 or progress >= 1:
            value = held_out_loss(average, loss, held_out)
            note = ""
            if value < best and step > 0:
                best, note = value, f", saved to {output}"
                save(average, output)
            print(f"step {step}, {elapsed:.1f} minutes, loss {mean:.3f}, held-out loss {value:.3f}{note}", flush=True)
        if progress >= 1:
            break
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        audio = next(data).to(device)
        # This needs float32, because bfloat16 gradients of transposed convolutions are wrong on a CPU (torch 2.11).
        value = loss(reconstruct(model, audio), audio)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        keep = min(AVERAGING, step / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, 1 - keep)
        mean += (value.item() - mean) * max(0.01, 1 / (step + 1))


if __name__ == "__main__":
    train()
