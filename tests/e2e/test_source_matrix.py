"""Real speech in the form of every source, through all stages: each dataset equals the plain one."""

import numpy as np
import pytest
from lhotse import CutSet
from support.project import DATA, TINY_CODEC, TINY_ENCODER, config_for
from support.sources import FORMS, whole_files

from sharmill.engine.executor import Listener
from sharmill.pipeline import run_dataset
from sharmill.shar import open_shar
from sharmill.shar.items import read_field

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="needs real speech in ../shared/data, which is not in the repository"),
]
AUDIO = DATA / "librispeech_10x10/audio"
FIELDS = ("target_audio", "context_audio", "codes_tiny/target_codes", "codes_tiny/context_codes")


@pytest.fixture(scope="module")
def records():
    found = whole_files(DATA / "librispeech_10x10/manifest.json", AUDIO, count=4)
    assert len(found) == 12
    return found


@pytest.fixture(scope="module")
def plain(records, tmp_path_factory):
    return build(tmp_path_factory.mktemp("plain"), "nemo", records)


def build(folder, form, records, **keys):
    """The dataset of the records in one form, checked deeply and against its source; no record may be missing."""
    (folder / "input").mkdir(parents=True)
    # The plain one without feeders, the others with some.
    feeders = 0 if form == "nemo" else 2
    source = {} if form == "copy" else FORMS[form](folder / "input", records, AUDIO)
    config = config_for(
        folder, [source | {"language": "en"} | keys], speaker_key="speaker", prepare={"unit_records": 5},
        match={"encoder": TINY_ENCODER, "min_similarity": -1.0, "min_duration": 0.0},
        write={"order": "manifest", "shard_size": 5}, encode={"codecs": [{"name": "tiny", "model": TINY_CODEC}]},
        validate={"deep": True, "against_sources": True}, executor={"workers": 1, "feeders": feeders},
    )  # fmt: skip
    result = run_dataset(config, Listener())
    assert result.ok
    assert result.report.findings == []
    assert (folder / "run/rejects.jsonl").read_bytes() == b""
    return folder / "dataset"


def facts(dataset):
    """Return the speaker and length of every cut and its context, by text."""
    found = {}
    for cut in open_shar(dataset, []):
        (said,) = cut.supervisions
        context = said.custom["context_audio_text"]
        found[said.text] = (said.custom["speaker"], cut.duration, context, said.custom["context_speaker_similarity"])
    return found


def contents(dataset):
    """The bytes of every item of every field, by the text of its cut."""
    texts = [cut.supervisions[0].text for cut in open_shar(dataset, [])]
    found = {}
    for field in FIELDS:
        items = []
        for path in sorted((dataset / field).glob("*.tar")):
            items += [bytes(item.data) for item in read_field(path)]
        found |= {(field, text): data for text, data in zip(texts, items, strict=True)}
    return found


@pytest.mark.parametrize("form", [form for form in FORMS if form != "nemo"])
def test_other_input_forms_give_the_dataset_of_a_plain_manifest(form, plain, records, tmp_path):
    made = build(tmp_path, form, records)
    assert len(facts(made)) == len(records)
    if form == "lhotse_shar":
        # The writer of this source encodes the audio again, with the same samples.
        expected = {cut.supervisions[0].text: cut.load_target_audio() for cut in open_shar(plain)}
        for cut in open_shar(made):
            np.testing.assert_array_equal(cut.load_target_audio(), expected[cut.supervisions[0].text])
    else:
        assert contents(made) == contents(plain)
    assert facts(made) == facts(plain)
    if form in ("table", "folder_of_texts", "lhotse_cuts", "lhotse_sets", "kaldi", "wenet_raw"):
        # The same paths have the same ids.
        assert {cut.id for cut in open_shar(made, [])} == {cut.id for cut in open_shar(plain, [])}


@pytest.mark.parametrize("form", ["lhotse_cuts", "lhotse_shar"])
def test_the_ids_of_cuts_are_kept_if_asked(form, records, tmp_path):
    dataset = build(tmp_path, form, records, keep_ids=True)
    source = tmp_path / "input"
    theirs = (
        CutSet.from_shar(in_dir=source / "shar")
        if form == "lhotse_shar"
        else CutSet.from_file(source / "cuts.jsonl.gz")
    )
    assert {cut.id: cut.supervisions[0].text for cut in open_shar(dataset, [])} == {
        cut.id: cut.supervisions[0].text for cut in theirs
    }
    made = build(tmp_path / "again", "copy", records, type="lhotse_shar", shar=str(dataset), keep_ids=True)
    assert [cut.id for cut in open_shar(made, [])] == [cut.id for cut in open_shar(dataset, [])]
    assert contents(made) == contents(dataset)
