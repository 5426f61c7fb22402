"""Models on a hub: what is on this machine already is used without asking, and a hub out of reach is found out soon.

The clients of the hubs repeat each request for half a minute, and some requests never end; so one request, with a limit
on its time, goes ahead of them.
"""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from typing import Final
from urllib.parse import urlsplit

from sharmill.errors import ConfigError

# Of a request to a server that does answer; and of all, with the look-up of its name, which knows no limit.
_ANSWER_SECONDS: Final = 4.0
_WAIT_SECONDS: Final = 6.0


def require_reachable(url: str, name: str, advice: str) -> None:
    """Raise ConfigError within some seconds unless the server of a URL answers; a proxy of the environment is used.

    Args:
        url: any address on the server.
        name: the model that is to come from it, for the message.
        advice: what to do without it, for the message.
    """
    parts = urlsplit(url)
    server = f"{parts.scheme}://{parts.netloc}"
    problem: list[str] = [f"no answer within {_WAIT_SECONDS:g} s"]

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(server, method="HEAD"), timeout=_ANSWER_SECONDS).close()
        except urllib.error.HTTPError:
            problem.clear()  # an answer all the same
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
            f"cannot load {name}: it is not on this machine, and {server} cannot be reached ({outcome[0]}); {advice}",
            code="unreachable_model",
        )
