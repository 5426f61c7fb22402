"""The keys that all sources have, and what is made of the keys that name files and folders."""

from __future__ import annotations

import pickle

import pytest
from support.shar import put, voice
from support.source_forms import FORMS

from sharmill.registry import SOURCES

# A source of every type, with the least that it needs, in folders of one name.
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


def make(kind, **keys):
    return SOURCES.load(kind)(**LEAST[kind] | keys)


def test_every_type_is_here():
    assert set(LEAST) == set(SOURCES.own)


@pytest.mark.parametrize("kind", LEAST)
def test_of_files_and_folders_only_names_identify_a_source(kind):
    text = str(make(kind, speaker="{path[0]}", language="en", dataset="d", channel=1).settings())
    assert "in/" not in text
    assert "audio_root" not in text
    assert all(repr(value) in text for value in ("{path[0]}", "en", "d", 1))


def test_the_names_of_several_files():
    assert make("nemo", manifest=["a/m.json", "b/n.json"]).settings()["manifest"] == ["m.json", "n.json"]
    assert make("lhotse").settings()["recordings"] is None


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
    assert make(kind, **keys).stem == stem


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
    assert make(kind, **keys).paths() == paths


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("nemo_tarred", {}), ("webdataset", {}), ("wenet", {"data_type": "shard"}), ("annotated", {}), ("folder", {}),
     ("lhotse_shar", {})],
)  # fmt: skip
def test_a_source_that_looks_into_its_folder_takes_no_url(kind, keys):
    with pytest.raises(ValueError, match=f"audio_root of {kind} is a folder to look into, and cannot be a URL"):
        make(kind, audio_root=URL, **keys)


@pytest.mark.parametrize(
    "keys", [{"audio_root": ""}, {"audio_root": []}, {"language": "a b"}, {"dataset": ""}, {"channel": -1},
             {"speaker": "{"}, {"speaker": "{path}"}],
)  # fmt: skip
@pytest.mark.parametrize("kind", LEAST)
def test_keys_that_all_have_are_checked_in_all(kind, keys):
    with pytest.raises(ValueError, match=next(iter(keys)).replace("speaker", "template")):
        make(kind, **keys)


@pytest.mark.parametrize("form", FORMS)
def test_a_source_that_was_read_is_sent_to_other_processes(form, tmp_path):
    put(tmp_path / "speech/one-1.wav", voice(1.0), 16000)
    (tmp_path / "form").mkdir()
    record = {"audio_filepath": "one-1.wav", "duration": 1.0, "speaker": "one", "text": "yes"}
    keys = {"type": "nemo"} | FORMS[form](tmp_path / "form", [record], tmp_path / "speech")
    source = SOURCES.load(keys.pop("type"))(**keys)
    (piece,) = source.pieces(10)
    (found,) = source.read(piece.params)
    copy = pickle.loads(pickle.dumps(source))
    assert copy == source
    assert list(copy.read(piece.params)) == [found]
