"""Properties of all sources: the same corpus in each format, intact, with bad entries, damaged and moved."""

import dataclasses
import gzip
import io
import json
import os
import pickle
import re
import shutil
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from support.project import config_for, put, raises, run_prepare, voice
from support.sources import FORMS, pack, write_tar
from support.stores import AIStoreStandIn, S3Store

from sharmill.audio.roots import AudioRoot
from sharmill.errors import ConfigError
from sharmill.registry import SOURCES
from sharmill.sources import record_text

NAMES = ["anna-0", "anna-1", "ben-2", "ben-3"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Four recordings of two speakers, and their records."""
    audio = tmp_path_factory.mktemp("audio")
    for number, name in enumerate(NAMES):
        put(audio / f"{name}.flac", voice(1.0 + number / 10, seed=number), 16000)
    records = [
        {"audio_filepath": f"{name}.flac", "duration": 1.0 + n / 10, "text": f"text {n}", "speaker": name[:-2]}
        for n, name in enumerate(NAMES)
    ]
    return audio, records


@pytest.fixture
def make(corpus, tmp_path):
    """Return a function from a format to the entry of its source, whose files are in ``tmp_path / "input"``."""
    audio, records = corpus

    def write(form, **keys):
        (tmp_path / "input").mkdir()
        return FORMS[form](tmp_path / "input", records, audio) | {"language": "en"} | keys

    return write


@pytest.fixture(params=[S3Store, AIStoreStandIn], ids=lambda kind: kind.scheme)
def store(request):
    with request.param() as store:
        yield store


# The other formats need a local folder whose files are listed.
@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("folder_of_texts", "lhotse_shar")])
def test_the_records_of_urls_are_those_of_the_disk(form, make, corpus, store, tmp_path):
    audio, _ = corpus
    entry = make(form)
    expected = run_prepare(config_for(tmp_path / "disk", [entry], prepare={"unit_records": 2}))
    places = {str(tmp_path / "input"): store.url("input"), str(audio): store.url("audio")}
    for path in filter(Path.is_file, (tmp_path / "input").iterdir()):
        if path.suffix not in (".tar", ".parquet"):
            for place, url in places.items():
                change(path, re.escape(place).encode(), url.encode(), count=0)
    store.upload(tmp_path / "input", "input")
    store.upload(audio, "audio")
    shutil.rmtree(tmp_path / "input")
    for place, url in places.items():
        entry = json.loads(json.dumps(entry).replace(place, url))
    # Only the keys that affect what is read.
    keys = {"prepare": {"unit_records": 2}, "cache_dir": str(tmp_path / "cache"), "cache_gib": 150_000 / (1 << 30)}
    prepared = run_prepare(config_for(tmp_path / "remote", [entry], **keys))
    assert prepared.rejects == []
    without_notes = [[dataclasses.replace(one.segment, notes=None) for one in run.kept] for run in (expected, prepared)]
    assert [one.cut_id for one in prepared.kept] == [one.cut_id for one in expected.kept]
    assert without_notes[0] == without_notes[1]
    assert [one.segment.notes.size for one in prepared.kept] == [one.segment.notes.size for one in expected.kept]
    size = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert 0 < size < 152_000
    assert not (tmp_path / "remote/run/copies").exists()


def source_of(entry):
    (source,) = config_for(Path("unused"), [entry]).sources
    return source


def change(path, old, new, count=1):
    """Replace matches of a pattern in a file, plain or gzip, ``count`` times, or rename the first member of a tar."""
    if isinstance(old, str):
        rename_member(path, old, new)
        return
    data = path.read_bytes() if path.exists() else b""
    is_packed = data.startswith(b"\x1f\x8b")
    changed, found = re.subn(old, lambda found: new, gzip.decompress(data) if is_packed else data, count=count)
    assert count in (0, found)
    path.write_bytes(gzip.compress(changed) if is_packed else changed)


def rename_member(path, old, new):
    stream = io.BytesIO()
    with tarfile.open(path) as archive, tarfile.open(fileobj=stream, mode="w") as made:
        for member in archive:
            data = archive.extractfile(member)
            member.name = new if member.name == old else member.name
            made.addfile(member, data)
    path.write_bytes(stream.getvalue())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_records_are_the_same_in_all_forms_and_pieces(form, size, make, tmp_path):
    entry = make(form)
    prepared = run_prepare(config_for(tmp_path, [entry], prepare={"unit_records": size}))
    assert prepared.rejects == []
    assert sorted((u.text, u.speaker.split()[-2], round(u.segment.duration, 6)) for u in prepared.kept) == [
        (f"text {n}", f"Speaker:{name[:-2]}", 1.0 + n / 10) for n, name in enumerate(NAMES)
    ]
    source = source_of(entry)
    whole = [record_text(raw) for raw in source.records()]
    # A source that has been read can be sent to other processes.
    copy = pickle.loads(pickle.dumps(source))
    assert copy == source
    pieces = list(copy.pieces(size))
    parts = [[record_text(raw) for raw in copy.read(piece.params)] for piece in reversed(pieces)]
    assert [len(part) for part in parts] == [piece.num_records for piece in reversed(pieces)]
    assert [text for part in reversed(parts) for text in part] == whole


COMPRESSED = {
    "nemo": "m.json", "nemo_tarred": "manifest_*.json", "table": "table.csv", "lhotse_sets": "*.jsonl",
    "wenet_raw": "data.list", "wenet_shards": "shards.list", "kaldi": "*",
}  # fmt: skip


@pytest.mark.parametrize("end", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("form", COMPRESSED)
def test_compressed_texts_are_read_in_all_forms(form, end, make, tmp_path):
    entry = make(form)
    for path in (tmp_path / "input").glob(COMPRESSED[form]):
        path.write_bytes(pack(end, path.read_bytes()))
    prepared = run_prepare(config_for(tmp_path, [entry], prepare={"unit_records": 1}))
    assert (sorted(one.text for one in prepared.kept), prepared.rejects) == ([f"text {n}" for n in range(4)], [])


# Difference, name of the file, name in the record.
SPELLINGS = [
    ("Unicode form (NFC or NFD)", "J\u00fcrgen.flac", "Ju\u0308rgen.flac"),
    ("upper and lower case", "Anna.FLAC", "anna.flac"), ("upper and lower case", "Deep/anna.flac", "deep/anna.flac"),
    ("kind of blanks", "anna\u202f4.flac", "anna 4.flac"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "there", "wanted"), SPELLINGS)
@pytest.mark.parametrize("is_tarred", [False, True])
def test_a_file_of_another_spelling_is_named_in_the_reject(is_tarred, what, there, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr("sharmill.files.similar.listed", {})  # other tests in this process may have listed many folders
    put(tmp_path / "audio" / there, voice(1.0), 16000)
    lines = [json.dumps({"audio_filepath": name, "text": "x", "speaker": "a"}) for name in (there, wanted)]
    (tmp_path / "m.json").write_text("\n".join(lines))
    entry = {"manifest": str(tmp_path / "m.json"), "audio_root": str(tmp_path / "audio")}
    if is_tarred:
        path = write_tar(tmp_path / "a.tar", [(there, (tmp_path / "audio" / there).read_bytes())])
        entry = {"type": "nemo_tarred", "manifest": entry["manifest"], "tars": str(path)}
    (reject,) = run_prepare(config_for(tmp_path, [entry])).rejects
    assert (reject["reason"], f"in {what}:" in reject["detail"]) == ("missing_audio", True), reject["detail"]


def test_an_input_of_another_spelling_is_named_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr("sharmill.files.similar.listed", {})
    (tmp_path / "M.json").write_text("{}")
    with raises(ConfigError, "missing_input", "differs from 'm.json' in upper and lower case"):
        source_of({"manifest": str(tmp_path / "m.json"), "audio_root": "a"}).check()
    with raises(ConfigError, "missing_input", "differs from 'm.JSON' in upper and lower case"):
        AudioRoot.of(tmp_path / "m.JSON").check()


WITHIN = {
    "nemo": "m.json", "nemo_tarred": "manifest_*.json", "lhotse_cuts": "cuts.jsonl.gz", "lhotse_sets": "sup*.jsonl",
    "lhotse_shar": "shar/cuts.*",
}  # fmt: skip


@pytest.mark.parametrize("form", WITHIN)
def test_a_column_within_a_column_is_the_text(form, make, tmp_path):
    entry = make(form)
    for path in (tmp_path / "input").glob(WITHIN[form]):
        packed = path.suffix == ".gz"
        data = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
        custom = rb'"custom": {"texts": ["Raw.", \1]}' if form.startswith("lhotse") else rb'"texts": ["Raw.", \1]'
        data = re.sub(rb'"text": ("text \d")', custom, data)
        path.write_bytes(gzip.compress(data) if packed else data)
    prepared = run_prepare(config_for(tmp_path, [entry | {"columns": {"text": "texts.1"}}]))
    assert (sorted(one.text for one in prepared.kept), prepared.rejects) == ([f"text {n}" for n in range(4)], [])
    with raises(ConfigError, "unknown_key", "columns.text uses the column 'text.1'", "did you mean 'texts'"):
        source_of(entry | {"columns": {"text": "text.1"}}).check_keys()


# The other formats take the speakers' names from file names.
@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith(("folder", "wenet"))])
def test_a_placeholder_is_no_speaker_in_any_source(form, corpus, tmp_path):
    audio, records = corpus
    (tmp_path / "input").mkdir()
    entry = FORMS[form](tmp_path / "input", [records[0] | {"speaker": "N/A"}, *records[1:]], audio)
    prepared = run_prepare(config_for(tmp_path, [entry], prepare={"unit_records": 2}))
    assert [(reject["reason"], "'N/A'" in reject["detail"]) for reject in prepared.rejects] == [("bad_speaker", True)]
    assert len(prepared.kept) == len(NAMES) - 1


LINES = b"utt000 utt000 0 1\nutt001 utt001 %s\nutt002 utt002 0 1\nutt003 utt003 0 1\n"


# Format, file, change, reason of the reject, words in its message, and number of rejects.
BAD = [
    ("nemo", "m.json", rb'\{"audio_filepath": "anna-1', b'"anna-1', "malformed", "not a JSON object", 1),
    ("nemo", "m.json", b"text 1", b"t\xfcxt", "malformed", "not a JSON object", 1),
    ("nemo", "m.json", b"anna-1", b"../x", "outside_root", "..", 1),
    ("nemo_tarred", "manifest_1.json", b"anna-1", b"none", "missing_audio", "no file named 'none.flac'", 1),
    ("nemo_tarred", "manifest_1.json", b'"anna-1.flac"', b"3", "malformed", "a number, not a text", 1),
    ("nemo_tarred", "manifest_1.json", b'"anna-1.flac"', b"null", "malformed", "audio_filepath is null", 1),
    ("nemo_tarred", "manifest_1.json", b'"text 1"', b"NaN", "malformed", "text is 'nan'", 1),
    ("nemo_tarred", "manifest_1.json", b'"text 1"', b'"a", "_skipme": "noise"', "skipped", "noise", 1),
    ("nemo_tarred", "manifest_1.json", b'anna-1.flac"', b'x", "custom": {"_skipme": 1}', "skipped", "_skipme", 1),
    ("nemo_tarred", "manifest_1.json", rb'\{"audio_filepath": "anna', b'"anna', "malformed", "JSON", 1),
    ("nemo_tarred", "manifest_1.json", b'"anna-1', b'"../../anna-1', "missing_audio", "no file named", 1),
    ("nemo_tarred", "audio_1.tar", b"ben-3", b"ben-4", "unreadable_audio", "is damaged at byte", 1),
    ("nemo_tarred", "audio_1.tar", "ben-3.flac", "anna-1.flac", "ambiguous_audio", "several members named", 2),
    ("table", "table.csv", b",text 1", b",text 1,more", "malformed", "the row has 5 cells", 1),
    ("table", "table.csv", b"anna-1.flac", b'"anna-1.flac" x', "malformed", "the row is not valid CSV", 1),
    ("table", "table.csv", b"anna-1", b"../x", "outside_root", "..", 1),
    ("lhotse_cuts", "cuts.jsonl.gz", b'"MonoCut"', b'"MixedCut"', "unsupported_cut", "MixedCut", 1),
    ("lhotse_cuts", "cuts.jsonl.gz", b'"type": "file"', b'"type": "command"', "outside_root", "command", 1),
    ("lhotse_cuts", "cuts.jsonl.gz", b'"type": "file"', b'"type": "memory"', "unsupported_cut", "the manifest", 1),
    ("lhotse_cuts", "cuts.jsonl.gz", b'"type": "file"', b'"type": "shar"', "unsupported_cut", "of a Shar", 1),
    ("lhotse_cuts", "cuts.jsonl.gz", b'"type": "file"', b'"type": "tape"', "malformed", "'tape'", 1),
    ("lhotse_cuts", "cuts.jsonl.gz", b"[^/]*anna-1.flac", b"../x", "outside_root", "audio root", 1),
    ("lhotse_cuts", "cuts.jsonl.gz", b'"start": 0.0', b'"start": NaN', "malformed", "not a lhotse cut", 1),
    ("lhotse_cuts", "cuts.jsonl.gz", b'"sampling_rate"', b'"transforms": [{"name": "Speed"}], "sampling_rate"',
     "unsupported_cut", "Speed", 1),
    ("lhotse_sets", "recordings.jsonl", b'"id": "anna-1"', b'"id": "x"', "malformed", "no recording has", 1),
    ("lhotse_sets", "recordings.jsonl", b'"id": "ben-2"', b'"id": "anna-0"', "malformed", "different recordings", 2),
    ("lhotse_sets", "supervisions.jsonl", b"text 1", b"t\xfcxt", "malformed", "not a lhotse supervision", 1),
    ("kaldi", "wav.scp", b"utt001 .*", b"utt001 touch x |", "outside_root", "has the command", 1),
    ("kaldi", "wav.scp", b"utt001 .*", b"utt001 sox a.wav -r 8000 -t wav - |", "outside_root", "has the command", 1),
    ("kaldi", "wav.scp", b"utt001 .*", b"utt001 cat ../a.wav |", "outside_root", "..", 1),
    ("kaldi", "wav.scp", b"utt001 .*", b"utt001 raw.ark:1712", "unreadable_audio", "Kaldi archive", 1),
    ("kaldi", "wav.scp", b"utt001 .*", b"utt001", "missing_audio", "no path for 'utt001'", 1),
    ("kaldi", "text", b"utt001 .*", b"utt001 a\nutt001 b", "malformed", "2 different lines for 'utt001'", 1),
    ("kaldi", "segments", b"^", LINES % b"a b", "malformed", "not numbers", 1),
    ("kaldi", "segments", b"^", LINES % b"0.5", "malformed", "start and end", 1),
    ("kaldi", "segments", b"^", LINES % b"0 nan", "malformed", "not finite", 1),
    ("kaldi", "segments", b"^", LINES % b"0 9", "duration_mismatch", "ends at 9 s", 1),
    ("webdataset", "speech-1.tar", b'"speaker": "ben"', b'"speaker"- "ben"', "malformed", "is not a JSON object", 1),
    ("webdataset", "speech-1.tar", b'{"speaker": "ben"}', b'["speaker", "ben"]', "malformed", "not a JSON object", 1),
    ("webdataset", "speech-1.tar", b"ben-3.flac", b"ben-4.flac", "unreadable_audio", "is damaged at byte", 1),
    ("webdataset", "speech-1.tar", "ben-3.flac", "ben-3.fla", "missing_audio", "no audio", 1),
    ("webdataset", "speech-1.tar", "ben-3.txt", "ben-3.wav", "ambiguous_audio", "several audio files", 1),
    ("webdataset", "speech-1.tar", "ben-2.txt", "ben-2.flac", "ambiguous_audio", "two members with", 1),
    ("wenet_raw", "data.list", b'"txt": "text 1"', b'"start": 2, "end": 1', "malformed", "must be times", 1),
    ("wenet_raw", "data.list", rb'\{"key": "anna-1', b'"anna-1', "malformed", "JSON", 1),
    ("wenet_raw", "data.list", b'"[^"]*anna-1.flac', b'"pipe:touch x', "outside_root", "a command", 1),
    ("wenet_shards", "shard_0.tar", "ben-3.txt", "anna-0.txt", "ambiguous_audio", "an earlier sample", 1),
    ("lhotse_shar", "shar/cuts.000000.jsonl.gz", b'"MonoCut"', b'"MixedCut"', "unsupported_cut", "MixedCut", 1),
    ("lhotse_shar", "shar/cuts.000000.jsonl.gz", b"^", b"[" * 100_000 + b"\n", "malformed", "not a lhotse cut", 1),
    ("lhotse_shar", "shar/cuts.000000.jsonl.gz", b'"duration": 1.0', b'"duration": 9.0', "duration_mismatch", "9 s", 1),
    ("lhotse_shar", "shar/recording.000000.tar", b'"num_samples": 17600', b'"num-samples": 17600',
     "malformed", "not a lhotse recording", 1),
]  # fmt: skip


@pytest.mark.parametrize(("form", "file", "old", "new", "reason", "words", "lost"), BAD)
def test_a_bad_entry_is_a_reject_and_the_rest_goes_on(form, file, old, new, reason, words, lost, make, tmp_path):
    entry = make(form, speaker="x") if form == "wenet_shards" else make(form)
    change(tmp_path / "input" / file, old, new)
    prepared = run_prepare(config_for(tmp_path, [entry], prepare={"require_text": False}))
    assert len(prepared.rejects) == lost
    assert all(reason == reject["reason"] and words in reject["detail"] for reject in prepared.rejects[:1])
    assert len(prepared.kept) >= len(NAMES) - lost


TEXTS = {
    "table": "table.csv", "folder_of_texts": "texts/anna-1.txt", "kaldi": "text", "webdataset": "speech-0.tar",
    "wenet_shards": "shard_0.tar",
}  # fmt: skip


@pytest.mark.parametrize("form", TEXTS)
def test_texts_in_an_unnamed_encoding_are_rejected(form, make, tmp_path):
    entry = make(form)
    change(tmp_path / "input" / TEXTS[form], b"text 1", b"t\xfcxt 1")
    prepared = run_prepare(config_for(tmp_path / "utf-8", [entry]))
    assert [(reject["reason"], "set the key encoding" in reject["detail"]) for reject in prepared.rejects] == [
        ("malformed", True)
    ]
    prepared = run_prepare(config_for(tmp_path / "latin-1", [entry | {"encoding": "latin-1"}]))
    assert sorted(u.text for u in prepared.kept) == ["text 0", "text 2", "text 3", "t\u00fcxt 1"]


FILES = [
    ("nemo", "m.json"), ("nemo_tarred", "manifest_0.json"), ("nemo_tarred", "audio_1.tar"), ("table", "table.csv"),
    ("lhotse_cuts", "cuts.jsonl.gz"), ("lhotse_sets", "recordings.jsonl"), ("lhotse_sets", "supervisions.jsonl"),
    ("kaldi", "wav.scp"), ("kaldi", "text"), ("webdataset", "speech-0.tar"), ("wenet_raw", "data.list"),
    ("wenet_shards", "shards.list"), ("parquet", "train.parquet"),
]  # fmt: skip


CONTENTS = {
    "missing": None, "folder": Path.mkdir, "FIFO": os.mkfifo, "empty": b"", "zip": b"PK\x03\x04" + bytes(600),
    "UTF-16": b"\xff\xfea\0\n\0" * 200, "one array": b'[{"a": 1}]',
    "cut off in gzip": gzip.compress(b'{"id": "a"}\n' * 9)[:-9],
    "empty in gzip": gzip.compress(b""), "blank in gzip": gzip.compress(b"\n \n"),
}  # fmt: skip


# Kaldi needs no text, an archive without members has no records, and other formats may have such lines.
NOT_REFUSED = {
    *(("text", content) for content in ("missing", "one array")),
    *((file, content) for file in ("speech-0.tar", "audio_1.tar") for content in ("empty", "one array")),
    *((file, "one array") for file in ("data.list", "shards.list", "wav.scp")),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(("form", "file"), FILES)
def test_an_unusable_file_ends_the_run_before_any_work(form, file, content, make, tmp_path):
    if (file, content) in NOT_REFUSED:
        pytest.skip("records tell")
    entry, path = make(form), tmp_path / "input" / file
    path.unlink()
    found = CONTENTS[content]
    if isinstance(found, bytes):
        path.write_bytes(found)
    elif found is not None:
        found(path)
    with pytest.raises(ConfigError) as caught:
        source_of(entry).identity()
    assert caught.value.code in ("missing_input", "bad_manifest", "unknown_key")
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


# Format, keys of its entry, error code, and words in its message.
WRONG_KEYS = [
    ("nemo", {"manifest": " "}, "bad_config_value", "manifest"),
    ("nemo", {"manifest": []}, "bad_config_value", "manifest"),
    ("nemo", {"audio_root": ["a", " "]}, "bad_config_value", "audio_root"),
    ("nemo_tarred", {"tars": []}, "bad_config_value", "tars"),
    ("nemo_tarred", {"audio_root": "/usr"}, "bad_config_value", "audio root"),
    ("table", {"delimiter": "||"}, "bad_config_value", "one character"),
    ("table", {"encoding": "utf-16"}, "bad_config_value", "UTF-8"),
    ("table", {"encoding": "none"}, "bad_config_value", "'none'"),
    ("table", {"header": ["a", "a"]}, "bad_config_value", "a, a"),
    ("table", {"audio": "{"}, "bad_config_value", "template"),
    ("table", {"audio": "{idd}.wav"}, "unknown_key", "{idd}.wav"),
    ("table", {"columns": {"x": "txt"}}, "unknown_key", "did you mean 'text'"),
    ("table", {"delimiter": "|"}, "unknown_key", "delimiter"),
    ("folder_of_texts", {"audio_root": None}, "bad_config_value", "one folder"),
    ("folder_of_texts", {"audio_suffixes": []}, "bad_config_value", "audio_suffixes"),
    ("folder_of_texts", {"audio_suffixes": [".x"]}, "missing_input", "no file name"),
    ("folder_of_texts", {"text_root": "/none"}, "missing_input", "text_root"),
    ("lhotse_cuts", {"recordings": "r"}, "bad_config_value", "either cuts"),
    ("lhotse_cuts", {"cuts": None}, "bad_config_value", "either cuts"),
    ("lhotse_sets", {"split": True}, "bad_config_value", "split applies only to cuts"),
    ("kaldi", {"data_dir": "/usr"}, "missing_input", "has no wav.scp"),
    ("kaldi", {"data_dir": "/none"}, "missing_input", "data_dir"),
    ("webdataset", {"tars": "pipe:cat a.tar"}, "bad_config_value", "is a command"),
    ("webdataset", {"tars": "ftp://host/{0..9}.tar"}, "bad_config_value", "must begin with"),
    ("webdataset", {"tars": "s3://bucket/*.tar"}, "bad_config_value", "use a range"),
    ("nemo", {"manifest": "https://me:secret@host/m.json"}, "bad_config_value", "password"),
    ("wenet_raw", {"key_pattern": "("}, "bad_config_value", "not a valid regular"),
    ("wenet_raw", {"key_pattern": "a"}, "bad_config_value", "needs a named group"),
    ("wenet_raw", {"data_type": "shard"}, "bad_manifest", "data_type: raw"),
    ("wenet_shards", {"data_type": "raw"}, "bad_manifest", "data_type: shard"),
    ("wenet_shards", {"audio_root": "/usr"}, "missing_input", ""),
    ("parquet", {"audio": "audoi"}, "unknown_key", "did you mean 'audio'"),
    ("parquet", {"columns": {"text": "sentences"}}, "unknown_key", "did you mean 'sentence'"),
    ("parquet", {"columns": {"text": "audio"}}, "bad_config_value", "not text"),
    (
        "parquet",
        {"columns": {"audio_filepath": "sentence"}},
        "bad_config_value",
        "audio_filepath must not be in columns",
    ),
    ("parquet", {"audio_root": "/usr"}, "bad_config_value", "audio root"),
    ("lhotse_shar", {"audio": "recordin"}, "unknown_field", "did you mean 'recording'"),
    ("lhotse_shar", {"shar": "/none"}, "missing_input", "not a folder"),
    ("lhotse_shar", {"audio_root": "/usr"}, "bad_config_value", "audio root"),
]


@pytest.mark.parametrize(("form", "keys", "code", "words"), WRONG_KEYS)
def test_keys_that_do_not_fit_end_the_run_before_any_work(form, keys, code, words, make):
    entry = make(form)
    with raises(ConfigError, code, words):
        source_of(entry | keys).check()


@pytest.mark.parametrize("form", FORMS)
def test_an_unknown_key_in_a_template_gets_a_suggestion(form, make):
    with raises(ConfigError, "unknown_key", "did you mean 'text'?"):
        source_of(make(form, speaker="{textt}")).check_keys()


@pytest.mark.parametrize("form", FORMS)
def test_the_identity_knows_every_file_but_no_time_and_no_folder(form, make, tmp_path):
    entry, here, there = make(form), tmp_path / "input", tmp_path / "moved"
    before = source_of(entry).identity()
    if form != "wenet_shards":  # its list has absolute paths
        shutil.copytree(here, there)
        moved = {key: v.replace(str(here), str(there)) if isinstance(v, str) else v for key, v in entry.items()}
        assert source_of(moved).identity() == before
    # lhotse 2 writes an index beside each file, which is derived from the file and never read here.
    for path in sorted(path for path in here.rglob("*") if path.is_file() and path.suffix != ".idx"):
        data = path.read_bytes()
        os.utime(path, (0, 0))
        assert source_of(entry).identity() == before
        path.write_bytes(data + bytes(512))
        with suppress(ConfigError):  # some are rejected immediately
            assert source_of(entry).identity() != before
        path.write_bytes(data)


# A source of every type with its required keys, in folders of the same name.
LEAST = {
    "nemo": {"manifest": "in/m.json", "audio_root": "audio"},
    "nemo_tarred": {"manifest": "in/m.json", "tars": "in/a.tar"},
    "webdataset": {"tars": "in/a.tar"},
    "wenet": {"data_list": "in/data.list", "audio_root": "audio"},
    "lhotse": {"cuts": "in/cuts.jsonl.gz", "audio_root": "audio"},
    "kaldi": {"data_dir": "in/train", "audio_root": "audio"},
    "annotated": {"annotations": "rttm", "audio_root": "audio", "annotation_root": "in/notes"},
    "table": {"table": "in/t.csv", "audio_root": "audio"},
    "folder": {"audio_root": "audio", "text_root": "in/texts"},
    "lhotse_shar": {"shar": "in/shar"},
    "parquet": {"parquet": "in/p.parquet"},
}


URL = "https://data.example.org/speech"


def source_with(kind, **keys):
    return SOURCES.load(kind)(**LEAST[kind] | keys)


@pytest.mark.parametrize("kind", LEAST)
def test_of_files_and_folders_only_names_identify_a_source(kind):
    text = str(source_with(kind, speaker="{path[0]}", language="en", dataset="d", channel=1).settings())
    assert "in/" not in text
    assert "audio_root" not in text
    assert all(repr(value) in text for value in ("{path[0]}", "en", "d", 1))


@pytest.mark.parametrize(
    ("kind", "keys", "stem"),
    [
        ("nemo", {}, "m"),
        ("nemo", {"manifest": ["in/m.json"]}, None),
        ("nemo", {"manifest": "m_{0..1}.json"}, None),
        ("nemo", {"manifest": "m_<0..1>.json"}, None),
        ("nemo", {"manifest": "m*.json"}, None),
        ("nemo_tarred", {}, "m"),
        ("nemo_tarred", {"manifest": "m_{0..1}.json"}, None),
        ("webdataset", {}, "a"),
        ("wenet", {}, "data"),
        ("lhotse", {}, "cuts"),
        ("lhotse", {"cuts": None, "recordings": "in/r.jsonl"}, "r"),
        ("lhotse", {"cuts": None, "recordings": "in/r.jsonl", "supervisions": "in/s.jsonl"}, "s"),
        ("kaldi", {}, "train"),
        ("annotated", {}, None),
        ("folder", {}, None),
        ("lhotse_shar", {}, "shar"),
        ("parquet", {}, "p"),
    ],
)
def test_manifests_are_called_after_the_only_file(kind, keys, stem):
    assert source_with(kind, **keys).stem == stem


@pytest.mark.parametrize(
    ("kind", "keys", "paths"),
    [
        ("nemo", {"audio_root": ["/a", URL]}, {"manifest": "in/m.json", "audio_root[0]": "/a"}),
        ("nemo_tarred", {"manifest": ["m", "n"]},
         {"manifest[0]": "m", "manifest[1]": "n", "tars": "in/a.tar", "audio_root": "in"}),
        ("lhotse", {"audio_root": URL}, {"cuts": "in/cuts.jsonl.gz"}),
        ("kaldi", {}, {"data_dir": "in/train", "audio_root": "audio"}),
        ("annotated", {}, {"annotation_root": "in/notes", "audio_root": "audio"}),
        ("folder", {"text_root": None}, {"audio_root": "audio"}),
        ("lhotse_shar", {}, {"shar": "in/shar", "audio_root": "in/shar"}),
    ],
)  # fmt: skip
def test_paths_are_those_of_files_and_folders(kind, keys, paths):
    assert source_with(kind, **keys).paths() == paths


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("annotated", {}), ("folder", {}), ("lhotse_shar", {})],
)
def test_a_source_that_looks_into_its_folder_takes_no_url(kind, keys):
    with pytest.raises(ValueError, match=f"audio_root of {kind} cannot be a URL"):
        source_with(kind, audio_root=URL, **keys)


@pytest.mark.parametrize(
    "keys", [{"audio_root": ""}, {"audio_root": []}, {"language": "a b"}, {"dataset": ""}, {"channel": -1},
             {"speaker": "{"}, {"speaker": "{path}"}],
)  # fmt: skip
@pytest.mark.parametrize("kind", LEAST)
def test_keys_that_all_have_are_checked_in_all(kind, keys):
    with pytest.raises(ValueError, match=next(iter(keys)).replace("speaker", "template")):
        source_with(kind, **keys)
