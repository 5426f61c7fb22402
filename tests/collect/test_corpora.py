"""Corpora in the form in which they are published, on small trees of the same form."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import corpus_trees
from support.corpus_trees import TREES
from support.errors import raises

from sharmill.collect.manifest import ManifestOptions, make_manifest
from sharmill.errors import ConfigError


def make(name, tmp_path, tree=None, *, force=False, **options):
    """Makes the manifests of a corpus; returns the file names and their records, and the notes."""
    root = tmp_path / "corpus"
    (tree or TREES[name])(root)
    options = ManifestOptions(corpus=name, **options)
    _, totals = make_manifest([str(root)], str(tmp_path / "m.json"), options, workers=1, force=force)
    files = {
        path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("m*json")
    }
    return files, totals.notes


def tag(dataset, speaker, language="en"):
    return f"| Language:{language} Dataset:{dataset} Speaker:{speaker} |"


EXPECTED = {
    "LibriSpeech": {
        "m.dev-clean.json": [("dev-clean/84/121123/84-121123-0000.flac", 0.5, "GO", tag("LibriSpeech", "84")),
                             ("dev-clean/84/121123/84-121123-0001.flac", 0.625, "DO YOU", tag("LibriSpeech", "84"))],
        "m.train-clean-100.json": [
            ("train-clean-100/19/198/19-198-0000.flac", 0.25, "GO", tag("LibriSpeech", "19")),
            ("train-clean-100/19/198/19-198-0001.flac", 0.375, "DO YOU", tag("LibriSpeech", "19"))],
    },
    "LibriTTS": {"m.dev-clean.json": [("dev-clean/84/121123/84_121123_000007_000001.wav", 0.5, "Maximilian one.",
                                       tag("LibriTTS", "84"))]},
    "HiFi-TTS": {"m.92_clean_dev.json": [("audio/92_clean/1/two.flac", 0.5, "two", tag("HiFiTTS", "92_clean"))],
                 "m.92_clean_train.json": [("audio/92_clean/1/one.flac", 0.5, "one", tag("HiFiTTS", "92_clean"))]},
    "VCTK": {"m.json": [("wav48_silence_trimmed/p225/p225_001_mic2.flac", 0.5, "Please call Stella.",
                         tag("VCTK", "p225"))]},
    "LJSpeech": {"m.json": [("wavs/LJ001-0001.wav", 0.5, "Chapter 1", tag("LJSpeech", "LJ"))]},
    "Aishell-1": {
        f"m.{part}.json": [(f"data_aishell/wav/{part}/S000{number}/BAC009S000{number}W0121.wav", 0.5, "甚至出现交易",
                            tag("AISHELL-1", f"S000{number}", "zh"))]
        for number, part in enumerate(("train", "dev", "test"))
    },
    "AIShell-2": {
        f"m.{part}.json": [(f"AISHELL-2/iOS/{folder}/wav/C000{number}/IC000{number}W0001.wav", 0.5, "听广岛之恋",
                            tag("AISHELL-2", f"C000{number}", "zh"))]
        for number, (part, folder) in enumerate((("train", "data"), ("dev", "dev"), ("test", "test")))
    },
    "Fisher English Training Speech": {"m.json": [
        (f"LDC200{year}S13/fe_03_p{part}_sph1/audio/000/fe_03_0000{part}.sph", seconds, text, tag("Fisher", speaker))
        for year, part in ((4, 1), (5, 2))
        for seconds, text, speaker in ((0.75, "hello there", 2602), (1.0, "hi", 1790))
    ]},
    "HUB5": {"m.json": [("LDC2002S09/hub5e_00/english/en_4156.sph", 0.75, "yeah", tag("HUB5", "en_4156-A")),
                        ("LDC2002S09/hub5e_00/english/en_4156.sph", 1.0, "mhm right", tag("HUB5", "en_4156-B"))]},
    "AN4": {"m.train.json": [("wav/an4_clstk/fash/an251-fash-b.sph", 0.5, "R U B OUT", tag("AN4", "fash"))],
            "m.test.json": [("wav/an4test_clstk/mcaw/cen6-mcaw-b.sph", 0.5, "G L E N", tag("AN4", "mcaw"))]},
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_the_corpora_of_nemos_documentation(name, tmp_path):
    files, _ = make(name, tmp_path)
    found = {
        file: [(row["audio_filepath"], row["duration"], row["text"], row["speaker"]) for row in rows]
        for file, rows in files.items()
    }
    assert found == EXPECTED[name]


def test_further_keys_and_segments(tmp_path):
    rows = make("HUB5", tmp_path)[0]["m.json"]
    assert [(row["offset"], row["channel"]) for row in rows] == [(0.5, 0), (1.0, 1)]
    (row,) = make("LibriTTS", tmp_path / "b")[0]["m.dev-clean.json"]
    assert (row["gender"], row["orig_text"], row["snr"], "offset" in row) == ("F", "Maximilian 1.", 21.5, False)


def test_what_a_recipe_leaves_out_is_noted(tmp_path):
    _, notes = make("LibriSpeech", tmp_path)
    assert len(notes) == 1
    assert "84-121123-0002.flac" in notes[0]
    assert (tmp_path / "m.recipe.log").read_text().count("No such file") == 2


@pytest.mark.parametrize(
    ("name", "tree", "path"),
    [
        ("vctk", corpus_trees.vctk_of_2012, "wav48/p225/p225_001.wav"),
        ("fisher", corpus_trees.fisher_as_nemo_has_it, "LDC2004S13-Part1/fe_03_p1_sph1/audio/000/fe_03_00001.sph"),
        ("fisher", corpus_trees.fisher, "LDC2004S13/fe_03_p1_sph1/audio/000/fe_03_00001.sph"),
        ("an4", lambda root: corpus_trees.an4(root / "an4"), "an4/wav/an4_clstk/fash/an251-fash-b.sph"),
    ],
)
def test_other_forms_of_a_corpus(name, tree, path, tmp_path):
    files, _ = make(name, tmp_path, tree)
    assert files[min(files, key=len) if "m.train.json" not in files else "m.train.json"][0]["audio_filepath"] == path


@pytest.mark.parametrize(("damage", "reason"), [(b"", "empty_audio"), (b"no audio", "unreadable_audio")])
@pytest.mark.parametrize(("name", "path", "count"), [
    ("HUB5", "LDC2002S09/hub5e_00/english/en_4156.sph", 2), ("LJSpeech", "wavs/LJ001-0001.wav", 1),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_a_reject(damage, reason, name, path, count, tmp_path):
    def tree(root):
        TREES[name](root)
        (root / path).write_bytes(damage)
        good = {"HUB5": "en_5000", "LJSpeech": "LJ001-0002"}[name]
        TREES[name](root / "again")
        (root / path).with_name(f"{good}{Path(path).suffix}").write_bytes((root / "again" / path).read_bytes())
        if name == "LJSpeech":
            with (root / "metadata.csv").open("a") as table:
                table.write(f"{good}|x|y\n")
        else:
            texts = root / "LDC2002T43/reference/english"
            (texts / f"{good}.txt").write_text((texts / "en_4156.txt").read_text())

    files, _ = make(name, tmp_path, tree)
    assert len(files["m.json"]) == count
    rejects = [json.loads(line) for line in (tmp_path / "m.rejects.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rejects] == [reason] * count


def test_splits_by_name_and_pattern(tmp_path):
    assert set(make("Aishell-1", tmp_path, splits=("dev", "t*t"))[0]) == {"m.dev.json", "m.test.json"}
    with raises(ConfigError, "bad_usage", "valid", "dev, test, train"):
        make("Aishell-1", tmp_path / "b", splits=("valid",))


def test_manifests_of_splits_are_replaced_only_by_force(tmp_path):
    (tmp_path / "m.dev.json").write_text("mine")
    with raises(ConfigError, "foreign_output", "m.dev.json", "--force"):
        make("Aishell-1", tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["m.dev.json"]
    assert (tmp_path / "m.dev.json").read_text() == "mine"
    assert len(make("Aishell-1", tmp_path, force=True)[0]) == 3


@pytest.mark.parametrize(("of_words", "lines"), [(False, "UBORT"), (True, ["B", "OUT", "R", "U"])])
def test_the_vocabulary_is_that_of_the_training_split(of_words, lines, tmp_path):
    make("AN4", tmp_path, vocabulary=str(tmp_path / "vocab.txt"), of_words=of_words)
    assert (tmp_path / "vocab.txt").read_text().split() == list(lines)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("lhotse:librispeech", "librispeech"), ("lhotse:an4", "an4"), ("AISHELL-2", "aishell2"),
     ("fisher", "fisher_english"), ("lhotse:eval2000", "eval2000"), ("lhotse:yesno", "yesno"),
     ("lhotse:tedlium2", "tedlium2")],
)  # fmt: skip
def test_names_of_corpora(name, recipe, tmp_path):
    with pytest.raises(ConfigError, match=f"the recipe {recipe} "):
        make(name, tmp_path, lambda root: root.mkdir())


@pytest.mark.parametrize(("name", "near"), [("lhotse:librispeach", "'librispeech'"), ("hifits", "'hifitts'")])
def test_an_unknown_corpus_has_the_nearest_name(name, near, tmp_path):
    with raises(ConfigError, "unknown_name", name, near):
        make(name, tmp_path, lambda root: root.mkdir())


@pytest.mark.parametrize("name", [*TREES, "yesno"])
def test_a_folder_of_another_form_ends_with_one_line(name, tmp_path):
    with pytest.raises(ConfigError) as caught:
        make(name, tmp_path, lambda root: root.mkdir())
    assert caught.value.code in ("bad_manifest", "missing_input")
    assert str(tmp_path / "corpus") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_parts_of_a_corpus_end_with_one_line(tmp_path):
    def tree(root):
        TREES["AN4"](root)
        (root / "etc/an4_train.transcription").unlink()

    with raises(ConfigError, "bad_manifest", "an4_train.transcription"):
        make("AN4", tmp_path, tree)


@pytest.mark.skipif(find_spec("textgrid") is not None, reason="the package is here")
def test_a_recipe_that_needs_a_missing_package_says_so(tmp_path):
    with raises(ConfigError, "bad_manifest", "pip install textgrid"):
        make("lhotse:aishell4", tmp_path, lambda root: root.mkdir())


@pytest.mark.parametrize(("options", "names"), [({"normalise_text": 1}, ["normalise_text", "normalize_text"])])
def test_arguments_of_a_recipe(options, names, tmp_path):
    with raises(ConfigError, "bad_usage", *names):
        make("LibriSpeech", tmp_path, recipe_options=options)
    files, _ = make("LibriSpeech", tmp_path / "b", recipe_options={"normalize_text": "lower"})
    assert files["m.dev-clean.json"][0]["text"] == "go"
