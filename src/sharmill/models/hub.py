"""Models on a hub: what is on this machine already is used without asking, and a hub out of reach is found out soon.

The clients of the hubs repeat each request for half a minute, and some requests never end; so one request, with a limit
on its time, goes ahead of them.
"""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from sharmill.errors import ConfigError

# Of a request to a server that does answer; and of all, with the look-up of its name, which knows no limit.
_ANSWER_SECONDS: Final = 4.0
_WAIT_SECONDS: Final = 6.0


class _FollowsNoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that takes a redirect for an answer: large files lie on servers that need not answer this request."""

    def redirect_request(self, *args: Any) -> None:
        return None


def require_on_hub(model: str, file: str, name: str, advice: str) -> None:
    """Raise ConfigError within some seconds unless a file of a model is in the cache of this machine or on the hub.

    Args:
        model: the model as the hub names it.
        file: a file without which it cannot be loaded.
        name: the model as the configuration names it, for the message.
        advice: what to do without it, for the message.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, build_hf_headers

    try:
        if isinstance(try_to_load_from_cache(model, file), str):
            return
    except HFValidationError as error:
        raise ConfigError(f"{name}: {str(error).splitlines()[0]}", code="bad_model") from error
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"cannot load {name}: it is not on this machine, and HF_HUB_OFFLINE is set; {advice}",
            code="unreachable_model",
        )
    require_reachable(f"{constants.ENDPOINT}/{model}/resolve/main/{file}", name, advice, build_hf_headers())


def require_reachable(url: str, name: str, advice: str, headers: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError within some seconds unless the server of a URL answers; a proxy of the environment is used.

    Args:
        url: any address on the server.
        name: the model that is to come from it, for the message.
        advice: what to do without it, for the message.
        headers: with them the server is asked for this very address, and must have it.
    """
    parts = urlsplit(url)
    server = f"{parts.scheme}://{parts.netloc}"
    request = urllib.request.Request(server if headers is None else url, headers=dict(headers or {}), method="HEAD")
    problem: list[str] = [f"no answer within {_WAIT_SECONDS:g} s"]

    def ask() -> None:
        try:
            urllib.request.build_opener(_FollowsNoRedirect).open(request, timeout=_ANSWER_SECONDS).close()
        except urllib.error.HTTPError as error:
            problem.clear()  # an answer all the same
            if headers is not None and error.code in (401, 403, 404):
                problem.append(f"{url}: {error.code} {error.reason}")
        except (OSError, ValueError) as error:
            problem[0] = str(getattr(error, "reason", error))
        else:
            problem.clear()

    # A daemon, so that a look-up without an end keeps nobody.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_WAIT_SECONDS)
    if outcome := list(problem):
        raise ConfigError(
            f"cannot load {name}: it is not on this machine, and {server} does not give it ({outcome[0]}); {advice}",
            code="unreachable_model",
        )
