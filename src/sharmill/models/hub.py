"""Reachability of models: whether they are on this machine, or on a server that answers.

A model that is on this machine is used without asking a hub, and a hub out of reach is found out soon. The clients of
the hubs repeat each request for half a minute, and some requests never end; so one request, with a limit on its time,
goes ahead of them.
"""

import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from sharmill.errors import ConfigError, one_line

# Seconds for a request to a server that answers, and for all with the look-up of its name, which has no limit.
_ANSWER_SECONDS: Final = 4.0
_WAIT_SECONDS: Final = 6.0


class _FollowsNoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that takes a redirect for an answer: large files lie on servers that need not answer this request."""

    def redirect_request(self, *args: Any) -> None:
        return None


def require_on_hub(name: str, file: str) -> None:
    """Raise ConfigError within some seconds unless a file of a model is in the cache of this machine or on the hub.

    Args:
        name: the model as the configuration names it: the family, a colon and its name on the hub.
        file: a file without which it cannot be loaded.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, build_hf_headers

    model = name.partition(":")[2]
    try:
        if isinstance(try_to_load_from_cache(model, file), str):
            return
    except HFValidationError as error:
        raise ConfigError(f"{name}: {one_line(error)}", code="bad_model") from error
    if constants.HF_HUB_OFFLINE:
        raise _unreachable(name, "HF_HUB_OFFLINE is set")
    require_reachable(f"{constants.ENDPOINT}/{model}/resolve/main/{file}", name, build_hf_headers())


def require_reachable(url: str, name: str, headers: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError within some seconds unless the server of a URL answers; a proxy of the environment is used.

    Args:
        url: any address on the server.
        name: the model that is to come from it, as the configuration names it.
        headers: with them the server is asked for this very address, and must have it.
    """
    parts = urlsplit(url)
    server = f"{parts.scheme}://{parts.netloc}"
    request = urllib.request.Request(server if headers is None else url, headers=dict(headers or {}), method="HEAD")
    problem = f"no answer within {_WAIT_SECONDS:g} s"

    def ask() -> None:
        nonlocal problem
        try:
            urllib.request.build_opener(_FollowsNoRedirect).open(request, timeout=_ANSWER_SECONDS).close()
            problem = ""
        except urllib.error.HTTPError as error:
            is_refused = headers is not None and error.code in (401, 403, 404)
            problem = f"{url}: {error.code} {error.reason}" if is_refused else ""
        except (OSError, ValueError) as error:
            problem = str(getattr(error, "reason", error))

    # A daemon, so that a look-up without an end keeps nobody.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_WAIT_SECONDS)
    if outcome := problem:
        raise _unreachable(name, f"{server} does not give it ({outcome})")


def _unreachable(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"cannot load {name}: it is not on this machine, and {why}; download the model elsewhere and give "
        f"{name.partition(':')[0]}:/path/of/the/model",
        code="unreachable_model",
    )
