"""Convert conversations with separately recorded sides to a Shar for NeMo's speech-to-speech models.

python examples/conversations.py MANIFEST OUTPUT

Each line of MANIFEST is JSON: ``{"id": "c1", "user_audio_filepath": "u.wav", "agent_audio_filepath": "a.wav", "turns":
[{"role": "user", "start": 0.0, "duration": 1.5, "text": "..."}, {"role": "assistant", ...}]}``, with paths relative to
the manifest. Both files are mono and equally long, and each is silent while the other side speaks.

In OUTPUT, the user's side is the field ``recording``, and the agent's side is ``target_audio``. Each turn is a
supervision whose speaker is its role. OUTPUT appears only once it is complete.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.audio.utils import AudioLoadingError

from sharmill.errors import ConfigError
from sharmill.files.atomic import make_folder, open_folder_atomic
from sharmill.shar.index import read_dataset
from sharmill.shar.rebuild import rebuild_index

ROLES = ("user", "assistant")
# Tolerance in seconds for unequal lengths, since files end at whole samples or blocks.
TOLERANCE = 0.01


def read_conversations(manifest: Path) -> Iterator[MonoCut]:
    """Yield a cut for each line of the manifest.

    Raises:
        ConfigError: a line is invalid; the message names its number.
    """
    for number, line in enumerate(manifest.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            yield make_cut(json.loads(line), manifest.parent)
        except KeyError as error:
            raise ConfigError(f"{manifest}, line {number}: the key {error} is missing", code="bad_manifest") from error
        except (TypeError, ValueError, AudioLoadingError) as error:
            what = str(error).partition("\n")[0]
            raise ConfigError(f"{manifest}, line {number}: {what}", code="bad_manifest") from error


def make_cut(record: dict[str, Any], folder: Path) -> MonoCut:
    """Return the cut of a conversation, with one supervision per turn and the agent's side as ``target_audio``."""
    user, agent = (
        Recording.from_file(folder / record[f"{side}_audio_filepath"], recording_id=record["id"])
        for side in ("user", "agent")
    )
    if user.num_channels != 1 or agent.num_channels != 1 or abs(user.duration - agent.duration) > TOLERANCE:
        raise ValueError(
            f"both sides must be mono files of equal length; they last {user.duration} s and {agent.duration} s"
        )
    cut = user.to_cut().with_id(record["id"])
    cut.target_audio = agent
    for number, turn in enumerate(record["turns"]):
        if turn["role"] not in ROLES:
            raise ValueError(f"the role of turn {number} is {turn['role']!r}; it must be one of {', '.join(ROLES)}")
        if not 0 <= turn["start"] < turn["start"] + turn["duration"] <= cut.duration + TOLERANCE:
            raise ValueError(f"turn {number} is not within the audio, which lasts {cut.duration} s")
        cut.supervisions.append(
            SupervisionSegment(
                id=f"{cut.id}-{number}",
                recording_id=cut.recording_id,
                start=turn["start"],
                duration=turn["duration"],
                text=turn["text"],
                speaker=turn["role"],
            )
        )
    if not cut.supervisions:
        raise ValueError("the conversation has no turns")
    return cut


def main(manifest: Path, output: Path) -> int:
    if output.exists():
        raise ConfigError(f"{output} exists already; name a new folder", code="foreign_output")
    make_folder(output.absolute().parent)
    with open_folder_atomic(output.absolute()) as folder:
        cuts = CutSet(read_conversations(manifest))
        cuts.to_shar(folder, fields={"recording": "flac", "target_audio": "flac"}, shard_size=1000)
        list(rebuild_index(folder, name=output.name))
    print(f"wrote {output}: {read_dataset(output).num_cuts} conversations")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
    except ConfigError as error:
        sys.exit(f"Error: {error}")
