"""Audio roots: the files that the audio paths of a manifest stand for, inside one folder and never a command.

Every stage asks here, so that all of them agree on which file a path means. A root may be a URL: audio below it is
fetched once into a folder of the run directory, where every stage and rank finds the same copy. What a server says of
one file becomes a ``RejectRecord``; what it says of itself, or no answer at all, an ``OSError``, so that the unit is
tried again.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOENT
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote, urljoin, urlsplit

import xxhash
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from sharmill.errors import ConfigError, DeviceError, RejectRecord
from sharmill.files.storage import open_atomic, open_stored, refuse_strangers
from sharmill.manifest import MAX_PATH, Segment

if TYPE_CHECKING:
    import requests

# A part of a URL's path goes up whatever query or parameter is behind it.
_GOES_UP: Final = re.compile(r"(?:^|[/\\])\.\.(?:[/\\?;#]|$)")
FETCHES_AT_ONCE: Final = 8
# More than a day of speech at 16 kHz in WAV.
_MAX_BYTES: Final = 4 << 30
_BLOCK_BYTES: Final = 1 << 20
_CONNECT_SECONDS: Final = 10.0
_SILENT_SECONDS: Final = 60.0
# A server that sends less is as good as one that is silent.
_LEAST_BYTES_PER_SECOND: Final = 1024
_MAX_REDIRECTS: Final = 5
_TRIES: Final = 4
_wait = wait_exponential(multiplier=0.5, max=10)
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_locks: Final = [Lock() for _ in range(64)]


def is_url(path: str) -> bool:
    """Return True if a path begins with the scheme of a URL, whichever."""
    return _SCHEME.match(path) is not None


def check_url_root(root: str) -> None:
    """Raise ValueError where a URL cannot be the root of audio: of another scheme, with a password or a query."""
    try:
        parts = urlsplit(root)
        problem = "needs a host" if not parts.hostname else None
    except ValueError as error:
        raise ValueError(f"audio_root {root!r} is no URL: {error}") from error
    if parts.scheme not in ("http", "https"):
        problem = "must begin with https:// or http://"
    elif parts.username is not None or parts.password is not None:
        problem = "must not have a password, which would be stored; put it into ~/.netrc"
    elif parts.query or parts.fragment or "?" in root or "#" in root:
        problem = "must end before '?' and '#'"
    if problem is not None:
        raise ValueError(f"the URL of audio_root, {root!r}, {problem}")


def normalise_path(audio_filepath: str, roots: Iterable[str] = ()) -> str:
    """Return an audio path of a manifest relative to its root: without ``.``, ``..`` and double slashes.

    Only the text is looked at, not the disk. ``roots`` are the absolute paths, or URLs, that the root is known by.

    Raises:
        RejectRecord: ``outside_root`` where the path names a command, is absolute or a URL and below none of ``roots``,
            or leaves the root by ``..``; ``missing_audio`` where it is longer than any path.

    Example:
        >>> normalise_path("/data/./speech/a/../b.wav", ["/data/speech"])
        'b.wav'
    """
    if audio_filepath.startswith("pipe:") or audio_filepath.rstrip().endswith("|"):
        raise RejectRecord("outside_root", "the audio path names a command, not a file")
    if "\0" in audio_filepath:
        raise RejectRecord("outside_root", "the audio path has a null character, which no path can have")
    if len(audio_filepath) > MAX_PATH:
        raise RejectRecord(
            "missing_audio", f"the audio path has {len(audio_filepath):,} characters, more than a path can have"
        )
    relative = audio_filepath
    if audio_filepath.startswith("/") or is_url(audio_filepath):
        behind = [rest for root in roots if (rest := _behind(root, audio_filepath)) is not None]
        if not behind:
            problem = "the audio path is absolute and not below the audio root"
            if is_url(audio_filepath):
                problem = (
                    "the audio path is a URL and not below the audio root; it is fetched where audio_root is the begin "
                    "of it, https://host/folder"
                )
            raise RejectRecord("outside_root", problem)
        relative = behind[0]
    if is_url(audio_filepath):
        _check_dots(relative)
        return relative
    parts: list[str] = []
    for part in relative.split("/"):
        if part in ("", "."):
            continue
        if part != "..":
            parts.append(part)
        elif parts:
            parts.pop()
        else:
            raise RejectRecord("outside_root", "the audio path leaves the audio root by '..'")
    return "/".join(parts)


def _behind(root: str, path: str) -> str | None:
    """Return the part of an absolute path or a URL below a root; None if it lies elsewhere."""
    if is_url(path):
        return path.removeprefix(f"{root}/") if path.startswith(f"{root}/") else None
    pure = PurePosixPath(path)
    return str(pure.relative_to(root)) if pure.is_relative_to(root) else None


def _check_dots(relative: str) -> None:
    """Raise RejectRecord ``outside_root`` where a path below a URL goes up: a server undoes the quoting before."""
    if _GOES_UP.search(unquote(relative)):
        raise RejectRecord("outside_root", "the audio path leaves the audio root by '..'")


@dataclass(frozen=True)
class AudioRoot:
    """A folder, or a URL, that no audio path of one source may leave.

    Args:
        path: the folder; of a URL that of the copies.
        absolute_only: paths relative to it are rejected: of ``audio_root: null``, where it is the root of all folders.
        url: without a slash at its end; empty for a folder.
    """

    path: Path
    absolute_only: bool = False
    url: str = ""

    @classmethod
    def of(cls, path: str | Path | None, copies: Path = Path()) -> AudioRoot:
        """Make the root of a value of ``audio_root``: ``~`` is a home folder, and None is all folders.

        ``copies`` is the folder for what is fetched of a URL.
        """
        if path is None:
            return cls(Path("/"), absolute_only=True)
        if is_url(str(path)):
            return cls(copies, url=str(path).rstrip("/"))
        return cls(Path(os.path.expanduser(path)))  # noqa: PTH111

    def check(self) -> None:
        """Raise ConfigError where the folder is not there, or has nothing in it; a URL is not asked for."""
        if self.url:
            return
        fault = "is empty"
        try:
            with os.scandir(self.path) as entries:
                # A disk that is not mounted leaves an empty folder.
                if next(entries, None) is not None:
                    return
        except PermissionError:
            return  # its files may be readable
        except NotADirectoryError:
            fault = "is not a folder"
        except OSError as error:
            fault = "does not exist" if error.errno == ENOENT else f"cannot be read ({error.strerror})"
        where = "" if self.path.is_absolute() else f", which is relative to {Path.cwd()},"
        raise ConfigError(
            f"the audio root {self.path}{where} {fault}; correct audio_root, or run from the folder that it is "
            "relative to",
            code="missing_input",
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The absolute paths that it is known by: as it is written, without ``..``, and with links resolved."""
        if self.url:
            return (self.url,)
        return str(self.path.absolute()), os.path.normpath(self.path.absolute()), os.path.realpath(self.path)

    @property
    def real(self) -> str:
        """The absolute path, links resolved, or the URL."""
        return self.names[-1]

    def _join(self, relative: str) -> str:
        # Without pathlib, which would be a tenth of the time that checking a record takes.
        return os.path.join(self.path, relative)  # noqa: PTH118

    def holds(self, absolute: str) -> bool:
        """Return True if an absolute path or a URL is below one of the names of the root."""
        return any(_behind(name, absolute) is not None for name in self.names)

    def has(self, relative: str) -> bool:
        """Return True if there is a file of a normalised path on this machine; of a URL, a copy."""
        return os.path.exists(copy_of(self.name_of(relative), self.path) if self.url else self._join(relative))  # noqa: PTH110

    def name_of(self, relative: str) -> str:
        """Return the name of a file that is the same by whatever links it is reached: a real path, or a URL."""
        return _url_below(self.url, relative) if self.url else os.path.realpath(self._join(relative))

    def check_inside(self, relative: str) -> None:
        """Raise RejectRecord ``outside_root`` where a normalised path leads out: by a symbolic link, or quoted dots."""
        if self.url:
            _check_dots(relative)
            return
        real = os.path.realpath(self._join(relative))
        inside = os.path.join(self.real, "")  # noqa: PTH118 - a Path has no separator at its end
        if not real.startswith(inside) and real != self.real:
            raise RejectRecord("outside_root", "the audio path leaves the audio root by a symbolic link")


@dataclass(frozen=True)
class AudioRoots:
    """The audio roots of all sources of a dataset, numbered in their order in the configuration.

    Attributes:
        roots: by number.
        numbers: those of each source.
    """

    roots: tuple[AudioRoot, ...]
    numbers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, audio_roots: Iterable[str | Path | Sequence[str] | None], copies: Path = Path()) -> AudioRoots:
        """Make the roots of the values of ``audio_root``, one of each source; ``copies`` is for what is fetched."""
        roots: list[AudioRoot] = []
        numbers = []
        for value in audio_roots:
            paths = [value] if value is None or isinstance(value, (str, Path)) else value
            numbers.append(tuple(range(len(roots), len(roots) + len(paths))))
            roots += [AudioRoot.of(path, copies) for path in paths]
        return cls(tuple(roots), tuple(numbers))

    def check(self) -> None:
        """Raise ConfigError where a folder is not there, or one of a source lies within another of it."""
        for root in self.roots:
            root.check()
        for numbers in self.numbers:
            for one, other in itertools.permutations(numbers, 2):
                outer, inner = self.roots[one], self.roots[other]
                if Path(inner.real).is_relative_to(outer.real):
                    raise ConfigError(
                        f"the audio root {inner.path} lies within {outer.path}; name the outer one only",
                        code="bad_config_value",
                    )

    def check_node(self) -> None:
        """Raise DeviceError where this node does not see a folder: all records there would be rejected, one by one."""
        for root in self.roots:
            try:
                root.check()
            except ConfigError as error:
                raise DeviceError(
                    f"this node does not see the audio: {error}",
                    place=f"node {socket.gethostname()}",
                    code="unlike_nodes",
                ) from error

    def place(self, source: int, audio_filepath: str) -> tuple[int, str]:
        """Return the root of a record's audio, by its number, and the normalised path below it, links left as they are.

        A relative path is below the first folder of the source that has such a file, else below its first root. Of
        equal roots the first one is returned, so that one file is one file in whichever source it is.

        Raises:
            RejectRecord: ``outside_root``, as ``normalise_path``, and where a symbolic link, or a quoted ``..`` below a
                URL, leads out.
        """
        numbers = self.numbers[source]
        relative = normalise_path(audio_filepath, [name for number in numbers for name in self.roots[number].names])
        number = numbers[0]
        if audio_filepath.startswith("/") or is_url(audio_filepath):
            number = next(n for n in numbers if self.roots[n].holds(audio_filepath))
        elif self.roots[number].absolute_only:
            raise RejectRecord("outside_root", "the audio path is relative, and its source has audio_root: null")
        elif len(numbers) > 1:
            # A URL is not asked: records must not depend on what it has at that moment.
            number = next((n for n in numbers if not self.roots[n].url and self.roots[n].has(relative)), number)
        found = self.roots[number]
        found.check_inside(relative)
        return next(n for n, root in enumerate(self.roots) if root.real == found.real), relative

    def locate(self, segment: Segment) -> Path:
        """Return where the file of a segment, or its container, lies, as ``obtain``.

        Raises:
            RejectRecord: ``outside_root`` where the path leads out by now, and what ``fetch`` raises.
        """
        self.roots[segment.root].check_inside(segment.file)
        return self.obtain(segment.root, segment.file)

    def obtain(self, number: int, relative: str) -> Path:
        """Return where the file of a path that ``place`` has just returned lies, links as they are; of a URL the copy.

        Raises:
            RejectRecord: what ``fetch`` raises.
        """
        root = self.roots[number]
        if root.url:
            origins = {_origin(other.url) for other in self.roots if other.url}
            return fetch(_url_below(root.url, relative), root.path, origins)
        return root.path / relative

    def real_name(self, segment: Segment) -> str:
        """Return a name of a segment's recording: the same for one file, by whatever links and roots it is named."""
        path = self.roots[segment.root].name_of(segment.file)
        return path if segment.member is None else f"{path}\0{segment.member.start}"


class _PassingError(Exception):
    """An error that another try may not meet; ``final`` is what is raised where none is left."""

    def __init__(self, final: RejectRecord | OSError) -> None:
        super().__init__(str(final))
        self.final = final


def _origin(url: str) -> str:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()


def _url_below(root: str, relative: str) -> str:
    """Return the URL of a path below a root; what URLs cannot have is quoted.

    >>> _url_below("https://host/speech", "84/a b.flac")
    'https://host/speech/84/a%20b.flac'
    """
    # What is quoted already stays so.
    return f"{root}/" + quote(relative, safe="/%?=&+,:;@~!$'()*[]")


def copy_of(url: str, copies: Path) -> Path:
    """Return the path of the copy of a URL in a folder of copies."""
    name = xxhash.xxh3_128_hexdigest(url.encode())
    return copies / name[:2] / name


def fetch(url: str, copies: Path, origins: Collection[str]) -> Path:
    """Return the copy of a URL in the folder ``copies``, fetched where it is not there yet.

    Args:
        url: of scheme http or https.
        copies: a folder, which is made.
        origins: those that a redirect may lead to.

    Raises:
        RejectRecord: missing_audio where the server does not give the file, unreadable_audio where it cuts it off or it
            is too large, outside_root where it redirects elsewhere.
        OSError: the server cannot be reached, or is busy.
        ConfigError: a folder on the way to the copy is a link, or a stranger's.
    """
    path = copy_of(url, copies)
    # Segments of one recording are wanted by several threads at once.
    with _locks[int(path.name, 16) % len(_locks)]:
        refuse_strangers(copies.parent, [path.parent])
        # What others have put in its place is fetched anew.
        with suppress(FileNotFoundError, ConfigError):
            open_stored(path).close()
            return path
        tries = Retrying(
            retry=retry_if_exception_type(_PassingError), stop=stop_after_attempt(_TRIES), wait=_wait, reraise=True
        )
        try:
            tries(_fetch, url, path, origins)
        except _PassingError as error:
            raise error.final from None
    return path


def _fetch(url: str, path: Path, origins: Collection[str]) -> None:
    import requests
    from urllib3.exceptions import DecodeError, HTTPError, ProtocolError

    try:
        with _follow(url, origins) as response:
            if (code := response.status_code) != 200:
                answer = f"{url}: {code} {response.reason}"
                if code in (429, 503):  # busy, whatever is asked of it
                    raise _PassingError(ConnectionError(answer))
                reject = RejectRecord("missing_audio", answer)
                raise _PassingError(reject) if code >= 500 or code == 408 else reject
            _store(url, response, path)
    except (ProtocolError, DecodeError) as error:
        raise _PassingError(RejectRecord("unreadable_audio", f"{url} was cut off, {_TRIES} times: {error}")) from error
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout, HTTPError) as error:
        raise _PassingError(ConnectionError(f"cannot fetch {url}: {error}")) from error
    except requests.exceptions.RequestException as error:
        raise RejectRecord("missing_audio", f"{url} cannot be fetched: {error}") from error


def _follow(url: str, origins: Collection[str]) -> requests.Response:
    """Return the answer of a server, redirects followed, of which the body was not read yet."""
    place = url
    for _ in range(_MAX_REDIRECTS + 1):
        response = _session().get(
            place, stream=True, allow_redirects=False, timeout=(_CONNECT_SECONDS, _SILENT_SECONDS)
        )
        if response.status_code not in (301, 302, 303, 307, 308):
            return response
        response.close()
        try:
            place = urljoin(place, response.headers.get("Location", ""))
            host = _origin(place)
        except ValueError as error:
            raise RejectRecord("missing_audio", f"{url} redirects to what is no URL: {error}") from error
        if host not in origins:
            raise RejectRecord(
                "outside_root",
                f"{url} redirects to {host[:200]}, which is no audio root; make it one if it is to be trusted",
            )
    raise RejectRecord("missing_audio", f"{url} redirects more than {_MAX_REDIRECTS} times")


@cache
def _session() -> requests.Session:
    """Return the session whose connections are used again; proxies and ``~/.netrc`` are those of the user."""
    import requests
    from requests.adapters import HTTPAdapter

    class Session(requests.Session):
        def get_redirect_target(self, resp: requests.Response) -> None:
            """Return None: requests would read a redirect's body, however long, and parse its target unchecked."""

    session = Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=FETCHES_AT_ONCE))
    # The bytes as they are stored, not packed for the way.
    session.headers["Accept-Encoding"] = "identity"
    return session


def _store(url: str, response: requests.Response, path: Path) -> None:
    too_large = RejectRecord("unreadable_audio", f"{url} has more than {_MAX_BYTES:,} bytes")
    # None where the header is absent or no number.
    if (response.raw.length_remaining or 0) > _MAX_BYTES:
        raise too_large
    begun, size = time.monotonic(), 0
    with open_atomic(path) as stream:
        # What has come, and not a whole block, for which a slow server would be waited for without an end.
        while block := response.raw.read1(_BLOCK_BYTES, decode_content=True):
            size += len(block)
            if size > _MAX_BYTES:
                raise too_large
            if time.monotonic() - begun > _SILENT_SECONDS + size / _LEAST_BYTES_PER_SECOND:
                raise _PassingError(ConnectionError(f"{url} comes too slowly"))
            stream.write(block)
