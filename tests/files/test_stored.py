"""Arrays of a run directory."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from sharmill.files.stored import load_stored_array, save_array


@pytest.mark.parametrize(
    "array",
    [np.arange(3000, dtype=np.uint32), np.zeros((2, 3), dtype=[("hash", "<u8", 2), ("size", "<u4")]), np.zeros(0)],
)
def test_an_array_is_saved_as_numpy_saves_it(tmp_path, array):
    save_array(tmp_path / "ours.npy", array)
    np.save(tmp_path / "theirs.npy", array)
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()
    np.testing.assert_array_equal(load_stored_array(tmp_path / "ours.npy"), array)


def test_where_an_array_does_not_fit_the_error_says_so(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files end at 4 kB, in the middle of a write; a disk that is full does the same to them.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_array(tmp_path / "array.npy", np.zeros(100_000))
    finally:
        # Not for longer than the write: what pytest prints may go to a file, too.
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
