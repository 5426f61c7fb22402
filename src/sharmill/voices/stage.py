"""Stage ``voices``, which checks speaker labels against the voices of the clips, or names speakers by their voices.

The stage has three rounds: ``sharmill.voices.embed`` embeds the segments, ``sharmill.voices.cluster`` clusters the
clips of each group by voice, and ``VoicesStage`` compares each clip with the voices of all groups and decides about its
label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from sharmill.config import Config
from sharmill.engine.run import merge_files
from sharmill.engine.stage import Advance, Processor, Stage, StageRun, versions
from sharmill.engine.unit import Output, Totals, Unit, add_up, make_unit
from sharmill.errors import RejectRecord, refuse
from sharmill.files.arrays import load_stored_array, map_stored_array, publish_array, save_array
from sharmill.files.atomic import open_atomic, open_new
from sharmill.files.staging import Staging
from sharmill.files.stored import open_stored, read_stored
from sharmill.manifest import Reject, Utterance, parse_speaker_tag
from sharmill.match.config import MatchConfig
from sharmill.models.device import check_device
from sharmill.sources.speakers import NO_SPEAKER
from sharmill.stages.lines import (
    FIRST_OF_GROUP,
    column,
    finish_manifest,
    identify_manifest,
    merge_columns,
    number_groups,
    write_part,
)
from sharmill.stages.speaker_key import key_of, make_speaker_key
from sharmill.voices.compare import compare_with_voices
from sharmill.voices.config import VoicesConfig
from sharmill.voices.embed import ARRAYS
from sharmill.voices.find import find_voices
from sharmill.voices.labels import Labels
from sharmill.voices.similarity import doubtful_similarity, voice_similarity

_LINES_PER_UNIT: Final = (1_000, 16_384)
_UNITS_WANTED: Final = 64
_MEANINGS: Final = {
    "wrong_voice": "clips that sound like another group than their own",
    "mixed_voices": "clips with two voices",
    "several_voices": "groups with several voices",
    "one_voice": "voices in several groups",
}


class VoicesStage(Stage):
    """The round that decides about the label of each clip. A unit is a span of lines of the manifest."""

    kind = "voices"
    is_cheap = True
    section = VoicesConfig
    after = ("prepare", "voices.embed", "voices.cluster")
    resource = "gpu"
    cost_unit = "records"

    def check(self, config: Config) -> None:
        voices = config.all(VoicesConfig)
        relabels = any(one.action == "relabel" for one in voices)
        refuse(
            (len(voices) > 1, "voices must be one section, not a list"),
            (
                voices and config.find(MatchConfig) is None,
                "voices needs the encoder of match: remove match=null, or remove voices",
            ),
            (
                relabels and config.speaker_key != "speaker",
                "voices.action=relabel changes speakers, which speaker_key does not use: set speaker_key=speaker",
            ),
            code="bad_config_value",
        )

    def identity(self, run: StageRun) -> dict[str, Any]:
        clusters = run.totals_of("voices.cluster", "clusters").products["clusters"]
        embedded = run.totals_of("voices.embed", *ARRAYS).products
        return {
            "voices": asdict(run.settings),
            "similarities": [voice_similarity(run.config), doubtful_similarity(run.config)],
            "speaker_key": run.config.matched_key,
            "clusters": clusters.xxh3,
            "embedded": [embedded[name].xxh3 for name in ARRAYS],
            "input": identify_manifest(run, "voices.embed"),
            "versions": versions("numpy", "torch"),
        }

    def plan(self, run: StageRun) -> Iterator[Unit]:
        clusters = map_stored_array(run.product("voices.cluster/clusters"))
        embeddings = map_stored_array(run.product("voices.embed/embedding"))
        voices, directions = find_voices(embeddings, clusters, _groups(run, clusters), voice_similarity(run.config))
        save_array(run.plan_folder / "voices.npy", voices)
        save_array(run.plan_folder / "directions.npy", directions)
        if run.settings.labels == "find":
            # A voice is named by the lowest hash of its clips' samples, so neither paths nor the order of lines matter.
            names = np.full(len(clusters), np.iinfo(np.uint64).max)
            np.minimum.at(names, clusters, map_stored_array(run.product("voices.embed/content"))[:, 0])
            save_array(run.plan_folder / "names.npy", names)
        step = int(np.clip(len(clusters) / _UNITS_WANTED, *_LINES_PER_UNIT))
        for number, start in enumerate(range(0, len(clusters), step)):
            stop = min(start + step, len(clusters))
            yield make_unit(number, cost=float(stop - start), size=stop - start, params={"start": start, "stop": stop})

    def expect_units(self, run: StageRun, num_records: float, cost: float) -> int:
        return max(1, round(num_records / np.clip(num_records / _UNITS_WANTED, *_LINES_PER_UNIT)))

    def open(self, run: StageRun, device: str) -> Processor:
        return VoicesProcessor(run, device)

    def finalize(self, run: StageRun) -> Totals:
        totals = add_up(run.commits)
        manifest, labels = run.run_dir.manifests / "voices.json", run.dir.path / "labels.jsonl"
        lines, columns, arrays, findings = (
            [run.root / commit.files[number].name for commit in run.commits] for number in range(4)
        )
        merge_files(lines, manifest)
        products = merge_columns(run.dir.merged, columns, ["index", "seconds", "group"], count=totals.num_out)
        products[FIRST_OF_GROUP] = number_groups(products["group"])
        products["similarities"] = run.dir.merged / "similarities.npy"
        parts = map(load_stored_array, arrays)
        publish_array(products["similarities"], np.dtype("f4"), (totals.num_out, 2), parts)
        described = list(Labels(run).describe_groups()) if run.settings.labels == "audit" else []
        with open_atomic(labels) as stream:
            stream.writelines(msgspec.json.encode(row) + b"\n" for row in described)
            for path in findings:
                stream.write(read_stored(path))
        found = Counter(row["finding"] for row in described)
        for commit in run.commits:
            found.update(commit.stats["findings"])
        _, sizes = np.unique(map_stored_array(products[FIRST_OF_GROUP]), return_counts=True)
        notes = [f"{_MEANINGS[kind]} ({kind}): {count:,}" for kind, count in sorted(found.items())]
        if run.settings.labels == "find":
            notes.insert(0, f"{len(sizes):,} voices, {np.count_nonzero(sizes == 1):,} of them with one clip")
        nearer, compared = (sum(commit.stats[name] for commit in run.commits) for name in ("nearer", "compared"))
        if compared:
            notes.append(f"{nearer / compared:.1%} of {compared:,} clips are most similar to the voice of their group")
        totals = msgspec.structs.replace(
            totals, notes=[*notes, *([f"see {labels.relative_to(run.run_dir.path)}"] if found else [])]
        )
        facts = {"findings": dict(found), "nearer": nearer, "compared": compared, "num_voices": len(sizes)}
        return finish_manifest(run, manifest, products | {"labels": labels}, totals, **facts)


def _groups(run: StageRun, clusters: np.ndarray) -> np.ndarray:
    """Return the first line of each line's group (N,): its speaker group, or its cluster where speakers are found."""
    return column(run, "prepare", FIRST_OF_GROUP) if run.settings.labels == "audit" else clusters


class VoicesProcessor(Processor):
    """Processor that compares the clips of spans of lines with all voices, in one rank.

    Args:
        device: the device that computes the similarities.
    """

    def __init__(self, run: StageRun, device: str) -> None:
        import torch

        check_device(device)
        self._settings: VoicesConfig = run.settings
        self._labels = Labels(run)
        self._directions = torch.from_numpy(np.array(self._labels.directions)).to(device)
        self._embedded = {name: map_stored_array(run.product(f"voices.embed/{name}")) for name in ARRAYS}
        self._clusters = map_stored_array(run.product("voices.cluster/clusters"))
        self._groups = _groups(run, self._clusters)
        names = run.plan_folder / "names.npy"
        self._names = map_stored_array(names) if self._settings.labels == "find" else None
        self._doubtful = doubtful_similarity(run.config)
        self._key = make_speaker_key(run.config.matched_key)
        with open_stored(run.product("voices.embed/unusable")) as stream:
            lost = [msgspec.json.decode(line, type=tuple[int, str, str]) for line in stream]
        self._lost = {line: RejectRecord(reason, detail) for line, reason, detail in lost}

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        lines = np.arange(unit.params["start"], unit.params["stop"])
        embeddings, clusters, groups = self._embedded["embedding"][lines], self._clusters[lines], self._groups[lines]
        compared = compare_with_voices(embeddings, clusters, groups, self._labels.voices, self._directions)
        similarities = np.stack([compared.own, compared.other], axis=1)
        similarities[~embeddings.any(axis=1) | ~np.isfinite(similarities).all(axis=1)] = np.nan
        kept, rejects, findings = list[Utterance](), list[Reject](), list[dict[str, Any]]()
        rows, moved = list[int](), list[int]()
        for row, utterance in enumerate(self._labels.read(lines)):
            utterance.index = int(lines[row])
            reject = self._lost.get(utterance.index)
            found = [] if reject else self._judge(utterance, similarities[row], int(compared.nearest[row]))
            findings += found
            if found and self._settings.action == "reject":
                reject = RejectRecord(found[0]["finding"], _sentence(found[0]))
            if reject is not None:
                rejects.append(Reject(VoicesStage.kind, reject.reason, reject.detail, utterance.public_record()))
                continue
            if self._name(utterance, found, int(compared.nearest[row])):
                moved.append(len(rows))
            kept.append(utterance)
            rows.append(row)
        name = f"parts/{unit.index:06d}"
        columns = write_part(staging.path(f"{name}.jsonl"), kept, partial(key_of, self._key))
        save_array(staging.path(f"{name}.npy"), columns)
        saved = similarities[rows].astype(np.float32)
        saved[moved] = saved[moved, ::-1]
        save_array(staging.path(f"{name}.similarities.npy"), saved)
        with open_new(staging.path(f"{name}.labels.jsonl")) as stream:
            stream.writelines(msgspec.json.encode(one) + b"\n" for one in findings)
        files = [f"{name}.{kind}" for kind in ("jsonl", "npy", "similarities.npy", "labels.jsonl")]
        stats = {
            "seconds": sum(one.segment.duration for one in kept),
            "findings": dict(Counter(one["finding"] for one in findings)),
            "compared": int(np.isfinite(similarities[:, 0]).sum()),
            "nearer": int((similarities[:, 0] >= similarities[:, 1]).sum()),
        }
        return Output(files=files, num_out=len(kept), rejects=rejects, stats=stats)

    def _judge(self, utterance: Utterance, similarities: np.ndarray, nearest: int) -> list[dict[str, Any]]:
        """Return the findings about a clip, in the form of the lines of ``labels.jsonl``."""
        (own, other), (turn, at) = similarities.tolist(), self._embedded["turn"][utterance.index].tolist()
        segment, found = utterance.segment, list[dict[str, Any]]()
        clip = {
            "id": utterance.cut_id, "audio_filepath": segment.audio_filepath, "offset": segment.offset,
            "duration": segment.duration, "group": key_of(self._key, utterance),
        }  # fmt: skip
        if self._settings.labels == "audit" and other > own and other >= self._doubtful:
            group = self._labels.group_of(int(self._labels.voices["group"][nearest]))
            evidence = {"own": own, "other": other, "margin": own - other}
            rounded = {name: round(value, 4) for name, value in evidence.items()}
            found.append({"finding": "wrong_voice", **clip, "other_group": group, **rounded})
        if turn < self._doubtful:
            found.append({"finding": "mixed_voices", **clip, "similarity": round(turn, 4), "at": round(at, 3)})
        return found

    def _name(self, utterance: Utterance, found: list[dict[str, Any]], nearest: int) -> bool:
        """Set the speaker of an utterance according to its voice, if the configuration asks for it.

        Returns:
            True if the utterance moves to the group of the nearest voice, so that ``own`` and ``other`` swap.
        """
        wrong = False
        if self._names is not None:
            head = int(self._clusters[utterance.index])
            speaker = f"voice-{int(self._names[head]):016x}"
        elif self._settings.action == "relabel":
            wrong = any(one["finding"] == "wrong_voice" for one in found)
            voice = nearest if wrong else self._voice_of(utterance.index)
            if voice is None:
                return False
            speaker = self._labels.speaker_of(voice)
        else:
            return False
        tag = parse_speaker_tag(utterance.speaker)
        if tag.speaker != speaker:
            utterance.speaker = str(replace(tag, speaker=speaker))
            if tag.speaker != NO_SPEAKER:
                utterance.custom = {"given_speaker": tag.speaker} | utterance.custom
        return wrong

    def _voice_of(self, line: int) -> int | None:
        """Return the row in ``voices`` of a line's cluster; None if the cluster is too small to be a voice."""
        voices, group = self._labels.voices, int(self._groups[line])
        begin, end = np.searchsorted(voices["group"], [group, group + 1])
        found = begin + np.flatnonzero(voices["cluster"][begin:end] == self._clusters[line])
        return int(found[0]) if len(found) else None


def _sentence(finding: dict[str, Any]) -> str:
    """Return the detail of a reject for a finding about a clip."""
    if finding["finding"] == "mixed_voices":
        return f"the voices before and after {finding['at']:g} s have a similarity of only {finding['similarity']:.4f}"
    return (
        f"its similarity to the voice of the group {finding['other_group']!r} is {finding['other']:.4f}, but to that "
        f"of its own group {finding['group']!r} only {finding['own']:.4f}"
    )
