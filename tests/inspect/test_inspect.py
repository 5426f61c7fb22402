"""``sharmill inspect``."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.shar import ToyCodec, copy, voice

from sharmill.inspect.describe import waveform
from sharmill.inspect.stored import find_cut
from sharmill.shar import open_shar
from sharmill.shar.items import FieldWriter, Item, read_field

CUT = "cut-rec-utt1-0.00-1.12"


def test_a_dataset_in_a_few_lines(looked_at, call):
    status, out, _ = call("inspect", looked_at)
    assert status == 0
    for shown in ("5 cuts in 2 shards", "target_audio, context_audio", "3 codebooks of 64", "50 frames per second",
                  "its codes mean nothing", "--shard 0"):  # fmt: skip
        assert shown in out


def test_the_table_of_a_shard(looked_at, call):
    status, out, _ = call("inspect", looked_at, "--shard", 0)
    assert status == 0
    (row,) = [line for line in out.splitlines() if line.startswith(CUT)]
    assert row.split() == [CUT, "1.125", "1.250", "0.750", *row.split()[4:]]
    assert row.rstrip().endswith("sentence 1")
    assert "cuts: cuts/cuts.000000.jsonl.gz" in out
    assert "utt3" not in out.split("cuts/cuts")[0].replace("context", "")


def test_a_cut_in_full(looked_at, call):
    status, out, _ = call("inspect", looked_at, CUT)
    assert status == 0
    assert "cut 1 of shard 0" in out
    stored = find_cut(looked_at, CUT)
    assert len(out.splitlines()) > 30
    for shown in ("supervisions.0.custom.context_speaker_similarity", "0.75", "sentence 1",
                  "target_audio: (18000,) at 16000 Hz, 1.125 s of flac", "context_audio: (20000,) at 16000 Hz",
                  "codes_toy/target_codes: (3, 57) int16, codebooks and frames"):  # fmt: skip
        assert shown in out
    assert stored.cut["supervisions"][0]["text"] == "sentence 1"


def test_each_cut_is_found_with_its_own_items(looked_at):
    for cut in open_shar(looked_at):
        stored = find_cut(looked_at, cut.id)
        assert stored.items["target_audio"].metadata["num_samples"] == cut.target_audio.num_samples
        assert (stored.shard, stored.number) == divmod(int(cut.id[11]), 3)


def test_hostile_text_is_shown_as_text_on_one_line(looked_at, call):
    for arguments in (("--shard", 1), ("cut-rec-utt3-0.00-1.38",)):
        status, out, _ = call("inspect", looked_at, *arguments)
        assert status == 0
        assert not any(char in out for char in "\x1b\x07\u202e")
        (line,) = [line for line in out.splitlines() if "<script>" in line and "custom" not in line]
        assert "[bold]x[/bold]" in line


def test_what_is_exported_is_what_is_stored(looked_at, call, tmp_path):
    status, out, _ = call("inspect", looked_at, CUT, "--export", tmp_path / "out")
    assert status == 0
    stored = find_cut(looked_at, CUT)
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(found) == [
        "codes_toy_context_codes.npy", "codes_toy_target_codes.npy", "context_audio.flac", "cut.json",
        "target_audio.flac",
    ]  # fmt: skip
    assert found["target_audio.flac"] == stored.items["target_audio"].data
    assert json.loads(found["cut.json"]) == stored.cut
    codes = np.load(tmp_path / "out" / "codes_toy_target_codes.npy")
    assert np.array_equal(codes, ToyCodec().codes(voice(1.125, pitch=170, seed=1)))
    assert str(tmp_path / "out" / "cut.json") in out


@pytest.mark.parametrize(
    ("arguments", "status", "names"),
    [
        (["absent"], 2, ["absent", "--shard"]),
        (["--shard", 2], 2, ["no shard 2", "2 shards"]),
        (["--shard", "x"], 2, ["--shard"]),
        ([CUT, "--shard", 0], 2, ["not both"]),
        (["--export", "out"], 2, ["--export"]),
        ([CUT, "--export", "/proc"], 2, ["/proc", "empty"]),
    ],
)
def test_wrong_use_is_one_line(looked_at, call, arguments, status, names):
    found, out, err = call("inspect", looked_at, *arguments)
    assert (found, out, err.count("\n")) == (status, "", 1)
    for name in names:
        assert name in err


def test_a_folder_without_a_dataset_is_one_line(call, tmp_path):
    status, _, err = call("inspect", tmp_path)
    assert (status, err.count("\n")) == (2, 1)
    assert "is not a finished dataset" in err


def test_a_damaged_item_does_not_hide_the_others(looked_at, call, tmp_path):
    dataset = copy(looked_at, tmp_path / "damaged")
    for field, file in (("target_audio", "recording"), ("codes_toy/target_codes", "codes")):
        path = dataset / field / f"{file}.000000.tar"
        items = list(read_field(path))
        items[1] = Item(items[1].cut_id, items[1].extension, b"damaged", items[1].metadata)
        with FieldWriter(path) as writer:
            for item in items:
                writer.add(item)
    status, out, _ = call("inspect", dataset, CUT)
    assert status == 0
    assert out.count("cannot be decoded") == 2
    assert "context_audio: (20000,) at 16000 Hz" in out


def test_items_of_other_cuts_are_damage(looked_at, call, tmp_path):
    dataset = copy(looked_at, tmp_path / "damaged")
    path = dataset / "target_audio" / "recording.000000.tar"
    items = list(read_field(path))
    with FieldWriter(path) as writer:
        for item in reversed(items):
            writer.add(item)
    status, _, err = call("inspect", dataset, "cut-rec-utt0-0.00-1.00")
    assert (status, err.count("\n")) == (1, 1)
    assert "recording.000000.tar" in err


def test_a_waveform_is_as_high_as_its_peaks():
    samples = np.concatenate([np.zeros(100), np.full(100, 0.01), np.full(100, -1.0)]).astype(np.float32)
    assert waveform(samples, width=3) == " ▃█"
    assert waveform(samples[:0]) == ""
    assert len(waveform(voice(1.0))) == 60
