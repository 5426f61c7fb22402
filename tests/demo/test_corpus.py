import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from support.errors import raises

from sharmill.demo.corpus import CorpusSummary, make_corpus
from sharmill.demo.defects import DEFECTS
from sharmill.errors import REASONS, ConfigError

NUM_VOICES, UTTERANCES_PER_VOICE = 3, 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> CorpusSummary:
    directory = tmp_path_factory.mktemp("demo") / "corpus"
    return make_corpus(directory, num_voices=NUM_VOICES, utterances_per_voice=UTTERANCES_PER_VOICE)


def read_records(corpus: CorpusSummary) -> list[dict]:
    """All records that are JSON."""
    records = []
    for line in corpus.manifest.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def good_records(corpus: CorpusSummary) -> list[dict]:
    return [record for record in read_records(corpus) if "demo_defect" not in record]


def defect(corpus: CorpusSummary, name: str) -> dict:
    (record,) = [record for record in read_records(corpus) if record.get("demo_defect") == name]
    return record


def read_segment(corpus: CorpusSummary, record: dict) -> tuple[np.ndarray, int]:
    path = corpus.audio_root / record["audio_filepath"]
    rate = soundfile.info(path).samplerate
    start, num_samples = round(record.get("offset", 0.0) * rate), round(record["duration"] * rate)
    return soundfile.read(path, start=start, frames=num_samples)


def hash_files(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_summary_counts_what_the_manifest_holds(corpus):
    assert corpus.num_records == len(corpus.manifest.read_text().splitlines())
    assert corpus.num_records - corpus.num_bad_records == len(good_records(corpus)) == 12
    assert corpus.num_bad_records == len(DEFECTS) == 14
    total = sum(record["duration"] for record in good_records(corpus))
    assert corpus.audio_seconds == pytest.approx(total, abs=1e-3)


def test_each_voice_has_its_utterances_and_its_own_texts(corpus):
    records = good_records(corpus)
    tags = [record["speaker"] for record in records]
    assert {tag: tags.count(tag) for tag in tags} == {
        f"| Language:en Dataset:Demo Speaker:{name} |": UTTERANCES_PER_VOICE for name in ("ada", "ben", "cora")
    }
    assert len({record["text"] for record in records}) == len(records)


def test_there_are_flac_wav_and_long_files(corpus):
    records = good_records(corpus)
    assert {Path(record["audio_filepath"]).suffix for record in records} == {".flac", ".wav"}
    long_files = {record["audio_filepath"] for record in records if "offset" in record}
    assert long_files == {"ben/ben_session_00.flac"}


def test_some_records_have_optional_keys(corpus):
    records = good_records(corpus)
    assert len(records) / 2 < sum("cer" in record for record in records) < len(records)
    assert 0 < sum("normalized_text" in record for record in records) < len(records)


def test_durations_match_the_files(corpus):
    for record in good_records(corpus):
        info = soundfile.info(corpus.audio_root / record["audio_filepath"])
        assert (info.channels, info.samplerate) == (1, 22050)
        assert 1.0 <= record["duration"] <= 12.0
        if "offset" in record:
            assert record["offset"] + record["duration"] < info.duration
        else:
            assert record["duration"] == pytest.approx(info.duration, abs=1e-5)


def test_segments_are_speech_between_pauses(corpus):
    segments = [record for record in good_records(corpus) if "offset" in record]
    for record in segments:
        samples, rate = read_segment(corpus, record)
        before, _ = read_segment(corpus, {**record, "offset": record["offset"] - 0.3, "duration": 0.3})
        assert len(samples) == round(record["duration"] * rate)
        # The first half second is already speech, and what lies before it is noise only.
        assert np.sqrt(np.mean(samples[: rate // 2] ** 2)) > 0.02
        assert np.sqrt(np.mean(before**2)) < 0.001


def test_same_arguments_give_the_same_bytes_in_another_process(corpus, tmp_path):
    script = (
        "import sys; from pathlib import Path; from sharmill.demo.corpus import make_corpus\n"
        "num_voices, utterances_per_voice = map(int, sys.argv[2:])\n"
        "make_corpus(Path(sys.argv[1]), num_voices=num_voices, utterances_per_voice=utterances_per_voice)"
    )
    counts = (str(NUM_VOICES), str(UTTERANCES_PER_VOICE))
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "other"), *counts], check=True)
    assert hash_files(tmp_path / "other") == hash_files(corpus.manifest.parent)


def test_another_seed_gives_other_texts(corpus, tmp_path):
    other = make_corpus(tmp_path / "other", num_voices=1, utterances_per_voice=2, seed=7)
    texts = {record["text"] for record in good_records(other)}
    assert texts.isdisjoint(record["text"] for record in good_records(corpus))


def test_finished_corpus_is_reused(corpus):
    directory = corpus.manifest.parent
    before = corpus.manifest.stat().st_mtime_ns
    again = make_corpus(directory, num_voices=NUM_VOICES, utterances_per_voice=UTTERANCES_PER_VOICE)
    assert again == corpus
    assert corpus.manifest.stat().st_mtime_ns == before
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_directory_with_other_content_is_left_alone(corpus, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with raises(ConfigError, "foreign_output"):
        make_corpus(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with raises(ConfigError, "foreign_output", "num_voices"):
        make_corpus(corpus.manifest.parent, num_voices=2)


@pytest.mark.parametrize("arguments", [{"num_voices": 0}, {"num_voices": 13}, {"utterances_per_voice": 1}])
def test_arguments_out_of_range_leave_nothing_behind(tmp_path, arguments):
    with raises(ConfigError, "bad_config_value", next(iter(arguments))):
        make_corpus(tmp_path / "corpus", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_every_defect_is_there_once_and_has_a_reason_code(corpus):
    named = [record["demo_defect"] for record in read_records(corpus) if "demo_defect" in record]
    # A line that is not JSON cannot carry the key.
    assert sorted(named) == sorted(DEFECTS.keys() - {"not_json"})
    assert len(corpus.manifest.read_text().splitlines()) - len(read_records(corpus)) == 1
    assert set(DEFECTS.values()) <= REASONS.keys()


def test_defective_records_are_wrong_in_the_text(corpus):
    assert defect(corpus, "empty_text")["text"].strip() == ""
    assert "Dataset:" not in defect(corpus, "bad_speaker_tag")["speaker"]
    assert defect(corpus, "skipme")["_skipme"] == 1
    solo = defect(corpus, "single_utterance")["speaker"]
    assert [record["speaker"] for record in read_records(corpus)].count(solo) == 1


def test_duplicate_comes_after_the_good_record(corpus):
    records = read_records(corpus)
    copy = defect(corpus, "duplicate")
    original = {key: value for key, value in copy.items() if key != "demo_defect"}
    assert records.index(original) < records.index(copy)


def test_defective_files_are_wrong_in_the_audio(corpus):
    path = {name: corpus.audio_root / defect(corpus, name)["audio_filepath"] for name in DEFECTS if name != "not_json"}
    assert not path["missing_file"].exists()
    with pytest.raises(soundfile.LibsndfileError):
        soundfile.info(path["not_audio"])
    assert soundfile.info(path["stereo"]).channels == 2
    assert soundfile.info(path["wrong_duration"]).duration < defect(corpus, "wrong_duration")["duration"] - 3.0
    assert not path["outside_root"].resolve().is_relative_to(corpus.audio_root.resolve())
    assert soundfile.info(path["outside_root"]).duration >= 1.0
    assert np.isnan(soundfile.read(path["nan_samples"])[0]).sum() == 10
    assert soundfile.info(path["too_short"]).duration == pytest.approx(0.05, abs=1e-4)


def test_only_decoding_finds_the_truncated_flac(corpus):
    record = defect(corpus, "truncated_flac")
    path = corpus.audio_root / record["audio_filepath"]
    assert soundfile.info(path).duration == pytest.approx(record["duration"], abs=1e-5)
    try:
        samples, rate = soundfile.read(path)
    except soundfile.LibsndfileError:
        return
    assert len(samples) / rate < record["duration"] - 0.1
