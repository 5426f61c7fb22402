"""Kinds of damage to the content of a dataset: cuts, audio, codes and what dataset.json says of them.

What a faulty writer or an attacker does: every file can be read, and only what it holds is wrong.
"""

from __future__ import annotations

import io

import numpy as np

from sharmill.shar.items import read_field
from support import damage as do
from support.damage import CODES, CONTEXT_CODES, CONTEXTS, CUTS, FILES, TARGETS, Kind
from support.damage_structure import files_of, shards_but
from support.shar import lines


def within_last_audio(archive):
    """Two thirds into the last audio of an archive."""
    place = do.places(archive)[-2]
    return place.data + place.size * 2 // 3


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
    """The first cut of the shard before takes the place of the first of this one, in every field."""
    for name in FILES:
        other = dataset / name.replace("000001", "000000")
        if name == CUTS:
            do.change_cuts(name, lambda cuts, other=other: [lines(other)[0], *cuts[1:]])(dataset)
        else:
            first = next(iter(read_field(other)))
            do.change_items(name, lambda items, first=first: [first, *items[1:]])(dataset)


def target_as_context(dataset):
    """The context audio of the first cut is its target audio, and everything says that it is the context."""
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
    """The same change to the cuts and to the items of all fields."""
    return do.all_of(do.change_cuts(CUTS, change), *(do.change_items(name, change) for name in FILES[1:]))


def loud_and_clipped(samples):
    return np.clip(samples * 20, -1, 1)


def at_half_the_rate(samples):
    return samples[::2]


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
            do.change_cuts(CUTS, lambda cuts: [*cuts[:2], do.merge_custom(cuts[2], context_audio_offset=1.0)]),
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
    "zeros within the audio": (
        do.change_item(TARGETS, data=lambda data: data[:2000] + bytes(4000) + data[6000:]),
        "bad_audio",
        "deep",
    ),
    "audio with a sample more": (do.change_audio(TARGETS, lambda samples: np.pad(samples, (0, 1))), "bad_audio"),
    "audio at half the rate": (do.change_audio(CONTEXTS, at_half_the_rate, rate=8000), "bad_audio"),
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
        do.change_audio(TARGETS, loud_and_clipped),
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

# The index itself is what is damaged: no other index would be that of the files.
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

# Nothing in the dataset itself tells that it once had more or other cuts.
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
