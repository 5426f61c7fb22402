"""Train a tiny model on the codes of a dataset, with exact resume in the middle of an epoch.

python examples/train.py DATASET CHECKPOINT [STEPS]

Repeat the command to resume from the checkpoint with the remaining cuts of the epoch. ``jobs/train.py`` is an example
of a training with several ranks, mixed data and SLURM.
"""

import itertools
import os
import sys
from pathlib import Path

import torch
from lhotse.dataset import DynamicCutSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.shar import open_shar
from sharmill.shar.reading.loading import ResumableDataset, merge_loader_states
from sharmill.training import ContextSpeechDataset
from sharmill.training.codes import CodecForm


class NextFrame(torch.nn.Module):
    """Model that predicts each frame of the target from the previous frame and the mean of the context."""

    def __init__(self, form: CodecForm, size: int = 32) -> None:
        super().__init__()
        num_codes = form.codebook_size + 8  # codes and special ids
        self.embedding = torch.nn.Embedding(num_codes, size)
        self.output = torch.nn.Linear(size, num_codes)

    def forward(self, batch: dict) -> torch.Tensor:
        # Only the first codebook is used, with shape (cuts, frames).
        target, context = batch["target_codes"][:, 0], batch["context_codes"][:, 0]
        voice = self.embedding(context).mean(dim=1, keepdim=True)
        logits = self.output(self.embedding(target[:, :-1]) + voice)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def main(dataset: str, checkpoint: Path, steps: int) -> None:
    torch.manual_seed(0)
    form = CodecForm.of_dataset(dataset)
    cuts = open_shar(dataset, ["target_codes", "context_codes"], shuffle=True, seed=1, infinite=True)
    # The reader counts only delivered cuts as consumed, not the cuts that the sampler holds back.
    data = ResumableDataset(
        cuts,
        lambda cuts: DynamicCutSampler(cuts, max_cuts=4),
        finish=ContextSpeechDataset(form).__getitem__,
    )
    model = NextFrame(form)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        data.load_state_dict(merge_loader_states([state["data"]]))  # pass all ranks' states, before creating the loader
    loader = StatefulDataLoader(data, batch_size=None)
    for batch in itertools.islice(loader, steps):
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.3f} {' '.join(batch['ids'])}")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}
    # The previous checkpoint stays intact until this one is complete.
    part = checkpoint.with_name(f"{checkpoint.name}.part")
    with part.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(checkpoint)


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 20)
