"""Stage ``encode`` (stage 3): the codes of one codec for the targets of a dataset and, if it has any, the contexts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from sharmill.config import CodecConfig, Config
from sharmill.config.references import hide
from sharmill.encode.codec_batches import CodecBatches
from sharmill.engine.fence import require_own_output
from sharmill.engine.identity import versions
from sharmill.engine.ledger import committed_files
from sharmill.engine.plan import load_plan
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import ConfigError, FatalError, UnitFailed
from sharmill.models import describe_codec, load_codec, make_deterministic, published_name, require_codec
from sharmill.models.protocols import Codec
from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.index import CodecRecord, FieldFile
from sharmill.shar.items import FieldWriter, Item, read_field
from sharmill.shar.layout import CONTEXT_AUDIO, TARGET_AUDIO, codec_fields, shard_file
from sharmill.shar.lhotse_json import array_json, temporal_array_json
from sharmill.storage import Staging, checksum


class EncodeStage(Stage):
    """The codes of one codec for the audio of a dataset, added to it as fields. One unit is one shard."""

    kind: ClassVar[str] = "encode"
    uses_gpu: ClassVar[bool] = True

    def __init__(self, config: Config, codec: CodecConfig) -> None:
        self.run_dir = RunDir(Path(config.run_dir))
        self.root = Path(config.dataset_dir)
        self.codec_config = codec
        self.batch_seconds = config.encode.batch_seconds
        self._dataset = ShardedDataset(self.root)

    @property
    def folders(self) -> Sequence[str]:  # type: ignore[override]
        """The fields of its codes: those of contexts where the dataset has contexts, whatever the configuration."""
        return self._dataset.codec_fields(self.codec_config.name)

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.codec_config.name}"

    def identity(self) -> dict[str, Any]:
        self._dataset.record()
        require_own_output(self)
        return {
            "codec": describe_codec(self.codec_config.model, self.codec_config.allow_targets),
            "batch_seconds": self.batch_seconds,
            "input": self._dataset.audio_checksum(),
            "versions": versions("torch", "torchaudio", "nemo_toolkit", "transformers"),
        }

    def require_models(self) -> None:
        require_codec(self.codec_config.model)

    def plan(self, folder: Path) -> Iterator[Unit]:
        for shard in self._dataset.shards():
            cost = round(shard.target_seconds + shard.context_seconds, 3)
            # One for each field of codes, in their order.
            sources = (TARGET_AUDIO, CONTEXT_AUDIO)[: len(self.folders)]
            checksums = {field: shard.fields[field].xxh3 for field in sources}
            params = {"shard": shard.index, "checksums": checksums}
            yield make_unit(shard.index, cost=cost, size=shard.count, params=params)

    def open(self, device: str) -> Processor:
        threads = make_deterministic(device)
        codec = load_codec(self.codec_config.model, device, self.codec_config.allow_targets)
        return EncodeProcessor(self, codec, threads)

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        records = {msgspec.json.encode(commit.stats["codec"]): commit.stats["codec"] for commit in commits}
        if len(records) > 1:
            raise FatalError(
                f"{self.name}: ranks used different models under the same name; run with --restart", code="bad_model"
            )
        record = next((msgspec.convert(found, CodecRecord) for found in records.values()), None)
        self._dataset.add_codec(self.codec_config.name, record, [self._files(commit) for commit in commits])
        return add_up(commits)

    def is_finalized(self) -> bool:
        # The index may have been made again without this codec, as when it was lost.
        return self.codec_config.name in [codec.name for codec in self._dataset.record().codecs]

    def discard(self) -> None:
        self._dataset.remove_codec(self.codec_config.name, len(load_plan(self)))

    def check_output(self) -> None:
        """Raise ConfigError where the dataset has codes of this name that this run has not made."""
        name = self.codec_config.name
        own = committed_files(self)
        if name in self._dataset.stored_codecs() and not self._dataset.is_made_of(codec_fields(name), own):
            raise ConfigError(
                f"{self.root} already has codes called {name!r} that were not made from {self.run_dir.path}; "
                "give this codec another name",
                code="foreign_output",
            )

    def _files(self, commit: Commit) -> dict[str, FieldFile]:
        files = [FieldFile(file.name, file.size, file.xxh3) for file in commit.files]
        return dict(zip(self.folders, files, strict=True))


class EncodeProcessor(Processor):
    """A codec that encodes the audio of shards.

    Args:
        threads: how many may read and resample audio beside the codec.
    """

    def __init__(self, stage: EncodeStage, codec: Codec, threads: int) -> None:
        self._stage = stage
        self._codec = codec
        self._encode = CodecBatches(codec, batch_seconds=stage.batch_seconds, threads=threads)

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        shard = unit.params["shard"]
        audio = [self._read(unit, field) for field in unit.params["checksums"]]
        targets = audio[0]
        if any([item.cut_id for item in items] != [item.cut_id for item in targets] for items in audio):
            raise UnitFailed(
                f"shard {shard}: target_audio and context_audio do not have the same ids", code="damaged_shard"
            )
        # The same audio is encoded once, be it target or context, and however often.
        unique = {item.data: item for items in audio for item in items}
        # The cost counts every use, but the work is one encoding of each.
        share = unit.cost / max(1, sum(self._encode.num_frames(item) for item in unique.values()))
        encoded = self._encode(list(unique.values()), lambda frames: advance(frames * share))
        codes = dict(zip(unique, encoded, strict=True))
        frame_shift = self._codec.samples_per_frame / self._codec.sampling_rate
        files = [shard_file(field, shard) for field in self._stage.folders]
        for file, items in zip(files, audio, strict=True):
            with FieldWriter(staging.path(file)) as writer:
                for item in items:
                    shape = codes[item.data].shape
                    metadata = temporal_array_json(shape, frame_shift) if items is targets else array_json(shape)
                    writer.add(_codes_item(item.cut_id, codes[item.data], metadata))
        return Output(
            files=files,
            num_out=len(targets),
            stats={"seconds": sum(item.metadata["duration"] for item in targets if item.metadata),
                   "codec": msgspec.to_builtins(self._record())},
        )  # fmt: skip

    def _read(self, unit: Unit, field: str) -> list[Item]:
        """Return the items of an audio field, if it is as it was written: damaged audio would give codes as well."""
        path = self._stage.root / shard_file(field, unit.params["shard"])
        if checksum(path) != unit.params["checksums"][field]:
            raise UnitFailed(
                f"{path} has changed since it was written: remove it and run the stage write again",
                code="damaged_shard",
            )
        items = list(read_field(path))
        if len(items) != unit.size:
            raise UnitFailed(f"{path} has {len(items)} items instead of {unit.size}", code="damaged_shard")
        return items

    def _record(self) -> CodecRecord:
        codec, config = self._codec, self._stage.codec_config
        return CodecRecord(
            name=config.name,
            model=hide(published_name(config.model), self._stage.variables),
            checksum=codec.checksum,
            trained=codec.trained,
            sampling_rate=codec.sampling_rate,
            samples_per_frame=codec.samples_per_frame,
            num_codebooks=codec.num_codebooks,
            codebook_size=codec.codebook_size,
        )


def _codes_item(cut_id: str, array: np.ndarray, metadata: dict[str, Any]) -> Item:
    return Item(cut_id, "npy", array_to_bytes(array), metadata)
