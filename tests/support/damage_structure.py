"""Kinds of damage to the structure of a dataset: files, archives, lines, and the index.

What a disk, a copy or a killed process does: no reader may take it for fewer or for other items.
"""

from __future__ import annotations

import gzip
import os
import random

from support import damage as do
from support.damage import CODES, CONTEXT_CODES, CONTEXTS, CUTS, FILES, TARGETS, Kind


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


# Files whose bytes are others than they were. More zeros after an archive's or a gzip file's end are legal.
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
    "zeros from a member boundary on": (do.zero_from(CODES, lambda data: do.places(data)[2].header), "wrong_count"),
    "zeros after the end of an archive": (do.change_bytes(TARGETS, lambda data: data + bytes(512)), ""),
    "bytes after the end of an archive": (do.change_bytes(TARGETS, lambda data: data + b"more"), "damaged"),
    "an archive twice in a file": (do.change_bytes(CODES, lambda data: data * 2), "damaged"),
    "an archive compressed": (do.change_bytes(TARGETS, gzip.compress), "damaged"),
    "a bit of metadata": (
        do.flip_bit(TARGETS, lambda data: do.places(data)[1].data + 2),
        "bad_cut bad_audio",
    ),
    "a bit of a name in an archive": (do.flip_bit(TARGETS, 3), "damaged"),
    "a bit of a size in an archive": (do.flip_bit(TARGETS, 124 + 9), "damaged"),
    "a bit of a checksum in an archive": (do.flip_bit(CODES, 148 + 3), "damaged"),
    "a bit of a member's type": (do.flip_bit(CODES, 156), "damaged"),
    "a bit of padding": (do.flip_bit(TARGETS, lambda data: do.places(data)[1].data_end), "damaged"),
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
    "a member said to be a byte shorter": (do.change_size(TARGETS, 0, -1), "damaged"),
    "a member said to be a block longer": (do.change_size(TARGETS, 2, 512), "damaged"),
    "a member said to be 4 GiB long": (do.change_size(TARGETS, 2, 1 << 32), "damaged"),
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

# Which files there are, and what the index says of shards and fields.
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
    "the index of another dataset": (do.take_index(), "wrong_size"),
    "a digit of a size in the index": (do.change_file(1, "target_audio", size=lambda size: size ^ 1), "wrong_size"),
    "a digit of a checksum in the index": (
        do.change_file(1, "cuts", xxh3=lambda text: text[:-1] + ("0" if text[-1] == "1" else "1")),
        "wrong_checksum",
    ),
    "another file in the index": (
        do.change_file(1, "target_audio", file="target_audio/recording.000000.tar"),
        "wrong_name wrong_size stray_file wrong_id wrong_totals bad_cut bad_codes",
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
    """Where an archive may be cut off, in words: functions from its bytes to a length."""
    at = {
        "after one byte": lambda data: 1,
        "within the first header": lambda data: 300,
        "after the first header": lambda data: 512,
        "within the first audio": lambda data: 2000,
        "before the padding of the first member": lambda data: do.places(data)[0].data_end,
        "between a member and its metadata": lambda data: do.places(data)[1].header,
        "within metadata": lambda data: do.places(data)[1].data + 20,
        "between two pairs": lambda data: do.places(data)[2].header,
        "before the last pair": lambda data: do.places(data)[-2].header,
        "within the last member": lambda data: do.places(data)[-1].data_end - 1,
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
