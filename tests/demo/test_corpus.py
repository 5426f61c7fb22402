"""The demo corpus: its contents, identical bytes each time, and refusals in one line."""

import hashlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from support import damage as do
from support.project import raises

from sharmill.demo.corpus import VOICES, CorpusSummary, make_corpus
from sharmill.demo.espeak import Espeak, VoiceSettings
from sharmill.errors import ConfigError

COUNTS = {"num_voices": 3, "utterances_per_voice": 4}
TEXTS = ("Good morning to you.", "The seven ships left the harbour before the storm.")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> CorpusSummary:
    return make_corpus(tmp_path_factory.mktemp("demo") / "corpus", **COUNTS)


def good_records(corpus: CorpusSummary) -> list[dict]:
    lines = [line for line in corpus.manifest.read_text().splitlines() if line.endswith("}")]
    assert len(lines) == corpus.num_records - 1  # one is cut off
    return [record for line in lines if "demo_defect" not in (record := json.loads(line))]


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def spoken(*, reverse: bool) -> dict[str, str]:
    """Return a digest for each text and voice, independent of the order of synthesis."""
    espeak = Espeak()
    jobs = list(itertools.product(TEXTS, VOICES.items()))
    return {
        f"{text} {name}": hashlib.sha256(espeak.synthesize(text, voice).tobytes()).hexdigest()
        for text, (name, voice) in (reversed(jobs) if reverse else jobs)
    }


def test_the_summary_counts_what_the_manifest_and_the_files_hold(corpus):
    records = good_records(corpus)
    assert (len(records), corpus.num_bad_records, corpus.num_records) == (12, 14, 26)
    assert corpus.audio_seconds == pytest.approx(sum(record["duration"] for record in records), abs=1e-3)
    assert len({record["text"] for record in records}) == len(records)
    for record in records:
        length = soundfile.info(corpus.audio_root / record["audio_filepath"]).duration
        if "offset" in record:
            assert record["offset"] + record["duration"] < length
        else:
            assert record["duration"] == pytest.approx(length, abs=1e-5)
    tags = [record["speaker"] for record in records]
    assert {tag: tags.count(tag) for tag in tags} == {
        f"| Language:en Dataset:Demo Speaker:{name} |": 4 for name in ("ada", "ben", "cora")
    }


def test_equal_arguments_give_equal_bytes_in_another_process(corpus, tmp_path):
    script = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_corpus import COUNTS, make_corpus, spoken
make_corpus(Path({str(tmp_path / "other")!r}), **COUNTS)
print(json.dumps(spoken(reverse=True)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == spoken(reverse=False)
    directory = corpus.manifest.parent
    assert digests(tmp_path / "other") == digests(directory)
    before = corpus.manifest.stat().st_mtime_ns
    assert make_corpus(directory, **COUNTS) == corpus
    assert corpus.manifest.stat().st_mtime_ns == before
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "demo.yaml").write_text("mine"),
        do.change_bytes("demo.yaml", lambda data: data + b"# mine\n"),
        do.change_bytes("corpus/corpus.json", lambda data: data[:9]),
        do.change_bytes("corpus/corpus.json", lambda data: data.replace(b'"num_voices": 12', b'"num_voices": 2')),
        do.change_bytes("corpus/corpus.json", lambda data: b"[]"),
        lambda folder: (folder / "corpus/corpus.json").rename(folder / "corpus/thesis.txt"),
    ],
)
def test_a_demo_replaces_only_what_it_made(tmp_path, call, change):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/corpus.json").write_text(json.dumps({
        "arguments": {"version": 2, "num_voices": 12, "utterances_per_voice": 20, "seed": 42},
        "totals": {"num_records": 254, "num_bad_records": 14, "audio_seconds": 1191.006},
    }))  # fmt: skip
    # No stage starts if the manifest is missing.
    for overrides in ([], ["write.shard_size=20"], []):
        assert "cannot read the manifest" in call("demo", tmp_path, *overrides)[2]
    change(tmp_path)
    before = digests(tmp_path)
    assert (call("demo", tmp_path)[0], digests(tmp_path)) == (2, before)


@pytest.mark.parametrize("arguments", [{"num_voices": 0}, {"num_voices": 13}, {"utterances_per_voice": 1}])
def test_arguments_out_of_range_leave_nothing_behind(tmp_path, arguments):
    with raises(ConfigError, "bad_config_value", next(iter(arguments))):
        make_corpus(tmp_path / "corpus", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_voice_is_a_configuration_error():
    with raises(ConfigError, "bad_config_value", "en-us-nowhere"):
        Espeak().synthesize("Hello.", VoiceSettings(name="en-us-nowhere"))


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with raises(ConfigError, "missing_package", "pip install 'sharmill[demo]'"):
        Espeak()
