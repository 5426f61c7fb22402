"""Corpora in their published layouts, as small trees of files."""

import json
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from support.project import lines, raises, run_sharmill
from support.web import serving

from sharmill.collect.manifest import ManifestOptions, make_manifest
from sharmill.errors import ConfigError, FatalError


@dataclass(frozen=True)
class Tone:
    """An audio file; the suffix ``.sph`` makes it SPHERE."""

    seconds: float = 0.5
    rate: int = 16000
    channels: int = 1
    subtype: str | None = None

    def write(self, path: Path) -> None:
        tone = 0.1 * np.sin(2 * np.pi * 220 * np.arange(round(self.seconds * self.rate)) / self.rate)
        samples = np.repeat(tone[:, None], self.channels, axis=1)
        form = "NIST" if path.suffix == ".sph" else None
        sf.write(path, samples, self.rate, format=form, subtype=self.subtype)


Tree = dict[str, str | Tone]
CALL = Tone(3.0, 8000, 2, "ULAW")


def write_tree(root: Path, tree: Tree) -> None:
    """Write the files of a tree."""
    for name, content in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            content.write(path)


def _librispeech(part: str, name: str, seconds: float) -> Tree:
    folder = f"{part}/{name.replace('-', '/')}/{name}"
    return {
        f"{folder}-0000.flac": Tone(seconds),
        f"{folder}-0001.flac": Tone(seconds + 0.125),
        f"{folder}.trans.txt": f"{name}-0000 GO\n{name}-0001 DO YOU\n{name}-0002 NOT HERE\n",
    }


def _hifitts(split: str, name: str) -> Tree:
    return {
        f"audio/92_clean/1/{name}.flac": Tone(rate=44100),
        f"92_manifest_clean_{split}.json": f'{{"audio_filepath": "audio/92_clean/1/{name}.flac", "text": "{name}", '
        f'"duration": 0.5, "text_no_preprocessing": "{name}", "text_normalized": "{name.capitalize()}."}}\n',
    }


def _fisher(audio: str = "LDC2004S13", texts: str = "LDC2004T19", part: str = "1") -> Tree:
    name = f"fe_03_0000{part}"
    return {
        f"{audio}/fe_03_p{part}_sph1/audio/000/{name}.sph": CALL,
        f"{texts}/data/trans/000/{name}.txt": f"# {name}.sph\n# Transcribed at the LDC\n\n0.25 1.00 A: hello there\n"
        "1.50 2.50 B: hi\n",
        f"{texts}/doc/fe_03_p{part}_calldata.tbl": "CALL_ID,DATE_TIME,TOPICID,SIG_GRADE,CNV_GRADE,APIN,ASX.DL,APHNUM,"
        f"APHSET,APHTYP,BPIN,BSX.DL\n0000{part},20021127,ENG01,4,4,2602,f.a,1,1,1,1790,m.a\n",
    }


_LIBRITTS = "84_121123_000007_000001"
AN4: Tree = {
    "wav/an4_clstk/fash/an251-fash-b.sph": Tone(),
    "wav/an4test_clstk/mcaw/cen6-mcaw-b.sph": Tone(),
    "etc/an4_train.fileids": "an4_clstk/fash/an251-fash-b\n",
    "etc/an4_test.fileids": "an4test_clstk/mcaw/cen6-mcaw-b\n",
    "etc/an4_train.transcription": "<s> R U B OUT </s> (an251-fash-b)\n",
    "etc/an4_test.transcription": "G L E N (cen6-mcaw-b)\n",
}
STM = """;; CATEGORY "0" "" ""
en_4156 A inter_segment_gap 0.00 0.25 <O,en,F,en-F> IGNORE_TIME_SEGMENT_IN_SCORING
en_4156 A en_4156_A 0.25 0.75 <O,en,F,en-F> (%HESITATION) WELL-KNOWN
en_4156 A en_4156_A 1.00 1.50 <O,en,F,en-F> <B_ASIDE> HI <E_ASIDE> TH(ERE)
en_4156 A en_4156_A 1.50 1.75 <O,en,F,en-F> BYE
en_4156 B en_4156_B 0.50 1.00 <O,en,F,en-F> UH
en_4156 B en_4156_B1 1.00 1.25 <O,en,F,en-F> YES
en_4156 B en_4156_B 1.25 1.50 <O,en,F,en-F> NO
en_4156 B excluded_region 1.50 1.75 <O,en,F,en-F> IGNORE_TIME_SEGMENT_IN_SCORING
en_4156 B en_4156_B 1.75 2.00 <O,en,F,en-F> SO
"""
# Trees by corpus name as in NeMo's documentation.
TREES: dict[str, Tree] = {
    "LibriSpeech": _librispeech("dev-clean", "84-121123", 0.5) | _librispeech("train-clean-100", "19-198", 0.25),
    "LibriTTS": {
        f"dev-clean/84/121123/{_LIBRITTS}.wav": Tone(rate=24000),
        "dev-clean/84/121123/84_121123.trans.tsv": f"{_LIBRITTS}\tMaximilian 1.\tMaximilian one.\n",
        "dev-clean/84/121123/84_121123.book.tsv": f"{_LIBRITTS}\tMaximilian.\t1\t2\t21.5\n",
        "SPEAKERS.txt": "; ID |SEX| SUBSET |MINUTES| NAME\n84 | F | dev-clean | 8.02 | Christie\n",
    },
    "HiFi-TTS": _hifitts("train", "one") | _hifitts("dev", "two"),
    "VCTK": {
        "speaker-info.txt": "ID AGE GENDER ACCENTS REGION COMMENTS\np225 23 F English Southern England\n",
        "wav48_silence_trimmed/p225/p225_001_mic1.flac": Tone(rate=48000),
        "wav48_silence_trimmed/p225/p225_001_mic2.flac": Tone(rate=48000),
        "txt/p225/p225_001.txt": "Please call Stella.\n",
    },
    "LJSpeech": {"wavs/LJ001-0001.wav": Tone(rate=22050), "metadata.csv": "LJ001-0001|Chapter 1|Chapter one\n"},
    "Aishell-1": {
        **{
            f"data_aishell/wav/{part}/S000{number}/BAC009S000{number}W0121.wav": Tone()
            for number, part in enumerate(("train", "dev", "test"))
        },
        "data_aishell/transcript/aishell_transcript_v0.8.txt": "".join(
            f"BAC009S000{number}W0121 甚至 出现 交易\n" for number in range(3)
        ),
    },
    "AIShell-2": {
        f"AISHELL-2/iOS/{part}/{name}": content
        for number, part in enumerate(("data", "dev", "test"))
        for name, content in (
            (f"wav/C000{number}/IC000{number}W0001.wav", Tone()),
            ("trans.txt", f"IC000{number}W0001\t听广岛之恋\n"),
        )
    },
    "Fisher English Training Speech": _fisher() | _fisher("LDC2005S13", "LDC2005T19", "2"),
    "2000 HUB5": {
        "hub5e_00/english/en_4156.sph": CALL,
        "2000_hub5_eng_eval_tr/reference/hub5e00.english.000405.stm": STM,
    },
    "HUB5": {
        "LDC2002S09/hub5e_00/english/en_4156.sph": CALL,
        "LDC2002T43/reference/english/en_4156.txt": "#Language: eng\n#File id: 4156\n\n0.50 1.25 A: yeah\n\n"
        "1.00 2.00 B: mhm right\n",
    },
    "AN4": AN4,
}
OLD_VCTK: Tree = {
    "speaker-info.txt": "ID AGE GENDER ACCENTS REGION\n225 23 F English Southern England\n",
    "wav48/p225/p225_001.wav": Tone(rate=48000),
    "txt/p225/p225_001.txt": "Please call Stella.\n",
}
ONE_FISHER = _fisher()
FISHER_OF_NEMO = _fisher("LDC2004S13-Part1", "LDC2004S13-Part1/fe_03_p1_transcripts") | _fisher(
    "LDC2005S13-Part2", "LDC2005S13-Part2/fe_03_p2_transcripts", "2"
)


def make(name, tmp_path, tree=None, **options):
    """Create the manifests of a corpus; return records by file name, and the notes."""
    root = tmp_path / "corpus"
    root.mkdir(parents=True)
    write_tree(root, TREES[name] if tree is None else tree)
    options = ManifestOptions(corpus=name, **options)
    _, totals = make_manifest([str(root)], str(tmp_path / "m.json"), options, workers=1)
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
    "Fisher English Training Speech": {"m.train.json": [
        (f"LDC200{year}S13/fe_03_p{part}_sph1/audio/000/fe_03_0000{part}.sph", seconds, text, tag("Fisher", speaker))
        for year, part in ((4, 1), (5, 2))
        for seconds, text, speaker in ((0.75, "hello there", 2602), (1.0, "hi", 1790))
    ]},
    "2000 HUB5": {"m.json": [
        ("hub5e_00/english/en_4156.sph", seconds, text, tag("HUB5", f"en_4156_{speaker}"))
        for seconds, text, speaker in (
            (0.5, "uh wellknown", "A"), (0.5, "uh", "B"), (0.5, "hi there", "A"), (0.25, "yes", "B1"),
            (0.25, "no", "B"), (0.25, "bye", "A"), (0.25, "so", "B"),
        )
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


def test_what_a_recipe_leaves_out_is_noted(tmp_path):
    _, notes = make("LibriSpeech", tmp_path)
    assert len(notes) == 1
    assert "84-121123-0002.flac" in notes[0]
    assert (tmp_path / "m.recipe.log").read_text().count("No such file") == 2


@pytest.mark.parametrize(
    ("name", "tree", "path"),
    [
        ("vctk", OLD_VCTK, "wav48/p225/p225_001.wav"),
        ("fisher", FISHER_OF_NEMO, "LDC2004S13-Part1/fe_03_p1_sph1/audio/000/fe_03_00001.sph"),
        ("fisher", ONE_FISHER, "LDC2004S13/fe_03_p1_sph1/audio/000/fe_03_00001.sph"),
        ("an4", {f"an4/{path}": content for path, content in AN4.items()}, "an4/wav/an4_clstk/fash/an251-fash-b.sph"),
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
    tree, good = TREES[name], {"HUB5": "en_5000", "LJSpeech": "LJ001-0002"}[name]
    bad = Path(path).stem
    further = {file.replace(bad, good): content for file, content in tree.items() if bad in file}
    if name == "LJSpeech":
        further["metadata.csv"] = f"{tree['metadata.csv']}{good}|x|y\n"
    files, _ = make(name, tmp_path, tree | further | {path: damage.decode()})
    assert len(files["m.json"]) == count
    rejects = [json.loads(line) for line in (tmp_path / "m.rejects.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rejects] == [reason] * count


def test_splits_by_name_and_pattern(tmp_path):
    assert set(make("Aishell-1", tmp_path, splits=("dev", "t*t"))[0]) == {"m.dev.json", "m.test.json"}
    with raises(ConfigError, "bad_usage", "valid", "dev, test, train"):
        make("Aishell-1", tmp_path / "b", splits=("valid",))


@pytest.mark.parametrize(("word_vocabulary", "lines"), [(False, "UBORT"), (True, ["B", "OUT", "R", "U"])])
def test_the_vocabulary_is_that_of_the_training_split(word_vocabulary, lines, tmp_path):
    make("AN4", tmp_path, vocabulary=str(tmp_path / "vocab.txt"), word_vocabulary=word_vocabulary)
    assert (tmp_path / "vocab.txt").read_text().split() == list(lines)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("lhotse:librispeech", "librispeech"), ("lhotse:an4", "an4"), ("AISHELL-2", "aishell2"),
     ("fisher", "fisher_english"), ("lhotse:eval2000", "eval2000"), ("lhotse:yesno", "yesno"),
     ("lhotse:tedlium2", "tedlium2")],
)  # fmt: skip
def test_names_of_corpora(name, recipe, tmp_path):
    with pytest.raises(ConfigError, match=f"the recipe {recipe} "):
        make(name, tmp_path, {})


@pytest.mark.parametrize(("name", "near"), [("lhotse:librispeach", "'librispeech'"), ("hifits", "'hifitts'")])
def test_an_unknown_corpus_has_the_nearest_name(name, near, tmp_path):
    with raises(ConfigError, "unknown_name", name, near):
        make(name, tmp_path, {})


@pytest.mark.parametrize("name", [*TREES, "yesno"])
def test_a_folder_of_another_form_ends_with_one_line(name, tmp_path):
    with pytest.raises(ConfigError) as caught:
        make(name, tmp_path, {})
    assert caught.value.code in ("bad_manifest", "missing_input")
    assert str(tmp_path / "corpus") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "names"), [({"normalise_text": 1}, ["normalise_text", "normalize_text"])])
def test_arguments_of_a_recipe(options, names, tmp_path):
    with raises(ConfigError, "bad_usage", *names):
        make("LibriSpeech", tmp_path, recipe_options=options)
    files, _ = make("LibriSpeech", tmp_path / "b", recipe_options={"normalize_text": "lower"})
    assert files["m.dev-clean.json"][0]["text"] == "go"


def test_librispeech_in_small_letters_as_nemos_script(tmp_path):
    write_tree(tmp_path / "corpus", TREES["LibriSpeech"])
    options = ("--from", "librispeech", "--recipe-option", "normalize_text=lower", "--splits", "dev-clean")
    run_sharmill("manifest", tmp_path / "corpus", "-o", tmp_path / "m.json", *options)
    assert [row["text"] for row in lines(tmp_path / "m.dev-clean.json")] == ["go", "do you"]


def calls(count: int, *lines: str) -> Tree:
    """Return a tree of Fisher with ``count`` calls, whose texts have the usual header and these lines."""
    tree, table = dict(ONE_FISHER), "CALL_ID,,,,,A,,,,,B\n"
    for number in range(1, count + 1):
        name = f"fe_03_{number:05d}"
        tree[f"LDC2004S13/fe_03_p1_sph1/audio/000/{name}.sph"] = CALL
        tree[f"LDC2004T19/data/trans/000/{name}.txt"] = "\n".join((f"# {name}", "# LDC", "", *lines, ""))
        table += f"{number:05d},,,,,{2 * number},,,,,{2 * number + 1}\n"
    return tree | {"LDC2004T19/doc/fe_03_p1_calldata.tbl": table}


def test_fisher_is_split_into_tenths_of_its_files(tmp_path):
    files, _ = make("fisher", tmp_path, calls(20, "0.00 1.00 A: hello"))
    names = {split: [Path(row["audio_filepath"]).stem[-2:] for row in rows] for split, rows in files.items()}
    assert names == {
        "m.train.json": [f"{number:02d}" for number in range(1, 17)],
        "m.validation.json": ["17", "18"], "m.test.json": ["19", "20"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tree", "left_out", "missing"),
    [(ONE_FISHER, "/doc/", "/LDC2004T19/doc"), (FISHER_OF_NEMO, "/doc/", "/LDC2004S13-Part1/fe_03_p1_transcripts/doc"),
     (ONE_FISHER, "T19", "")],
)  # fmt: skip
def test_what_fisher_lacks_is_named_in_the_folder_of_the_user(tree, left_out, missing, tmp_path):
    tree = {path: content for path, content in tree.items() if left_out not in path}
    with raises(ConfigError, "bad_manifest", f"{tmp_path}/corpus{missing}") as caught:
        make("fisher", tmp_path, tree)
    assert f"{tmp_path}/corpus{missing}" in str(caught.value).partition(": ")[2]
    assert "sharmill-fisher" not in str(caught.value)


FISHER_TEXTS = (
    "0.00 0.50 A: [laughter] I'd say, 'Mini'-van. <noise>", "0.50 0.75 B: (( maybe ))", "0.75 1.00 A: [noise] [[skip]]",
    "1.00 1.50 B: [uh] on A._B._C.", "1.50 1.75 A: (( so ))", "1.75 2.00 A: bye", "2.00 2.50 A: bye!",
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "found", "notes"),
    [
        ([], [(0.5, "[laughter] I'd say, 'Mini'-van. <noise>"), (0.25, "(( maybe ))"), (0.25, "[noise] [[skip]]"),
              (0.5, "[uh] on A._B._C."), (0.25, "(( so ))"), (0.25, "bye"), (0.5, "bye!")], []),
        (["--remove-noises"], [(0.5, "i'd say minivan"), (0.5, "uh on a b c"), (0.25, "bye"), (0.5, "bye")],
         ["3 utterances are left out"]),
        # No joined utterance spans an uncertain one, which would be in the audio but not in the text.
        (["--remove-noises", "--min-segment", "0.6"], [(0.75, "bye bye")],
         ["3 utterances are left out", "2 utterances are left out: even joined, they last less than 0.6 s"]),
    ],
)  # fmt: skip
def test_texts_of_fisher(options, found, notes, tmp_path):
    write_tree(tmp_path / "corpus", calls(1, *FISHER_TEXTS))
    done = run_sharmill("manifest", tmp_path / "corpus", "-o", tmp_path / "m.json", "--from", "fisher", *options)
    assert [(row["duration"], row["text"]) for row in lines(tmp_path / "m.train.json")] == found
    log = tmp_path / "m.recipe.log"
    assert all(note in (done.stdout + log.read_text() if notes else "") for note in notes)


@pytest.mark.parametrize(
    ("least", "found"),
    [(0.6, [(0.25, 1.25, "uh wellknown hi there")]), (1.5, [(0.25, 1.5, "uh wellknown hi there bye")]),
     (0.5, [(0.25, 0.5, "uh wellknown"), (0.5, 0.5, "uh"), (1.0, 0.5, "hi there")])],
)  # fmt: skip
def test_utterances_are_joined_to_a_minimum_duration(least, found, tmp_path):
    files, notes = make("2000 HUB5", tmp_path, min_segment=least)
    assert [(row["offset"], row["duration"], row["text"]) for row in files["m.json"]] == found
    assert "left out: even joined, they last less than" in notes[-1]


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [("LibriSpeech", {"min_segment": 10.0}, ["--min-segment"]), ("AN4", {"min_segment": 10.0}, ["--min-segment"]),
     ("LibriSpeech", {"recipe_options": {"remove_noises": True}}, ["remove_noises", "librispeech"]),
     ("HUB5", {"download": True}, ["lhotse cannot download eval2000", "--download"]),
     ("AN4", {"download": True}, ["lhotse cannot download an4"]),
     ("LibriSpeech", {"download": True, "splits": ("dev",)}, ["--splits dev", "dev-clean, dev-other"])],
)  # fmt: skip
def test_what_a_corpus_does_not_have_is_refused(name, options, names, tmp_path):
    with raises(ConfigError, "bad_usage", *names):
        make(name, tmp_path, **options)


def test_a_line_that_is_no_stm_is_named(tmp_path):
    path = "2000_hub5_eng_eval_tr/reference/hub5e00.english.000405.stm"
    with raises(ConfigError, "bad_manifest", path, "line 2 ", "en_4156 A"):
        make("2000 HUB5", tmp_path, TREES["2000 HUB5"] | {path: ";;\nen_4156 A\n"})


def pack(archive: Path, *folders: Path, root: str) -> None:
    """Pack folders into an archive, below ``root``."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for folder in folders:
            tar.add(folder, f"{root}/{folder.name}")


@pytest.fixture
def openslr(tmp_path):
    """A server for archives of corpora, with OpenSLR's paths."""
    published, web = tmp_path / "published", tmp_path / "web"
    for name in ("LibriSpeech", "LibriTTS", "HiFi-TTS", "Aishell-1"):
        write_tree(published / name, TREES[name])
    for part in ("dev-clean", "train-clean-100"):
        pack(web / f"12/{part}.tar.gz", published / "LibriSpeech" / part, root="LibriSpeech")
    pack(web / "60/dev-clean.tar.gz", published / "LibriTTS/dev-clean", root="LibriTTS")
    pack(web / "109/hi_fi_tts_v0.tar.gz", *(published / "HiFi-TTS").iterdir(), root="hi_fi_tts_v0")
    aishell = published / "Aishell-1/data_aishell"
    for part in [*(aishell / "wav").iterdir()]:
        pack(aishell / f"wav/{part.name}.tar.gz", part, root=".")
        shutil.rmtree(part)
    pack(web / "33/data_aishell.tgz", *aishell.iterdir(), root="data_aishell")
    pack(web / "33/resource_aishell.tgz", aishell / "transcript", root="resource_aishell")
    with serving(web) as server:
        yield server


def download(tmp_path, url, splits=("dev-clean", "train-clean-100"), corpus="librispeech"):
    """Download a corpus into ``data``; return the first paths of the manifests."""
    options = ManifestOptions(corpus=corpus, download=True, splits=splits, recipe_options={"base_url": url}, force=True)
    make_manifest([str(tmp_path / "data")], str(tmp_path / "m.json"), options, workers=1)
    return {path.name: lines(path)[0]["audio_filepath"] for path in tmp_path.glob("m*json")}


DOWNLOADED = {
    "m.dev-clean.json": "LibriSpeech/dev-clean/84/121123/84-121123-0000.flac",
    "m.train-clean-100.json": "LibriSpeech/train-clean-100/19/198/19-198-0000.flac",
}


def test_a_corpus_is_downloaded_once(tmp_path, openslr):
    assert download(tmp_path, openslr.url) == DOWNLOADED
    asked = dict(openslr.requests)
    assert asked == {"/12/dev-clean.tar.gz": 1, "/12/train-clean-100.tar.gz": 1}
    run_sharmill(
        "manifest", tmp_path / "data", "-o", tmp_path / "again.json", "--from", "librispeech", "--download",
        "--splits", "dev-clean,train-*100", "--recipe-option", f"base_url={openslr.url}",
    )  # fmt: skip
    assert openslr.requests == asked
    assert (tmp_path / "again.train-clean-100.json").read_bytes() == (tmp_path / "m.train-clean-100.json").read_bytes()


@pytest.mark.parametrize(
    ("corpus", "split", "path"),
    [("libritts", "dev-clean", "LibriTTS/dev-clean/84/121123/84_121123_000007_000001.wav"),
     ("hifitts", "92_clean_dev", "hi_fi_tts_v0/audio/92_clean/1/two.flac"),
     ("aishell", "train", "aishell/data_aishell/wav/train/S0000/BAC009S0000W0121.wav")],
)  # fmt: skip
def test_each_corpus_is_read_where_lhotse_has_unpacked_it(corpus, split, path, tmp_path, openslr):
    assert download(tmp_path, openslr.url, (split,), corpus) == {f"m.{split}.json": path}


@pytest.mark.parametrize("kind", ["once-cut", "once-500"])
def test_a_partial_download_is_resumed(kind, tmp_path, openslr):
    splits, url = ("dev-clean",), f"{openslr.url}/{kind}"
    with raises(FatalError, "missing_input", "the download of librispeech to", "run the same command again") as caught:
        download(tmp_path, url, splits)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("m*"))
    assert download(tmp_path, url, splits) == {"m.dev-clean.json": DOWNLOADED["m.dev-clean.json"]}


def test_an_unreachable_server_ends_the_download(tmp_path):
    with raises(FatalError, "missing_input", "refused", "run the same command again"):
        download(tmp_path, "http://127.0.0.1:9")


def test_an_unwritable_disk_ends_the_download(tmp_path, openslr):
    archive = tmp_path / "data/dev-clean.tar.gz"
    archive.parent.mkdir()
    # Not even root can create files here.
    archive.symlink_to("/sys/kernel/dev-clean.tar.gz")
    with raises(FatalError, "disk", str(tmp_path / "data"), "free space"):
        download(tmp_path, openslr.url)
    archive.unlink()
    assert download(tmp_path, openslr.url) == DOWNLOADED
