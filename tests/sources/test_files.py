"""Paths that stand for several files."""

from __future__ import annotations

import pytest
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.sources.files import expand_shards, find_files, names_several


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("m.json", ["m.json"]),
        ("m_{0..3}.json", ["m_0.json", "m_1.json", "m_2.json", "m_3.json"]),
        ("m_(0..1).json", ["m_0.json", "m_1.json"]),
        ("m_[0..1].json", ["m_0.json", "m_1.json"]),
        ("m_<0..1>.json", ["m_0.json", "m_1.json"]),
        ("m__OP_8..10_CL_.json", ["m_8.json", "m_9.json", "m_10.json"]),
        ("m_{08..10}.json", ["m_08.json", "m_09.json", "m_10.json"]),
        ("m_{000..002}.json", ["m_000.json", "m_001.json", "m_002.json"]),
        ("m_{5..5}.json", ["m_5.json"]),
        ("{0..1}/m_[2..3].json", ["0/m_2.json", "0/m_3.json", "1/m_2.json", "1/m_3.json"]),
        ("m_OP_x_CL_{y}.json", ["m_OP_x_CL_{y}.json"]),
        ("m_{0..1].json", ["m_{0..1].json"]),
    ],
)
def test_names_of_shards(pattern, names):
    assert expand_shards(pattern) == names


def test_sixty_four_shards():
    names = expand_shards("manifest__OP_0..63_CL_.json")
    assert (len(names), names[0], names[63]) == (64, "manifest_0.json", "manifest_63.json")


@pytest.mark.parametrize("pattern", ["m_{3..0}.json", "m_{0..99999999999999999999}.json", "{0..9999}/<0..9999>.json"])
def test_ranges_that_make_no_sense(pattern):
    with raises(ConfigError, "bad_config_value", pattern):
        expand_shards(pattern)


@pytest.mark.parametrize(
    "pattern", [f"m_{{{'0' * 5000}..1}}.json", f"m_{{0..{'9' * 5000}}}.json"], ids=["zeros", "nines"]
)
def test_numbers_of_ranges_have_a_limit(pattern):
    with raises(ConfigError, "bad_config_value", "more than 18 digits"):
        expand_shards(pattern)


def test_stars_find_files_sorted(tmp_path):
    for name in ("b.json", "a.json", "[x]/c1.json", "d/e/f.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def found(pattern):
        return [path.relative_to(tmp_path).as_posix() for path in find_files([str(tmp_path / pattern)])]

    assert found("*.json") == ["a.json", "b.json"]
    assert found("[x]/c?.json") == ["[x]/c1.json"]
    assert found("**/f.json") == ["d/e/f.json"]


def test_a_star_that_finds_nothing(tmp_path):
    with raises(ConfigError, "missing_input", "none_*.json"):
        find_files([str(tmp_path / "none_*.json")])


def test_a_file_may_be_called_like_a_pattern(tmp_path):
    (tmp_path / "a*.json").touch()
    (tmp_path / "ab.json").touch()
    assert find_files([str(tmp_path / "a*.json")]) == [tmp_path / "a*.json"]


def test_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files(["~/m_{0..1}.json"]) == [tmp_path / "m_0.json", tmp_path / "m_1.json"]


def test_patterns_are_told_from_names():
    assert [names_several(name) for name in ("m.json", "m_(0..3).json", "m?.json", "m_(a..b).json")] == [
        False, True, True, False,
    ]  # fmt: skip
