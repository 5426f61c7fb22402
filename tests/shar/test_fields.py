"""The fields that a dataset says it has: what may be said, and datasets that do not say it."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.reader import make_dataset

from sharmill.errors import DamagedShard
from sharmill.shar.index import read_dataset, write_dataset
from sharmill.shar.layout import Field, base_fields, codec_fields

SCORE = Field(name="score", file="score/score.{:06d}.jsonl.gz", kind="value", attribute="score", by="scorer")


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../score", "file": "../score/score.{:06d}.jsonl.gz"},
        {"name": "/score", "file": "/score/score.{:06d}.jsonl.gz"},
        {"name": ".sharmill-staging", "file": ".sharmill-staging/score.{:06d}.jsonl.gz"},
        {"name": "a\nb", "file": "a\nb/score.{:06d}.jsonl.gz"},
        {"file": "target_audio/score.{:06d}.jsonl.gz"},
        {"file": "score/../../score.{:06d}.jsonl.gz"},
        {"file": "score/score.000000.jsonl.gz"},
        {"file": "score/score.{:999999999d}.jsonl.gz"},
        {"file": "score/score.{0.__class__}.jsonl.gz"},
        {"file": "score/score.{:06d}.tar"},
        {"kind": "array"},
        {"kind": "cuts"},
        {"kind": "pickle"},
        {"name": "cuts", "file": "cuts/cuts.{:06d}.jsonl.gz"},
        {"attribute": "id"},
        {"attribute": "recording"},
        {"attribute": "shar_position"},
        {"attribute": "__dict__"},
        {"attribute": "two words"},
        {"attribute": ""},
        {"limits": [1, 0]},
        {"limits": ["a", "b"]},
    ],
    ids=str,
)
def test_a_field_that_leads_elsewhere_or_replaces_what_a_cut_has_is_refused(tmp_path, changes):
    make_dataset(tmp_path, [1])
    path = tmp_path / "dataset.json"
    content = json.loads(path.read_text())
    content["layout"].append({**msgspec.to_builtins(SCORE), **changes})
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedShard, match=r"dataset\.json"):
        read_dataset(tmp_path)


def test_a_dataset_that_does_not_say_it_has_the_published_layout(tmp_path):
    make_dataset(tmp_path, [1], codes=True)
    said = read_dataset(tmp_path)
    path = tmp_path / "dataset.json"
    content = json.loads(path.read_text())
    assert content.pop("layout") == [
        {"name": field.name, "file": field.file, "kind": field.kind, "attribute": field.attribute, "optional": False,
         "limits": None, "by": field.by}
        for field in (base_fields(contexts=False)[0], *codec_fields("toy"))
    ]  # fmt: skip
    path.write_text(json.dumps(content))
    assert read_dataset(tmp_path) == said
    write_dataset(tmp_path, read_dataset(tmp_path))
    assert "layout" in json.loads(path.read_text())
