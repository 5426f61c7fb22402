import hashlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from support.errors import raises

from sharmill.demo.corpus import sentences
from sharmill.demo.espeak import Espeak, VoiceSettings
from sharmill.demo.voices import VOICES
from sharmill.errors import ConfigError

TEXTS = ("Good morning to you.", "The seven ships left the harbour before the storm.")


def digests(*, reverse: bool) -> dict[str, str]:
    """One hash for each text and voice, spoken in one order or the other."""
    espeak = Espeak()
    jobs = list(itertools.product(TEXTS, VOICES.items()))
    return {
        f"{text} {name}": hashlib.sha256(espeak.synthesize(text, voice).tobytes()).hexdigest()
        for text, (name, voice) in (reversed(jobs) if reverse else jobs)
    }


def test_samples_do_not_depend_on_the_order_or_the_process():
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    script += "import json, test_espeak; print(json.dumps(test_espeak.digests(reverse=True)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == digests(reverse=False)


def test_speech_is_mono_and_audible():
    samples = Espeak().synthesize(TEXTS[0], VOICES["ada"])
    assert samples.dtype == np.int16
    assert samples.ndim == 1
    assert 0.5 < len(samples) / Espeak.sampling_rate < 3.0
    assert np.abs(samples).max() > 3000


def test_unknown_voice_is_a_configuration_error():
    with raises(ConfigError, "bad_config_value", "en-us-nowhere"):
        Espeak().synthesize("Hello.", VoiceSettings(name="en-us-nowhere"))


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with raises(ConfigError, "missing_package", "pip install 'sharmill[demo]'"):
        Espeak()


def test_importing_the_corpus_does_not_import_the_loader():
    script = "import sys, sharmill.demo.corpus; print('espeakng_loader' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_sentences_are_distinct_and_of_3_to_30_words():
    first = list(itertools.islice(sentences(seed=42), 500))
    assert len(set(first)) == 500
    assert {3 <= len(text.split()) <= 30 for text in first} == {True}
    assert not any(character.isdigit() or character in "{}" for text in first for character in text)
    assert first == list(itertools.islice(sentences(seed=42), 500))
