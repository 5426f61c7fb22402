"""Read a dataset with plain Lhotse, without sharmill, and load all audio and codes.

python examples/read_with_lhotse.py DATASET
"""

import json
import sys
from pathlib import Path

from lhotse import CutSet


def main(dataset: Path) -> None:
    fields = json.loads((dataset / "dataset.json").read_text())["fields"]
    # Only one codec can be read at a time, because all codecs use the same attributes of a cut.
    codec = next((field.split("/")[0] for field in fields if "/" in field), None)
    chosen = [field for field in fields if "/" not in field or field.startswith(f"{codec}/")]
    files = {Path(field).name: [str(path) for path in sorted((dataset / field).iterdir())] for field in chosen}
    cuts = samples = frames = 0
    for cut in CutSet.from_shar(fields=files):
        cuts += 1
        samples += cut.load_target_audio().size + cut.load_context_audio().size
        if codec is not None:
            frames += cut.target_codes.load().shape[1] + cut.context_codes.load().shape[1]
    print(f"{cuts} cuts, {samples} samples of audio, {frames} frames of codes")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
