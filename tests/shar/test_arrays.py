"""Arrays: what is written is read, and what is no array is damage."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.errors import raises
from support.properties import examples

from sharmill.errors import DamagedShard
from sharmill.shar.arrays import array_from_bytes, array_to_bytes

DTYPES = st.sampled_from([np.dtype(name) for name in ("int16", "int32", "int64", "float32", "bool", ">i2")])


@settings(max_examples=examples(100), deadline=None)
@given(DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0))))
def test_arrays_come_back(array):
    found = array_from_bytes(array_to_bytes(array), "x")
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_columns_first_comes_back():
    array = np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4))
    np.testing.assert_array_equal(array_from_bytes(array_to_bytes(array), "x"), array)


def npy(header: str, body: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + body


def pickled() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return stream.getvalue()


def zipped() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(3))
    return stream.getvalue()


GOOD = array_to_bytes(np.zeros((2, 3), dtype=np.int16))


@pytest.mark.parametrize(
    "data",
    [
        pickled(),
        zipped(),
        zipped()[:30],
        b"",
        b"\x80\x04\x95",
        GOOD[:-1],
        GOOD + b"\0",
        GOOD[:40],
        GOOD.replace(b"(2, 3)", b"(3, 3)"),
        npy("{'descr': '<i2', 'fortran_order': False, 'shape': (99999999999999, 99999999), }"),
        npy("{'descr': '<i2', 'fortran_order': False, 'shape': (-1, -3), }", bytes(6)),
        npy("{'descr': '<i2', 'fortran_order': False, 'shape': ('a',), }"),
        npy("__import__('os').system('true')"),
        npy("(" * 100),
        GOOD.replace(b"NUMPY\1\0", b"NUMPY\3\0"),
    ],
)
def test_what_is_no_array_is_damage(data):
    with raises(DamagedShard, "damaged_shard", "x:"):
        array_from_bytes(data, "x")


def test_archives_of_arrays_are_not_opened():
    assert zipfile.is_zipfile(io.BytesIO(zipped()))
    with raises(DamagedShard, "damaged_shard"):
        array_from_bytes(zipped(), "x")


HEADERS = {
    "a dimension that no array has": "{'descr': '<i2', 'fortran_order': False, 'shape': (0, 1%s), }" % ("0" * 30),
    "70 dimensions": "{'descr': '<i2', 'fortran_order': False, 'shape': (%s), }" % ("0," * 70),
    "keys of two types": "{'descr': '<i2', 5: 1, 'shape': ()}",
    "a type of no parts": "{'descr': (), 'fortran_order': False, 'shape': (), }",
    "a list as a key": "{[]: 1}",
    "3,000 signs": "-" * 3000 + "1",
    "3,000 brackets": "(" * 3000,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_headers_that_numpy_stumbles_over_are_damage(header):
    with raises(DamagedShard, "damaged_shard", "where"):
        array_from_bytes(npy(header), "where")
