"""Commands of ``wav.scp`` that only decode a file, understood as the file and the channel; none is ever run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from sharmill.errors import RejectRecord

# What a shell would give a meaning to; a file of such a name has to be renamed.
_OF_THE_SHELL: Final = re.compile(r"[|&;<>()$`\\\"'*?\[\]#~!{}\n]")
_DECODE_FLAC: Final = re.compile(r"-[cds]+|--decode|--stdout|--silent")
_REMEDY: Final = (
    "commands are never run. Of those that only decode a file, `sph2pipe -f wav -p -c 1 a.sph |`, "
    "`flac -c -d -s a.flac |`, `sox a.wav -t wav - |` and `cat a.wav |` are understood; store what others make as "
    "files, and name these"
)


def read_command(command: str) -> dict[str, Any]:
    """Return ``audio_filepath`` and perhaps ``channel`` of a command that ends in ``|`` and only decodes a file.

    >>> read_command("sph2pipe -f wav -p -c 2 calls/en_4156.sph |")
    {'audio_filepath': 'calls/en_4156.sph', 'channel': 1}

    Raises:
        RejectRecord: ``outside_root`` where it is another command.
    """
    text = command.rstrip().removesuffix("|")
    program, *words = text.split() or [""]
    parse = _PROGRAMS.get(program.rpartition("/")[2])
    found = parse(words) if parse is not None and not _OF_THE_SHELL.search(text) else None
    if found is None:
        raise RejectRecord("outside_root", f"wav.scp has the command {command[:100]!r}; {_REMEDY}")
    return found


def _sph2pipe(words: list[str]) -> dict[str, Any] | None:
    channel: dict[str, Any] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        option = left.pop(0)
        value = left.pop(0) if option in ("-f", "-c") and left else ""
        if option == "-c" and value in ("1", "2"):
            channel = {"channel": int(value) - 1}
        elif option != "-p" and (option, value) not in (("-f", "wav"), ("-f", "rif")):
            return None
    return _file(left, channel)


def _flac(words: list[str]) -> dict[str, Any] | None:
    files = [word for word in words if not _DECODE_FLAC.fullmatch(word)]
    decodes = any(word == "--decode" or re.fullmatch("-[cs]*d[cs]*", word) for word in words)
    return _file(files, {}) if decodes else None


def _sox(words: list[str]) -> dict[str, Any] | None:
    if words[1:4] != ["-t", "wav", "-"]:
        return None
    effects = words[4:]
    if effects[:1] == ["remix"] and len(effects) == 2 and re.fullmatch("[1-9][0-9]?", effects[1]):
        return _file(words[:1], {"channel": int(effects[1]) - 1})
    return None if effects else _file(words[:1], {})


def _file(words: list[str], channel: dict[str, Any]) -> dict[str, Any] | None:
    if len(words) != 1 or words[0].startswith("-"):
        return None
    return {"audio_filepath": words[0]} | channel


_PROGRAMS: Final[dict[str, Callable[[list[str]], dict[str, Any] | None]]] = {
    "sph2pipe": _sph2pipe,
    "flac": _flac,
    "sox": _sox,
    "cat": lambda words: _file(words, {}),
}
