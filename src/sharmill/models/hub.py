"""Quick checks that a model is on this machine or that its server responds.

A local model is used without contacting a hub. The clients of hubs repeat each request for half a minute, and some
requests never end. Therefore, a single request with a time limit is made first, so that an unreachable hub is detected
early.
"""

import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from sharmill.errors import ConfigError, one_line, refuse

# Time limits in seconds: for the request alone, and for the request and the name lookup, which has no limit of its own.
_ANSWER_SECONDS: Final = 4.0
_WAIT_SECONDS: Final = 6.0


class _FollowsNoRedirect(urllib.request.HTTPRedirectHandler):
    """Accepts a redirect as a response, since the servers of large files need not answer this request."""

    def redirect_request(self, *args: Any) -> None:
        return None


def packaged_file(package: str, file: str) -> Path:
    """Return the path of a file in an installed package, such as its weights, without importing the package.

    Raises:
        ConfigError: the package has no such file.
    """
    path = Path(str(distribution(package).locate_file(file)))
    refuse((not path.is_file(), f"{path} is missing: run pip install --force-reinstall {package}"), code="bad_model")
    return path


def require_in_torch_hub(name: str, cached: str, server: str) -> None:
    """Raise ConfigError within seconds unless torch.hub has cached a model, or its server responds.

    Args:
        name: the model as named in the configuration.
        cached: the file or folder below the folder of torch.hub.
        server: the URL of the server.
    """
    import torch

    if not (Path(torch.hub.get_dir()) / cached).exists():
        require_reachable(server, name)


def require_on_hub(name: str, file: str) -> None:
    """Raise ConfigError within seconds unless a file of a model is in the local cache or on the hub.

    Args:
        name: the model as named in the configuration: the family, a colon and the name on the hub.
        file: a file that is needed to load the model.
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
    """Raise ConfigError within seconds unless the server of a URL responds; proxies set in the environment are used.

    Args:
        url: any URL on the server.
        name: the model to download from there, as named in the configuration.
        headers: the headers of a request for exactly this URL, which must exist; None to request only the server.
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

    # A daemon thread, so that an endless name lookup does not keep the process alive.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_WAIT_SECONDS)
    if outcome := problem:
        raise _unreachable(name, f"{server} does not provide it ({outcome})")


def _unreachable(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"cannot load {name}: it is not on this machine, and {why}; download the model elsewhere and use "
        f"{name.partition(':')[0]}:/path/of/the/model",
        code="unreachable_model",
    )
