"""The model of the training example: nothing looks ahead, and padding changes nothing."""

from __future__ import annotations

import pytest
import torch
from speech_lm import SpeechLM, count_targets
from support.sequences import CODEBOOKS, CODES_SIZE, HEARD, SAMPLES, SHORT_TTS, TEXT, TEXT_SIZE, TTS, Spans, make_batch
from train_config import ModelConfig


@pytest.fixture
def model() -> SpeechLM:
    torch.manual_seed(0)
    config = ModelConfig(dim=16, num_layers=2, num_heads=2)
    return SpeechLM(config, TEXT_SIZE, CODEBOOKS, CODES_SIZE, SAMPLES).double().eval()


def test_padding_changes_no_loss(model: SpeechLM) -> None:
    plain, padded = model(make_batch(TTS, SHORT_TTS)), model(make_batch(TTS, SHORT_TTS, padding=4))
    assert plain.text.item() == pytest.approx(padded.text.item(), rel=1e-12)
    assert plain.codes.item() == pytest.approx(padded.codes.item(), rel=1e-12)
    assert plain.num_positions == padded.num_positions == 5 + 6 + 9 + 3 + 4 + 2


def test_a_batch_is_the_mean_over_its_tokens(model: SpeechLM) -> None:
    batch = make_batch(TTS, SHORT_TTS)
    both = model(batch)
    first, second = (model({name: part[i : i + 1] for name, part in batch.items()}) for i in range(2))
    # One token less than there are is predicted: 4 and 2 of text, 8 and 1 of target.
    assert count_targets(batch) == (4 + 2, CODEBOOKS * (8 + 1))
    assert both.text.item() == pytest.approx((4 * first.text + 2 * second.text).item() / 6, rel=1e-9)
    assert both.codes.item() == pytest.approx((8 * first.codes + 1 * second.codes).item() / 9, rel=1e-9)


def test_examples_of_all_kinds_are_independent_of_each_other(model: SpeechLM) -> None:
    """Text alone, speech, and audio that is heard: in one batch as each by itself."""
    together = model(make_batch(TEXT, HEARD, TTS))
    counts = count_targets(make_batch(TEXT, HEARD, TTS))
    assert counts == (5 + 2 + 4, CODEBOOKS * 8)
    changed = make_batch(TEXT, HEARD, TTS)
    changed["text_tokens"][0] = (changed["text_tokens"][0] + 1) % TEXT_SIZE
    changed["audio"] += 1.0
    assert model(changed).codes.item() == together.codes.item()
    assert model(changed).text.item() != together.text.item()


def test_nothing_looks_ahead(model: SpeechLM) -> None:
    batch = make_batch(TTS)
    # The first seven frames of the target are predicted from what comes before them, whatever follows.
    batch["predicted"][0, -2:] = False
    before = model(batch).codes.item()
    batch["codes"][..., -2:] = (batch["codes"][..., -2:] + 1) % CODES_SIZE
    assert model(batch).codes.item() == before
    batch["codes"][..., -6] = (batch["codes"][..., -6] + 1) % CODES_SIZE
    assert model(batch).codes.item() != before


def test_context_and_text_reach_the_target(model: SpeechLM) -> None:
    batch = make_batch(TTS)
    before = model(batch).codes.item()
    for name, size, place in (("text_tokens", TEXT_SIZE, 0), ("codes", CODES_SIZE, 5)):
        changed = {name: value.clone() for name, value in batch.items()}
        changed[name][..., place] = (changed[name][..., place] + 1) % size
        assert model(changed).codes.item() != before


def test_audio_reaches_the_answer(model: SpeechLM) -> None:
    batch = make_batch(TEXT, HEARD)
    before = model(batch).text.item()
    for frame in range(4):
        changed = batch | {"audio": batch["audio"].clone()}
        changed["audio"][frame] *= 2
        assert model(changed).text.item() != before


@pytest.mark.parametrize("spans", [TEXT, HEARD, TTS])
def test_every_weight_has_a_gradient_whatever_a_batch_has(model: SpeechLM, spans: Spans) -> None:
    """Otherwise ranks whose batches differ in kind would wait for each other's gradients."""
    losses = model(make_batch(spans))
    losses.total.backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []
    text, codes = count_targets(make_batch(spans))
    assert (losses.text.item() > 0, losses.codes.item() > 0) == (text > 0, codes > 0)


def test_the_loss_is_that_of_the_logits_by_hand(model: SpeechLM) -> None:
    for head in (model.text_head, model.codes_head):
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
    losses = model(make_batch(TTS))
    assert losses.text.item() == pytest.approx(torch.tensor(float(TEXT_SIZE)).log().item(), rel=1e-6)
    assert losses.codes.item() == pytest.approx(torch.tensor(float(CODES_SIZE)).log().item(), rel=1e-6)
    assert losses.total.item() == pytest.approx(losses.text.item() + losses.codes.item())


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="multiple of twice num_heads"):
        ModelConfig(dim=30, num_heads=4)
