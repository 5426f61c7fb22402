"""The export form ``nemo_tarred``: tar archives with manifests, like NeMo's ``convert_to_tarred_audio_dataset.py``.

The stored target audio is copied unchanged. A tarred set has as many archives as the dataset has shards, but at most as
many as the set has cuts; the numbers of cuts in its archives differ by at most one. With buckets, there is one tarred
set per range of durations.
"""

import math
import re
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import soundfile as sf
from omegaconf import OmegaConf

from sharmill.errors import ConfigError, DamagedShard, refuse
from sharmill.export.run import Export
from sharmill.files.atomic import open_atomic, write_atomic
from sharmill.files.checksums import checksum, checksum_bytes, hash_text
from sharmill.manifest import ALIGNMENT
from sharmill.shar.fields import CUTS
from sharmill.shar.index import audio_checksum
from sharmill.shar.items import ItemTable
from sharmill.shar.json_lines import decode_line, read_json_lines
from sharmill.shar.tar import END, write_member

_SHARDED: Final = "sharded_manifests"
_MANIFEST: Final = "tarred_audio_manifest.json"
# Parts of a name that NeMo would misread: it cuts a name at its first dot, and treats a prefix before a slash as a
# folder, and a suffix -sub1 as a segment.
_NOT_IN_NAMES: Final = re.compile(r"[./\s\x00-\x1f\x7f]|-(?=sub[0-9]+$)")
# The audio formats that ``nemo.collections.asr.data.audio_to_text`` reads.
_FORMATS: Final = {"wav", "mp3", "flac", "opus", *map(str.lower, sf.available_formats())}
# Record keys that describe the source rather than the stored audio, each with the name that NeMo's script gives it.
_OF_SOURCE: Final = {"audio_filepath": "source_audio_filepath", "offset": "source_audio_offset"}


class _Cut(msgspec.Struct):
    id: str
    duration: float
    supervisions: list[dict[str, Any]]


_cut_decoder: Final = msgspec.json.Decoder(_Cut)


class _Tar(NamedTuple):
    """An archive: its bucket, its number in the bucket, and the indices of its cuts in the dataset, (num_cuts,)."""

    bucket: int
    number: int
    places: np.ndarray


class NemoTarred(Export):
    """Tarred sets: ``audio_N.tar``, ``sharded_manifests/manifest_N.json``, a combined manifest, and ``metadata.yaml``.

    A unit is an archive with its manifest. A line of a manifest has the ``record_keys``, ``cut_id`` and ``shard_id``;
    its ``audio_filepath`` is the name of the archive's member. ``source_audio_filepath`` and ``source_audio_offset``
    name the origin of the audio.

    Raises:
        ConfigError: the dataset has no audio, an option is invalid, or a bucket would have no cuts.
    """

    version = 2
    options = ("buckets", "min_duration", "max_duration")
    left_out = "of other durations"

    def __init__(
        self, dataset: Path, out: Path, buckets: int = 1, min_duration: float = 0.0, max_duration: float = math.inf
    ) -> None:
        super().__init__(dataset, out)
        self._field = self.record.audio_fields[0]
        refuse(
            (self._field not in self.record.fields, f"{dataset} has no target_audio: choose a dataset with audio"),
            (not 1 <= buckets <= max(1, self.record.num_cuts),
             f"--buckets is {buckets}: give at least 1, and at most the number of cuts, {self.record.num_cuts}"),
            (not 0 <= min_duration < max_duration,
             f"--min-duration {min_duration:g} must be at least 0 and less than --max-duration {max_duration:g}"),
            (buckets > 1 and max_duration == math.inf, "--buckets needs --max-duration as the end of the last bucket"),
            code="bad_usage",
        )  # fmt: skip
        # A bucket contains durations from its edge up to, but excluding, the next edge.
        self._edges = [
            min_duration,
            *(min_duration + bucket * (max_duration - min_duration) / buckets for bucket in range(1, buckets)),
            max_duration,
        ]
        names = [f"bucket{number + 1}" for number in range(buckets)] if buckets > 1 else [""]
        self._sets = [out / name for name in names]
        self.folders = [*names, *(f"{name}/{_SHARDED}".lstrip("/") for name in names)]
        self.identity = {
            "edges": [str(float(edge)) for edge in self._edges],
            "num_cuts": self.record.num_cuts,
            "content": audio_checksum(self.shards, (CUTS, self._field)),
        }
        self._starts = np.cumsum([0, *(shard.count for shard in self.shards)])
        # Keep few shards open: archives with the same number in different buckets mostly contain cuts of the same
        # shards.
        self._open = lru_cache(maxsize=4)(self._open_shard)
        self.units: Sequence[_Tar] = self._plan()

    def _plan(self) -> list[_Tar]:
        """Read all cuts, and return the archives ordered by number and then by bucket."""
        durations, names = array("d"), array("Q")
        for shard in range(len(self.shards)):
            for cut in self._read_cuts(shard):
                durations.append(cut.duration)
                names.append(hash_text(_NOT_IN_NAMES.sub("_", cut.id)))
        found, counts = np.unique(np.array(names), return_counts=True)
        # Hashes of member names that several cuts would share.
        self._repeated = set(found[counts > 1].tolist())
        self._durations = np.array(durations)
        buckets = np.searchsorted(self._edges, self._durations, side="right") - 1
        tars = []
        for bucket in range(len(self._sets)):
            chosen = np.flatnonzero(buckets == bucket)
            refuse(
                (not len(chosen),
                 f"no cut lasts at least {self._edges[bucket]:g} s and less than {self._edges[bucket + 1]:g} s, and a "
                 "tarred set cannot be empty: choose other durations, or fewer buckets"),
                code="too_few_cuts",
            )  # fmt: skip
            parts = np.array_split(chosen, min(len(self.shards), len(chosen)))
            tars += [_Tar(bucket, number, places) for number, places in enumerate(parts)]
        return sorted(tars, key=lambda tar: (tar.number, tar.bucket))

    def write(self, unit: _Tar) -> Iterable[Path]:
        """Publish an archive and then its manifest."""
        tar, manifest = self._files(unit)
        lines = []
        with open_atomic(tar) as stream:
            for place in unit.places.tolist():
                line, data = self._read(place)
                write_member(stream, line["audio_filepath"], data)
                lines.append(line | {"shard_id": unit.number})
            stream.write(END)
        write_atomic(manifest, msgspec.json.Encoder().encode_lines(lines))
        return tar, manifest

    def finish(self) -> tuple[Path, int, float]:
        """Publish the combined manifest and the metadata of each tarred set; see ``Export.finish``."""
        for bucket, folder in enumerate(self._sets):
            tars = [tar for tar in self.units if tar.bucket == bucket]
            with open_atomic(folder / _MANIFEST) as stream:
                stream.writelines(self._files(tar)[1].read_bytes() for tar in tars)
            write_atomic(folder / "metadata.yaml", self._metadata(bucket, tars))
        places = np.concatenate([tar.places for tar in self.units])
        listed = self.out / _MANIFEST if len(self._sets) == 1 else self.out
        return listed, len(places), float(self._durations[places].sum())

    def _metadata(self, bucket: int, tars: Sequence[_Tar]) -> bytes:
        """Return the metadata of a tarred set in the format of NeMo's script, but without the creation time."""
        metadata: dict[str, Any] = {
            "created_datetime": None,
            "version": 0,
            "num_samples_per_shard": min(len(tar.places) for tar in tars),
            "is_concatenated_manifest": False,
            "dataset_config": {
                "num_shards": len(tars),
                "shuffle": False,
                "max_duration": None if self._edges[bucket + 1] == math.inf else self._edges[bucket + 1],
                "min_duration": self._edges[bucket],
                "shuffle_seed": None,
                "sort_in_shards": False,
                "slice_with_offset": False,
                "shard_manifests": True,
                "keep_files_together": False,
                "force_codec": None,
                "use_lhotse": False,
                "use_bucketing": False,
                "num_buckets": None,
                "bucket_duration_bins": None,
            },
            "history": [],
        }
        return OmegaConf.to_yaml(metadata).encode()

    def _files(self, tar: _Tar) -> tuple[Path, Path]:
        folder = self._sets[tar.bucket]
        return folder / f"audio_{tar.number}.tar", folder / _SHARDED / f"manifest_{tar.number}.json"

    def _read_cuts(self, shard: int) -> list[_Cut]:
        record = self.shards[shard]
        path = self.dataset / record.fields[CUTS].file
        cuts = [decode_line(path, line, _cut_decoder) for line in read_json_lines(path)]
        if len(cuts) != record.count:
            raise DamagedShard(f"{path} has {len(cuts)} cuts instead of {record.count}")
        return cuts

    def _open_shard(self, shard: int) -> tuple[list[_Cut], ItemTable]:
        cuts, file = self._read_cuts(shard), self.shards[shard].fields[self._field]
        path = self.dataset / file.file
        table = ItemTable(path, ids=[cut.id for cut in cuts])
        if checksum(path) != file.xxh3:
            raise table.damage(f"its checksum differs from the index: run sharmill validate {self.dataset}")
        return cuts, table

    def _read(self, place: int) -> tuple[dict[str, Any], bytes]:
        """Return the manifest line of a cut, without its ``shard_id``, and its audio.

        Raises:
            ConfigError: NeMo does not read the format of the audio.
            DamagedShard: the cut has no audio, or does not have exactly one supervision with a text.
        """
        shard = int(np.searchsorted(self._starts, place, side="right")) - 1
        cuts, table = self._open(shard)
        number = place - int(self._starts[shard])
        cut, (cut_id, extension, data, metadata) = cuts[number], table.raw(number)
        said = cut.supervisions[0] if len(cut.supervisions) == 1 else {}
        if not metadata or not isinstance(said.get("text"), str):
            raise table.damage(f"the cut {cut_id} does not have {self._field} and one supervision with a text")
        if extension.lower() not in _FORMATS:
            raise ConfigError(
                f"the audio of the cut {cut_id} is .{extension}, which NeMo does not read from tars: first convert "
                "these shards to a FLAC dataset, with a source of type lhotse_shar",
                code="unsupported_format",
            )
        name = _NOT_IN_NAMES.sub("_", cut_id)
        if hash_text(name) in self._repeated:
            name += f"-{checksum_bytes(cut_id.encode('utf-8', 'surrogatepass'))}"
        typed = {
            "audio_filepath": f"{name}.{extension}",
            "duration": cut.duration,
            "cut_id": cut_id,
            "text": said["text"],
            "speaker": said.get("speaker"),
        }
        further = self.record_keys(said.get("custom"), _OF_SOURCE)
        further |= {ALIGNMENT: said["alignment"]} if "alignment" in said else {}
        return {**typed, "lang": said.get("language"), **further, **typed}, data
