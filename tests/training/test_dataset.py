"""``ContextSpeechDataset``: every entry of a batch with its values, and what is refused."""

from __future__ import annotations

import json
import math
import pickle
from itertools import islice

import numpy as np
import pytest
import torch
from lhotse import CutSet
from lhotse.array import TemporalArray
from lhotse.dataset import DynamicCutSampler, SimpleCutSampler
from lhotse.utils import fastcopy
from support.errors import raises
from support.pipelines import shar_fields
from support.shar import ToyCodec, voice
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.shar.reading.loading import ResumableDataset, merge_loader_states
from sharmill.training import ContextSpeechDataset
from sharmill.training.codes import CodecForm
from sharmill.training.cut_data import ContextLimits, ContextSlice
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


def test_the_form_is_that_of_the_dataset(form):
    assert (form.sampling_rate, form.samples_per_frame, form.codebook_size) == (16000, 320, 64)
    assert form.frame_shift == 0.02
    assert form.target_marks == form.context_marks == (BOS, EOS)


def test_the_codec_is_named_where_there_are_several(project):
    for number in range(2):
        project.add(f"{number}.wav", voice(1.0, seed=number))
    config = project.write()
    with raises(ConfigError, "unknown_codec", str(project.dataset)):
        CodecForm.of_dataset(project.dataset)
    project.encode(config, "fine", ToyCodec(samples_per_frame=160))
    project.encode(config, "coarse", ToyCodec(samples_per_frame=640))
    with raises(ConfigError, "unknown_codec", "coarse, fine"):
        CodecForm.of_dataset(project.dataset)
    with raises(ConfigError, "unknown_codec", "'mimi'"):
        CodecForm.of_dataset(project.dataset, "mimi")
    assert CodecForm.of_dataset(project.dataset, "coarse").samples_per_frame == 640


def test_what_describes_the_cuts(cuts, form):
    batch = batch_of(cuts, form)
    assert batch["ids"] == [cut.id for cut in cuts]
    assert batch["text"] == [f"text of spk/utt{n}.flac" for n in range(7)]
    assert batch["language"] == ["en"] * 7
    assert batch["speaker"] == ["| Language:en Dataset:Tests Speaker:anna |"] * 7
    assert batch["durations"].dtype == torch.float32
    np.testing.assert_allclose(batch["durations"], [1.0, 2.005, 0.5, 3.1, 0.7, 1.3, 0.25], rtol=1e-6)
    assert batch["similarity"].tolist() == [0.75] * 7
    assert "text_tokens" not in batch


def test_similarity_and_language_may_be_unknown(coded, form):
    supervision = fastcopy(coded[0].supervisions[0], custom=None, language=None, text=None)
    batch = batch_of([fastcopy(coded[0], supervisions=[supervision])], form)
    assert math.isnan(batch["similarity"][0])
    assert (batch["language"], batch["text"]) == ([None], [None])


@pytest.mark.parametrize(("written", "similarity"), [(None, math.nan), ("0.5", 0.5), (1, 1.0)])
def test_similarity_is_a_number_however_it_was_written(coded, form, written, similarity):
    custom = coded[0].supervisions[0].custom | {"context_speaker_similarity": written}
    cut = fastcopy(coded[0], supervisions=[fastcopy(coded[0].supervisions[0], custom=custom)])
    np.testing.assert_equal(batch_of([cut], form)["similarity"].tolist(), [similarity])


def test_text_may_have_no_token(coded, form):
    batch = batch_of(coded[:2], form, tokenizer=lambda text: [])
    assert batch["text_tokens"].shape == (2, 0)
    assert batch["text_lens"].tolist() == [0, 0]


def test_text_tokens_have_begin_end_and_padding(coded, form):
    batch = batch_of(coded[:2], form, tokenizer=lambda text: [5] * int(text[-6]), text_bos_id=1, text_eos_id=2)
    # Of "text of spk/utt0.flac" and "...utt1.flac": no token and one.
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
    with pytest.raises(ValueError, match=r"cut 'cut-.*utt1.*' has no 'normalized_text'; use tokenizer=None"):
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


def test_ids_of_begin_and_end_can_be_chosen_or_left_out(coded, built):
    form = CodecForm.of_dataset(built.dataset, bos=70, eos=71, context_bos=72)
    batch = batch_of(coded[:1], form)
    assert batch["target_codes"][0, 0, [0, -1]].tolist() == [70, 71]
    assert batch["context_codes"][0, 0, [0, -1]].tolist() == [72, 71]
    bare = batch_of(coded[:1], CodecForm.of_dataset(built.dataset, marks=False))
    np.testing.assert_array_equal(bare["target_codes"][0], coded[0].target_codes.load())
    assert bare["target_code_lens"].tolist() == [50]


def test_a_truncated_cut_has_its_frames_only_and_its_whole_context(coded, form):
    part = coded[3].truncate(offset=1.0, duration=0.5)
    batch = batch_of([part], form, context_duration_min=0.7, context_duration_max=0.7)
    np.testing.assert_array_equal(batch["target_codes"][0, :, 1:-1], coded[3].target_codes.load()[:, 50:75])
    np.testing.assert_array_equal(batch["context_codes"][0, :, 1:-1], coded[3].context_codes.load())


def test_the_rest_that_windows_leave_has_the_last_frame(coded, form):
    # 5 ms from 0.995 s on: the nearest frame would begin at 1 s, where the codes end.
    _, rest = coded[0].cut_into_windows(0.995)
    batch = batch_of([rest], form)
    np.testing.assert_array_equal(batch["target_codes"][0, :, 1:-1], coded[0].target_codes.load()[:, 49:])


@pytest.mark.parametrize("read", [{}, {"decode_threads": 1}])
def test_perturbed_audio_is_that_of_the_cut(built, form, read):
    cut = list(open_shar(built.dataset, ["target_audio"], **read))[1]
    for perturbed in (cut.perturb_speed(1.25), cut.perturb_speed(0.8), cut.perturb_volume(0.5)):
        batch = batch_of([perturbed], form, context=False)
        assert batch["target_audio_lens"].tolist() == [perturbed.num_samples]
        heard = batch["target_audio"][0, : perturbed.num_samples]
        np.testing.assert_array_equal(heard, perturbed.load_audio()[0])


def test_what_cannot_follow_a_perturbation_is_refused(built, coded, form):
    for changed in (coded[1].perturb_speed(1.1), coded[1].perturb_volume(2.0)):
        with pytest.raises(
            ValueError, match=r"cut 'cut-.*utt1.*' was changed by \w+, and its codes were not: load audio"
        ):
            batch_of([changed], form)
    assert batch_of([coded[1].resample(8000)], form)["target_code_lens"].tolist() == [103]
    plain = list(CutSet.from_shar(fields=shar_fields(built.dataset)))[1]
    with pytest.raises(ValueError, match="was changed by Speed, and its target_audio was not: read it with open_shar"):
        batch_of([plain.perturb_speed(1.1)], form)


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
        assert any(_equal(whole, part, first) for first in range(available))


def _equal(whole, part, first):
    indices = np.arange(first, first + part.shape[1]) % whole.shape[1]
    return np.array_equal(whole[:, indices], part)


def test_a_short_context_is_repeated_from_its_beginning(coded, form):
    # The context of cut 5 is cut 6 with 13 frames.
    batch = batch_of([coded[5]], form, context_duration_min=0.6, context_duration_max=0.6)
    whole = coded[5].context_codes.load()
    np.testing.assert_array_equal(batch["context_codes"][0, :, 1:-1], np.tile(whole, 3)[:, :30])


def test_limits_are_in_whole_frames(coded, form):
    batch = batch_of([coded[2]], form, context_duration_min=0.601, context_duration_max=0.601)
    assert batch["context_code_lens"].tolist() == [31 + 2]
    batch = batch_of([coded[2]], form, context_duration_min=0.3, context_duration_max=0.3)
    assert batch["context_code_lens"].tolist() == [15 + 2]


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


def test_a_resumed_epoch_has_the_same_slices_on_other_workers(built, form):
    dataset = ContextSpeechDataset(form, BYTES, context_duration_min=0.1, context_duration_max=0.5)

    def slices(cuts):
        batch = dataset[cuts]
        lengths = batch["context_code_lens"].tolist()
        rows = [row[:, :length].tolist() for row, length in zip(batch["context_codes"], lengths, strict=True)]
        return {f"{cut.shar_position[0]} {cut.id}": row for cut, row in zip(cuts, rows, strict=True)}

    def resumable():
        cuts = open_shar(built.dataset, CODES, shuffle=True, seed=1, infinite=True)
        return ResumableDataset(cuts, lambda cuts: DynamicCutSampler(cuts, max_cuts=2), finish=slices)

    def taken(loader, batches):
        return {name: row for batch in islice(loader, batches) for name, row in batch.items()}

    whole = taken(StatefulDataLoader(resumable(), batch_size=None), 14)
    first = StatefulDataLoader(resumable(), batch_size=None)
    before = taken(first, 2)
    second = resumable()
    second.load_state_dict(merge_loader_states([first.state_dict()]))
    after = taken(StatefulDataLoader(second, batch_size=None, num_workers=2), 4)
    assert {name[0] for name in after} >= {"0", "1"}
    assert all(whole[name] == row for name, row in {**before, **after}.items())
    assert not all(whole["1" + name[1:]] == row for name, row in whole.items() if name[0] == "0")


@pytest.mark.parametrize("told", [{"shar_epoch": 3}, {"shar_position": (3, 0, 0, 0, 0)}])
def test_the_epoch_of_the_reader_counts(coded, form, told):
    dataset = ContextSpeechDataset(form, context_duration_min=0.1, context_duration_max=0.5)

    def codes(told):
        cuts = [fastcopy(cut, custom={**cut.custom, "shar_position": None, **told}) for cut in coded]
        return dataset[CutSet.from_cuts(cuts)]["context_codes"].tolist()

    first = codes({name: 0 if name == "shar_epoch" else (0, 1, 2, 3, 4) for name in told})
    assert codes({}) == first
    assert codes(told) != first


def test_workers_that_stay_see_the_next_epoch(coded, form):
    dataset = ContextSpeechDataset(form, context_duration_min=0.1, context_duration_max=0.5)
    sampler = SimpleCutSampler(CutSet.from_cuts(coded), max_cuts=7)
    loader = torch.utils.data.DataLoader(
        dataset, sampler=sampler, batch_size=None, num_workers=1, persistent_workers=True, prefetch_factor=1
    )
    drawn = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        (batch,) = loader
        drawn.append(batch["context_codes"])
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert torch.equal(dataset[CutSet.from_cuts(coded)]["context_codes"], drawn[epoch])
    assert not torch.equal(*drawn)


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


def test_audio_is_resampled_to_the_rate_of_the_codec(heard):
    form = CodecForm(sampling_rate=8000, samples_per_frame=80, codebook_size=64)
    batch = batch_of(heard[:1], form)
    assert batch["target_audio_lens"].tolist() == [8000]
    np.testing.assert_array_equal(batch["target_audio"][0], heard[0].target_audio.resample(8000).load_audio()[0])


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


def test_a_slice_at_another_rate_keeps_the_frames_of_the_context():
    # 21504 Hz and 1024 samples per frame: three frames are 2285.7 samples at 16 kHz, and the audio may have 2286.
    part = ContextSlice(first=0, length=4, num_frames=3, frame_shift=1024 / 21504)
    for num_samples in (2284, 2285, 2286, 2287):
        taken = part.of_samples(np.arange(1, num_samples + 1), 16000)
        whole = np.array([n if n <= num_samples else 0 for n in range(1, 2287)])
        np.testing.assert_array_equal(taken, np.concatenate([whole, whole])[: round(4 * 1024 / 21504 * 16000)])


def test_starts_and_lengths_are_drawn_evenly():
    limits = ContextLimits(0.06, 0.1, 0.02)
    drawn = [limits.draw(10, f"0/{epoch}/cut") for epoch in range(6000)]
    for length in (3, 4, 5):
        starts = [one.first for one in drawn if one.length == length]
        assert 1800 < len(starts) < 2200
        counts = np.bincount(starts, minlength=10 - length + 1)
        assert len(counts) == 10 - length + 1
        # Each of n places is expected 2000 / n times: far outside five standard deviations none lies by chance.
        expected = len(starts) / len(counts)
        assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_codes_can_be_ignored(cuts, form):
    assert batch_of(cuts, form)["target_codes"].shape[0] == 7
    batch = batch_of(cuts, form, codes=False)
    assert not {"target_codes", "context_codes"} & batch.keys()
    assert batch["target_audio_lens"][0] == 16000


def test_without_a_codec_there_is_audio(cuts):
    """At the rate that it has; a frame is a sample, so that slices end where the limits say."""
    batch = batch_of(cuts, None, context_duration_min=1.0, context_duration_max=1.0)
    assert not [name for name in batch if "codes" in name]
    assert batch["target_audio"].shape == (7, 49600)
    for row, cut in enumerate(cuts):
        samples = cut.target_audio.load_audio()[0]
        np.testing.assert_array_equal(batch["target_audio"][row, : batch["target_audio_lens"][row]], samples)
    assert batch["context_audio_lens"].tolist() == [16000] * 7
    assert batch["context_durations"].tolist() == [1.0] * 7


def test_without_a_codec_audio_has_the_rate_that_is_asked_for(heard, form):
    batch = batch_of(heard, None, sampling_rate=8000, audio_16khz="context")
    assert batch["target_audio_lens"].tolist() == [cut.resample(8000).num_samples for cut in heard]
    np.testing.assert_allclose(batch["context_audio_lens"] / 8000, batch["context_durations"], rtol=1e-6)
    np.testing.assert_allclose(batch["audio_16khz_lens"] / 16000, batch["context_durations"], atol=1e-4)
    with pytest.raises(ValueError, match="leave out sampling_rate"):
        ContextSpeechDataset(form, sampling_rate=8000)


def test_without_a_codec_a_batch_has_one_rate(heard):
    other = heard[1].resample(8000)
    with pytest.raises(ValueError, match="give sampling_rate="):
        batch_of([heard[0], other], None, context=False)
    assert batch_of([heard[0], other], None, context=False, sampling_rate=16000)["target_audio_lens"][0] == 16000


def test_without_a_codec_and_without_audio_the_cut_is_named(coded):
    with pytest.raises(ValueError, match=f"{coded[0].id}.*has no target_audio"):
        batch_of(coded, None)


def test_data_without_contexts(built, form):
    batch = batch_of(list(open_shar(built.dataset, ["target_codes"])), form, context=False)
    assert batch["target_codes"].shape == (7, 3, 157)
    assert not [name for name in batch if name.startswith("context")]
    with pytest.raises(ValueError, match="needs contexts"):
        ContextSpeechDataset(form, context=False, audio_16khz="context")


def test_a_dataset_without_contexts_serves_where_none_are_needed(without_contexts):
    form = CodecForm.of_dataset(without_contexts.dataset)
    batch = batch_of(list(open_shar(without_contexts.dataset)), form, tokenizer=BYTES, context=False)
    assert batch["target_codes"].shape == (7, 3, 157)
    assert batch["speaker"] == ["| Language:und Dataset:small Speaker:unknown |"] * 7
    assert not [name for name in batch if name.startswith("context")]
    assert all(math.isnan(similarity) for similarity in batch["similarity"])
    heard = batch_of(list(open_shar(without_contexts.dataset, ["target_audio"])), None, context=False)
    assert heard["target_audio_lens"].tolist() == [16000, 32080, 8000, 49600, 11200, 20800, 4000]


@pytest.mark.parametrize(("codec", "what"), [(True, "neither context_codes nor context_audio"), (False, "no context_")])
def test_a_dataset_without_contexts_is_told_where_contexts_are_needed(without_contexts, codec, what):
    form = CodecForm.of_dataset(without_contexts.dataset) if codec else None
    wanted = f"^cut 'cut-rec-.*' has {what}.*made without contexts .match: null.; give context=False.*$"
    with pytest.raises(ValueError, match=wanted):
        batch_of(list(open_shar(without_contexts.dataset)), form)


@pytest.mark.parametrize(
    ("fields", "options", "what"),
    [
        (["target_codes"], {}, "'cut-.*' has neither context_codes nor context_audio; name .*, or give context=False"),
        (["context_codes"], {}, "'cut-.*' has neither target_codes nor target_audio"),
        ([], {}, "neither target_codes nor target_audio"),
        (CODES, {"codes": False}, "'cut-.*' has no target_audio; name"),
        (CODES, {"audio_16khz": "target"}, "'cut-.*' has no target_audio; name"),
        (CODES, {"audio_16khz": "context"}, "'cut-.*' has no context_audio; name"),
    ],
)
def test_what_is_missing_is_named(built, form, fields, options, what):
    with pytest.raises(ValueError, match=what):
        batch_of(list(open_shar(built.dataset, fields)), form, **options)


def test_a_batch_has_one_form(coded, heard, form):
    with pytest.raises(ValueError, match=r"'cut-.*utt0.*' has target_codes and cut 'cut-.*utt1.*' has none"):
        batch_of([coded[0], heard[1]], form)


def test_codes_out_of_range_and_other_codecs_are_refused(coded, form):
    small = CodecForm(sampling_rate=16000, samples_per_frame=320, codebook_size=4)
    with pytest.raises(ValueError, match=r"the codes of cut 'cut-.*' are \d+ to \d+, not 0 to 3"):
        batch_of(coded, small)
    slow = CodecForm(sampling_rate=16000, samples_per_frame=1280, codebook_size=64)
    with pytest.raises(ValueError, match=r"the codes of cut 'cut-.*' have a frame each 0.02 s, .* one each 0.08 s"):
        batch_of(coded, slow)
    fewer = fastcopy(coded[1], custom=coded[1].custom | {"target_codes": _two_codebooks(coded[1])})
    with pytest.raises(ValueError, match=r"utt0.*' has 3 codebooks and cut '.*utt1.*' has 2"):
        batch_of([coded[0], fewer], form)


def _two_codebooks(cut):
    from sharmill.shar.arrays import array_to_bytes

    array = cut.target_codes
    stored = fastcopy(array.array, storage_key=array_to_bytes(array.load()[:2]), shape=[2, array.shape[1]])
    return fastcopy(array, array=stored)


def test_cuts_that_are_no_single_utterance_are_refused(coded, form):
    with pytest.raises(ValueError, match=r"is a MixedCut; batches are made of MonoCuts"):
        batch_of([coded[0].pad(duration=2.0, direction="left")], form)
    with pytest.raises(ValueError, match=r"is a MixedCut; batches are made of MonoCuts"):
        batch_of([coded[0].append(coded[1])], form)
    with pytest.raises(ValueError, match=r"has 0 supervisions instead of one"):
        batch_of([fastcopy(coded[0], supervisions=[])], form)
    with pytest.raises(ValueError, match="without cuts"):
        batch_of([], form)


@pytest.mark.parametrize(("seconds", "frames"), [(30.0, 1500), (30.01, 1501)])
def test_cuts_padded_to_30_seconds_have_their_own_lengths_in_long_tensors(cuts, form, seconds, frames):
    """As Whisper's encoder takes them: ``pad_min_duration`` of the loader."""
    padded = list(CutSet.from_cuts(cuts).pad(duration=seconds, preserve_id=True))
    plain, whole = batch_of(cuts, form), batch_of(padded, form, code_pad_id=99)
    assert whole["target_codes"].shape == (7, 3, frames + 2)
    assert whole["ids"] == plain["ids"]
    for name in ("durations", "target_code_lens", "context_code_lens"):
        assert torch.equal(whole[name], plain[name])
    for row, other, length in zip(whole["target_codes"], plain["target_codes"], plain["target_code_lens"], strict=True):
        assert torch.equal(row[:, :length], other[:, :length])
        assert (row[:, length:] == 99).all()


def test_padded_audio_is_that_of_the_cut_and_silence(heard):
    padded = list(CutSet.from_cuts(heard).pad(duration=30.0, preserve_id=True))
    batch = batch_of(padded, None, context=False, audio_16khz="target")
    assert batch["target_audio"].shape == batch["audio_16khz"].shape == (7, 30 * 16000)
    assert batch["target_audio_lens"].tolist() == [16000, 32080, 8000, 49600, 11200, 20800, 4000]
    for row, cut in enumerate(padded):
        np.testing.assert_array_equal(batch["target_audio"][row], cut.load_audio()[0])
    # What is longer is not cut off.
    assert batch_of([heard[3].pad(duration=2.0)], None, context=False)["target_audio"].shape == (1, 49600)


@pytest.mark.parametrize(("shortest", "longest"), [(0.0, 1.0), (2.0, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_limits_that_cannot_be_are_refused(form, shortest, longest):
    with pytest.raises(ValueError, match="must be positive and not above"):
        ContextSpeechDataset(form, context_duration_min=shortest, context_duration_max=longest)


def test_a_frame_shift_of_each_cut_is_the_codecs(coded, form):
    # The published scripts write the cut's duration divided by its frames.
    array = coded[1].target_codes
    near = fastcopy(array, frame_shift=coded[1].duration / array.shape[1])
    assert near.frame_shift != form.frame_shift
    batch = batch_of([fastcopy(coded[1], custom=coded[1].custom | {"target_codes": near})], form)
    np.testing.assert_array_equal(batch["target_codes"][0, :, 1:-1], array.load())


def test_a_tokenizer_must_be_a_function(form):
    for wrong in ("bytes", {"en": BYTES, "de": "bytes"}):
        with raises(ConfigError, "bad_tokenizer", "'bytes'", "load_tokenizer"):
            ContextSpeechDataset(form, wrong)


def test_it_reaches_processes_that_are_not_forked(coded, form):
    dataset = ContextSpeechDataset(form, BYTES, context_duration_min=0.1, context_duration_max=0.5, seed=3)
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again[coded]["context_codes"], dataset[coded]["context_codes"])


def test_the_documented_entries_are_those_there_are(cuts, heard, form):
    documented = set()
    for line in (ContextSpeechDataset.__doc__ or "").splitlines():
        if line.strip().startswith("``") and "  " in line.strip():
            documented |= set(line.split("  ")[2].replace("``", "").replace(",", "").split())
    made = batch_of(cuts, form, tokenizer=BYTES, audio_16khz="target", tags=["task"]).keys()
    made |= batch_of(heard, form).keys()
    assert documented == made, json.dumps(sorted(documented ^ made))
