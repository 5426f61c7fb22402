"""Tests of utterances cut by voice activity: kept speech, places of cuts, and resumption of the command."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.project import put, raises, run_sharmill, snapshot, write_lines

from sharmill.collect.manifest import ManifestOptions, make_manifest
from sharmill.collect.utterances import JOINED, LEFT_OUT, SPLIT, Frames, UtteranceLimits, find_utterances
from sharmill.demo.espeak import Espeak, VoiceSettings
from sharmill.errors import ConfigError, FatalError

RATE = Espeak.sampling_rate
SENTENCES = [
    "The morning train was late again, and nobody knew why.",
    "Please put the heavy boxes beside the kitchen door.",
    "She asked him for the second time.",
    "Every window of the old house was open.",
    "Yes.",
    "We walked along the river until the lights of the town were far behind us.",
]


def frames_of(pieces, rate=16000):
    """Return the frames of pieces (probability, number of frames) or (probability, number, level instead of -20 dB)."""
    probabilities = np.concatenate([np.full(piece[1], piece[0], np.float32) for piece in pieces])
    levels = np.concatenate([np.full(piece[1], (*piece, -20.0)[2], np.float32) for piece in pieces])
    edges = np.arange(len(probabilities) + 1) * 512 * rate // 16000
    return Frames(probabilities, levels, edges, rate)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.3, 0.4, 0.6, 1.0]), st.integers(1, 900)), max_size=12),
    st.sampled_from([8000, 16000, 22050, 44100, 96000]),
    st.sampled_from([(1.0, 20.0), (0.1, 0.3), (2.0, 4.0), (5.0, 60.0)]),
)
def test_utterances_lie_within_their_limits(pieces, rate, limits):
    frames = frames_of([(0.0, 1), *pieces], rate)
    found, _ = find_utterances(frames, UtteranceLimits(shortest=limits[0], longest=limits[1]))
    flat = [sample for span in found for sample in span]
    assert flat == sorted(flat)
    assert not found or 0 <= flat[0] < flat[-1] <= frames.edges[-1]
    assert all(limits[0] * rate <= end - begin <= limits[1] * rate for begin, end in found)


SECOND = 16000 / 512
# Pieces of probabilities, and the expected utterances in frames with the notes.
CUTS = {
    "speech between the thresholds goes on": ([(0, 40), (1, 40), (0.4, 40), (0.6, 40), (0.3, 40)], [(37, 163)], {}),
    "a pause of half a second is kept": ([(0, 9), (1, 40), (0, 15), (1, 40), (0, 9)], [(6, 107)], {}),
    "a longer pause separates": ([(0, 9), (1, 40), (0, 16), (1, 40), (0, 9)], [(6, 52), (62, 108)], {}),
    "a short utterance is joined to the nearer one":
        ([(1, 60), (0, 30), (1, 10), (0, 20), (1, 60)], [(0, 63), (87, 180)], {JOINED: 1}),
    "short utterances are joined to each other":
        ([(0, 60), (1, 14), (0, 20), (1, 14), (0, 60)], [(57, 111)], {JOINED: 1}),
    "a short utterance far from others is left out":
        ([(1, 60), (0, 60), (1, 10), (0, 60), (1, 60)], [(0, 63), (187, 250)], {LEFT_OUT: 1}),
    "a noise is no speech": ([(1, 60), (0, 20), (1, 3), (0, 20), (1, 60)], [(0, 63), (100, 163)], {}),
    "a long utterance is split where speech is least likely":
        ([(1, 400), (0.5, 4), (0.4, 4), (1, 400)], [(0, 406), (406, 808)], {SPLIT: 1}),
    "and at the lowest level if it is equally likely":
        ([(1, 400), (1, 4, -60.0), (1, 400)], [(0, 402), (402, 804)], {SPLIT: 1}),
    "a cut within the first half is not made": ([(1, 100), (0.4, 4), (1, 600)], [(0, 469), (469, 704)], {SPLIT: 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", CUTS)
def test_utterances_are_joined_and_split_at_pauses(case):
    pieces, expected, notes = CUTS[case]
    found, counts = find_utterances(frames_of(pieces), UtteranceLimits())
    assert [(begin // 512, end // 512) for begin, end in found] == expected
    assert counts == notes


@pytest.fixture(scope="module")
def spoken():
    """Return a function from a signal-to-noise ratio in dB (None: no noise) to joined sentences and their times."""
    espeak = Espeak()
    sentences = [
        espeak.synthesize(text, VoiceSettings(f"en-us+{voice}")).astype(np.float32) / 32768
        for text, voice in zip(SENTENCES, ["f5", "m3", "f2", "m7", "f5", "m1"], strict=True)
    ]
    sentences = [samples[slice(*np.flatnonzero(np.abs(samples) > 0.01)[[0, -1]])] for samples in sentences]
    level = np.sqrt(np.mean(np.concatenate(sentences) ** 2))

    def join(snr, repeats=1):
        parts, times, position = [], [], 0
        for number, samples in enumerate(sentences * repeats):
            pause = int((1.2 + 0.3 * (number % 4)) * RATE)
            parts += [np.zeros(pause), samples]
            times.append((position + pause, position + pause + len(samples)))
            position = times[-1][1]
        joined = np.concatenate([*parts, np.zeros(RATE)])
        noise = 0.0 if snr is None else level * 10 ** (-snr / 20)
        return joined + noise * np.random.default_rng(0).standard_normal(len(joined)), times

    return join


def cut(folder, output, **options):
    """Cut the recordings of a folder or manifest; return the records and the totals."""
    _, totals = make_manifest(
        [str(folder)], str(output), ManifestOptions(segment="vad", **options), workers=options.pop("workers", 1)
    )
    return [json.loads(line) for line in output.read_text().splitlines()], totals


@pytest.mark.parametrize(("snr", "kept", "let_in"), [(None, 0.98, 0.02), (20, 0.95, 0.05), (10, 0.9, 0.1)])
def test_speech_is_kept_and_pauses_are_left_out(snr, kept, let_in, spoken, tmp_path):
    samples, times = spoken(snr)
    put(tmp_path / "in/a.wav", 0.3 * samples, RATE)
    records, _ = cut(tmp_path / "in", tmp_path / "m.json", min_segment=0.3)
    is_speech, is_near, is_found = np.zeros((3, len(samples)), bool)
    for begin, end in times:
        is_speech[begin:end] = True
        is_near[begin - RATE // 5 : end + RATE // 5] = True
    for record in records:
        begin, size = record["offset"] * RATE, record["duration"] * RATE
        # Times are exact to a sample.
        assert max(abs(begin - round(begin)), abs(size - round(size))) < 1e-6
        is_found[round(begin) : round(begin) + round(size)] = True
    assert is_found[is_speech].mean() >= kept
    assert is_found[~is_near].mean() <= let_in


def test_a_part_of_a_recording_is_cut_as_a_recording_of_its_own(spoken, tmp_path):
    # The part is longer than a block of 30 s.
    samples, _ = spoken(None, repeats=3)
    begin, end = 10 * RATE, 50 * RATE
    put(tmp_path / "in/part.wav", 0.3 * samples[begin:end], RATE)
    put(tmp_path / "whole.wav", 0.3 * samples, RATE)
    record = {"audio_filepath": "whole.wav", "offset": begin / RATE, "duration": (end - begin) / RATE, "_alignment": {}}
    whole = write_lines(tmp_path / "whole.json", [record])
    alone, totals = cut(tmp_path / "in", tmp_path / "a.json", max_segment=4.0)
    (of_whole, _) = cut(whole, tmp_path / "b.json", max_segment=4.0)
    assert len(alone) > 8
    assert (totals.num_out, totals.facts) == (1, {"records": len(alone)})
    assert of_whole == [
        one | {"audio_filepath": "whole.wav", "offset": pytest.approx(one["offset"] + begin / RATE)} for one in alone
    ]


def test_a_text_is_kept_only_by_a_single_utterance(spoken, tmp_path):
    samples, times = spoken(None)
    put(tmp_path / "in/anna/many.wav", 0.3 * samples, RATE)
    put(tmp_path / "in/anna/one.wav", 0.3 * samples[: times[0][1] + RATE], RATE)
    put(tmp_path / "in/anna/silence.wav", np.zeros(2 * RATE), RATE)
    for name in ("many", "one"):
        (tmp_path / f"in/anna/{name}.txt").write_text(name)
    records, totals = cut(tmp_path / "in", tmp_path / "m.json", keys={"speaker": "{path[0]}"})
    texts = {(record["audio_filepath"], record["text"]) for record in records}
    assert texts == {("anna/many.wav", ""), ("anna/one.wav", "one")}
    assert {record["speaker"] for record in records} == {"| Language:und Dataset:in Speaker:anna |"}
    assert (totals.rejects, totals.num_out) == ({"no_speech": 1}, 2)
    assert "1 texts were left out, because the recording has several utterances" in totals.notes


def test_a_killed_command_continues_with_the_same_bytes(spoken, tmp_path):
    samples, _ = spoken(20)
    for number in range(6):
        put(tmp_path / f"in/{number}.wav", 0.3 * np.roll(samples, 9999 * number), RATE)
    run_sharmill("manifest", tmp_path / "in", "-o", tmp_path / "whole/m.json", "--segment", "vad", "--workers", 1)
    script = (
        "import os, sys; from sharmill.collect.manifest import *; "
        "Listener.unit_done = lambda *_: os.kill(os.getpid(), 9); "
        "make_manifest(sys.argv[1:2], sys.argv[2], ManifestOptions(segment='vad'), workers=2)"
    )
    output = tmp_path / "killed/m.json"
    killed = subprocess.run([sys.executable, "-c", script, tmp_path / "in", output], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    with raises(ConfigError, "changed_plan", "--restart"):
        cut(tmp_path / "in", output, max_segment=10.0)
    done = {path: path.stat().st_ino for path in output.parent.glob(".m.json.manifest/manifest/parts/*.jsonl")}
    kept = []
    # A command that is killed while it publishes may leave an incomplete manifest.
    output.write_text("incomplete")

    class Watch(sys.modules["sharmill.engine.executor"].Listener):
        def unit_done(self, unit, commit):
            kept.extend(path for path, inode in done.items() if path.exists() and path.stat().st_ino == inode)

    make_manifest([str(tmp_path / "in")], str(output), ManifestOptions(segment="vad"), workers=2, listener=Watch())
    assert set(kept) == set(done) != set()
    assert snapshot(output.parent) == snapshot(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"segment": "vad", "min_segment": 5.0, "max_segment": 9.0}, ["--max-segment 9", "--min-segment 5"]),
        ({"segment": "vad", "min_segment": 1e-9, "max_segment": 1e-6}, ["--max-segment 1e-06"]),
        ({"segment": "vad", "max_segment": float("inf")}, ["--max-segment inf", "finite"]),
        ({"max_segment": 9.0}, ["--max-segment", "--segment vad"]),
        ({"min_segment": 9.0}, ["--min-segment", "--segment vad"]),
        ({"segment": "vad", "corpus": "an4"}, ["--segment", "--from"]),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, names, tmp_path):
    put(tmp_path / "in/a.wav", np.zeros(RATE), RATE)
    with raises(ConfigError, "bad_usage", *names):
        make_manifest([str(tmp_path / "in")], str(tmp_path / "m.json"), ManifestOptions(**options))


def test_recordings_that_cannot_be_cut_are_rejected(tmp_path):
    put(tmp_path / "in/silence.wav", np.zeros(RATE), RATE)
    put(tmp_path / "in/short.wav", np.zeros(3), RATE)
    put(tmp_path / "in/stereo.wav", np.zeros((RATE, 2)), RATE)
    put(tmp_path / "in/loud.wav", np.full(RATE, 3e4), RATE, subtype="FLOAT")
    with raises(FatalError, "too_many_rejects"):
        cut(tmp_path / "in", tmp_path / "m.json")
    rejects = [json.loads(line) for line in (tmp_path / "m.rejects.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rejects] == ["over_full_scale", "no_speech", "no_speech", "unsupported_channels"]
    assert os.path.basename(rejects[1]["record"]["audio_filepath"]) == "short.wav"  # noqa: PTH119


def test_restart_reads_corrected_recordings_again(spoken, tmp_path):
    samples, times = spoken(None)
    source = write_lines(tmp_path / "source.json", [{"audio_filepath": "a.wav"}])
    with raises(FatalError, "too_many_rejects", "the same command with --restart"):
        cut(source, tmp_path / "m.json")
    put(tmp_path / "a.wav", 0.3 * samples[: times[0][1] + RATE], RATE)
    records, _ = cut(source, tmp_path / "m.json", restart=True)
    assert len(records) == 1


def test_a_url_as_output_is_refused(tmp_path):
    put(tmp_path / "in/a.wav", np.zeros(RATE), RATE)
    with raises(ConfigError, "bad_usage", "--output s3://bucket/m.json is a URL"):
        make_manifest([str(tmp_path / "in")], "s3://bucket/m.json", ManifestOptions())
