"""Parquet and Arrow files as sources: rows with audio or paths, and files that cannot be read."""

import datetime
import decimal
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.project import config_for, put, raises, run_prepare, voice
from support.sources import read_raw

from sharmill.audio.arrow import read_audio
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import Member
from sharmill.sources import DescribedRecord, UnreadableRecord, record_text
from sharmill.sources.parquet import ParquetSource

AUDIO = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def source_of(path, **keys):
    return ParquetSource(parquet=str(path), **keys)


def read(source, size=100):
    """The raw records, whose text must be the same if audio is not read."""
    rows = read_raw(source, size)
    assert [json.loads(record_text(raw)) for raw in source.records()] == [json.loads(record_text(raw)) for raw in rows]
    return rows


def texts(source, size=100):
    return [json.loads(record_text(raw)) for raw in read(source, size)]


@pytest.fixture(scope="module")
def voices(tmp_path_factory):
    """Seven FLAC files."""
    folder = tmp_path_factory.mktemp("voices")
    return [put(folder / f"{n}.flac", voice(0.5 + n / 10, seed=n)) for n in range(7)]


@pytest.fixture(scope="module")
def table(voices):
    """A table as Hugging Face's datasets write it, and columns of many types."""
    return pa.table(
        {
            "audio": pa.array([{"bytes": path.read_bytes(), "path": path.name} for path in voices], AUDIO),
            "text": [f"text {n}" for n in range(7)],
            "speaker": [n % 2 for n in range(7)],
            "cer": [0.5, None, float("nan"), 0.0, 1.0, 2.0, 3.0],
            "day": [datetime.date(2024, 1, 2)] * 7,
            "when": pa.array([datetime.datetime(2024, 1, 2, 3)] * 7, pa.timestamp("ns")),
            "kind": pa.array(["a", "b"] * 3 + ["a"]).dictionary_encode(),
            "nested": [[1]] * 7,
            "blob": [b"\xff"] * 7,
        }
    )


def write(table, path, form="parquet", rows=3):
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "parquet":
        pq.write_table(table, path, row_group_size=rows)
    else:
        # Hugging Face's cache uses the stream format, feather the file format.
        make = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


FORMS = ["parquet", "file", "stream"]


class TestRecords:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
    def test_are_the_rows(self, form, size, table, voices, tmp_path):
        path = write(table, tmp_path / "train-0.any", form)
        source = source_of(path)
        source.check()
        found = read(source, size)
        assert [raw.member for raw in found] == [
            ("train-0.any", "row:audio", n, voices[n].stat().st_size) for n in range(7)
        ]
        expected = {"audio_filepath": "train-0.any#1", "audio_name": "1.flac", "text": "text 1", "speaker": 1,
                    "day": "2024-01-02", "when": "2024-01-02 03:00:00.000000000", "kind": "b"}  # fmt: skip
        assert json.loads(found[1].record) == expected
        assert json.loads(found[0].record)["cer"] == 0.5
        assert json.loads(found[2].record)["cer"] is None

    @pytest.mark.parametrize("form", FORMS)
    def test_have_the_samples_of_the_files(self, form, table, voices, tmp_path):
        path = write(table, tmp_path / "data" / "train-0.any", form)
        prepared = run_prepare(
            config_for(tmp_path, [{"type": "parquet", "parquet": str(path), "language": "en"}], speaker_key="speaker")
        )
        assert prepared.rejects == []
        reader = SegmentReader(AudioRoots.of([path.parent]), 0.1)
        rows = list(zip(prepared.kept, voices, strict=True))
        for utterance, file in [*rows, *rows[::-1], rows[3]]:
            audio = reader.read(utterance.segment)
            np.testing.assert_array_equal(audio.samples, voice(0.5 + int(file.stem) / 10, seed=int(file.stem)))
            ((_, copy),) = reader.read_or_copy([utterance.segment], lambda location: True)
            assert copy.data == file.read_bytes()
        assert [u.recording_id for u in prepared.kept] == [f"rec-train-0#{n}" for n in range(7)]
        assert prepared.kept[1].speaker == "| Language:en Dataset:small Speaker:1 |"

    @pytest.mark.parametrize("form", FORMS)
    def test_of_paths_are_plain_records(self, form, voices, tmp_path):
        paths = [str(path) for path in voices[:2]]
        struct = [{"bytes": None, "path": path} for path in paths]
        tables = {
            "text": pa.table({"file": paths, "text": ["a", "b"]}),
            "struct": pa.table({"file": pa.array(struct, AUDIO), "text": ["a", "b"]}),
            "path": pa.table({"file": [{"path": path} for path in paths], "text": ["a", "b"]}),
        }
        for name, rows in tables.items():
            source = source_of(write(rows, tmp_path / name, form), audio="file", audio_root=str(voices[0].parent))
            assert texts(source) == [{"audio_filepath": paths[n], "text": "ab"[n]} for n in range(2)]
            assert all(isinstance(raw, bytes) for raw in read(source))

    @pytest.mark.parametrize("form", FORMS)
    def test_of_plain_bytes(self, form, voices, tmp_path):
        rows = pa.table({"audio": [path.read_bytes() for path in voices], "audio_filepath": ["x"] * 7})
        found = read(source_of(write(rows, tmp_path / "t.bin", form)))
        assert json.loads(found[6].record) == {"audio_filepath": "t.bin#6", "source_audio_filepath": "x"}
        assert read_audio(tmp_path / "t.bin", found[6].member) == voices[6].read_bytes()

    @pytest.mark.parametrize("form", FORMS)
    def test_of_rows_with_and_without_audio(self, form, voices, tmp_path):
        data = voices[0].read_bytes()
        audio = [None, {"bytes": data, "path": None}, {"bytes": None, "path": "a.wav"}, {"bytes": None, "path": None},
                 {"bytes": b"", "path": "b.wav"}]  # fmt: skip
        rows = pa.table({"audio": pa.array(audio, AUDIO), "text": ["a", None, "c", "d", "e"]})
        found = read(source_of(write(rows, tmp_path / "t.any", form)))
        assert [type(raw) for raw in found] == [
            UnreadableRecord,
            DescribedRecord,
            bytes,
            UnreadableRecord,
            DescribedRecord,
        ]
        assert [raw.reason for raw in found if isinstance(raw, UnreadableRecord)] == ["missing_audio"] * 2
        assert [json.loads(record_text(raw)) for raw in found] == [
            {"audio_filepath": "t.any#0", "text": "a"},
            {"audio_filepath": "t.any#1"},
            {"audio_filepath": "a.wav", "text": "c"},
            {"audio_filepath": "t.any#3", "text": "d"},
            {"audio_filepath": "t.any#4", "audio_name": "b.wav", "text": "e"},
        ]

    def test_of_pandas_and_of_hugging_face_are_the_same(self, voices, tmp_path):
        datasets = pytest.importorskip("datasets")
        import pandas

        rows = [{"bytes": path.read_bytes(), "path": path.name} for path in voices]
        plain = pa.table({"audio": pa.array(rows, AUDIO), "text": [f"t{n}" for n in range(7)], "sex": [0, 1] * 3 + [0]})
        made = datasets.Dataset(plain).cast_column("audio", datasets.Audio(decode=False))
        made = made.cast_column("sex", datasets.ClassLabel(names=["f", "m"]))
        made.to_parquet(tmp_path / "hf.parquet", batch_size=3)
        made.save_to_disk(tmp_path / "saved", num_shards=2)
        pandas.read_parquet(tmp_path / "hf.parquet").to_parquet(tmp_path / "pandas.parquet")
        # pandas drops the label names in Hugging Face's metadata.
        for pattern, names in (("hf.parquet", "fm"), ("pandas.parquet", [0, 1]), ("saved/*.arrow", "fm")):
            expected = [{"text": f"t{n}", "sex": names[n % 2], "audio_name": f"{n}.flac"} for n in range(7)]
            source = source_of(tmp_path / pattern)
            source.check()
            found = read(source)
            records = [json.loads(raw.record) for raw in found]
            assert [{k: v for k, v in record.items() if k != "audio_filepath"} for record in records] == expected
            root = (tmp_path / pattern).parent
            audio = [read_audio(root / raw.member.container, raw.member) for raw in found]
            assert audio == [row["bytes"] for row in made["audio"]]


def labelled(features, **columns):
    """A table with Hugging Face's metadata."""
    table = pa.table({"audio": ["a.wav"] * len(next(iter(columns.values()))), **columns})
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


class TestTypedColumns:
    @pytest.mark.parametrize("form", FORMS)
    def test_labels_have_their_names(self, form, tmp_path):
        features = {
            "language": {"names": ["en", "pl"], "_type": "ClassLabel"},
            "speaker_id": {"num_classes": 2, "names": ["anna", "N/A"], "id": None, "_type": "ClassLabel"},
            "grade": {"num_classes": 9, "names": None, "_type": "ClassLabel"},
            "text": {"dtype": "string", "_type": "Value"},
            "words": [{"word": {"dtype": "string", "_type": "Value"}}],
        }
        rows = labelled(features, language=[1, 0, -1, None, 2], speaker_id=[0, 1, -1, 0, 0], grade=[3] * 5)
        found = read(source_of(write(rows, tmp_path / "t", form), columns={"speaker": "speaker_id"}))
        assert [json.loads(record_text(raw)) for raw in found[:4]] == [
            {"audio_filepath": "a.wav", "grade": 3, **more}
            for more in (
                {"language": "pl", "speaker": "anna"}, {"language": "en", "speaker": "N/A"}, {}, {"speaker": "anna"},
            )
        ]  # fmt: skip
        assert (found[4].reason, "'language'" in found[4].detail) == ("malformed", True)

    def test_decimals_times_and_custom_are_kept_and_nulls_left_out(self, tmp_path):
        columns = {
            "offset": [decimal.Decimal("1.25")], "said": [datetime.time(1, 2, 3)], "text": pa.nulls(1),
            "custom": [{"_skipme": True, "words": ["a"]}],
        }  # fmt: skip
        assert texts(source_of(write(labelled({}, **columns), tmp_path / "t"))) == [
            {"audio_filepath": "a.wav", "offset": 1.25, "said": "01:02:03.000000",
             "custom": {"_skipme": True, "words": ["a"]}},
        ]  # fmt: skip

    @pytest.mark.parametrize("features", [3, {"text": {"names": {"0": "en"}, "_type": "ClassLabel"}}])
    def test_metadata_that_cannot_be_read_is_refused(self, features, tmp_path):
        path = write(labelled(features, text=["a"]), tmp_path / "t")
        with raises(ConfigError, "bad_manifest", "metadata under 'huggingface'"):
            source_of(path).check()

    @pytest.mark.parametrize("column", [[b"a"], [["a"]], [{"en": "a"}]], ids=["bytes", "list", "struct"])
    @pytest.mark.parametrize("key", ["text", "speaker", "offset"])
    def test_no_value_of_a_record_is_left_out_silently(self, key, column, tmp_path):
        path = write(labelled({}, **{key: column}), tmp_path / "t")
        with raises(ConfigError, "bad_config_value", f"{key}: the column '{key}'", "choose another column"):
            source_of(path).check()


class TestDamage:
    @pytest.mark.parametrize(
        ("content", "names"),
        [
            (b"", ["is empty"]),
            (b"PARE" + b"\1" * 100 + b"PARE", ["encrypted"]),
            (b"PAR1" + b"\1" * 1000, ["cannot be read as parquet", "copy it again"]),
            (b"ARROW1\0\0" + b"\1" * 1000, ["cannot be read as an Arrow file"]),
            (b"audio,text\n" * 10, ["cannot be read as parquet or Arrow"]),
            (b"\x1f\x8b" + b"\1" * 100, ["compressed"]),
        ],
    )
    def test_of_a_whole_file_ends_the_run_before_any_work(self, content, names, tmp_path):
        (tmp_path / "t.parquet").write_bytes(content)
        with raises(ConfigError, "bad_manifest", "t.parquet", *names):
            source_of(tmp_path / "t.parquet").check()
        with raises(ConfigError, "missing_input", "none.parquet"):
            source_of(tmp_path / "none.parquet").check()

    @pytest.mark.parametrize("plaintext_footer", [False, True])
    def test_encrypted_files_are_refused(self, plaintext_footer, table, tmp_path):
        encryption = pytest.importorskip("pyarrow.parquet.encryption")

        class Keys(encryption.KmsClient):
            def wrap_key(self, key, name):
                return key.hex()

            def unwrap_key(self, wrapped, name):
                return bytes.fromhex(wrapped)

        factory = encryption.CryptoFactory(lambda _: Keys())
        wanted = encryption.EncryptionConfiguration(
            footer_key="footer", column_keys={"column": ["speaker"]}, plaintext_footer=plaintext_footer
        )
        properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), wanted)
        with pq.ParquetWriter(tmp_path / "t.parquet", table.schema, encryption_properties=properties) as writer:
            writer.write_table(table)
        with raises(ConfigError, "bad_manifest", "t.parquet", "encrypted", "without encryption"):
            source_of(tmp_path / "t.parquet").check()

    def test_of_a_row_group_is_a_reject_of_its_rows(self, table, tmp_path):
        path = write(table, tmp_path / "t.parquet")
        data = bytearray(path.read_bytes())
        place = data.index(table["audio"][4].as_py()["bytes"][:64])
        data[place - 4 : place] = b"\xff" * 4
        path.write_bytes(data)
        source = source_of(path)
        source.check()
        found = read(source)
        assert [type(raw) for raw in found] == [DescribedRecord] * 3 + [UnreadableRecord] * 3 + [DescribedRecord]
        assert {raw.reason for raw in found[3:6]} == {"unreadable_audio"}
        assert json.loads(found[4].record)["text"] == "text 4"

    def test_of_a_text_that_is_not_utf_8_is_a_reject_of_its_row(self, table, tmp_path):
        latin = pa.array(["gr\xfcn".encode("latin-1"), b"fine", None]).view(pa.string())
        rows = pa.table({"audio": table["audio"].combine_chunks()[:3], "text": latin})
        found = read(source_of(write(rows, tmp_path / "t.parquet")))
        assert [type(raw) for raw in found] == [UnreadableRecord, DescribedRecord, DescribedRecord]
        assert (found[0].reason, "text" in found[0].detail) == ("malformed", True)

    def test_of_a_row_that_changed_is_noticed(self, table, tmp_path):
        path = write(table, tmp_path / "t.parquet")
        row = Member("t.parquet", "row:audio", 0, len(table["audio"][0].as_py()["bytes"]))
        assert len(read_audio(path, row)) == row.size
        for change, start, problem in (
            (lambda: write(table.slice(1), path), 0, "changed_audio"),
            (lambda: None, 6, r"unreadable_audio.*no row 6"),
            (lambda: path.write_bytes(b"PAR1"), 0, "unreadable_audio"),
            (path.unlink, 0, "missing_audio"),
        ):
            change()
            with pytest.raises(RejectRecord, match=problem):
                read_audio(path, row._replace(start=start))


@pytest.mark.parametrize(
    ("column", "keys", "code", "names"),
    [
        (pa.array([{"array": [0.0], "sampling_rate": 1}]), {}, "bad_config_value", ["decoded samples"]),
        (pa.array([[0.0, 1.0]]), {}, "bad_config_value", ["decoded samples"]),
        (pa.array([3]), {}, "bad_config_value", ["has the type int64"]),
        (pa.array([{"bytes": "a"}]), {}, "bad_config_value", ["struct<bytes: string>"]),
        (pa.array([{"url": "a"}]), {}, "bad_config_value", ["struct<url: string>"]),
        (pa.array(["a"]), {"audio": "audoi"}, "unknown_key", ["did you mean 'audio'"]),
        (pa.array(["a"]), {"columns": {"text": "txt"}}, "unknown_key", ["columns.text", "did you mean 'text'"]),
        (pa.array(["a"]), {"columns": {"text": "nested"}}, "bad_config_value", ["columns.text", "list"]),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_any_work(column, keys, code, names, tmp_path):
    path = write(pa.table({"audio": column, "text": ["a"], "nested": [[1]]}), tmp_path / "t.parquet")
    with raises(ConfigError, code, "t.parquet", *names):
        source_of(path, **keys).check()
