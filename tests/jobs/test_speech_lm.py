"""The model of the training example: it is causal, and examples of a batch are independent."""

import pytest
import torch
from speech_lm import SpeechLM, count_targets
from torch import Tensor
from train_config import ModelConfig

from sharmill.training.speech_text import Kind

# Triples of kind, length, and whether the span is predicted.
Spans = list[tuple[Kind, int, bool]]

TEXT_SIZE, CODEBOOKS, CODES_SIZE, SAMPLES = 11, 2, 7, 8

# In TTS, text and target are predicted and the context is given. The first position of a span is never predicted.
TTS: Spans = [(Kind.TEXT, 5, True), (Kind.CODES, 6, False), (Kind.CODES, 9, True)]
HEARD: Spans = [(Kind.TEXT, 2, False), (Kind.AUDIO, 4, False), (Kind.TEXT, 3, True)]
TEXT: Spans = [(Kind.TEXT, 6, True)]


def make_batch(*sequences: Spans, padding: int = 0, seed: int = 1) -> dict[str, Tensor]:
    """Return a batch of sequences of spans, with additional padding.

    The content of a sequence is equal in all batches with the same preceding sequences.
    """
    torch.manual_seed(seed)
    size = max(sum(length for _, length, _ in spans) for spans in sequences) + padding
    shape = (len(sequences), size)
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("kinds", "spans", "text_tokens")}
    batch["predicted"] = torch.zeros(shape, dtype=torch.bool)
    batch["codes"] = torch.zeros(len(sequences), CODEBOOKS, size, dtype=torch.int64)
    audio = [torch.zeros(0, SAMPLES)]
    for row, spans in enumerate(sequences):
        begin = 0
        for number, (kind, length, predicted) in enumerate(spans):
            place = slice(begin, begin + length)
            batch["kinds"][row, place], batch["spans"][row, place] = kind, number
            batch["predicted"][row, begin + 1 : begin + length] = predicted
            if kind == Kind.TEXT:
                batch["text_tokens"][row, place] = torch.randint(TEXT_SIZE, (length,))
            elif kind == Kind.CODES:
                batch["codes"][row, :, place] = torch.randint(CODES_SIZE, (CODEBOOKS, length))
            else:
                audio.append(torch.randn(length, SAMPLES))
            begin += length
    return batch | {"audio": torch.cat(audio).double()}


@pytest.fixture
def model() -> SpeechLM:
    torch.manual_seed(0)
    config = ModelConfig(dim=16, num_layers=2, num_heads=2)
    return SpeechLM(config, TEXT_SIZE, CODEBOOKS, CODES_SIZE, SAMPLES).double().eval()


def test_examples_of_all_kinds_are_independent_of_each_other(model: SpeechLM) -> None:
    """Changing text and input audio in a batch does not change the loss of codes."""
    together = model(make_batch(TEXT, HEARD, TTS))
    counts = count_targets(make_batch(TEXT, HEARD, TTS))
    assert counts == (5 + 2 + 4, CODEBOOKS * 8)
    changed = make_batch(TEXT, HEARD, TTS)
    changed["text_tokens"][0] = (changed["text_tokens"][0] + 1) % TEXT_SIZE
    changed["audio"] += 1.0
    assert model(changed).codes.item() == together.codes.item()
    assert model(changed).text.item() != together.text.item()


def test_the_model_is_causal(model: SpeechLM) -> None:
    batch = make_batch(TTS)
    # Predictions of the first seven target frames must not depend on later frames.
    batch["predicted"][0, -2:] = False
    before = model(batch).codes.item()
    batch["codes"][..., -2:] = (batch["codes"][..., -2:] + 1) % CODES_SIZE
    assert model(batch).codes.item() == before
    batch["codes"][..., -6] = (batch["codes"][..., -6] + 1) % CODES_SIZE
    assert model(batch).codes.item() != before
