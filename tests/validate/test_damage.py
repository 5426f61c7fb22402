"""Every kind of damage to a finished dataset is found at the level that can see it, and never misleads a reader.

Files are damaged in two ways: alone, as by a disk or a copy, so that the index reveals it; and with a matching index,
as by a faulty writer, so that only the content reveals it. The tables below list the kinds.
"""

import gzip
import io
import os
import random

import numpy as np
import pytest
from support import damage as do
from support.damage import (
    CODES,
    CONTEXT_CODES,
    CONTEXTS,
    CUTS,
    FILES,
    TARGETS,
    Kind,
    change_codec,
    change_description,
    index_as_written,
)
from support.project import ToyCodec, check_dataset, copy, lines, raises, snapshot

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.items import read_field
from sharmill.sources.nemo import NemoSource
from sharmill.validate.accounts import ExpectedRecords


def last_half(data):
    return len(data) // 2


def shards_but(*left_out):
    return do.change_shards(lambda shards: [shard for shard in shards if shard["index"] not in left_out])


def files_of(index):
    return [name.replace("000001", f"{index:06d}") for name in FILES]


def exchange_records(shards):
    first, second = (dict(shard) for shard in shards[:2])
    first["index"], second["index"] = 1, 0
    return [second, first, *shards[2:]]


# Files whose bytes have changed. Additional zeros after the end of an archive or gzip file are legal.
_FILES: dict[str, tuple[do.Damage, str]] = {
    "a link to another shard in the place of a file": (
        do.replace_by(TARGETS, lambda path: path.symlink_to("recording.000000.tar")),
        "wrong_id bad_cut bad_codes",
    ),
    "an archive of no bytes": (do.change_bytes(TARGETS, lambda data: b""), "damaged"),
    "cuts of no bytes": (do.change_bytes(CUTS, lambda data: b""), "damaged"),
    "an archive of zeros": (do.zero_from(TARGETS, lambda data: 0), "wrong_count"),
    "cuts of zeros": (do.zero_from(CUTS, lambda data: 0), "damaged"),
    "zeros from the middle of an archive on": (do.zero_from(CONTEXTS, last_half), "damaged"),
    "zeros from a member boundary on": (do.zero_from(CODES, lambda data: do.places(data)[2].offset), "wrong_count"),
    "zeros after the end of an archive": (do.change_bytes(TARGETS, lambda data: data + bytes(512)), ""),
    "bytes after the end of an archive": (do.change_bytes(TARGETS, lambda data: data + b"more"), "damaged"),
    "an archive twice in a file": (do.change_bytes(CODES, lambda data: data * 2), "damaged"),
    "an archive compressed": (do.change_bytes(TARGETS, gzip.compress), "damaged"),
    "a bit of metadata": (
        do.flip_bit(TARGETS, lambda data: do.places(data)[1].offset_data + 2),
        "bad_cut bad_audio",
    ),
    "a bit of a name in an archive": (do.flip_bit(TARGETS, 3), "damaged"),
    "a bit of a size in an archive": (do.flip_bit(TARGETS, 124 + 9), "damaged"),
    "a bit of a checksum in an archive": (do.flip_bit(CODES, 148 + 3), "damaged"),
    "a bit of a member's type": (do.flip_bit(CODES, 156), "damaged"),
    "a bit of padding": (do.flip_bit(TARGETS, lambda data: do.places(data)[2].offset - 1), "damaged"),
    "a bit of the end marker": (do.flip_bit(TARGETS, -700), "damaged"),
    "a bit of the last byte": (do.flip_bit(TARGETS, -1), "damaged"),
    "a member that is a link": (do.change_header(TARGETS, 2, type=b"2", linkname="x"), "damaged"),
    "a member that is a folder": (do.change_header(TARGETS, 2, type=b"5"), "damaged"),
    "a member with an absolute name": (do.change_header(TARGETS, 0, name="/etc/passwd.flac"), "damaged"),
    "a pair with names outside": (
        do.all_of(
            do.change_header(TARGETS, 0, name="../../outside.flac"),
            do.change_header(TARGETS, 1, name="../../outside.json"),
        ),
        "wrong_id",
    ),
    "a member said to be a byte shorter": (do.change_header(TARGETS, 0, size=lambda size: size - 1), "damaged"),
    "a member said to be a block longer": (do.change_header(TARGETS, 2, size=lambda size: size + 512), "damaged"),
    "a member said to be 4 GiB long": (do.change_header(TARGETS, 2, size=lambda size: size + (1 << 32)), "damaged"),
    "two members swapped": (do.change_members(TARGETS, lambda m: [m[1], m[0], *m[2:]]), "damaged"),
    "a member dropped": (do.change_members(TARGETS, lambda m: m[1:]), "damaged"),
    "the last member dropped": (do.change_members(CODES, lambda m: m[:-1]), "damaged"),
    "a member doubled": (do.change_members(CODES, lambda m: [m[0], *m]), "damaged"),
    "pairs swapped": (do.change_items(TARGETS, do.swap_items), "wrong_id bad_cut"),
    "pairs of codes swapped": (do.change_items(CODES, do.swap_items), "wrong_id"),
    "the first pair dropped": (do.change_items(TARGETS, lambda i: i[1:]), "wrong_count wrong_id bad_cut bad_codes"),
    "the last pair dropped": (do.change_items(CONTEXTS, lambda i: i[:-1]), "wrong_count"),
    "the last pair of codes dropped": (do.change_items(CODES, lambda i: i[:-1]), "wrong_count"),
    "a pair doubled": (do.change_items(CONTEXTS, lambda i: [*i, i[-1]]), "wrong_count"),
    "an archive without members": (do.change_items(CODES, lambda i: []), "wrong_count"),
    "a bit of compressed cuts": (do.flip_bit(CUTS, last_half), "damaged"),
    "a bit of the gzip header": (do.flip_bit(CUTS, 0), "damaged"),
    "a bit of the gzip checksum": (do.flip_bit(CUTS, -8), "damaged"),
    "a bit of the gzip length": (do.flip_bit(CUTS, -4), "damaged"),
    "bytes after the end of gzip": (do.change_bytes(CUTS, lambda data: data + b"more"), "damaged"),
    "zeros after the end of gzip": (do.change_bytes(CUTS, lambda data: data + bytes(9)), ""),
    "two gzip members with the cuts twice": (do.change_bytes(CUTS, lambda data: data * 2), "wrong_count duplicate_id"),
    "cuts not compressed": (do.change_bytes(CUTS, gzip.decompress), "damaged"),
    "cuts that end within a line": (do.change_lines(CUTS, lambda lines: [*lines[:-1], lines[-1][:-30]]), "damaged"),
    "a blank line among the cuts": (do.change_lines(CUTS, lambda lines: [lines[0], b"\n", *lines[1:]]), "damaged"),
    "a byte order mark before the cuts": (do.change_lines(CUTS, lambda lines: [b"\xef\xbb\xbf", *lines]), "damaged"),
    "cuts that are not UTF-8": (
        do.change_lines(CUTS, lambda lines: [lines[0].replace(b"text of", b"\xff\xfe of"), *lines[1:]]),
        "damaged",
    ),
    "a cut nested 100,000 levels deep": (
        do.change_lines(CUTS, lambda lines: [b'{"a":' * 100_000 + b"1" + b"}" * 100_000, *lines]),
        "damaged",
    ),
    "a cut that is no object": (do.change_cuts(CUTS, lambda cuts: [3, *cuts[1:]]), "damaged"),
    "a cut dropped": (do.change_cuts(CUTS, lambda cuts: cuts[:-1]), "wrong_count"),
    "a cut doubled": (do.change_cuts(CUTS, lambda cuts: [*cuts, cuts[0]]), "wrong_count duplicate_id"),
    "cuts swapped": (do.change_cuts(CUTS, do.swap_items), "wrong_id bad_cut"),
    "a cut of another type": (do.change_cut(CUTS, type="MultiCut"), "bad_cut"),
    "a cut without start": (do.change_cut(CUTS, start=...), "bad_cut"),
    "an id of another cut": (do.change_cut(CUTS, id="cut-x"), "wrong_id bad_cut"),
    "an id that is a number": (do.change_cut(CUTS, id=3), "wrong_id bad_cut"),
    "metadata that is no JSON": (
        do.change_bytes(TARGETS, lambda data: data.replace(b'"sources":[{', b'"sources":[[')),
        "damaged",
    ),
    "targets of two shards exchanged": (
        do.exchange(TARGETS, TARGETS.replace("1.", "0.")),
        "wrong_id bad_cut bad_codes",
    ),
    "codes of two shards exchanged": (do.exchange(CODES, CODES.replace("1.", "0.")), "wrong_id bad_codes"),
    "cuts of two shards exchanged": (do.exchange(CUTS, CUTS.replace("1.", "0.")), "wrong_id bad_cut"),
    "target audio of another dataset": (do.take_files("target_audio"), "wrong_id bad_cut"),
    "codes of another dataset": (do.take_files("codes_toy/context_codes"), "wrong_id"),
    "cuts of another dataset": (do.take_files("cuts"), "wrong_id bad_cut"),
}

# Files that exist, and the entries of the index about shards and fields.
_DIRECTORY: dict[str, tuple[do.Damage, str]] = {
    "a file is gone": (do.remove_files(TARGETS), "missing_file"),
    "the cuts of a shard are gone": (do.remove_files(CUTS), "missing_file"),
    "a folder in the place of a file": (do.replace_by(TARGETS, lambda path: path.mkdir()), "missing_file"),
    "a link to nothing in the place of a file": (
        do.replace_by(CODES, lambda path: path.symlink_to("nowhere")),
        "missing_file",
    ),
    "a FIFO in the place of a file": (do.replace_by(CONTEXTS, os.mkfifo), "missing_file"),
    "a leftover of publishing": (do.leave(f".shards.jsonl.{'0' * 32}.tmp"), "stray_file"),
    "a leftover of staging": (do.leave(".sharmill-staging/000001-x/cuts/cuts.000001.jsonl.gz"), "stray_file"),
    "an empty folder of staging": (lambda dataset: (dataset / ".sharmill-staging").mkdir(), "stray_file"),
    "a leftover of copying": (do.leave("target_audio/.recording.000001.tar.Qx3f2A"), "stray_file"),
    "a file of somebody": (do.leave("cuts/notes.txt"), "stray_file"),
    "a shard more than the index has": (do.leave("cuts/cuts.000003.jsonl.gz"), "stray_file"),
    "codes that the index does not name": (do.leave("codes_b/target_codes/codes.000000.tar"), "stray_file"),
    "a link to nothing": (lambda dataset: (dataset / "link").symlink_to("nowhere"), "stray_file"),
    "a link to a folder": (lambda dataset: (dataset / "link").symlink_to("/tmp"), "stray_file"),
    "the files of the last shard are gone": (do.remove_files(*files_of(2)), "missing_file"),
    "the last shard is not in the index": (shards_but(2), "stray_file wrong_totals"),
    "a shard in the middle is not in the index": (shards_but(1), "stray_file wrong_totals index_gap"),
    "a shard in the middle is gone": (
        do.all_of(do.remove_files(*files_of(1)), shards_but(1)),
        "wrong_totals index_gap",
    ),
    "the last shard is gone and not in the index": (
        do.all_of(do.remove_files(*files_of(2)), shards_but(2)),
        "wrong_totals",
    ),
    "the index of another dataset": (do.take_files("shards.jsonl", other="again"), "wrong_size"),
    "a digit of a size in the index": (do.change_file(1, "target_audio", size=lambda size: size ^ 1), "wrong_size"),
    "a digit of a checksum in the index": (
        do.change_file(1, "cuts", xxh3=lambda text: text[:-1] + ("0" if text[-1] == "1" else "1")),
        "wrong_checksum",
    ),
    "another file in the index": (
        do.change_file(1, "target_audio", file="target_audio/recording.000000.tar"),
        "wrong_name wrong_size stray_file wrong_id wrong_totals bad_cut bad_codes",
    ),
    "an index with a name longer than one can be": (
        do.change_file(1, "target_audio", file=f"target_audio/{'x' * 300}.tar"),
        "wrong_name missing_file stray_file",
    ),
    "no shards in the index": (do.change_shards(lambda shards: []), "wrong_totals stray_file"),
    "no dataset.json": (do.remove_files("dataset.json"), "missing_file"),
    "no shards.jsonl": (do.remove_files("shards.jsonl"), "missing_file"),
    "dataset.json of no bytes": (do.change_bytes("dataset.json", lambda data: b""), "damaged"),
    "dataset.json cut off": (do.change_bytes("dataset.json", lambda data: data[:-3]), "damaged"),
    "dataset.json without a key": (do.change_description(limits=...), "damaged"),
    "dataset.json with text for a number": (do.change_codec(samples_per_frame="320"), "damaged"),
    "shards.jsonl cut off within a line": (do.change_bytes("shards.jsonl", lambda data: data[:-9]), "damaged"),
    "shards.jsonl with a blank line": (do.change_bytes("shards.jsonl", lambda data: b"\n" + data), "damaged"),
    "shards.jsonl of zeros": (do.zero_from("shards.jsonl", lambda data: 0), "damaged"),
    "shards.jsonl with NaN": (
        do.change_bytes("shards.jsonl", lambda data: data.replace(b'"count":3', b'"count":NaN')),
        "damaged",
    ),
    "an index without a checksum": (do.change_file(1, "cuts", xxh3=...), "damaged"),
    "an index that leaves the dataset": (do.change_file(1, "cuts", file="../cuts.000001.jsonl.gz"), "damaged"),
    "an index with an absolute path": (do.change_file(1, "cuts", file="/etc/passwd"), "damaged"),
    "a shard is in the index twice": (
        do.change_shards(lambda shards: [*shards[:2], *shards[1:]]),
        "wrong_totals index_gap duplicate_id",
    ),
    "the index in another order": (do.change_shards(lambda shards: [shards[0], shards[2], shards[1]]), "index_gap"),
    "two shards under each other's index": (do.change_shards(exchange_records), "wrong_name"),
    "a shard without a field": (
        do.change_shard(1, fields=lambda fields: {k: v for k, v in fields.items() if k != "context_audio"}),
        "missing_field stray_file",
    ),
    "two fields under each other's name": (
        do.change_shard(
            1,
            fields=lambda f: f | {"target_audio": f["context_audio"], "context_audio": f["target_audio"]},
        ),
        "wrong_name wrong_totals bad_cut bad_codes",
    ),
    "a count one too low": (do.change_shard(1, count=2), "wrong_count wrong_totals"),
    "a count below zero": (do.change_shard(1, count=-3), "wrong_count wrong_totals"),
    "fewer shards in dataset.json": (do.change_description(num_shards=2), "wrong_totals"),
    "a field missing in dataset.json": (
        do.change_description(fields=lambda fields: [f for f in fields if f != "context_audio"]),
        "wrong_totals",
    ),
    "no fields of the codec in dataset.json": (do.change_description(fields=lambda fields: fields[:3]), "wrong_totals"),
    "no codec in dataset.json": (do.change_description(codecs=[]), "wrong_totals"),
    "another name of the codec": (do.change_codec(name="other"), "wrong_totals"),
}


def _places_to_cut():
    """Return places where an archive may be cut off: functions from its bytes to a length, by descriptions."""
    at = {
        "after one byte": lambda data: 1,
        "within the first header": lambda data: 300,
        "after the first header": lambda data: 512,
        "within the first audio": lambda data: 2000,
        "before the padding of the first member": lambda data: do.places(data)[0].offset_data + do.places(data)[0].size,
        "between a member and its metadata": lambda data: do.places(data)[1].offset,
        "within metadata": lambda data: do.places(data)[1].offset_data + 20,
        "between two pairs": lambda data: do.places(data)[2].offset,
        "before the last pair": lambda data: do.places(data)[-2].offset,
        "within the last member": lambda data: do.places(data)[-1].offset_data + do.places(data)[-1].size - 1,
        "before the end marker": lambda data: len(data) - 1024,
        "within the end marker": lambda data: len(data) - 1000,
        "half the end marker gone": lambda data: len(data) - 512,
        "one byte gone": lambda data: len(data) - 1,
    }
    places = random.Random(4)
    for _ in range(6):
        share = places.random()
        at[f"after {share:.1%}"] = lambda data, share=share: int(len(data) * share)
    return at


for words, length in _places_to_cut().items():
    for name, what in ((TARGETS, "audio"), (CONTEXT_CODES, "codes")):
        _FILES[f"{what} cut off: {words}"] = (
            do.change_bytes(name, lambda data, length=length: data[: length(data)]),
            "damaged",
        )
for words, length in {
    "within the gzip header": lambda data: 5,
    "after the gzip header": lambda data: 10,
    "in the middle": last_half,
    "before the gzip checksum": lambda data: len(data) - 8,
    "one byte gone": lambda data: len(data) - 1,
}.items():
    _FILES[f"cuts cut off: {words}"] = (
        do.change_bytes(CUTS, lambda data, length=length: data[: length(data)]),
        "damaged",
    )

FILES_DAMAGED = {name: Kind(*row) for name, row in _FILES.items()}
DIRECTORY_DAMAGED = {name: Kind(*row) for name, row in _DIRECTORY.items()}


def within_last_audio(archive):
    """Return a position two thirds into the last audio of an archive."""
    place = do.places(archive)[-2]
    return place.offset_data + place.size * 2 // 3


def pickled(_):
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return stream.getvalue()


def as_npz(data):
    stream = io.BytesIO()
    np.savez(stream, codes=np.load(io.BytesIO(data)))
    return stream.getvalue()


def with_first(value):
    def change(codes):
        codes[0, 0] = value
        return codes

    return change


def repeat_first_cut(dataset):
    """Replace the first cut of this shard by the first cut of the previous shard, in every field."""
    for name in FILES:
        other = dataset / name.replace("000001", "000000")
        if name == CUTS:
            do.change_cuts(name, lambda cuts, other=other: [lines(other)[0], *cuts[1:]])(dataset)
        else:
            first = next(iter(read_field(other)))
            do.change_items(name, lambda items, first=first: [first, *items[1:]])(dataset)


def target_as_context(dataset):
    """Use the target audio of the first cut as its context audio, consistently in all metadata."""
    target = next(iter(read_field(dataset / TARGETS)))
    do.change_item(CONTEXTS, data=target.data)(dataset)


def exchange_texts(cuts):
    texts = [cut["supervisions"][0]["text"] for cut in cuts]
    for cut, text in zip(cuts, [texts[1], texts[0], *texts[2:]], strict=True):
        cut["supervisions"][0]["text"] = text
    return cuts


def exchange_all_texts(cuts):
    for cut, other in zip(exchange_texts(cuts), cuts, strict=True):
        cut["supervisions"][0]["custom"]["text"] = other["supervisions"][0]["text"]
    return cuts


def with_command():
    return {
        "id": "x",
        "sampling_rate": 16000,
        "num_samples": 16000,
        "duration": 1.0,
        "channel_ids": [0],
        "sources": [{"type": "command", "channels": [0], "source": "touch ran"}],
    }


def in_every_field(change):
    """Return the same change for the cuts and for the items of all fields."""
    return do.all_of(do.change_cuts(CUTS, change), *(do.change_items(name, change) for name in FILES[1:]))


_CUT = {
    "NaN in the JSON of a cut": (
        do.change_lines(CUTS, lambda lines: [lines[0].replace(b":0.75", b":NaN"), *lines[1:]]),
        "damaged",
    ),
    "no cuts at all": (do.change_cuts(CUTS, lambda cuts: []), "wrong_count"),
    "a cut of another shard, in every field": (repeat_first_cut, "duplicate_id"),
    "a cut that starts later": (do.change_cut(CUTS, start=0.5), "bad_cut"),
    "a cut that lasts longer": (do.change_cut(CUTS, duration=9.0), "bad_cut"),
    "a cut of another channel": (do.change_cut(CUTS, channel=1), "bad_cut"),
    "a cut whose id tells another segment": (do.change_cut(CUTS, id=lambda i: i[:-4] + "7.00"), "wrong_id bad_cut"),
    "a cut whose context lhotse would cut": (do.change_cut(CUTS, custom={"context_audio_unaligned": False}), "bad_cut"),
    "a cut without custom": (do.change_cut(CUTS, custom=None), "bad_cut"),
    "a cut with a key of no cut": (do.change_cut(CUTS, sppeaker="anna"), "bad_cut"),
    "a cut with features elsewhere": (do.change_cut(CUTS, features={"storage_path": "/etc"}), "bad_cut"),
    "a cut without supervisions": (do.change_cut(CUTS, supervisions=[]), "bad_cut"),
    "a cut with two supervisions": (do.change_cut(CUTS, supervisions=lambda s: s * 2), "bad_cut"),
    "a cut without recording": (do.change_cut(CUTS, recording=None), "bad_cut"),
    "a recording of another length": (do.change_cut(CUTS, recording=lambda r: r | {"num_samples": 15999}), "bad_cut"),
    "a recording of another duration": (do.change_cut(CUTS, recording=lambda r: r | {"duration": 2.0}), "bad_cut"),
    "a recording of another rate": (do.change_cut(CUTS, recording=lambda r: r | {"sampling_rate": 8000}), "bad_cut"),
    "a recording of another id": (do.change_cut(CUTS, recording=lambda r: r | {"id": "rec-x"}), "bad_cut"),
    "a recording with a transform": (
        do.change_cut(CUTS, recording=lambda r: r | {"transforms": [{"name": "Speed", "kwargs": {"factor": 2.0}}]}),
        "bad_cut",
    ),
    "a recording that is a command": (
        do.change_cut(CUTS, recording=lambda r: r | {"sources": with_command()["sources"]}),
        "bad_cut",
    ),
    "a recording that is a URL": (
        do.change_cut(CUTS, recording=lambda r: r | {"sources": [r["sources"][0] | {"type": "url"}]}),
        "bad_cut",
    ),
    "a recording with an absolute path": (
        do.change_cut(CUTS, recording=lambda r: r | {"sources": [r["sources"][0] | {"source": "/etc/passwd"}]}),
        "bad_cut",
    ),
    "a recording with a path that leaves": (
        do.change_cut(CUTS, recording=lambda r: r | {"sources": [r["sources"][0] | {"source": "a/../../b"}]}),
        "bad_cut",
    ),
    "a recording of another file than its record": (
        do.change_cut(CUTS, recording=lambda r: r | {"sources": [r["sources"][0] | {"source": "spk/utt0.flac"}]}),
        "bad_cut",
    ),
    "a command in what a cut has beside it": (
        do.change_cut(CUTS, custom=lambda c: c | {"noise": with_command()}),
        "bad_cut",
    ),
    "a supervision that starts later": (do.change_supervision(CUTS, start=0.5), "bad_cut"),
    "a supervision that lasts shorter": (do.change_supervision(CUTS, duration=0.5), "bad_cut"),
    "a supervision of another id": (do.change_supervision(CUTS, id="sup-x"), "bad_cut"),
    "a supervision of another recording": (do.change_supervision(CUTS, recording_id="x"), "bad_cut"),
    "a supervision without text": (do.change_supervision(CUTS, text=None), "bad_cut"),
    "the texts of two cuts exchanged": (do.change_cuts(CUTS, exchange_texts), "bad_cut"),
    "a speaker without tag": (do.change_supervision(CUTS, speaker="anna"), "bad_cut"),
    "a speaker of another cut": (
        do.change_supervision(CUTS, speaker="| Language:en Dataset:Tests Speaker:x |"),
        "bad_cut",
    ),
    "a language that is not the speaker's": (do.change_supervision(CUTS, language="de"), "bad_cut"),
    "a command in what a supervision has beside it": (do.change_custom(CUTS, noise=with_command()), "bad_cut"),
    "a record of another duration": (do.change_custom(CUTS, duration=7.0), "bad_cut"),
    "a record of another offset": (do.change_custom(CUTS, offset=7.0), "bad_cut"),
    "a similarity below the limit": (do.change_custom(CUTS, context_speaker_similarity=0.59), "bad_cut"),
    "a similarity above 1": (do.change_custom(CUTS, context_speaker_similarity=1.7), "bad_cut"),
    "no similarity": (do.change_custom(CUTS, context_speaker_similarity=...), "bad_cut"),
    "a context of another recording": (do.change_custom(CUTS, context_recording_id="rec-x"), "bad_cut"),
    "a context of another offset": (do.change_custom(CUTS, context_audio_offset=1.0), "bad_cut"),
    "a context that is the target": (
        do.all_of(
            do.change_custom(CUTS, context_recording_id="rec-spk-utt3", context_audio_duration=1.0),
            do.change_metadata(CONTEXTS, id="context_cut-rec-spk-utt3-0.00-1.00"),
        ),
        "bad_cut",
    ),
    "a context that overlaps the target": (
        do.all_of(
            do.change_custom(CUTS, 2, context_audio_offset=1.0),
            do.change_metadata(CONTEXTS, 2, id="context_cut-rec-spk-long-1.00-1.50"),
        ),
        "bad_cut",
    ),
    "a context below the shortest": (
        do.all_of(
            do.change_custom(CUTS, context_audio_duration=0.3),
            do.change_metadata(CONTEXTS, id="context_cut-rec-spk-utt4-0.00-0.30"),
        ),
        "bad_cut",
    ),
    "a context beyond the longest": (
        do.all_of(
            do.change_custom(CUTS, context_audio_duration=30.0),
            do.change_metadata(CONTEXTS, id="context_cut-rec-spk-utt4-0.00-30.00"),
        ),
        "bad_cut",
    ),
}

_AUDIO = {
    "contents of two targets swapped": (do.change_items(TARGETS, do.swap_contents), "bad_cut copied_context"),
    "contents of two contexts swapped": (
        do.change_items(CONTEXTS, do.swap_contents),
        "bad_cut copied_context bad_codes",
    ),
    "audio of two contexts swapped": (do.change_items(CONTEXTS, do.swap_data), "bad_audio copied_context"),
    "targets and contexts exchanged": (do.exchange(TARGETS, CONTEXTS), "bad_cut bad_codes"),
    "the target as its context": (target_as_context, "copied_context"),
    "a placeholder": (
        do.change_item(TARGETS, extension="nodata", data=None, metadata=None),
        "bad_audio bad_cut bad_codes",
    ),
    "audio of no bytes": (do.change_item(CONTEXTS, data=b""), "bad_audio"),
    "audio that is text": (do.change_item(TARGETS, data=b"no audio at all"), "bad_audio"),
    "audio cut off": (do.change_item(TARGETS, data=lambda data: data[: len(data) // 2]), "bad_audio", "deep"),
    "a bit of audio": (do.flip_bit(TARGETS, within_last_audio), "bad_audio", "deep"),
    "bytes after the audio": (do.change_item(TARGETS, data=lambda data: data + b"more"), ""),
    "another MD5 sum of the audio": (
        do.change_item(TARGETS, data=lambda data: data[:26] + b"another MD5 sum." + data[42:]),
        "bad_audio",
        "deep",
    ),
    "zeros within the audio": (
        do.change_item(TARGETS, data=lambda data: data[:2000] + bytes(4000) + data[6000:]),
        "bad_audio",
        "deep",
    ),
    "audio with a sample more": (do.change_audio(TARGETS, lambda samples: np.pad(samples, (0, 1))), "bad_audio"),
    "audio at half the rate": (do.change_audio(CONTEXTS, lambda samples: samples[::2], rate=8000), "bad_audio"),
    "audio said to be of another rate": (do.change_audio(TARGETS, np.copy, rate=8000), "bad_audio"),
    "audio with two channels": (do.change_audio(TARGETS, lambda samples: np.stack([samples] * 2, 1)), "bad_audio"),
    "audio of another format": (do.change_audio(TARGETS, np.copy, format="WAV"), "bad_audio"),
    "audio under another extension": (do.change_item(TARGETS, extension="npy"), "bad_audio"),
    "silent audio": (
        do.change_audio(TARGETS, np.zeros_like),
        "silent_audio",
        "deep",
    ),
    "clipped audio": (
        do.change_audio(TARGETS, lambda samples: np.clip(samples * 20, -1, 1)),
        "clipped_audio",
        "deep",
    ),
    "samples said to be fewer": (do.change_metadata(CONTEXTS, num_samples=5), "bad_audio bad_codes"),
    "a rate said to be another": (do.change_metadata(CONTEXTS, sampling_rate=8000), "bad_audio bad_codes"),
    "a rate of zero": (do.change_metadata(CONTEXTS, sampling_rate=0), "bad_audio bad_codes"),
    "a rate that is text": (do.change_metadata(TARGETS, sampling_rate="x"), "bad_audio bad_codes bad_cut"),
    "a duration said to be another": (do.change_metadata(TARGETS, duration=1.5), "bad_audio"),
    "no duration": (do.change_metadata(CONTEXTS, duration=...), "bad_audio wrong_totals"),
    "a target of another id": (do.change_metadata(TARGETS, id="x"), "bad_cut"),
    "audio whose metadata has a transform": (
        do.change_metadata(TARGETS, transforms=[{"name": "Speed", "kwargs": {"factor": 2.0}}]),
        "bad_audio",
    ),
    "audio whose metadata has a command": (do.change_metadata(TARGETS, sources=with_command()["sources"]), "bad_audio"),
    "audio without sources": (do.change_metadata(TARGETS, sources=[]), "bad_audio"),
}

_CODES = {
    "codes with a frame more": (
        do.change_codes(CODES, lambda c: np.pad(c, ((0, 0), (0, 1))), describe=True),
        "bad_codes",
    ),
    "codes with a frame less": (do.change_codes(CONTEXT_CODES, lambda c: c[:, :-1], describe=True), "bad_codes"),
    "codes with a codebook less": (do.change_codes(CODES, lambda c: c[:2], describe=True), "bad_codes"),
    "codes with a batch dimension": (do.change_codes(CODES, lambda c: c[None], describe=True), "bad_codes"),
    "codes transposed": (do.change_codes(CODES, lambda c: np.ascontiguousarray(c.T), describe=True), "bad_codes"),
    "codes without frames": (do.change_codes(CODES, lambda c: c[:, :0], describe=True), "bad_codes"),
    "codes of another shape than described": (do.change_codes(CODES, lambda c: c[:, :-1]), "bad_codes"),
    "codes of 32 bits": (do.change_codes(CODES, lambda c: c.astype(np.int32)), "bad_codes"),
    "codes with floats": (do.change_codes(CODES, lambda c: c.astype(np.float32)), "bad_codes"),
    "codes in another byte order": (do.change_codes(CODES, lambda c: c.astype(">i2")), "bad_codes"),
    "codes one too large": (do.change_codes(CODES, with_first(64)), "bad_codes"),
    "codes below zero": (do.change_codes(CONTEXT_CODES, with_first(-1)), "bad_codes"),
    "codes pickled": (do.change_item(CODES, data=pickled), "bad_codes"),
    "codes as npz": (do.change_item(CODES, data=as_npz), "bad_codes"),
    "codes of no bytes": (do.change_item(CODES, data=b""), "bad_codes"),
    "codes cut off": (do.change_item(CODES, data=lambda data: data[:-1]), "bad_codes"),
    "bytes after the codes": (do.change_item(CODES, data=lambda data: data + b"more"), "bad_codes"),
    "codes under another extension": (do.change_item(CODES, extension="flac"), "bad_codes"),
    "a placeholder for codes": (
        do.change_item(CONTEXT_CODES, extension="nodata", data=None, metadata=None),
        "bad_codes",
    ),
    "codes without shape": (do.change_metadata(CONTEXT_CODES, shape=...), "bad_codes"),
    "codes of another frame shift": (do.change_metadata(CODES, frame_shift=0.021), "bad_codes"),
    "codes whose time is the first axis": (do.change_metadata(CODES, temporal_dim=0), "bad_codes"),
    "codes that start later": (do.change_metadata(CODES, start=1.0), "bad_codes"),
    "context codes that lhotse would cut": (
        do.change_item(
            CONTEXT_CODES, metadata=lambda array: {"array": array, "temporal_dim": -1, "frame_shift": 0.02, "start": 0}
        ),
        "bad_codes",
    ),
    "target and context codes exchanged": (do.exchange(CODES, CONTEXT_CODES), "bad_codes"),
    "codes of two cuts swapped": (
        do.change_items(CODES, do.swap_contents),
        "different_codes",
        "recheck-codes",
    ),
    "codes of cuts of two lengths swapped": (
        do.change_items(CODES, lambda items: [items[0], *do.swap_contents(items[1:])]),
        "bad_codes",
    ),
    "codes all the same": (
        do.change_codes(CODES, np.ones_like),
        "different_codes",
        "recheck-codes",
    ),
    "codes of another codec of the same audio": (do.take_files("codes_toy/target_codes", other="again"), "bad_codes"),
}

# Damage to the index itself; an index rebuilt from the files would not have it.
_INDEX = {
    "seconds of targets": (do.change_shard(1, target_seconds=9.0), "wrong_totals"),
    "seconds of contexts": (do.change_shard(1, context_seconds=0.0), "wrong_totals"),
    "more cuts in dataset.json": (do.change_description(num_cuts=8), "wrong_totals"),
    "seconds in dataset.json": (do.change_description(target_seconds=1.0), "wrong_totals"),
    "a field twice in dataset.json": (do.change_description(fields=lambda f: [*f, f[0]]), "wrong_totals"),
    "another audio format in dataset.json": (do.change_description(audio_format="wav"), "bad_audio"),
    "another rate in dataset.json": (do.change_description(sampling_rate=22050), "bad_audio"),
    "a stricter similarity in dataset.json": (
        do.change_description(limits=lambda old: old | {"min_similarity": 0.8}),
        "bad_cut",
    ),
    "no limits in dataset.json": (do.change_description(limits={}), "wrong_totals"),
    "a codec of another rate": (do.change_codec(sampling_rate=24000), "bad_codes"),
    "a codec of longer frames": (do.change_codec(samples_per_frame=640), "bad_codes"),
    "a codec of more codebooks": (do.change_codec(num_codebooks=4), "bad_codes"),
    "a codec of fewer values": (do.change_codec(codebook_size=8), "bad_codes"),
    "a codec with wider codes": (do.change_codec(codebook_size=1 << 16), "bad_codes"),
}

# Damage after which nothing in the dataset reveals that it once had more or other cuts.
ACCOUNT = ("lost_record", "against")
_LOST = {
    "a cut dropped from every field": (in_every_field(lambda rows: rows[:-1]), *ACCOUNT),
    "the last shard gone without trace": (do.all_of(do.remove_files(*files_of(2)), shards_but(2)), *ACCOUNT),
    "the texts of two records exchanged": (
        do.change_cuts(CUTS, exchange_all_texts),
        "different_text",
        "against",
    ),
}

CONTENT_DAMAGED = {name: Kind(*row) for rows in (_CUT, _AUDIO, _CODES) for name, row in rows.items()}
DESCRIPTION_DAMAGED = {name: Kind(*row) for name, row in _INDEX.items()}
RECORDS_LOST = {name: Kind(*row) for name, row in _LOST.items()}


IN_TWO_WAYS = FILES_DAMAGED | CONTENT_DAMAGED
IN_ONE_WAY = DIRECTORY_DAMAGED | DESCRIPTION_DAMAGED
KINDS = IN_TWO_WAYS | IN_ONE_WAY | RECORDS_LOST
STRUCTURE = FILES_DAMAGED | DIRECTORY_DAMAGED

# Options of the checker for a dataset, by level.
LEVELS = {
    "default": lambda dataset: {},
    "deep": lambda dataset: {"deep": True},
    "recheck-codes": lambda dataset: {"recheck_codes": 1.0},
    "against": lambda dataset: {
        "against": ExpectedRecords(
            sources=(NemoSource(manifest=str(dataset.with_name("project") / "small.json"), audio_root="."),)
        )
    },
}
FIELDS = ["target_audio", "context_audio", "target_codes", "context_codes"]
CHANGED_BYTES = {"wrong_size", "wrong_checksum"}


@pytest.fixture(autouse=True)
def toy_codec(monkeypatch):
    """Make the checker load the codec that made the codes."""
    monkeypatch.setattr("sharmill.models.load_codec", lambda model, **trust: ToyCodec())


@pytest.fixture
def dataset(finished, tmp_path):
    for name in ("again", "foreign", "project"):
        (tmp_path / name).symlink_to(finished / name)
    return copy(finished / "dataset", tmp_path / "dataset")


def check(dataset, level="default"):
    return check_dataset(dataset, dataset.with_name(f"check-{level}"), **LEVELS[level](dataset)).findings


@pytest.mark.parametrize("name", IN_TWO_WAYS)
def test_the_index_tells_every_file_that_has_changed(dataset, name):
    before = snapshot(dataset)
    KINDS[name].do(dataset)
    after = snapshot(dataset)
    changed = {file for file in before if after[file] != before[file]}
    findings = check(dataset)
    assert changed
    assert {row["where"] for row in findings if row["code"] in CHANGED_BYTES} == changed


@pytest.mark.parametrize("name", KINDS)
def test_damage_with_a_matching_index_is_found_at_its_level(dataset, name):
    kind = KINDS[name]
    kind.do(dataset)
    if name not in IN_ONE_WAY:
        index_as_written(dataset)
    findings = check(dataset, kind.level)
    assert {row["code"] for row in findings} == set(kind.codes.split()), findings


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.level != "default"])
def test_damage_of_a_deeper_level_is_not_found_before(dataset, name):
    KINDS[name].do(dataset)
    index_as_written(dataset)
    assert check(dataset) == []


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_found_or_changed_where_nothing_is_damaged(dataset, level):
    before = snapshot(dataset)
    times = {path: path.stat().st_mtime_ns for path in dataset.rglob("*")}
    assert check(dataset, level) == []
    assert snapshot(dataset) == before
    assert {path: path.stat().st_mtime_ns for path in dataset.rglob("*")} == times


@pytest.mark.parametrize("facts", [{"checksum": "other"}, {"sampling_rate": 32000, "samples_per_frame": 640}])
def test_codes_are_not_compared_with_those_of_another_codec(dataset, facts):
    change_codec(**facts)(dataset)
    assert check(dataset) == []
    with raises(ConfigError, "bad_codec", "'toy'"):
        check(dataset, "recheck-codes")


def test_a_dataset_of_another_version_is_refused(dataset):
    change_description(format_version=2)(dataset)
    for use in (check, lambda directory: list(open_shar(directory))):
        with raises(ConfigError, "wrong_version", "2"):
            use(dataset)


@pytest.mark.parametrize("file", FILES)
def test_any_flipped_bit_is_found_and_moves_no_cut(dataset, right, file):
    path = dataset / file
    data = path.read_bytes()
    choice = random.Random(file)
    for at in (choice.randrange(len(data)) for _ in range(8)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << choice.randrange(8)
        path.write_bytes(flipped)
        assert (file, "wrong_checksum") in {(row["where"], row["code"]) for row in check(dataset)}, at
        try:
            cuts = [cut.id for cut in open_shar(dataset, FIELDS)]
        except DamagedShard:
            continue
        assert cuts == [cut[0] for cut in right], at


def read(dataset):
    """Return what a reader gets from each cut, and the error that ends reading."""
    cuts = []
    try:
        for cut in open_shar(dataset, FIELDS):
            arrays = [getattr(cut, f"load_{field}")().tobytes() for field in FIELDS]
            cuts.append((cut.id, cut.to_dict()["supervisions"], cut.start, cut.duration, arrays))
    except (DamagedShard, ConfigError) as error:
        return cuts, error
    return cuts, None


@pytest.fixture(scope="module")
def right(finished):
    cuts, error = read(finished / "dataset")
    assert (len(cuts), error) == (7, None)
    return cuts


@pytest.mark.parametrize(
    ("name", "index"),
    [(name, index) for index in ("stale", "fresh") for name in (STRUCTURE if index == "stale" else FILES_DAMAGED)],
)
def test_a_reader_refuses_damaged_structure_or_reads_all_rightly(dataset, right, name, index):
    KINDS[name].do(dataset)
    if index == "fresh":
        index_as_written(dataset)
    cuts, error = read(dataset)
    assert cuts == right[: len(cuts)]
    assert error is not None or len(cuts) == len(right)


@pytest.mark.parametrize("name", CONTENT_DAMAGED)
def test_a_reader_of_wrong_content_gets_as_many_cuts_or_an_error(dataset, right, name):
    KINDS[name].do(dataset)
    order, ids = [cut[0] for cut in right], []
    try:
        ids.extend(cut.id for cut in open_shar(dataset, FIELDS))
    except DamagedShard:
        assert ids == order[: len(ids)]
    else:
        assert len(ids) == len(order)
