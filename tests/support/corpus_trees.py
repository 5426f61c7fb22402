"""Small trees in the form in which corpora are published, with a tone for each utterance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile as sf

from support.manifests import write_tone


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_sphere(path: Path, seconds: float, *, channels: int = 1, rate: int = 8000, subtype: str = "PCM_16") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tone = 0.1 * np.sin(2 * np.pi * 220 * np.arange(round(seconds * rate)) / rate)
    sf.write(path, np.repeat(tone[:, None], channels, axis=1), rate, format="NIST", subtype=subtype)


def librispeech(root: Path) -> None:
    for part, name, seconds in (("dev-clean", "84-121123", 0.5), ("train-clean-100", "19-198", 0.25)):
        folder = root / part / name.replace("-", "/")
        write_tone(folder / f"{name}-0000.flac", seconds)
        write_tone(folder / f"{name}-0001.flac", seconds + 0.125)
        write_text(folder / f"{name}.trans.txt", f"{name}-0000 GO\n{name}-0001 DO YOU\n{name}-0002 NOT HERE\n")


def libritts(root: Path) -> None:
    folder = root / "dev-clean/84/121123"
    name = "84_121123_000007_000001"
    write_tone(folder / f"{name}.wav", 0.5, rate=24000)
    write_text(folder / "84_121123.trans.tsv", f"{name}\tMaximilian 1.\tMaximilian one.\n")
    write_text(folder / "84_121123.book.tsv", f"{name}\tMaximilian.\t1\t2\t21.5\n")
    write_text(root / "SPEAKERS.txt", "; ID |SEX| SUBSET |MINUTES| NAME\n84 | F | dev-clean | 8.02 | Christie\n")


def hifitts(root: Path) -> None:
    for split, name in (("train", "one"), ("dev", "two")):
        write_tone(root / f"audio/92_clean/1/{name}.flac", 0.5, rate=44100)
        write_text(
            root / f"92_manifest_clean_{split}.json",
            f'{{"audio_filepath": "audio/92_clean/1/{name}.flac", "text": "{name}", "duration": 0.5, '
            f'"text_no_preprocessing": "{name}", "text_normalized": "{name.capitalize()}."}}\n',
        )


def vctk(root: Path) -> None:
    write_text(root / "speaker-info.txt", "ID AGE GENDER ACCENTS REGION COMMENTS\np225 23 F English Southern England\n")
    for mic in ("mic1", "mic2"):
        write_tone(root / f"wav48_silence_trimmed/p225/p225_001_{mic}.flac", 0.5, rate=48000)
    write_text(root / "txt/p225/p225_001.txt", "Please call Stella.\n")


def vctk_of_2012(root: Path) -> None:
    write_text(root / "speaker-info.txt", "ID AGE GENDER ACCENTS REGION\n225 23 F English Southern England\n")
    write_tone(root / "wav48/p225/p225_001.wav", 0.5, rate=48000)
    write_text(root / "txt/p225/p225_001.txt", "Please call Stella.\n")


def ljspeech(root: Path) -> None:
    write_tone(root / "wavs/LJ001-0001.wav", 0.5, rate=22050)
    write_text(root / "metadata.csv", "LJ001-0001|Chapter 1|Chapter one\n")


def aishell(root: Path) -> None:
    lines = []
    for number, part in enumerate(("train", "dev", "test")):
        name = f"BAC009S000{number}W0121"
        write_tone(root / f"data_aishell/wav/{part}/S000{number}/{name}.wav", 0.5)
        lines.append(f"{name} 甚至 出现 交易\n")
    write_text(root / "data_aishell/transcript/aishell_transcript_v0.8.txt", "".join(lines))


def aishell2(root: Path) -> None:
    for number, part in enumerate(("data", "dev", "test")):
        name = f"IC000{number}W0001"
        write_tone(root / f"AISHELL-2/iOS/{part}/wav/C000{number}/{name}.wav", 0.5)
        write_text(root / f"AISHELL-2/iOS/{part}/trans.txt", f"{name}\t听广岛之恋\n")


def fisher(root: Path, audio: str = "LDC2004S13", texts: str = "LDC2004T19", part: str = "1") -> None:
    name = f"fe_03_0000{part}"
    write_sphere(root / f"{audio}/fe_03_p{part}_sph1/audio/000/{name}.sph", 3.0, channels=2, subtype="ULAW")
    write_text(
        root / f"{texts}/data/trans/000/{name}.txt",
        f"# {name}.sph\n# Transcribed at the LDC\n\n0.25 1.00 A: hello there\n1.50 2.50 B: hi\n",
    )
    header = "CALL_ID,DATE_TIME,TOPICID,SIG_GRADE,CNV_GRADE,APIN,ASX.DL,APHNUM,APHSET,APHTYP,BPIN,BSX.DL"
    write_text(
        root / f"{texts}/doc/fe_03_p{part}_calldata.tbl",
        f"{header}\n0000{part},20021127,ENG01,4,4,2602,f.a,1,1,1,1790,m.a\n",
    )


def both_fishers(root: Path) -> None:
    fisher(root)
    fisher(root, "LDC2005S13", "LDC2005T19", "2")


def fisher_as_nemo_has_it(root: Path) -> None:
    fisher(root, "LDC2004S13-Part1", "LDC2004S13-Part1/fe_03_p1_transcripts")
    fisher(root, "LDC2005S13-Part2", "LDC2005S13-Part2/fe_03_p2_transcripts", "2")


def eval2000(root: Path) -> None:
    write_sphere(root / "LDC2002S09/hub5e_00/english/en_4156.sph", 3.0, channels=2, subtype="ULAW")
    write_text(
        root / "LDC2002T43/reference/english/en_4156.txt",
        "#Language: eng\n#File id: 4156\n\n0.50 1.25 A: yeah\n\n1.00 2.00 B: mhm right\n",
    )


def an4(root: Path) -> None:
    for split, folder, name in (
        ("train", "an4_clstk/fash", "an251-fash-b"),
        ("test", "an4test_clstk/mcaw", "cen6-mcaw-b"),
    ):
        write_sphere(root / f"wav/{folder}/{name}.sph", 0.5, rate=16000)
        write_text(root / f"etc/an4_{split}.fileids", f"{folder}/{name}\n")
    write_text(root / "etc/an4_train.transcription", "<s> R U B OUT </s> (an251-fash-b)\n")
    write_text(root / "etc/an4_test.transcription", "G L E N (cen6-mcaw-b)\n")


# By the names that NeMo's documentation uses.
TREES: dict[str, Callable[[Path], None]] = {
    "LibriSpeech": librispeech,
    "LibriTTS": libritts,
    "HiFi-TTS": hifitts,
    "VCTK": vctk,
    "LJSpeech": ljspeech,
    "Aishell-1": aishell,
    "AIShell-2": aishell2,
    "Fisher English Training Speech": both_fishers,
    "HUB5": eval2000,
    "AN4": an4,
}
