"""Ways of computing that codes do not depend on, by construction or as far as ``sharmill certify`` tells.

Where they do not, a change of ``encode.batch_seconds`` under way keeps what is done, and long segments may be cut.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from sharmill.engine.stored import decode_stored, read_stored
from sharmill.errors import ConfigError
from sharmill.models.arithmetic import fit_batch_seconds
from sharmill.models.certificate import Certificate, ModelCertificate
from sharmill.models.pieces import PIECE_SECONDS

log = logging.getLogger(__name__)

_KEY: Final = "batch_seconds"
# Backends of codecs that sharmill brings, whose pieces have the codes of the whole by its own tests.
_TESTED: Final = ("builtin", "untrained")


def is_change_of_batches(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if two identities of the stage differ in the size of batches and in nothing else.

    Of a reference to the environment it is stored only that its value is another: such sizes cannot be compared.
    """
    numbers = all(isinstance(one[_KEY], int | float) for one in (before, now))
    return numbers and {**before, _KEY: 0} == {**now, _KEY: 0}


def require_same_codes(
    before: Mapping[str, Any], now: Mapping[str, Any], devices: Collection[str], certificate: Path
) -> None:
    """Raise ConfigError where codes may be others in batches of the size that the stage has now.

    Args:
        before: the identity that the stage was begun with.
        now: the same but for the size of batches.
        devices: the kinds of device that the codes which are there were made on.
        certificate: the file of the run directory.
    """
    if not devices or (set(devices) == {"cpu"} and _same_on_a_cpu(before, now)):
        return
    if now["canonical_shapes"]:
        reason = "canonical shapes have as many rows as batch_seconds allows, and codes may depend on that"
    elif now["precision"] != "fp32":
        reason = f"sharmill certify compares batches in fp32, and these codes are made in {now['precision']}"
    elif not certificate.exists():
        reason = "codes may depend on it: where 'sharmill certify CONFIG' finds none that does, what is done is kept"
    else:
        reason = _find_dependence(_read(certificate), before, now, devices)
    if reason:
        raise ConfigError(
            f"encode.batch_seconds is {now[_KEY]:g}, and was {before[_KEY]:g} when the stage was begun: {reason}. "
            f"Set it to {before[_KEY]:g} again, or begin the stage anew",
            code="changed_plan",
        )


def _same_on_a_cpu(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if both sizes give the same batches there: the limit of a CPU, or one row in any case."""
    # A reference to the environment is a text, whatever its value is.
    return now["canonical_shapes"] is True or fit_batch_seconds(before[_KEY], "cpu") == fit_batch_seconds(
        now[_KEY], "cpu"
    )


def _find_dependence(
    certificate: Certificate, before: Mapping[str, Any], now: Mapping[str, Any], devices: Collection[str]
) -> str:
    """Return why a certificate does not say that the codes are the same in batches of both sizes, or nothing."""
    if certificate.versions != now["versions"]:
        return "certificate.json was made with other versions; run 'sharmill certify CONFIG' again"
    found = _find_codec(certificate, now)
    if found is None:
        return "certificate.json has no such codec; run 'sharmill certify CONFIG'"
    for kind in devices:
        device = "cpu" if kind == "cpu" else "cuda"
        if not _is_of_device(certificate, kind):
            return f"certificate.json was not made on {kind}; run 'sharmill certify CONFIG' there"
        compared = [
            one
            for one in found.comparisons
            if one.batch_seconds is not None and one.piece_seconds is None and one.device == device
        ]
        if differing := sum(one.different for one in compared):
            return f"by certificate.json codes depend on it: {differing} of the probe differ on {kind}"
        largest = max(before[_KEY], now[_KEY])
        tried = max((one.batch_seconds or 0.0 for one in compared), default=0.0)
        if fit_batch_seconds(largest, device) > tried:
            return (
                f"certificate.json compares batches of {tried:g} s at most on {kind}; run "
                f"'sharmill certify CONFIG encode.batch_seconds={largest:g}'"
            )
    return ""


def may_cut(identity: Mapping[str, Any], device_kind: str, batch_seconds: float, certificate: Path) -> bool:
    """Return True if the codec gives the pieces of a segment the codes that it gives the whole on a kind of device.

    Args:
        identity: of the stage's plan.
        batch_seconds: of the batches that pieces share.
        certificate: the file of the run directory, which tells of codecs that others make.
    """
    if identity["precision"] != "fp32" or "compile" in identity:
        return False
    if identity["codec"]["backend"] in _TESTED:
        return True
    if not certificate.exists():
        return False
    try:
        found = _read(certificate)
    except ConfigError:
        log.warning("%s cannot be read, so no segment is cut; make it again by 'sharmill certify CONFIG'", certificate)
        return False
    model = _find_codec(found, identity)
    if model is None or found.versions != identity["versions"] or not _is_of_device(found, device_kind):
        return False
    device = "cpu" if device_kind == "cpu" else "cuda"
    used = fit_batch_seconds(batch_seconds, device)
    compared = [one for one in model.comparisons if one.piece_seconds is not None and one.device == device]
    # Nothing follows from small batches for larger ones.
    tried = any(one.piece_seconds == PIECE_SECONDS and (one.batch_seconds or 0.0) >= used for one in compared)
    return tried and not any(one.different for one in compared)


def _find_codec(certificate: Certificate, identity: Mapping[str, Any]) -> ModelCertificate | None:
    codecs = (one for one in certificate.models if one.kind == "codec" and one.identity == identity["codec"])
    return next(codecs, None)


def _is_of_device(certificate: Certificate, kind: str) -> bool:
    return ("cpu" if kind == "cpu" else f"cuda: {kind}") in certificate.devices


def _read(path: Path) -> Certificate:
    return decode_stored(path, read_stored(path), Certificate)
