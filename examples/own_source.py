"""Read your own input format, here one folder per speaker with a text file beside each audio file.

python examples/own_source.py AUDIO_ROOT OUTPUT

::

    AUDIO_ROOT/anna/hello.wav
    AUDIO_ROOT/anna/hello.txt
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soundfile

from sharmill.config import to_config
from sharmill.engine.executor import Listener
from sharmill.files.checksums import checksum_bytes
from sharmill.pipeline import run_dataset
from sharmill.sources import Piece, Source


@dataclass(frozen=True, kw_only=True)
class FolderSource(Source):
    """A source that reads utterances from folders. Its fields are keys in ``sources``, besides those of all sources."""

    type: str = "folders"
    audio_suffix: str = ".wav"

    def identity(self) -> dict[str, Any]:
        """Return the facts on which the records depend; a run is refused if these facts have changed."""
        listing = "\n".join(f"{path} {path.stat().st_size}" for path in self._files())
        return {"files": checksum_bytes(listing.encode())}

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield pieces: consecutive ranges of records. Any rank may read a piece as one unit of ``prepare``."""
        count = len(self._files())
        for begin in range(0, count, records_per_piece):
            end = min(begin + records_per_piece, count)
            yield Piece(end - begin, {"begin": begin, "end": end})

    def read(self, piece: dict[str, Any]) -> Iterator[bytes]:
        """Yield the records of a piece as JSON, with the keys of a NeMo manifest."""
        for path in self._files()[piece["begin"] : piece["end"]]:
            record = {
                "audio_filepath": path.relative_to(str(self.audio_root)).as_posix(),
                "duration": soundfile.info(path).duration,
                "speaker": path.parent.name,
                "text": path.with_suffix(".txt").read_text().strip(),
            }
            yield json.dumps(record).encode()

    def _files(self) -> list[Path]:
        return sorted(Path(str(self.audio_root)).glob(f"*/*{self.audio_suffix}"))


def main(audio_root: str, output: Path) -> int:
    config = to_config(
        {
            "name": "folders",
            "run_dir": str(output / "run"),
            "dataset_dir": str(output / "dataset"),
            "sources": [{"type": "python:own_source:FolderSource", "audio_root": audio_root, "language": "en"}],
        },
        origin="examples/own_source.py",
    )
    return 0 if run_dataset(config, Listener(), stages=["prepare"]).ok else 1


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
