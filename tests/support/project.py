"""Small projects like those of users: a corpus, a configuration, runs of stages and of ``sharmill``, a dataset, and
common assertions.
"""

import dataclasses
import gzip
import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import soundfile as sf
import torch
import yaml
from lhotse import CutSet

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.config import Config, to_config
from sharmill.encode.config import EncodeConfig
from sharmill.engine.executor import Listener, StageResult
from sharmill.engine.fence import release
from sharmill.engine.order import make_stages
from sharmill.engine.run import run_stage
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import StageRun
from sharmill.errors import ConfigError, SharmillError
from sharmill.executors.local import LocalExecutor
from sharmill.files.checksums import checksum
from sharmill.manifest import Context, Utterance
from sharmill.match.config import MatchConfig
from sharmill.match.stage import facts_of
from sharmill.models.config import CodecConfig
from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.fields import codes_field, published_field
from sharmill.shar.index import CodecRecord, DatasetRecord, FieldFile, ShardRecord, write_dataset, write_shards
from sharmill.shar.items import FieldWriter, Item, ItemTable
from sharmill.shar.json_lines import write_cuts
from sharmill.shar.manifests import array_json, recording_json, temporal_array_json
from sharmill.shar.tar import END, write_member
from sharmill.stages.lines import leave_manifest
from sharmill.validate.accounts import ExpectedRecords
from sharmill.validate.findings import Report, read_report
from sharmill.validate.stage import Subject, ValidateConfig, ValidateStage

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
# Real speech and a test cluster are outside the repository; tests that need them are skipped if they are absent.
DATA = REPOSITORY.parent / "shared/data"
LIBRISPEECH = DATA / "librispeech_10x10"
# Models without cost; they are not even imported if they are only named.
TINY_ENCODER = "python:support.plugin.tiny_speech:TinyEncoder"
TINY_CODEC = "python:support.plugin.tiny_speech:TinyCodec:50"


@contextmanager
def raises(kind: type[SharmillError], code: str, *names: str) -> Iterator[pytest.ExceptionInfo[SharmillError]]:
    """Expect an error of this class and code, or reason of a reject, whose message names each of ``names``.

    The message of a ConfigError is one line.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert kind is not ConfigError or "\n" not in caught.value.lines[0]
    found = getattr(caught.value, "reason", caught.value.code)
    assert found == code, f"{found}: {caught.value}"
    for name in names:
        assert name in str(caught.value)


def examples(count: int) -> int:
    """Return the number of examples for hypothesis: a fifth if ``EXAMPLES=quick`` is set, as in `make test`."""
    return max(1, count // 5) if os.environ.get("EXAMPLES") == "quick" else count


def within(seconds: float) -> float:
    """Return the present time limit on this machine for work that takes ``seconds`` on an idle one."""
    return seconds * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


# Corpora


def voice(seconds: float, rate: int = 16000, pitch: float = 200.0, seed: int = 0) -> np.ndarray:
    """Return a tone that glides a little, over quiet noise, rounded to 16 bits."""
    num_samples = round(seconds * rate)
    time = np.arange(num_samples) / rate
    noise = np.random.default_rng(seed).standard_normal(num_samples)
    samples = 0.3 * np.sin(2 * np.pi * pitch * time + np.sin(3 * time)) + 0.01 * noise
    return (np.round(samples * 32767) / 32768).astype(np.float32)


def put(path: Path, samples: np.ndarray, rate: int = 16000, subtype: str | None = None) -> Path:
    """Write an audio file in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    format = {"opus": "OGG", "sph": "NIST"}.get(path.suffix[1:])
    sf.write(path, samples, rate, format=format, subtype="OPUS" if path.suffix == ".opus" else subtype)
    return path


def write_tone(path: Path, seconds: float = 2.0, *, rate: int = 16000, channels: int = 1) -> Path:
    """Write a voice in each channel, in the format of the suffix."""
    return put(path, np.repeat(voice(seconds, rate)[:, None], channels, axis=1), rate)


def speaker_tag(speaker: str, language: str = "en") -> str:
    """Return the speaker tag of a speaker, as manifests have it."""
    return f"| Language:{language} Dataset:Tests Speaker:{speaker} |"


def make_record(**changes: Any) -> dict[str, Any]:
    """Return a good record of ``a.wav`` of the audio root; a change to ``...`` removes the key."""
    record = {"audio_filepath": "a.wav", "duration": 2.0, "speaker": speaker_tag("anna"), "text": "Good day."} | changes
    return {key: value for key, value in record.items() if value is not ...}


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write records as JSON lines, ``bytes`` as the lines that they are, compressed if the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    data = b"".join(row + b"\n" for row in rows)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def lines(path: Path) -> list[Any]:
    """Return the JSON lines of a file, compressed or not."""
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in data.splitlines()]


def utterances(path: Path) -> list[Utterance]:
    """Return the utterances of a manifest that a stage has written."""
    return [Utterance.from_json(line) for line in path.read_bytes().splitlines()]


# Configurations and runs


def _keys(folder: Path, sources: Iterable[Any], **changes: Any) -> dict[str, Any]:
    entries = [
        entry if isinstance(entry, dict) else {"manifest": str(entry[0]), "audio_root": str(entry[1])}
        for entry in sources
    ]
    run_dir, dataset = str(folder / "run"), str(folder / "dataset")
    return {"name": "small", "run_dir": run_dir, "dataset_dir": dataset, "sources": entries} | changes


def config_for(
    folder: Path, sources: Iterable[tuple[Path | str, Path | str] | dict[str, Any]], **changes: Any
) -> Config:
    """Return a configuration with its directories below ``folder``, of (manifest, audio root) pairs or sources."""
    return to_config(_keys(folder, sources, **changes), "test")


def write_config(folder: Path, manifest: Path, audio_root: Path, **changes: Any) -> Path:
    """Write ``folder/config.yaml``, with tiny models, small units and its directories below ``folder``."""
    values = {
        "sources": [(manifest, audio_root)],
        "prepare": {"unit_records": 10},
        "match": {"encoder": TINY_ENCODER, "min_similarity": 0.0, "unit_seconds": 30.0},
        "write": {"shard_size": 8},
        "encode": {"codecs": [{"name": "tiny", "model": TINY_CODEC}]},
        "executor": {"workers": 1},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(_keys(folder, **values | changes)))
    return path


def command(*arguments: Any) -> list[str]:
    """Return ``sharmill`` as a command of this interpreter."""
    return [sys.executable, "-m", "sharmill", *map(str, arguments)]


def run_sharmill(*arguments: Any, status: int | None = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``sharmill`` to its end, from the root of the repository unless ``options`` say otherwise.

    Args:
        status: that it must end with; None for any.
    """
    options = {"cwd": REPOSITORY, "timeout": 500} | options
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, **options)
    assert status in (None, done.returncode), f"{done.returncode}: {done.stdout}{done.stderr}"
    return done


def run(stage: StageRun, *, restart: bool = False) -> StageResult:
    """Run a stage to its end in this process."""
    stage = dataclasses.replace(stage, options=dataclasses.replace(stage.options, max_reject_fraction=1.0))
    result = run_stage(stage, LocalExecutor(1), Listener(), restart=restart)
    release([stage])
    return result


@dataclass(frozen=True)
class Prepared:
    """The results of a run of ``prepare``."""

    config: Config
    stage: StageRun
    result: StageResult

    @property
    def kept(self) -> list[Utterance]:
        return utterances(prepared_manifest(self.config))

    @property
    def rejects(self) -> list[dict[str, Any]]:
        return lines(self.stage.dir.rejects)

    @property
    def stats(self) -> dict[str, Any]:
        return json.loads(self.stage.run_dir.stats.read_bytes())


def run_prepare(config: Config) -> Prepared:
    """Run ``prepare`` to its end in this process."""
    stage = stage_of(config, "prepare")
    return Prepared(config, stage, run(stage))


def check_dataset(dataset: Path, scratch: Path, against: ExpectedRecords | None = None, **level: Any) -> Report:
    """Return the report of a check of a dataset, at a level."""
    stage = check_of(dataset, scratch, against, **level)
    result = run(stage)
    assert result.ok, result.failures
    return read_report(stage.product("validate/report"))


def check_of(dataset: Path, scratch: Path, against: ExpectedRecords | None = None, **level: Any) -> StageRun:
    """Return the check of a dataset, at a level."""
    subject = Subject(dataset_dir=dataset, level=ValidateConfig(**level), against=against)
    return StageRun(ValidateStage(subject), RunDir(scratch))


def stage_of(config: Config, name: str) -> StageRun:
    """Return a stage of a run."""
    return make_stages(config, [name])[0]


def prepared_manifest(config: Config) -> Path:
    """Return the manifest that ``prepare`` has left."""
    return stage_of(config, "write").product("prepare/manifest")


def matched_manifest(config: Config) -> Path:
    """Return the manifest that ``match`` has left."""
    return stage_of(config, "write").product("match/manifest")


def codec_stages(config: Config, name: str = "toy", model: str = "builtin") -> list[StageRun]:
    """Return the rounds that bring the codes of one codec into a dataset."""
    codec = CodecConfig(name=name, model=model)
    if codec not in config.section(EncodeConfig).codecs:
        config = config.with_section(dataclasses.replace(config.section(EncodeConfig), codecs=[codec]))
    return [stage for stage in make_stages(config, ["encode"]) if stage.name in ("encode", f"encode/{name}")]


def run_codec(config: Config, name: str = "toy", model: str = "builtin") -> None:
    """Bring the codes of one codec into a dataset."""
    for stage in codec_stages(config, name, model):
        assert run(stage).ok


class Project:
    """A folder with audio, a manifest that grows, and a run directory and a dataset directory made from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "audio"
        self.run_dir = folder / "run"
        self.dataset = folder / "dataset"
        self.records: list[dict[str, Any]] = []

    def add(self, name: str, samples: np.ndarray | None = None, rate: int = 16000, **keys: Any) -> Path:
        """Add a record, and its file if samples are given. ``speaker`` is the name in the tag."""
        path = self.root / name
        if samples is not None:
            put(path, samples, rate, keys.pop("subtype", None))
            keys.setdefault("duration", len(samples) / rate)
        tag = speaker_tag(keys.pop("speaker", "anna"))
        self.records.append({"audio_filepath": name, "duration": 0.0, "speaker": tag, "text": f"text of {name}"} | keys)
        return path

    def add_voices(self, durations: Iterable[float], name: str = "{}.flac", **keys: Any) -> "Project":
        """Add a voice of each duration in seconds, by its number; return the project."""
        for number, seconds in enumerate(durations):
            self.add(name.format(number), voice(seconds, seed=number), **keys)
        return self

    def configure(self, **changes: Any) -> Config:
        manifest = write_lines(self.folder / "small.json", self.records)
        values = {"run_dir": str(self.run_dir), "dataset_dir": str(self.dataset), "prepare": {"min_duration": 0.0}}
        # The default threshold is lowered, since encoders are not made for synthetic voices.
        match = changes.get("match", {})
        changes["match"] = None if match is None else {"min_similarity": 0.6} | match
        return config_for(self.folder, **{"sources": [(manifest, self.root)]} | values | changes)

    def prepare(self, config: Config) -> list[Utterance]:
        """Run ``prepare``; return the utterances that it kept."""
        prepared = run_prepare(config)
        assert prepared.result.ok
        return prepared.kept

    def match_by_hand(
        self,
        config: Config,
        contexts: list[int] | None = None,
        similarities: list[float] | None = None,
        *,
        noted: bool = False,
    ) -> list[Utterance]:
        """Run ``prepare`` and give utterance n the context ``contexts[n]`` (by default n + 1).

        With ``noted`` they have what the stage match notes of audio when it reads it.
        """
        kept = self.prepare(config)
        if noted:
            reader = SegmentReader(AudioRoots.of([self.root]))
            for utterance in kept:
                utterance.segment = dataclasses.replace(utterance.segment, notes=reader.read(utterance.segment).notes)
        for index, utterance in enumerate(kept):
            context = kept[contexts[index] if contexts else (index + 1) % len(kept)]
            utterance.index = index
            utterance.context = Context(
                segment=context.segment,
                recording_id=context.recording_id,
                text=context.text,
                similarity=similarities[index] if similarities else 0.75,
            )
        self.leave_matched(config, kept)
        return kept

    def leave_matched(self, config: Config, utterances: Sequence[Utterance]) -> None:
        """Leave utterances as the output of ``match``, and prepare as finished."""
        for name, facts in (
            ("prepare", {"duration_tolerance": 0.1}),
            ("match", facts_of(config.section(MatchConfig), [])),
        ):
            stage = stage_of(config, name)
            if name == "match" or not stage.dir.done.exists():
                leave_manifest(stage, f"{name}_by_hand.json", utterances, **facts)

    def write(
        self, contexts: list[int] | None = None, similarities: list[float] | None = None, **changes: Any
    ) -> Config:
        """Make the dataset directory, without codes; ``match=None`` makes one without contexts."""
        config = self.configure(**changes)
        if config.has_contexts:
            self.match_by_hand(config, contexts, similarities)
        else:
            self.prepare(config)
        assert run(stage_of(config, "write")).ok
        return config

    def encode(self, config: Config, name: str = "toy", codec: "ToyCodec | None" = None) -> "ToyCodec":
        """Add the codes of a toy codec."""
        codec = codec or ToyCodec()
        with loading(codec):
            run_codec(config, name)
        return codec

    def rejects(self, stage: str) -> list[dict[str, Any]]:
        return lines(self.run_dir / stage / "rejects.jsonl")


class ToyCodec:
    """The codes of codebook c are the frame's mean magnitude in 50 steps, plus c."""

    checksum = "toy"
    trained = False

    def __init__(
        self,
        sampling_rate: int = 16000,
        samples_per_frame: int = 320,
        codebook_size: int = 64,
        equal_lengths_only: bool = False,
    ) -> None:
        self.sampling_rate = sampling_rate
        self.samples_per_frame = samples_per_frame
        self.num_codebooks = 3
        self.codebook_size = codebook_size
        self.equal_lengths_only = equal_lengths_only
        self.batches: list[list[int]] = []

    def encode(self, audio: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        self.batches.append(num_samples.tolist())
        rows = [torch.from_numpy(self.codes(a[:n].numpy())).T for a, n in zip(audio, self.batches[-1], strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).transpose(1, 2)

    def codes(self, samples: np.ndarray) -> np.ndarray:
        """Return the codes (codebooks, frames) of samples at the codec's rate."""
        frames = math.ceil(len(samples) / self.samples_per_frame)
        whole = np.pad(samples, (0, frames * self.samples_per_frame - len(samples)))
        level = np.abs(whole.reshape(frames, self.samples_per_frame)).mean(axis=1)
        steps = np.minimum(level * 50, 50).astype(np.int64)
        return np.stack([steps + codebook for codebook in range(self.num_codebooks)])


@contextmanager
def loading(codec: Any) -> Iterator[None]:
    """Make every codec name load ``codec``."""
    with mock.patch("sharmill.encode.stage.load_codec", return_value=codec):
        yield


# Datasets


def make_voices(folder: Path, prefix: str, voices: int = 2, *, codecs: str = "", per_voice: int = 2) -> Project:
    """Make a dataset in shards of three cuts; the context of each utterance is the next one of its voice."""
    project = Project(folder)
    contexts = []
    for number in range(voices * per_voice):
        speaker = f"{prefix}{number // per_voice}"
        project.add(f"{speaker}/{number}.flac", voice(0.4 + 0.05 * number, seed=number), speaker=speaker)
        contexts.append(number - number % per_voice + (number + 1) % per_voice)
    config = project.write(
        contexts, write={"shard_size": 3, "order": "manifest"}, match={"min_duration": 0.0}, name=prefix
    )
    for codec in codecs:
        project.encode(config, codec)
    return project


def make_bare_dataset(directory: Path, counts: list[int], *, codes: bool = False) -> Path:
    """Write, in no time, a dataset with ``counts[n]`` cuts in shard n, by consecutive numbers; no audio in it."""
    targets, contexts = codes_field("toy", "target_codes"), codes_field("toy", "context_codes")
    fields = ["cuts", *([targets, contexts] if codes else [])]
    first, records = 0, []
    for index, count in enumerate(counts):
        numbered = {number: f"cut-rec-{number}-0.00-0.40" for number in range(first, first + count)}
        paths = {field: directory / published_field(field).path(index) for field in fields}
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        write_cuts(paths["cuts"], [_bare_cut(number, cut_id) for number, cut_id in numbered.items()])
        for field in fields[1:]:
            with FieldWriter(paths[field]) as writer:
                for number, cut_id in numbered.items():
                    array = np.full((2, 20), number % 1024, np.int16)
                    metadata = temporal_array_json(array.shape, 0.02) if field == targets else array_json(array.shape)
                    writer.add(Item(cut_id, "npy", array_to_bytes(array), metadata))
        files = {
            field: FieldFile(published_field(field).path(index), size=path.stat().st_size, xxh3="")
            for field, path in paths.items()
        }
        records.append(ShardRecord(index=index, count=count, target_seconds=0, context_seconds=0, fields=files))
        first += count
    write_shards(directory, records)
    codec = CodecRecord(
        name="toy", model="toy", checksum="", trained=False, sampling_rate=16000, samples_per_frame=320,
        num_codebooks=2, codebook_size=1024,
    )  # fmt: skip
    write_dataset(
        directory,
        DatasetRecord(
            format_version=1, name="tiny", fields=fields, num_shards=len(counts), num_cuts=sum(counts),
            target_seconds=0, context_seconds=0, audio_format="flac", sampling_rate=16000, limits={},
            codecs=[codec] if codes else [],
        ),
    )  # fmt: skip
    return directory


def _bare_cut(number: int, cut_id: str) -> dict[str, Any]:
    source = {"type": "file", "channels": [0], "source": f"{number}.flac"}
    return {
        "id": cut_id, "start": 0.0, "duration": 0.4, "channel": 0,
        "supervisions": [
            {"id": f"sup-{number}", "recording_id": f"rec-{number}", "start": 0.0, "duration": 0.4, "channel": 0,
             "text": f"text {number}", "custom": {"number": number}}
        ],
        "recording": recording_json(f"rec-{number}", 16000, 6400) | {"sources": [source]},
        "custom": {"context_audio_unaligned": True}, "type": "MonoCut",
    }  # fmt: skip


def numbers(cuts: Iterable[Any]) -> list[int]:
    """Return the numbers of cuts."""
    return [cut.supervisions[0].custom["number"] for cut in cuts]


def snapshot(directory: Path) -> dict[str, bytes]:
    """Return the bytes of every file of a directory."""
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def copy(directory: Path, to: Path) -> Path:
    """Make a copy that a test may damage."""
    return shutil.copytree(directory, to)


def reindex(directory: Path) -> None:
    """Bring sizes and checksums in ``shards.jsonl`` up to date, so that only deeper checks can see a damage."""
    shards = lines(directory / "shards.jsonl")
    for shard in shards:
        for file in shard["fields"].values():
            path = directory / file["file"]
            if path.exists():
                file.update(size=path.stat().st_size, xxh3=checksum(path))
    write_lines(directory / "shards.jsonl", shards)


def members_of(path: Path) -> list[tuple[str, bytes]]:
    """Return the names and bytes of the members of an archive."""
    table = ItemTable(path)
    return [(name, table.member(number)) for number, name in enumerate(table.names)]


def write_members(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write an archive of members."""
    with path.open("wb") as stream:
        for name, data in members:
            write_member(stream, name, data)
        stream.write(END)


def shar_fields(directory: Path, *codecs: str) -> dict[str, list[str]]:
    """Return the files of a dataset as ``lhotse.CutSet.from_shar`` takes them."""
    folders = {name: name for name in ("cuts", "target_audio", "context_audio")}
    for codec in codecs:
        folders |= {name: f"codes_{codec}/{name}" for name in ("target_codes", "context_codes")}
    there = {name: directory / folder for name, folder in folders.items() if (directory / folder).is_dir()}
    return {name: [str(path) for path in sorted(folder.iterdir())] for name, folder in there.items()}


def read_with_lhotse(directory: Path, *codecs: str) -> CutSet:
    """Return the cuts of a dataset as plain lhotse reads them, with the codes of the codecs named."""
    return CutSet.from_shar(fields=shar_fields(directory, *codecs))


def outcome(folder: Path) -> tuple[dict[str, bytes], bytes]:
    """Return the dataset and rejects of a ``write_config`` configuration, which must not depend on the executor."""
    return snapshot(folder / "dataset"), (folder / "run/rejects.jsonl").read_bytes()


def check_page(folder: Path) -> None:
    """Assert that the page of a whole run of a configuration by ``write_config`` has all that a run has."""
    page = (folder / "run/report.html").read_text()
    name = json.loads((folder / "dataset/dataset.json").read_text())["name"]
    sections = ("funnel", "listening", "contents", "voices", "codes", "work", "card")
    texts = (
        f"<title>{name} · sharmill report</title>", *(f'<section id="{section}"' for section in sections),
        "Blue charts show all cuts; green charts show the audio of", "each segment once",
    )  # fmt: skip
    assert [text for text in texts if text not in page] == []


def damage_shard(folder: Path) -> Path:
    """Damage a shard of the dataset of a configuration by ``write_config``; return the report of the checker."""
    shard, report = folder / "dataset/target_audio/recording.000001.tar", folder / "findings.json"
    shard.write_bytes(bytes(shard.stat().st_size))
    run_sharmill("validate", folder / "dataset", "--json", report, status=3)
    return report


def second_dataset() -> dict[str, Any]:
    """Return changes for ``write_config``: speakers that are found, and real speech if available."""
    voices = {"labels": "find", "similarity": 0.9}
    changes: dict[str, Any] = {"name": "other", "voices": voices, "write": {"shard_size": 5}}
    if LIBRISPEECH.is_dir():
        source = {"manifest": str(LIBRISPEECH / "manifest.json"), "audio_root": str(LIBRISPEECH / "audio")}
        changes |= {"sources": [source], "speaker_key": "librispeech", "prepare": {"unit_records": 25}}
    return changes


# Packages


def add_distribution(site: Path, name: str, version: str, entry_points: str = "") -> None:
    """Write the metadata of a distribution, optionally of another version, into a folder like pip."""
    folder = site / f"{name.replace('-', '_')}-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_points)


def install(patch: pytest.MonkeyPatch, site: Path, package: str, version: str | None = None) -> None:
    """Install a package of ``tests/plugins`` by writing its metadata to the folder ``site``."""
    project = tomllib.loads((TESTS / "plugins" / package / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"].items()
    texts = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in named.items()) for group, named in groups]
    add_distribution(site, project["name"], version or project["version"], "\n".join(texts))
    for folder in (site, TESTS / "plugins" / package):
        patch.syspath_prepend(str(folder))
