"""Tests of ``ContextSpeechDataset``: values of all entries of a batch, refused cuts and options, tokenizers by name."""

import pickle
import sys

import numpy as np
import pytest
import torch
from lhotse import CutSet
from lhotse.array import TemporalArray
from lhotse.utils import fastcopy
from support.project import ToyCodec, raises, shar_fields

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.training import ContextSpeechDataset
from sharmill.training.codes import CodecForm
from sharmill.training.tokenizers import load_tokenizer

BOS, EOS = 64, 65
CODES = ["target_codes", "context_codes"]
BYTES = load_tokenizer("bytes")


@pytest.fixture(scope="module")
def form(built):
    return CodecForm.of_dataset(built.dataset)


@pytest.fixture(scope="module")
def cuts(built):
    return list(open_shar(built.dataset))


@pytest.fixture(scope="module")
def coded(built):
    return list(open_shar(built.dataset, CODES))


@pytest.fixture(scope="module")
def heard(built):
    return list(open_shar(built.dataset, ["target_audio", "context_audio"]))


def batch_of(cuts, form, **options):
    return ContextSpeechDataset(form, **({"context_duration_min": 0.5, "context_duration_max": 1.0} | options))[
        CutSet.from_cuts(cuts)
    ]


def test_the_codec_is_named_where_there_are_several(project):
    project.add_voices([1.0] * 2, "{}.wav")
    config = project.write()
    with raises(ConfigError, "unknown_codec", str(project.dataset)):
        CodecForm.of_dataset(project.dataset)
    project.encode(config, "fine", ToyCodec(samples_per_frame=160))
    project.encode(config, "coarse", ToyCodec(samples_per_frame=640))
    for name, told in ((None, "coarse, fine"), ("mimi", "'mimi'")):
        with raises(ConfigError, "unknown_codec", told):
            CodecForm.of_dataset(project.dataset, name)
    assert CodecForm.of_dataset(project.dataset, "coarse").samples_per_frame == 640


def test_entries_that_describe_the_cuts(cuts, form):
    batch = batch_of(cuts, form)
    assert {name: batch[name] for name in ("ids", "text", "language", "speaker")} == {
        "ids": [cut.id for cut in cuts],
        "text": [f"text of spk/utt{n}.flac" for n in range(7)],
        "language": ["en"] * 7,
        "speaker": ["| Language:en Dataset:Tests Speaker:anna |"] * 7,
    }
    assert batch["durations"].dtype == torch.float32
    np.testing.assert_allclose(batch["durations"], [1.0, 2.005, 0.5, 3.1, 0.7, 1.3, 0.25], rtol=1e-6)
    assert batch["similarity"].tolist() == [0.75] * 7
    assert "text_tokens" not in batch


def test_text_tokens_have_begin_end_and_padding(coded, form):
    batch = batch_of(coded[:2], form, tokenizer=lambda text: [5] * int(text[-6]), text_bos_id=1, text_eos_id=2)
    # The texts "text of spk/utt0.flac" and "...utt1.flac" give no token and one token.
    assert batch["text_tokens"].tolist() == [[1, 2, 0], [1, 5, 2]]
    assert batch["text_lens"].tolist() == [2, 3]
    assert batch["text_tokens"].dtype == batch["text_lens"].dtype == torch.int64
    plain = batch_of(coded[:1], form, tokenizer=BYTES, text_pad_id=9)
    assert plain["text_tokens"].tolist() == [list(b"text of spk/utt0.flac")]


def test_each_language_may_have_its_tokenizer(coded, form):
    tokenizer = {"en": lambda text: [1], "de": lambda text: [2, 2]}
    other = fastcopy(coded[1], supervisions=[fastcopy(coded[1].supervisions[0], language="de")])
    batch = batch_of([coded[0], other], form, tokenizer=tokenizer)
    assert batch["text_tokens"].tolist() == [[1, 0], [2, 2]]
    third = fastcopy(coded[2], supervisions=[fastcopy(coded[2].supervisions[0], language="fr")])
    with raises(ConfigError, "bad_tokenizer", "'fr'", "utt2", "en, de"):
        batch_of([third], form, tokenizer=tokenizer)


def test_text_may_be_another_key_of_the_manifest(coded, form):
    supervision = coded[0].supervisions[0]
    custom = supervision.custom | {"normalized_text": "hi"}
    cut = fastcopy(coded[0], supervisions=[fastcopy(supervision, custom=custom)])
    batch = batch_of([cut], form, tokenizer=BYTES, text_field="normalized_text")
    assert (batch["text"], batch["text_tokens"].tolist()) == (["hi"], [[104, 105]])
    with pytest.raises(ValueError, match=r"cut 'cut-.*utt1.*' has no 'normalized_text': use tokenizer=None"):
        batch_of([cut, coded[1]], form, tokenizer=BYTES, text_field="normalized_text")


def test_target_codes_lie_between_begin_and_end(coded, form):
    batch = batch_of(coded, form, code_pad_id=99)
    codes, lengths = batch["target_codes"], batch["target_code_lens"]
    assert codes.dtype == lengths.dtype == torch.int64
    assert codes.shape == (7, 3, 155 + 2)
    assert lengths.tolist() == [frames + 2 for frames in (50, 101, 25, 155, 35, 65, 13)]
    for row, length, cut in zip(codes, lengths.tolist(), coded, strict=True):
        assert row[:, 0].tolist() == [BOS] * 3
        np.testing.assert_array_equal(row[:, 1 : length - 1], cut.target_codes.load())
        assert row[:, length - 1].tolist() == [EOS] * 3
        assert (row[:, length:] == 99).all()


@pytest.mark.parametrize("read", [{}, {"decode_threads": 1}])
def test_perturbed_audio_is_that_of_the_cut(built, form, read):
    cut = list(open_shar(built.dataset, ["target_audio"], **read))[1]
    for perturbed in (cut.perturb_speed(1.25), cut.perturb_speed(0.8), cut.perturb_volume(0.5)):
        batch = batch_of([perturbed], form, context=False)
        assert batch["target_audio_lens"].tolist() == [perturbed.num_samples]
        heard = batch["target_audio"][0, : perturbed.num_samples]
        np.testing.assert_array_equal(heard, perturbed.load_audio()[0])


def test_plain_lhotse_gives_the_same_batch(built, coded, form):
    plain = list(CutSet.from_shar(fields=shar_fields(built.dataset, "toy")))
    assert type(plain[0].target_codes) is TemporalArray
    ours, theirs = batch_of(coded, form, tokenizer=BYTES), batch_of(plain, form, tokenizer=BYTES)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(theirs[name], value, rtol=0, atol=0, equal_nan=True)
        else:
            assert theirs[name] == value


def test_the_slice_of_a_context_is_a_part_of_it(coded, form):
    batch = batch_of(coded, form)
    frames = [length - 2 for length in batch["context_code_lens"].tolist()]
    np.testing.assert_allclose(batch["context_durations"], [0.02 * n for n in frames], rtol=1e-6)
    for row, length, cut in zip(batch["context_codes"], frames, coded, strict=True):
        whole = cut.context_codes.load()
        available = whole.shape[1]
        assert 25 <= length <= min(50, max(25, available))
        part = row[:, 1 : 1 + length].numpy()
        assert row[:, 1 + length].tolist() == [EOS] * 3
        repeated = np.tile(whole, 5)
        assert any(np.array_equal(repeated[:, first : first + length], part) for first in range(available))


def test_a_slice_depends_on_seed_epoch_and_cut_alone(coded, form):
    options = {"context_duration_min": 0.1, "context_duration_max": 0.5}
    dataset = ContextSpeechDataset(form, **options)

    def slices(dataset, cuts):
        batch = dataset[CutSet.from_cuts(cuts)]
        lengths = batch["context_code_lens"].tolist()
        codes = zip(batch["ids"], batch["context_codes"], lengths, strict=True)
        return {cut_id: row[:, :length].tolist() for cut_id, row, length in codes}

    together = slices(dataset, coded)
    apart = {}
    for cut in reversed(coded):
        apart |= slices(ContextSpeechDataset(form, **options), [cut])
    assert apart == together
    assert slices(ContextSpeechDataset(form, seed=1, **options), coded) != together
    dataset.set_epoch(1)
    assert slices(dataset, coded) != together
    dataset.set_epoch(0)
    assert slices(dataset, coded) == together


@pytest.mark.parametrize("told", [{"shar_epoch": 3}, {"shar_position": (3, 0, 0, 0, 0)}])
def test_the_epoch_of_the_reader_counts(coded, form, told):
    dataset = ContextSpeechDataset(form, context_duration_min=0.1, context_duration_max=0.5)

    def codes(told):
        cuts = [fastcopy(cut, custom={**cut.custom, "shar_position": None, **told}) for cut in coded]
        return dataset[CutSet.from_cuts(cuts)]["context_codes"].tolist()

    first = codes({name: 0 if name == "shar_epoch" else (0, 1, 2, 3, 4) for name in told})
    assert codes({}) == first
    assert codes(told) != first


def test_audio_stands_in_where_there_are_no_codes(heard, form):
    batch = batch_of(heard, form)
    assert not {"target_codes", "context_codes"} & batch.keys()
    audio, lengths = batch["target_audio"], batch["target_audio_lens"]
    assert audio.dtype == torch.float32
    assert lengths.tolist() == [16000, 32080, 8000, 49600, 11200, 20800, 4000]
    assert audio.shape == (7, 49600)
    for row, length, cut in zip(audio, lengths.tolist(), heard, strict=True):
        np.testing.assert_array_equal(row[:length], cut.load_audio()[0])
        assert not row[length:].any()
    assert batch_of(heard[6:], form)["target_audio"].shape == (1, 13 * 320)


def test_audio_and_codes_have_the_same_slice(coded, heard, form):
    ours, audible = batch_of(coded, form), batch_of(heard, form)
    torch.testing.assert_close(audible["context_durations"], ours["context_durations"])
    assert audible["context_audio_lens"].tolist() == [320 * (n - 2) for n in ours["context_code_lens"].tolist()]
    codec = ToyCodec()
    for codes, frames, audio in zip(
        ours["context_codes"], ours["context_code_lens"].tolist(), audible["context_audio"], strict=True
    ):
        np.testing.assert_array_equal(codec.codes(audio[: 320 * (frames - 2)].numpy()), codes[:, 1 : frames - 1])


def test_without_a_codec_there_is_audio(cuts):
    """Audio keeps its rate, and a frame is one sample, so slices have exactly the limits' lengths."""
    batch = batch_of(cuts, None, context_duration_min=1.0, context_duration_max=1.0)
    assert not [name for name in batch if "codes" in name]
    assert batch["target_audio"].shape == (7, 49600)
    for row, cut in enumerate(cuts):
        samples = cut.target_audio.load_audio()[0]
        np.testing.assert_array_equal(batch["target_audio"][row, : batch["target_audio_lens"][row]], samples)
    assert batch["context_audio_lens"].tolist() == [16000] * 7
    assert batch["context_durations"].tolist() == [1.0] * 7


@pytest.mark.parametrize(("seconds", "frames"), [(30.0, 1500), (30.01, 1501)])
def test_padded_cuts_have_their_own_lengths_in_long_tensors(cuts, form, seconds, frames):
    """Cuts are padded with the loader's ``pad_min_duration``, as Whisper's encoder needs them."""
    padded = list(CutSet.from_cuts(cuts).pad(duration=seconds, preserve_id=True))
    plain, whole = batch_of(cuts, form), batch_of(padded, form, code_pad_id=99)
    assert whole["target_codes"].shape == (7, 3, frames + 2)
    assert whole["ids"] == plain["ids"]
    for name in ("durations", "target_code_lens", "context_code_lens"):
        assert torch.equal(whole[name], plain[name])
    for row, other, length in zip(whole["target_codes"], plain["target_codes"], plain["target_code_lens"], strict=True):
        assert torch.equal(row[:, :length], other[:, :length])
        assert (row[:, length:] == 99).all()


def test_a_truncated_cut_has_its_own_frames_and_whole_context(coded, form):
    part = coded[3].truncate(offset=1.0, duration=0.5)
    batch = batch_of([part], form, context_duration_min=0.7, context_duration_max=0.7)
    np.testing.assert_array_equal(batch["target_codes"][0, :, 1:-1], coded[3].target_codes.load()[:, 50:75])
    np.testing.assert_array_equal(batch["context_codes"][0, :, 1:-1], coded[3].context_codes.load())


def test_a_short_context_is_repeated_from_its_beginning(coded, form):
    # The context of cut 5 is cut 6, which has 13 frames.
    batch = batch_of([coded[5]], form, context_duration_min=0.6, context_duration_max=0.6)
    whole = coded[5].context_codes.load()
    np.testing.assert_array_equal(batch["context_codes"][0, :, 1:-1], np.tile(whole, 3)[:, :30])


def test_audio_at_16_khz(cuts, form):
    batch = batch_of(cuts, form, audio_16khz="target")
    assert batch["audio_16khz_lens"].tolist() == [16000, 32080, 8000, 49600, 11200, 20800, 4000]
    np.testing.assert_array_equal(batch["audio_16khz"][2, :8000], cuts[2].load_audio()[0])
    batch = batch_of(cuts, form, audio_16khz="context")
    frames = [length - 2 for length in batch["context_code_lens"].tolist()]
    assert batch["audio_16khz_lens"].tolist() == [320 * n for n in frames]
    codec = ToyCodec()
    for audio, codes, count in zip(batch["audio_16khz"], batch["context_codes"], frames, strict=True):
        np.testing.assert_array_equal(codec.codes(audio[: 320 * count].numpy()), codes[:, 1 : count + 1])


@pytest.fixture(scope="module")
def odd(built, coded, heard):
    """Cuts that cannot be batched, by name."""
    return {
        "faster": [coded[1].perturb_speed(1.1)],
        "louder": [coded[1].perturb_volume(2.0)],
        "faster, of plain lhotse": [CutSet.from_shar(fields=shar_fields(built.dataset))[1].perturb_speed(1.1)],
        "padded at its begin": [coded[0].pad(duration=2.0, direction="left")],
        "joined": [coded[0].append(coded[1])],
        "without a supervision": [fastcopy(coded[0], supervisions=[])],
        "of two forms": [coded[0], heard[1]],
        "none": [],
        "good": coded,
        "without contexts": list(open_shar(built.dataset, ["target_codes"])),
        "without targets": list(open_shar(built.dataset, ["context_codes"])),
    }


SMALL = CodecForm(sampling_rate=16000, samples_per_frame=320, codebook_size=4)
SLOW = CodecForm(sampling_rate=16000, samples_per_frame=1280, codebook_size=64)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("faster", {}, r"cut 'cut-.*utt1.*' was perturbed by Speed, but its codes were not: load audio"),
        ("louder", {}, r"cut 'cut-.*utt1.*' was perturbed by \w+, but its codes were not: load audio"),
        ("faster, of plain lhotse", {}, "was perturbed by Speed, but its target_audio was not: read it with open_shar"),
        ("padded at its begin", {}, "is a MixedCut: batches are built only from MonoCuts"),
        ("joined", {}, "is a MixedCut: batches are built only from MonoCuts"),
        ("without a supervision", {}, "has 0 supervisions instead of one"),
        ("of two forms", {}, r"'cut-.*utt0.*' has target_codes but cut 'cut-.*utt1.*' has none"),
        ("none", {}, "the batch has no cuts"),
        ("good", {"codec": SMALL}, r"the codes of cut 'cut-.*' range from \d+ to \d+, not from 0 to 3"),
        ("good", {"codec": SLOW}, r"the codes of cut 'cut-.*' have a frame every 0.02 s, .* one every 0.08 s"),
        ("good", {"codes": False}, "'cut-.*' has no target_audio: request"),
        ("good", {"audio_16khz": "context"}, "'cut-.*' has no context_audio: request"),
        ("good", {"context_duration_min": 2.0}, "must be positive and at most"),
        ("good", {"context": False, "audio_16khz": "context"}, "needs contexts"),
        ("without contexts", {}, "neither context_codes nor context_audio: request .*, or set context=False"),
        ("without targets", {}, "neither target_codes nor target_audio"),
    ],
)
def test_cuts_that_cannot_be_batched_are_named(odd, form, name, options, told):
    options = dict(options)
    with pytest.raises(ValueError, match=told):
        batch_of(odd[name], options.pop("codec", form), **options)


def test_built_in_tokenizers():
    assert load_tokenizer("bytes")("aé") == [97, 195, 169]
    assert load_tokenizer("chars")("aé") == [97, 233]


def test_a_tokenizer_json(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({"good": 3, "day": 4, "[CLS]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 0)])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    loaded = load_tokenizer(str(path))
    assert loaded("good good day sir") == [3, 3, 4, 1]
    assert pickle.loads(pickle.dumps(loaded))("day") == [4]


def test_a_sentencepiece_model(tmp_path):
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("good day sir\nthe day is good\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "small"), vocab_size=16, minloglevel=2
    )
    loaded = load_tokenizer(str(tmp_path / "small.model"))
    ids = loaded("good day")
    assert pickle.loads(pickle.dumps(loaded))("good day") == ids
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "small.model"))
    assert len(ids) > 1
    assert processor.decode(ids) == "good day"


def test_a_function_of_a_module_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "mine_for_tests.py").write_text("def words(text):\n    return [len(w) for w in text.split()]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load_tokenizer("mine_for_tests:words")("good day") == [4, 3]


@pytest.mark.parametrize("suffix", ["json", "model"])
def test_a_damaged_file_is_named(tmp_path, suffix):
    path = tmp_path / f"bad.{suffix}"
    path.write_text("{}")
    with raises(ConfigError, "bad_tokenizer", f"bad.{suffix}"):
        load_tokenizer(str(path))
