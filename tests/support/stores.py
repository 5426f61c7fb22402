"""Object stores on this machine: S3 by moto's server, stand-ins of AIStore and of Google's, and faults in any of them.

with S3Store() as store:                    # os.environ, and so that of new processes, has what clients need
    store.put("dataset/dataset.json", b"{}")
    store.faults.append(Fault("dataset.json", status=503, times=2))
    open_shar(store.url("dataset"))         # s3://bucket/dataset
    assert store.requests["GET", "dataset/dataset.json"] == 3
"""

import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Self
from unittest.mock import patch

import fsspec
from moto.backends import get_backend
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from moto.s3.models import FakeKey
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

from support.web import send

_CODES = {
    403: "AccessDenied",
    404: "NoSuchKey",
    412: "PreconditionFailed",
    500: "InternalError",
    503: "SlowDown",
}  # as S3 has them
_PIECE = 1 << 14


@dataclass
class Fault:
    """Fault of a store for requests of keys that contain ``key``; the first matching fault applies.

    ``status`` is answered in place of the object; after ``cut`` bytes of its body the connection ends; ``pause``
    seconds pass before each 16 KiB of it. ``call`` is called before the answer is made: it may put another object in
    place, kill the reader, or sleep. ``answer`` is sent in place of what the store answers, byte by byte where there
    is a ``pause``. The first ``after`` requests that fit are spared, and those after the next
    ``times``.
    """

    key: str
    _: KW_ONLY
    methods: str = "GET HEAD"
    status: int = 0
    cut: int | None = None
    pause: float = 0.0
    answer: bytes = b""
    call: Callable[[], object] = lambda: None
    after: int = 0
    times: int = sys.maxsize
    seen: int = 0

    def takes(self, method: str, key: str) -> bool:
        fits = self.key in key and method in self.methods.split()
        self.seen += fits
        return fits and self.after < self.seen <= self.after + self.times


class Store:
    """A store with one bucket, ``bucket``, on 127.0.0.1, which is there as long as its context lasts.

    ``objects`` has what is in it, by key; ``requests`` counts the requests for objects by method and key.
    """

    scheme = root = ""  # the root of the paths of objects
    environment = ""
    error = '{{"error": {{"code": {status}, "message": "{message}"}}, "message": "{message}"}}'

    def __init__(self) -> None:
        self.objects: dict[str, FakeKey] = {}
        self.requests: Counter[tuple[str, str]] = Counter()
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=_Handler)
        variables = self.environment.format(endpoint=f"http://127.0.0.1:{self._server.server_port}")
        self._environment = patch.dict(os.environ, [variable.split("=") for variable in variables.split()])

    def __enter__(self) -> Self:
        forget_clients()
        self._environment.start()
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._environment.stop()
        forget_clients()

    def url(self, key: str) -> str:
        return f"{self.scheme}://bucket/{key}"

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = FakeKey(key, data, DEFAULT_ACCOUNT_ID, "us-east-1")

    def upload(self, folder: Path, prefix: str) -> None:
        """Have the files below a folder as objects."""
        for file in filter(Path.is_file, folder.rglob("*")):
            self.put(f"{prefix}/{file.relative_to(folder)}", file.read_bytes())

    def get(self, key: str) -> bytes:
        return self.objects[key].value

    def __call__(self, environ: dict, start_response: Callable) -> Iterator[bytes]:
        """Answer a request, as WSGI has it."""
        request = Request(environ)
        key = self.key_of(request)
        with self._lock:
            self.requests[request.method, key] += 1
            fault = next((one for one in self.faults if one.takes(request.method, key)), Fault(""))
        fault.call()
        if fault.answer:
            send(environ["werkzeug.socket"], fault.answer, bool(fault.pause))
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        response = self.refuse(fault.status) if fault.status else self.answer(request, key)
        body = response(environ, start_response)
        return body if fault.cut is None and not fault.pause else _misbehave(b"".join(body), fault)

    def key_of(self, request: Request) -> str:
        return request.path.partition(f"{self.root}bucket/")[2]

    def refuse(self, status: int, message: str = "") -> Response:
        return Response(self.error.format(status=status, message=message or _CODES[status]), status)

    def send(self, request: Request, key: str, **headers: str) -> Response:
        """Return an object, or the requested range of it."""
        response = Response(self.get(key), headers=headers, content_type="application/octet-stream")
        return response.make_conditional(request, accept_ranges=True, complete_length=len(self.get(key)))


class _Handler(MotoRequestHandler):
    def log_request(self, *_: object) -> None:
        pass


def _misbehave(body: bytes, fault: Fault) -> Iterator[bytes]:
    for start in range(0, len(body[: fault.cut]), _PIECE):
        time.sleep(fault.pause)
        yield body[: fault.cut][start : start + _PIECE]


def forget_clients() -> None:
    """Make fsspec and lhotse create new clients, since a client keeps the endpoint and credentials of its first use."""
    for filesystem in fsspec.registry.values():
        filesystem.clear_instance_cache()
    if lhotse := sys.modules.get("lhotse.serialization"):
        for function in (lhotse.is_aistore_available, lhotse.get_aistore_client, lhotse.get_default_io_backend):
            function.cache_clear()


class S3Store(Store):
    """moto's S3 server, which also refuses requests without an access key, or with another one."""

    scheme, root = "s3", "/"
    environment = (
        "AWS_ENDPOINT_URL={endpoint} AWS_DEFAULT_REGION=us-east-1"
        " AWS_ACCESS_KEY_ID=sharmill AWS_SECRET_ACCESS_KEY=secret"
    )
    error = "<Error><Code>{message}</Code><Message>{message}</Message></Error>"

    def __init__(self) -> None:
        super().__init__()
        self._moto, backend = create_backend_app("s3"), get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"]
        backend.reset()
        self.objects = backend.create_bucket("bucket", "us-east-1").keys

    def answer(self, request: Request, key: str) -> Response:
        if "Credential=sharmill/" not in request.headers.get("Authorization", ""):
            return self.refuse(403, "InvalidAccessKeyId")
        return Response.from_app(self._moto, request.environ)


class AIStoreStandIn(Store):
    """A stand-in of AIStore, with as much of its HTTP interface as its SDK needs to read and write objects.

    It is a cluster of one node whose bucket has MD5 checksums. There are no redirects from a proxy to targets, no lists
    of objects, no tokens and no map of the cluster.
    """

    scheme, root = "ais", "/v1/objects/"
    environment = "AIS_ENDPOINT={endpoint}"

    def answer(self, request: Request, key: str) -> Response:
        if request.method == "PUT":
            self.put(key, request.get_data())
            return Response()
        if key not in self.objects:
            return self.refuse(404, f"{self.url(key)} does not exist")
        md5 = self.objects[key].etag.strip('"')
        checksum = {"ais-checksum-type": "md5", "ais-checksum-value": md5}
        return self.send(request, key, **{"ais-present": "true", "ais-version": md5[:4]}, **checksum)


class GcsStandIn(Store):
    """A stand-in of Google Cloud Storage, with as much of its JSON interface as gcsfs needs for objects below 5 MiB."""

    scheme, root = "gs", "/storage/v1/b/"
    environment = "STORAGE_EMULATOR_HOST={endpoint}"

    def key_of(self, request: Request) -> str:
        if request.method == "POST":  # the name is in the first part of the body, the object in the second
            return json.loads(request.get_data().split(b"\n")[3])["name"]
        return super().key_of(request).removeprefix("o/")

    def answer(self, request: Request, key: str) -> Response:
        if request.method == "POST":
            if key in self.objects and request.args.get("ifGenerationMatch") == "0":
                return self.refuse(412)
            self.put(key, request.get_data().split(b"\n\n", 2)[2].removesuffix(b"\n--==0==--"))
        if key not in self.objects:
            return self.refuse(404)
        if request.args.get("alt") == "media":
            return self.send(request, key)
        generation = str(int(self.objects[key].etag[1:13], 16))
        return Response(json.dumps({"name": key, "size": str(len(self.get(key))), "generation": generation}))
