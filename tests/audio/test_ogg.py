"""Ogg pages: serial numbers and checksums."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from support.audio import container, speech_like

from sharmill.audio import ogg
from sharmill.audio.encoding import encode
from sharmill.audio.files import decode_bytes


def test_with_serial_changes_serials_and_checksums_only():
    data = container(speech_like(100000, 16000), 16000, "OGG", "OPUS")
    changed = ogg.with_serial(data, 7)
    assert changed[14:18] == struct.pack("<I", 7)
    assert len(changed) == len(data)
    np.testing.assert_array_equal(decode_bytes(changed)[0], decode_bytes(data)[0])
    assert ogg.with_serial(changed, struct.unpack("<I", data[14:18])[0]) == data


def test_with_serial_refuses_what_is_not_one_intact_stream():
    data = encode(speech_like(100000, 16000), 16000, "opus")
    other = ogg.with_serial(data, 2)
    flipped = data[:500] + bytes([data[500] ^ 1]) + data[501:]
    for broken, message in [
        (data[:-1], "no complete Ogg page"),
        (data + b"junk", "no complete Ogg page"),
        (data + other, "another logical stream"),
        (flipped, "checksum"),
    ]:
        with pytest.raises(ValueError, match=message):
            ogg.with_serial(broken, 1)
