"""The model of the training example: nothing looks ahead, and padding changes nothing."""

import pytest
import torch
from speech_lm import SpeechLM
from torch import Tensor
from train_config import ModelConfig

TEXT_SIZE, CODEBOOKS, CODES_SIZE = 11, 2, 7


@pytest.fixture
def model() -> SpeechLM:
    torch.manual_seed(0)
    return SpeechLM(ModelConfig(dim=16, num_layers=2, num_heads=2), TEXT_SIZE, CODEBOOKS, CODES_SIZE).double().eval()


def make_batch(lengths: list[tuple[int, int, int]], padding: int = 0) -> dict[str, Tensor]:
    """Text, context and target of these lengths, the same ids for the same position, with more padding if asked."""
    torch.manual_seed(1)
    sizes = [max(length[part] for length in lengths) for part in range(3)]
    text = torch.randint(TEXT_SIZE, (len(lengths), sizes[0]))
    codes = [torch.randint(CODES_SIZE, (len(lengths), CODEBOOKS, size)) for size in sizes[1:]]
    text, *codes = (torch.nn.functional.pad(part, (0, padding)) for part in (text, *codes))
    text_lens, *codes_lens = (torch.tensor([length[part] for length in lengths]) for part in range(3))
    batch = {"text_tokens": text, "text_lens": text_lens}
    for name, ids, lens in zip(("context", "target"), codes, codes_lens, strict=True):
        batch |= {f"{name}_codes": ids, f"{name}_code_lens": lens}
    return batch


def test_padding_changes_no_loss(model: SpeechLM) -> None:
    lengths = [(5, 6, 9), (3, 4, 2)]
    plain, padded = model(make_batch(lengths)), model(make_batch(lengths, padding=4))
    assert plain.text.item() == pytest.approx(padded.text.item(), rel=1e-12)
    assert plain.codes.item() == pytest.approx(padded.codes.item(), rel=1e-12)
    assert plain.num_positions == padded.num_positions == 5 + 6 + 9 + 3 + 4 + 2


def test_a_batch_is_the_mean_over_its_tokens(model: SpeechLM) -> None:
    batch = make_batch([(5, 6, 9), (3, 4, 2)])
    both = model(batch)
    first, second = (model({name: part[i : i + 1] for name, part in batch.items()}) for i in range(2))
    # One token less than there are is predicted: 4 and 2 of text, 8 and 1 of target.
    assert both.text.item() == pytest.approx((4 * first.text + 2 * second.text).item() / 6, rel=1e-9)
    assert both.codes.item() == pytest.approx((8 * first.codes + 1 * second.codes).item() / 9, rel=1e-9)


def test_nothing_looks_ahead(model: SpeechLM) -> None:
    batch = make_batch([(5, 6, 9)])
    shorter = batch | {"target_code_lens": torch.tensor([7])}
    target = batch["target_codes"]
    # The first seven frames are predicted from what comes before them, whatever follows.
    shortened = model(shorter).codes
    target[..., 7:] = (target[..., 7:] + 1) % CODES_SIZE
    assert model(shorter).codes.item() == shortened.item()
    target[..., 3] = (target[..., 3] + 1) % CODES_SIZE
    assert model(shorter).codes.item() != shortened.item()


def test_context_and_text_reach_the_target(model: SpeechLM) -> None:
    batch = make_batch([(5, 6, 9)])
    before = model(batch).codes.item()
    for name, size in (("text_tokens", TEXT_SIZE), ("context_codes", CODES_SIZE)):
        changed = {name: value.clone() for name, value in batch.items()}
        changed[name][..., 0] = (changed[name][..., 0] + 1) % size
        assert model(changed).codes.item() != before


def test_the_loss_is_that_of_the_logits_by_hand(model: SpeechLM) -> None:
    batch = make_batch([(4, 3, 3)])
    torch.nn.init.zeros_(model.text_head.weight)
    torch.nn.init.zeros_(model.codes_head.weight)
    torch.nn.init.zeros_(model.text_head.bias)
    torch.nn.init.zeros_(model.codes_head.bias)
    losses = model(batch)
    assert losses.text.item() == pytest.approx(torch.tensor(float(TEXT_SIZE)).log().item(), rel=1e-6)
    assert losses.codes.item() == pytest.approx(torch.tensor(float(CODES_SIZE)).log().item(), rel=1e-6)
    assert losses.total.item() == pytest.approx(losses.text.item() + losses.codes.item())


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="multiple of twice num_heads"):
        ModelConfig(dim=30, num_heads=4)
