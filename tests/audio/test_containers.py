"""Recordings inside container files: the same audio as the file that was put there, in whole and in part."""

from __future__ import annotations

import json
from threading import Thread

import numpy as np
import pytest
from support.audio import read
from support.manifests import write_tone

from sharmill.audio.containers import read_member
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import RejectRecord
from sharmill.manifest import Context, Member, Utterance
from sharmill.prepare.check import RecordCheck
from sharmill.prepare.config import PrepareConfig
from sharmill.prepare.speaker_key import make_speaker_key
from sharmill.sources.speakers import SpeakerRule


def rejects(reason, *names):
    return pytest.raises(RejectRecord, match="(?s)" + "".join(f"(?=.*{name})" for name in (reason, *names)))


_TAG = "| Language:en Dataset:d Speaker:s |"


@pytest.fixture
def container(tmp_path):
    """A folder with one.flac, and container.bin, which has its bytes from byte 1000 on."""
    write_tone(tmp_path / "one.flac")
    data = (tmp_path / "one.flac").read_bytes()
    (tmp_path / "container.bin").write_bytes(b"\1" * 1000 + data + b"\1" * 1000)
    return tmp_path, Member("container.bin", "bytes", 1000, len(data))


def check(root, **options):
    rule = SpeakerRule(None, "und", "d")
    key = make_speaker_key("all")
    roots = AudioRoots.of([root])
    return RecordCheck(PrepareConfig(**options), [], roots, [rule], [None], [False], key)


class TestReadMember:
    def test_gives_the_bytes_of_the_file(self, container):
        root, member = container
        assert read_member(root / "container.bin", member) == (root / "one.flac").read_bytes()

    def test_of_a_container_that_was_replaced_reads_the_new_one(self, container):
        root, member = container
        path = root / "container.bin"
        read_member(path, member)
        path.write_bytes(b"\2" * 20000)
        assert read_member(path, member) == b"\2" * member.size

    def test_beyond_the_end_or_without_container_is_a_reject(self, container):
        root, member = container
        with rejects("unreadable_audio", "container.bin"):
            read_member(root / "container.bin", member._replace(size=10**9))
        with rejects("missing_audio"):
            read_member(root / "nothing.bin", member)

    def test_serves_threads_that_ask_for_the_same(self, container):
        root, member = container
        found = []
        threads = [Thread(target=lambda: found.append(read_member(root / "container.bin", member))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [(root / "one.flac").read_bytes()] * 8


class TestSegments:
    @pytest.mark.parametrize("segment", [{}, {"offset": 0.5, "duration": 1.0}])
    def test_have_the_samples_of_the_plain_file(self, container, segment):
        root, member = container
        record = {"duration": 2.0, "text": "one", "speaker": _TAG, **segment}
        plain = check(root)(record | {"audio_filepath": "one.flac"}, 0)
        inside = check(root)(record | {"audio_filepath": "container.bin/one.flac"}, 0, member)
        assert inside.notes.size == plain.notes.size
        assert inside.recording_id == "rec-container.bin-one"
        reader = SegmentReader(AudioRoots.of([root]), 0.1)
        expected, found = reader.read(plain.segment), reader.read(inside.segment)
        assert np.array_equal(found.samples, expected.samples)
        assert found.notes.checksum == expected.notes.checksum
        start, count = (8000, 16000) if segment else (0, None)
        assert np.array_equal(found.samples, read(root / "one.flac", start, count)[0])
        if not segment:
            ((_, copy),) = reader.read_or_copy([inside.segment], lambda location: True)
            assert copy.data == (root / "one.flac").read_bytes()

    def test_keep_their_place_in_manifests_as_context_too(self, container):
        root, member = container
        record = {"audio_filepath": "container.bin/one.flac", "duration": 2.0, "text": "one", "speaker": _TAG}
        utterance = check(root)(record, 0, member)
        utterance.context = Context(utterance.segment, utterance.recording_id, "one", 0.9)
        again = Utterance.from_json(utterance.to_json())
        assert again == utterance
        assert (again.member, again.context.segment.member) == (member, member)
        assert "_member" not in again.public_record()

    def test_of_names_that_lead_out_of_the_container_are_rejected(self, container):
        root, member = container
        for name in ("container.bin/../../one.flac", "container.bin/../one.flac", "one.flac", "container.bin2/a"):
            record = {"audio_filepath": name, "duration": 2.0, "text": "one", "speaker": _TAG}
            with rejects("outside_root"):
                check(root)(record, 0, member)

    def test_are_not_taken_from_keys_of_a_record(self, container):
        root, _ = container
        record = {"audio_filepath": "one.flac", "duration": 2.0, "text": "one", "speaker": _TAG}
        utterance = check(root)(record | {"_member": ["container.bin", "bytes", 0, 9], "_channel": 1}, 0)
        assert "_member" not in json.loads(utterance.to_json())
        assert (utterance.member, utterance.custom) == (None, {})

    def test_are_noticed_where_the_container_changed_since(self, container):
        root, member = container
        record = {"audio_filepath": "container.bin/one.flac", "duration": 2.0, "text": "one", "speaker": _TAG}
        utterance = check(root)(record, 0, member)
        reader = SegmentReader(AudioRoots.of([root]), 0.1)
        utterance.notes = reader.read(utterance.segment).notes
        write_tone(root / "other.flac", 1.9)
        other = (root / "other.flac").read_bytes().ljust(member.size, b"\1")
        (root / "container.bin").write_bytes(b"\1" * 1000 + other + b"\1" * 3000)
        with rejects("changed_audio", "container.bin"):
            reader.read(utterance.segment)
