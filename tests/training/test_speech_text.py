"""Tests of ``SpeechTextDataset``: sequences of speech, text and conversations, and refused examples."""

import numpy as np
import pytest
import torch
from lhotse import CutSet
from lhotse.utils import fastcopy
from nemo.collections.common.data.lhotse.text_adapters import (
    AudioTurn,
    NeMoMultimodalConversation,
    NeMoSFTExample,
    SourceTargetTextExample,
    TextExample,
    TextTurn,
)
from nemo.collections.common.prompts.plain import PlainPromptFormatter
from support.project import raises
from support.training import Letters, take

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.training import ContextSpeechDataset, SpeechTextDataset, get_dataloader
from sharmill.training.codes import CodecForm
from sharmill.training.speech_text import Kind

LETTERS = Letters()
BOS, EOS = 64, 65
LOCATOR = "<audio>"
LIMITS = {"context_duration_min": 0.2, "context_duration_max": 0.3}


@pytest.fixture(scope="module")
def form(corpora):
    return CodecForm.of_dataset(corpora.small)


@pytest.fixture(scope="module")
def cuts(corpora):
    """Cuts with codes and audio."""
    return list(open_shar(corpora.small))


@pytest.fixture(scope="module")
def heard(corpora):
    return list(open_shar(corpora.small, ["target_audio"]))


def prompted(example):
    """Return the example as the loader delivers it with ``prompt_format: plain``."""
    from nemo.collections.common.data.lhotse.dataloader import tokenize_with_prompt

    own = fastcopy(example, custom=dict(example.custom or {}))
    return tokenize_with_prompt(own, LETTERS, PlainPromptFormatter(LETTERS))


def batch_of(examples, form, **options):
    dataset = SpeechTextDataset(form, LETTERS, **(LIMITS | options))
    return dataset[CutSet.from_items([prompted(example) for example in examples])]


def conversation(*turns, name="c1"):
    """Return a conversation of turns, each given as a role and a text or a cut."""
    made = [
        TextTurn(content, role) if isinstance(content, str) else AudioTurn(content, role, LOCATOR)
        for role, content in turns
    ]
    return NeMoMultimodalConversation(name, made, token_equivalent_duration=0.1)


def text_at(batch, row, where):
    """Return the letters of a row at the positions where a mask is true."""
    return LETTERS.ids_to_text(batch["text_tokens"][row][where[row]].tolist())


def kinds_of(batch, row=0):
    """Return the kinds and lengths of a row's spans."""
    found = []
    for kind, span in zip(batch["kinds"][row].tolist(), batch["spans"][row].tolist(), strict=True):
        if kind != Kind.PADDING:
            if len(found) <= span:
                found.append((Kind(kind), 0))
            assert found[span][0] == kind
            found[span] = (found[span][0], found[span][1] + 1)
    return found


def test_text_is_predicted_and_so_is_the_target_of_a_pair(form):
    pair = SourceTargetTextExample(TextExample("why?"), TextExample("so"), question=TextExample("Q:"))
    chat = NeMoSFTExample({"conversations": [{"from": "User", "value": "a"}, {"from": "Assistant", "value": "bc"}]})
    batch = batch_of([TextExample("abcdef"), pair, chat], form)
    present = batch["kinds"] == Kind.TEXT
    assert [text_at(batch, row, present) for row in range(3)] == ["abcdef", "Q: why?so", "abc"]
    # The first position cannot be predicted.
    assert [text_at(batch, row, batch["predicted"]) for row in range(3)] == ["bcdef", "so", "bc"]
    assert batch["lengths"].tolist() == [6, 9, 3]
    assert batch["codes"].shape == (3, 3, 9)
    assert not batch["codes"].any()
    assert batch["audio"].shape == (0, form.samples_per_frame)
    assert {name: batch[name].dtype for name in ("kinds", "spans", "text_tokens", "codes", "lengths")} == dict.fromkeys(
        ("kinds", "spans", "text_tokens", "codes", "lengths"), torch.int64
    )


def test_an_utterance_is_its_text_context_and_target(form, cuts):
    batch = batch_of(cuts[:2], form, seed=3)
    plain = ContextSpeechDataset(form, LETTERS, seed=3, **LIMITS)[CutSet.from_cuts(cuts[:2])]
    assert batch["ids"] == plain["ids"]
    for row, cut in enumerate(cuts[:2]):
        context, target = int(plain["context_code_lens"][row]), cut.target_codes.shape[1] + 2
        assert kinds_of(batch, row) == [(Kind.TEXT, 5), (Kind.CODES, context), (Kind.CODES, target)]
        codes = batch["codes"][row, :, 5 : 5 + context + target]
        assert torch.equal(codes[:, :context], plain["context_codes"][row, :, :context])
        np.testing.assert_array_equal(codes[:, context + 1 : -1], cut.target_codes.load())
        assert codes[0, [0, context - 1, context, -1]].tolist() == [BOS, EOS, BOS, EOS]
        # The whole target is predicted except BOS, which is given; the context is not predicted.
        expected = [False] + [True] * 4 + [False] * (context + 1) + [True] * (target - 1)
        assert batch["predicted"][row, : len(expected)].tolist() == expected
        assert not batch["predicted"][row, len(expected) :].any()


def test_a_context_is_taken_where_an_utterance_has_one(form, cuts):
    without = fastcopy(cuts[1], custom={key: one for key, one in cuts[1].custom.items() if key != "context_codes"})
    batch = batch_of([cuts[0], without], form, context=None)
    kinds = [[kind for kind, _ in kinds_of(batch, row)] for row in (0, 1)]
    assert kinds == [[Kind.TEXT, Kind.CODES, Kind.CODES], [Kind.TEXT, Kind.CODES]]


def test_audio_replaces_the_locator_in_a_conversation(form, cuts, heard):
    """A user's turn without codes is audio; the assistant's turn is codes, which are predicted."""
    talk = conversation(
        ("user", "Hear"), ("user", heard[0]), ("assistant", "yes"), ("assistant", cuts[1]), ("user", "and"),
        ("assistant", "bye"),
    )  # fmt: skip
    batch = batch_of([talk], form)
    frames = form.num_frames(heard[0].duration)
    codes = cuts[1].target_codes.shape[1] + 2
    # Consecutive turns of one role are joined with a space.
    assert kinds_of(batch) == [
        (Kind.TEXT, 5), (Kind.AUDIO, frames), (Kind.TEXT, 4), (Kind.CODES, codes), (Kind.TEXT, 6)
    ]  # fmt: skip
    assert text_at(batch, 0, batch["kinds"] == Kind.TEXT) == "Hear yes andbye"
    assert text_at(batch, 0, batch["predicted"] & (batch["kinds"] == Kind.TEXT)) == "yes bye"
    assert int((batch["predicted"] & (batch["kinds"] == Kind.CODES)).sum()) == codes - 1
    assert not (batch["predicted"] & (batch["kinds"] == Kind.AUDIO)).any()
    np.testing.assert_array_equal(batch["audio"].flatten()[: heard[0].num_samples], heard[0].load_audio()[0])
    assert not batch["audio"].flatten()[heard[0].num_samples :].any()


def test_groups_of_tags_have_their_prompts(corpora, form):
    entries = [
        corpora.entry("small", tags={"task": "tts", "context": "Say: "}),
        corpora.entry("small", tags={"task": "clone", "context": "Clone: "}),
        {"type": "txt", "paths": str(corpora.text), "language": "en", "tags": {"task": "lm"}},
    ]
    settings = {"use_multimodal_sampling": True, "token_equivalent_duration": 0.1, "prompt_format": "plain"}
    cfg = {"input_cfg": entries, "batch_size": 12, "shard_seed": 1} | settings
    dataset = SpeechTextDataset(form, LETTERS, tags=["task"], **LIMITS)
    batches = take(get_dataloader(cfg, 0, 1, LETTERS, dataset=dataset), 3)
    found = set()
    for batch in batches:
        for row, tags in enumerate(batch["tags"]):
            given = (batch["kinds"] == Kind.TEXT) & ~batch["predicted"]
            found.add((tags["task"], text_at(batch, row, given)))
    # The first letter of a line of text is given rather than predicted.
    assert found == {("tts", "Say: "), ("clone", "Clone: "), ("lm", "l")}


OTHER = CodecForm(sampling_rate=16000, samples_per_frame=320, codebook_size=64, num_codebooks=4)
HINT = f"what is {LOCATOR}"


@pytest.mark.parametrize(
    ("make", "options", "code", "told"),
    [
        (lambda cut, audio, bare: conversation(("user", "a"), ("assistant", audio)), {}, "unknown_field",
         "assistant in conversation 'c1' has no target_codes, and audio cannot"),
        (lambda cut, audio, bare: conversation(("user", HINT), ("user", audio), ("assistant", "a")), {},
         "bad_config_value", "'c1' has a text turn of user that contains the audio_locator_tag '<audio>': remove it"),
        (lambda cut, audio, bare: conversation(("user", bare), ("assistant", "a")), {}, None,
         "of a conversation has neither target_codes nor target_audio: add one"),
        (lambda cut, audio, bare: bare, {"context": False}, "unknown_field",
         "has no target_codes: add the field to fields"),
        (lambda cut, audio, bare: bare, {}, "unknown_field", "has no context_codes: add the field .* context=False"),
        (lambda cut, audio, bare: cut, {"form": OTHER}, "bad_codec", "have 3 codebooks, but the codec has 4"),
        (lambda cut, audio, bare: cut, {"form": fastcopy(OTHER, num_codebooks=None)}, "bad_codec", "num_codebooks"),
        (lambda cut, audio, bare: None, {}, None, "the batch has no examples"),
    ],
)  # fmt: skip
def test_examples_without_a_sequence_are_refused(form, cuts, heard, corpora, make, options, code, told):
    example = make(cuts[0], heard[0], next(iter(open_shar(corpora.small, []))))
    with pytest.raises(ValueError if code is None else ConfigError, match=told) as caught:
        batch_of([] if example is None else [example], **({"form": form} | options))
    assert getattr(caught.value, "code", None) == code


def test_padded_cuts_and_missing_locators_are_named(form, cuts, heard):
    with pytest.raises(ValueError, match="is a MixedCut: sequences are built only from MonoCuts"):
        SpeechTextDataset(form, LETTERS)[CutSet.from_cuts([cuts[0].pad(duration=2.0)])]
    lost = fastcopy(prompted(conversation(("user", heard[0]), ("assistant", "a"))))
    lost.input_ids = lost.input_ids[1:]
    with raises(ConfigError, "bad_config_value", "1 audio turns but 0 occurrences of the tokens of '<audio>'"):
        SpeechTextDataset(form, LETTERS).spans_of(lost)
