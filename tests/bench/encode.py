"""Rows of the stages survey, encode and assemble, compared with the model alone and with the published script."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.models import nemo_codec_config, save_nemo_codec
from support.project import Project

from bench.rows import Case, row
from bench.speech import in_batches, load, model_seconds, write_corpus
from sharmill.models import Codec, load_codec, make_deterministic

RATE = 22050
# The fastest of 8, 10 and 30 padded seconds on one CPU thread.
BEST_BATCH_SECONDS = 8


@dataclass
class _Written:
    """Dataset without codes, whose contexts come from other shards, and its loaded codec."""

    project: Project
    config: Any
    codec: Codec
    checkpoint: Path

    @classmethod
    def make(cls, folder: Path, tiny: bool) -> "_Written":
        make_deterministic()
        project = Project(folder)
        project.records = write_corpus(folder, 6 if tiny else 16, rate=RATE)
        number = len(project.records)
        config = project.write(
            [(index + number // 2) % number for index in range(number)],
            write={"shard_size": number // 3}, match={"min_duration": 0.0},
            encode={"codecs": [{"name": "toy", "model": "builtin"}]},
        )  # fmt: skip
        checkpoint = save_codec(folder / "codec.nemo", base_channels=2 if tiny else 10)
        made = cls(project, config, load_codec(f"nemo:{checkpoint}"), checkpoint)
        for path in made.folders:
            shutil.copytree(path, path.with_suffix(".written"))
        return made

    @property
    def folders(self) -> tuple[Path, Path]:
        return self.project.dataset, self.project.run_dir

    def restore(self) -> None:
        """Restore the dataset without codes."""
        for path in self.folders:
            shutil.rmtree(path)
            shutil.copytree(path.with_suffix(".written"), path)

    def encode(self) -> dict[str, float]:
        """Add the codes to the dataset by running the stages in this process."""
        self.project.encode(self.config, codec=self.codec)  # type: ignore[arg-type]
        encoded, padded = model_seconds(self.project.run_dir, "encode", "encoded")
        return {"passes per segment": encoded / self.seconds, "padding": 1 - encoded / padded}

    @property
    def seconds(self) -> float:
        return sum(record["duration"] for record in self.project.records)

    def load_nemo(self) -> Any:
        """Load the codec as a plain script does."""
        from nemo.collections.tts.models import AudioCodecModel

        return AudioCodecModel.restore_from(str(self.checkpoint), map_location="cpu").eval()

    def load(self) -> list[np.ndarray]:
        """Decode the audio of all records as a plain script does."""
        paths = (self.project.root / record["audio_filepath"] for record in self.project.records)
        return [load(path, RATE) for path in paths]

    def case(self, baseline: Any) -> Case:
        amount = self.seconds / 3600
        return Case(amount=amount, unit="hours of segments", ours=self.encode, baseline=baseline, before=self.restore)


def save_codec(path: Path, *, base_channels: int) -> Path:
    """Save an AudioCodecModel shaped like NeMo's for 22.05 kHz and 21.5 frames per second, with fewer channels."""
    config = nemo_codec_config()
    encoder = {"down_sample_rates": [2, 2, 4, 8, 8], "base_channels": base_channels, "encoded_dim": 32}
    quantizer = {"num_groups": 8, "num_levels_per_group": [8, 7, 6, 6]}
    decoder = {"up_sample_rates": [1024], "input_dim": 32}
    config["audio_encoder"] |= encoder | {"resblock_dilation_sizes": [1, 3, 5]}
    config["vector_quantizer"] |= quantizer
    config["audio_decoder"] |= decoder
    return save_nemo_codec(path, config | {"sample_rate": RATE, "samples_per_frame": 1024})


@row(
    "encode model", baseline="NeMo's model alone on the best batches of the unique segments", inverse=True,
    targets={"ratio": "<= 1.10", "passes per segment": "<= 1.02", "padding": "<= 0.03"},
)  # fmt: skip
def encode_beside_model(folder: Path, tiny: bool) -> Case:
    """Survey, encode and assemble in shuffle order, with one rank and a NeMo codec with 1.7 M encoder parameters."""
    written = _Written.make(folder, tiny)
    model = written.load_nemo()
    return written.case(
        in_batches(
            lambda audio, num_samples: model.encode(audio=audio, audio_len=num_samples),
            written.load(), BEST_BATCH_SECONDS * RATE,
        )
    )  # fmt: skip


@row(
    "encode codec", baseline="the same codec as sharmill runs it, alone, on the best batches of the unique segments",
    inverse=True, group="further",
)  # fmt: skip
def encode_beside_codec(folder: Path, tiny: bool) -> Case:
    """The same stages, codec and dataset."""
    written = _Written.make(folder, tiny)
    return written.case(in_batches(written.codec.encode, written.load(), BEST_BATCH_SECONDS * RATE))


@row(
    "encode published", baseline="`AudioCodecModel.encode`, targets and contexts one by one", targets={"ratio": ">= 2"}
)
def encode_beside_published(folder: Path, tiny: bool) -> Case:
    """The same stages, codec and dataset."""
    written = _Written.make(folder, tiny)
    model = written.load_nemo()

    @torch.no_grad()
    def one_by_one() -> None:
        for _ in ("targets", "contexts"):
            for samples in written.load():
                audio = torch.from_numpy(samples)[None]
                model.encode(audio=audio, audio_len=torch.tensor([audio.shape[1]]))

    return written.case(one_by_one)
