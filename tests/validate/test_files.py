"""Files as the checker reads them: neither more nor less than other readers find."""

from __future__ import annotations

import tarfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.properties import examples

from sharmill.audio.encoding import encode
from sharmill.audio.files import probe_bytes
from sharmill.errors import DamagedShard, RejectRecord
from sharmill.shar.items import FieldWriter, Item, read_field
from sharmill.validate.levels import probe_item
from sharmill.validate.shard import read_contents


def strict(path):
    """What others read: items, or that there is damage."""
    try:
        return [(item.cut_id, item.extension, item.data, item.metadata) for item in read_field(path)]
    except DamagedShard as error:
        return str(error)


def quick(path):
    try:
        items = read_contents(path, "target_audio")
    except DamagedShard as error:
        return str(error)
    return [
        (item.cut_id, item.extension, None if item.data is None else bytes(item.data), item.metadata) for item in items
    ]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Items of 0, 1, 511, 512, 513 and 1500 bytes."""
    path = tmp_path_factory.mktemp("archive") / "x.tar"
    with FieldWriter(path) as writer:
        for size in (0, 1, 511, 512, 513, 1500):
            writer.add(Item(f"cut-{size}", "bin", bytes(range(1, 256)) * 6 + b"x" * 10, {"size": size}) if size == 1500
                       else Item(f"cut-{size}", "bin", b"\7" * size, {"size": size}))  # fmt: skip
    return path


def test_the_items_of_an_archive_are_views_of_it(archive):
    assert all(isinstance(item.data, memoryview) for item in read_contents(archive, "target_audio"))
    assert quick(archive) == strict(archive)
    assert [item[3] for item in quick(archive)] == [{"size": size} for size in (0, 1, 511, 512, 513, 1500)]


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_byte_is_seen_by_both_or_by_none(archive, tmp_path, data):
    content = bytearray(archive.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] = data.draw(st.integers(0, 255))
    path = tmp_path / "changed.tar"
    path.write_bytes(content)
    assert quick(path) == strict(path)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_archive_that_is_cut_off_or_too_long_is_seen_by_both(archive, tmp_path, data):
    content = archive.read_bytes()
    length = data.draw(st.integers(0, len(content)) | st.integers(0, len(content) // 512).map(lambda n: n * 512))
    path = tmp_path / "other.tar"
    path.write_bytes(content[:length] + data.draw(st.sampled_from([b"", b"\0" * 512, b"\0" * 9216, b"x", b"x" * 512])))
    assert quick(path) == strict(path)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["short", "größe", "long" * 40, f"{'folder' * 15}/{'name' * 10}"])
def test_archives_of_tarfile_are_read_in_every_format(tmp_path, archive, format, name):
    path, content = tmp_path / "x.tar", tmp_path / "content"
    content.write_bytes(b"{}")
    with tarfile.open(path, "w", format=format) as writer:
        for extension in ("bin", "json"):
            try:
                writer.add(content, f"{name}.{extension}")
            except ValueError:
                pytest.skip("USTAR has no such names")
    assert quick(path) == strict(path) == [(name, "bin", b"{}", {})]


def test_placeholders_are_items_without_data(tmp_path):
    path = tmp_path / "x.tar"
    with FieldWriter(path) as writer:
        writer.add(Item("a", "nodata", None, None))
        writer.add(Item("b", "bin", b"1", {}))
    assert quick(path) == strict(path) == [("a", "nodata", None, None), ("b", "bin", b"1", {})]


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(["flac", "wav", "mp3", "opus"]),
    st.sampled_from([8000, 16000, 48000]),
    st.integers(1, 3000),
    st.none() | st.tuples(st.integers(0, 43), st.integers(0, 255)),
)
def test_headers_tell_what_libsndfile_tells(format, rate, num_samples, change):
    """Of a header with a changed byte, unless libsndfile refuses it: then only decoding tells."""
    import numpy as np

    data = bytearray(encode(np.zeros(num_samples, np.float32), rate, format))
    if change is not None:
        data[change[0]] = change[1]
    try:
        expected = probe_bytes(bytes(data))
    except RejectRecord:
        return
    assert probe_item(bytes(data)) == expected
