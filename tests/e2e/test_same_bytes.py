"""The bytes of datasets, field by field, beside those of earlier versions.

Audio has the same bytes everywhere. Codes and similarities come out of float arithmetic: their checksums are stored
under the model of the CPU and the versions of torch and numpy. Elsewhere one rank is compared with three.

    python tests/e2e/test_same_bytes.py     stores the checksums of this machine
"""

import gzip
import hashlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.project import LIBRISPEECH, put, run_sharmill, write_config, write_lines

pytestmark = pytest.mark.e2e

REFERENCES = Path(__file__).with_name("same_bytes.json")
RATE = 22_050
VOICES = {"low": 211, "middle": 139, "high": 97}  # samples of a period
# Several units in each stage.
SECTIONS: dict[str, dict[str, Any]] = {
    "prepare": {"unit_records": 4},
    "match": {"encoder": "resemblyzer", "unit_seconds": 20.0},
    "write": {"shard_size": 4},
    "encode": {"codecs": [{"name": "builtin", "model": "builtin"}], "unit_seconds": 20.0},
}
CHANGES: dict[str, dict[str, Any]] = {
    "contexts": {},
    "resampled": {"write": {"sampling_rate": 24_000}},
    "without contexts": {"match": None},
}
# Real speech is FLAC, which is copied byte for byte.
CASES = [*(f"exact, {case}" for case in CHANGES), "librispeech, contexts"]


@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])])
def test_fields_have_the_bytes_of_earlier_versions(case, tmp_path, capsys):
    if case.startswith("librispeech") and not LIBRISPEECH.is_dir():
        pytest.skip("needs real speech in ../shared/data, which is not in the repository")
    reference = json.loads(REFERENCES.read_text())[case]
    # Feeders change nothing: the references are older than they are.
    built = build(case, tmp_path / "dataset", workers=3, feeders=2)
    exact = hash_fields(built)
    assert {name: exact[name] for name in reference["everywhere"]} == reference["everywhere"]
    if known := next((reference[name] for name in machine() if name in reference), None):
        assert {name: exact[name] for name in known} == known
    else:
        with capsys.disabled():
            print(f"\n{case}: cuts and codes have no reference for {machine()[0]}: one rank is compared with three")
        assert hash_fields(build(case, tmp_path / "alone", workers=1, feeders=0)) == exact


def build(case: str, folder: Path, *, workers: int, feeders: int) -> Path:
    """Run the stages of a case and return the dataset directory."""
    corpus, _, changes = case.partition(", ")
    if corpus == "librispeech":
        manifest, audio_root = LIBRISPEECH / "manifest.json", LIBRISPEECH / "audio"
        sizes = {"prepare": {"unit_records": 25}, "write": {"shard_size": 20}, "encode": {"unit_seconds": 100.0}}
    else:
        manifest, audio_root = make_corpus(folder / "corpus"), folder / "corpus/audio"
        sizes = {}
    sections: dict[str, Any] = {"executor": {"workers": workers, "feeders": feeders}}
    for name, values in SECTIONS.items():
        change = CHANGES[changes].get(name, {})
        sections[name] = None if change is None else values | sizes.get(name, {}) | change
    stages = ["prepare", "match", "write", "encode"]
    if changes == "without contexts":
        stages.remove("match")
    run_sharmill("run", write_config(folder, manifest, audio_root, name="exact", **sections), *stages)
    return folder / "dataset"


def make_corpus(folder: Path) -> Path:
    """Write three voices with five utterances of 3.2 to 4.8 s each and one bad record; return the manifest's path."""
    records = []
    for number, (voice, period) in enumerate(VOICES.items()):
        for utterance in range(5):
            num_samples = RATE * 32 // 10 + RATE * 4 // 10 * utterance
            samples = make_samples(num_samples, period, seed=10 * number + utterance)
            put(folder / f"audio/{voice}/{utterance}.wav", samples, RATE)
            records.append({
                "audio_filepath": f"{voice}/{utterance}.wav", "duration": num_samples / RATE,
                "text": f"text {utterance}", "speaker": f"| Language:en Dataset:Exact Speaker:{voice} |",
            })  # fmt: skip
    return write_lines(folder / "manifest.json", [*records, records[0] | {"audio_filepath": "low/missing.wav"}])


def make_samples(num_samples: int, period: int, seed: int) -> np.ndarray:
    """Return a saw tooth with noise, swelling like syllables, as int16 (num_samples,): the same on every machine."""
    times = np.arange(num_samples, dtype=np.int64)
    # The pitch moves by some samples a period, from utterance to utterance in another way.
    wobble = np.abs(times // 40 % 60 - 30) // (6 + seed % 3)
    saw = (times % (period + wobble)) * 24_000 // period - 12_000
    noise = (times * times * 40_503 + (times + seed) * 30_011) % 4_001 - 2_000
    summed = np.cumsum(saw + noise)
    width = 3 + period // 40
    smooth = (summed[width:] - summed[:-width]) // width
    smooth = np.concatenate([smooth, smooth[-1:].repeat(width)])
    swell = np.abs((times + 700 * seed) * 1_000 // (RATE // 5) % 2_000 - 1_000)
    return np.clip(smooth * swell // 1_000, -32_768, 32_767).astype("<i2")


def hash_fields(dataset: Path) -> dict[str, str]:
    """Return the sha256 of each field's files, in their order, and of the cuts without similarities."""
    fields = sorted(path.parent for path in dataset.rglob("*.000000.*"))
    hashes = {folder.relative_to(dataset).as_posix(): _hash_files(folder) for folder in fields}
    lines = b"".join(gzip.decompress(path.read_bytes()) for path in sorted((dataset / "cuts").iterdir())).splitlines()
    cuts = [json.loads(line) for line in lines]
    for cut in cuts:
        cut["supervisions"][0]["custom"].pop("context_speaker_similarity", None)
    return hashes | {"cuts without similarities": hashlib.sha256(json.dumps(cuts).encode()).hexdigest()}


def machine() -> tuple[str, str]:
    """Return the key of this machine: model of the CPU, versions of torch and numpy. The second lacks the numbers.

    Clouds give many models the same name: family, model and stepping tell them apart.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    name = found.get("model name", "unknown CPU")
    numbers = "-".join(found.get(key, "") for key in ("cpu family", "model", "stepping"))
    versions = f"torch {version('torch')}, numpy {version('numpy')}"
    return f"{name} {numbers}, {versions}", f"{name}, {versions}"


def _hash_files(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        found.update(f"{path.name} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _is_everywhere(field: str) -> bool:
    return field.endswith("_audio") or field == "cuts without similarities"


def _store_references() -> None:
    known = json.loads(REFERENCES.read_text()) if REFERENCES.exists() else {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = hash_fields(build(case, Path(folder), workers=1, feeders=0))
        everywhere = {name: value for name, value in found.items() if _is_everywhere(name)}
        here = {name: value for name, value in found.items() if name not in everywhere}
        known[case] = known.get(case, {}) | {"everywhere": everywhere, machine()[0]: here}
        print(case, "stored")
    REFERENCES.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    _store_references()
