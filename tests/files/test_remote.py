import os
from collections.abc import Iterator
from pathlib import Path

import aistore
import fsspec
import pytest
from support.stores import AIStoreStandIn, GcsStandIn, S3Store, Store


@pytest.fixture(params=[S3Store, GcsStandIn, AIStoreStandIn], ids=lambda kind: kind.scheme)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with request.param() as store:
        yield store


def test_the_store_of_the_tests_is_one_to_its_own_client(store: Store, tmp_path: Path):
    data, url = bytes(range(256)) * 100, store.url("folder/a b.bin")
    (tmp_path / "a b.bin").write_bytes(data)
    if store.scheme == "ais":
        there = aistore.Client(os.environ["AIS_ENDPOINT"]).get_object_from_url(url)
        there.get_writer().put_file(tmp_path / "a b.bin")
        size, some = there.props.size, there.get_reader(byte_range="bytes=300-309").read_all()
    else:
        files = fsspec.filesystem(store.scheme)
        files.put_file(str(tmp_path / "a b.bin"), url)
        size, some = files.info(url)["size"], files.cat_file(url, start=300, end=310)
    assert (store.get("folder/a b.bin"), size, some) == (data, len(data), data[300:310])
