"""Group keys: published presets, custom patterns, and messages for paths that do not match."""

import pickle

import pytest
from support.project import raises

from sharmill.errors import ConfigError, RejectRecord
from sharmill.stages.speaker_key import PRESETS, make_speaker_key

PUBLISHED = [
    ("speaker", "a/b/c.wav", "9136_Other", "9136_Other"),
    ("speaker", "x.wav", "Anna", "Anna"),
    ("all", "a/b/c.wav", "Anna", "all"),
    ("all", "d.wav", "Tom", "all"),
    ("librispeech", "train-clean-100/103/1240/103-1240-0000.flac", "103", "103_1240"),
    ("librispeech", "84-121123-0001.flac", "84", "84_121123"),
    ("libritts", "train-clean-100/89/218/89_218_000014_000003.wav", "89", "train-clean-100_89_218"),
    ("librittsDevClean", "dev-clean/84/121123/84_121123_000007_000001.wav", "84", "dev-clean_84_121123"),
    ("libritts", "Dev-Clean/84/121123/sub/84_121123_000007_000001.wav", "84", "dev-clean_84_121123"),
    (
        "hifitts",
        "11614_other/12352/prideofjennico_01_castle_0000.flac",
        "11614",
        "11614_other_12352_prideofjennico_01_castle",
    ),
    ("hifitts", "92_clean/8796/Emma_02_0017.flac", "92", "92_clean_8796_emma_02"),
    (
        "hifitts2",
        "100/2315/100_2315_sea_fairies_0812_librivox-01_baum_sea_fairies_0.flac",
        "100",
        "100_2315_sea_fairies_0812_librivox-01_baum_sea_fairies",
    ),
    ("hifitts2", "7/8/7_8_Walden_12.flac", "7", "7_8_walden"),
    ("nvyt2505", "NVYT_40K_audios_wav/Thg50o7gmsk.wav", "Thg50o7gmsk_SPEAKER_00", "thg50o7gmsk_speaker_00"),
    ("nvyt2505", "NVYT_40K_audios_wav/Thg50o7gmsk.wav", "Thg50o7gmsk_SPEAKER_01", "thg50o7gmsk_speaker_01"),
    ("rivaLindyRodney", "Lindy/44khz/WIZWIKI/LINDY_WIZWIKI_004161.wav", "Lindy", "lindy_wizwiki"),
    ("rivaLindyRodney", "Rodney/44khz/CMU_HAPPY/RODNEY_CMU_HAPPY_000001.wav", "Rodney", "rodney_cmu_happy"),
    (
        "rivaEmmaMeganSeanTom",
        "Emma/22_kHz/Emma_Sad_Intense_Correlated_00147.wav",
        "Emma",
        "emma_sad_intense_correlated",
    ),
    ("rivaEmmaMeganSeanTom", "Tom/22_kHz/Tom_Neutral_00001.wav", "Tom", "tom_neutral"),
    ("jhsdGtc20Amp20Keynote", "AMP20_KEYNOTE-VOOnly-44khz-16bit-mono_12.wav", "JHSD", "amp20"),
    ("jhsdGtc20Amp20Keynote", "wav/GTC_20_KEYNOTE-VOOnly-44khz-16bit-mono_7.wav", "JHSD", "gtc_20"),
    # Published rules ignore case, and custom patterns do not.
    ("librispeech", "Ab-Cd-1.wav", "Ab", "ab_cd"),
    (r"^(?P<voice>[^/]+)/", "S1/a.wav", "s1", "S1"),
    (r"^(?P<voice>[^/]+)/", "s1/a.wav", "S1", "s1"),
]


@pytest.mark.parametrize(("preset", "path", "speaker", "key"), PUBLISHED)
def test_a_preset_gives_the_published_key(preset, path, speaker, key):
    rule = make_speaker_key(preset)
    # Check the rule itself, and a copy sent to a worker.
    assert rule(path, speaker) == pickle.loads(pickle.dumps(rule))(path, speaker) == key


@pytest.mark.parametrize("name", PRESETS)
def test_the_case_of_a_preset_name_does_not_matter(name):
    assert make_speaker_key(name.upper()) is make_speaker_key(name.lower()) is PRESETS[name]


@pytest.mark.parametrize(
    ("preset", "path", "expected"),
    [
        ("librispeech", "train/84/121123/84_121123_0001.flac", "<speaker>-<chapter>-<utterance>"),
        ("librispeech", "84-121123-0001/audio.flac", "<speaker>-<chapter>-<utterance>"),
        ("libritts", "84/121123/84_121123_000007_000001.wav", "<subset>/<speaker>/<chapter>/<file>"),
        (
            "hifitts",
            "audio/11614_other/12352/castle_0000.flac",
            "<speaker>_<quality>/<book>/<chapter>_<segment>",
        ),
        ("hifitts", "11614_other/12352/castle.flac", "<speaker>_<quality>/<book>/<chapter>_<segment>"),
        ("hifitts2", "100/2315/castle.flac", "<speaker>_<book>_<chapter>_<segment>"),
        ("rivaLindyRodney", "Lindy/44khz/LINDY_WIZWIKI_004161.wav", "<speaker>/<rate>/<emotion>/<file>"),
        ("rivaEmmaMeganSeanTom", "22_kHz/Emma_Sad_00147.wav", "<speaker>/<rate>/<speaker>_<emotion>"),
        ("jhsdGtc20Amp20Keynote", "AMP20_12.wav", "<event>_<microphone>_<utterance>"),
    ],
)
def test_an_unexpected_path_is_rejected_with_the_expected_form(preset, path, expected):
    with raises(RejectRecord, "bad_speaker", repr(path), expected):
        make_speaker_key(preset)(path, "anna")


@pytest.mark.parametrize(
    ("spec", "path", "named"),
    [
        ("speaker", "anna/1.wav", ["'anna/1.wav'"]),
        (r"^(?P<voice>\d+)/", "anna/1.wav", ["'anna/1.wav'", repr(r"^(?P<voice>\d+)/")]),
        (r"^(?P<voice>\w+)/(?P<room>hall)?", "anna/1.wav", ["'room'", "'anna/1.wav'"]),
        (r"^(?P<voice>\d*)", "anna/1.wav", []),
        (r"^(?P<voice>[^/]+)/", "unknown/1.wav", ["names no speaker"]),
        (r"^(?P<voice>[^/]+)/", "None/1.wav", ["names no speaker"]),
    ],
    ids=["a tag without a name", "nothing found", "a group that takes no part", "a key of nothing", "a placeholder",
         "another placeholder"],
)  # fmt: skip
def test_a_record_without_a_key_is_rejected(spec, path, named):
    with raises(RejectRecord, "bad_speaker", *named):
        make_speaker_key(spec)(path, " ")


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ("librispech", "did you mean 'librispeech'?"),
        ("RivaLindy", "rivaLindyRodney"),
        ("zzzzzz", "speaker, all, librispeech"),
        ("", "speaker, all"),
        (r"^([^/]+)/", "(?P<name>"),
        (r"^(?<voice>[^/]+)/", "without named groups"),
        (r"\(?P<voice>", "without named groups"),
        (r"^(?P<voice>[^/]+/", "is not a valid regular expression"),
        (r"(?P<1>a)", "is not a valid regular expression"),
    ],
)
def test_a_wrong_specification_is_refused_with_what_to_change(spec, advice):
    with raises(ConfigError, "bad_config_value", advice) as caught:
        make_speaker_key(spec)
    assert str(caught.value).startswith("speaker_key: ")
