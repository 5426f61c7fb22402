"""Checkpoints of small models, built once per session."""

import logging

import pytest
from support import models

from sharmill.models.nemo_models import quiet_nemo


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Return paths by kind: nemo_speaker(_unmasked), nemo_codec(_noncausal), encodec, mimi, dac."""

    root = tmp_path_factory.mktemp("checkpoints")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with quiet_nemo():
        return {
            "nemo_speaker": models.save_nemo_speaker(root / "speaker.nemo"),
            "nemo_speaker_unmasked": models.save_nemo_speaker(root / "unmasked.nemo", masked=False),
            "nemo_codec": models.save_nemo_codec(root / "codec.nemo"),
            "nemo_codec_noncausal": models.save_nemo_codec(
                root / "noncausal.nemo", models.nemo_codec_config(causal=False)
            ),
            "encodec": models.save_encodec(root / "encodec"),
            "mimi": models.save_mimi(root / "mimi"),
            "dac": models.save_dac(root / "dac"),
        }
