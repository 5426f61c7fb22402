"""Certificates: the codecs and the encoder of a configuration, each computed in several ways on a fixed probe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sharmill.config import Config
from sharmill.engine.identity import versions
from sharmill.engine.rundir import RunDir
from sharmill.executors.devices import visible_gpus
from sharmill.models import describe_codec, describe_speaker_encoder, make_deterministic, published_name
from sharmill.models.device import check_device
from sharmill.pipeline import check_config
from sharmill.storage import PROBE, disk_errors, remove_asides, require_writable, write_atomic

if TYPE_CHECKING:
    from sharmill.models.certificate import Certificate


def certify_models(config: Config) -> tuple[Path, Certificate]:
    """Compare, for each codec and the speaker encoder, ways to compute a fixed probe on the devices of this machine.

    Returns:
        The file in the run directory that has the certificate, and the certificate.

    Raises:
        ConfigError: a model cannot be loaded.
    """
    # Only this needs torch in the driver.
    from sharmill.models.certificate import Certificate, ModelCertificate, certify_codec, certify_encoder

    check_config(config, stages=())
    devices = ["cuda", "cpu"] if visible_gpus() else ["cpu"]
    for device in devices:
        make_deterministic(device)
    references = config.references

    def as_stored(identity: dict[str, str], section: str) -> dict[str, str]:
        # A codec's as that of its stage's plan has it, to which it is compared; neither section has such a key.
        return references.identify({"codec": identity}, section)["codec"]

    models = [
        ModelCertificate(
            kind="codec", name=codec.name,
            model=references.hide_at(("encode", "codecs", number, "model"), published_name(codec.model)),
            identity=as_stored(describe_codec(codec.model, codec.allow_targets), "encode"),
            comparisons=list(
                certify_codec(
                    codec.model, devices, codec.allow_targets, config.encode.batch_seconds, config.encode.compile
                )
            ),
        )
        for number, codec in enumerate(config.encode.codecs)
    ]  # fmt: skip
    if (match := config.match) is not None:
        models.append(
            ModelCertificate(
                kind="encoder", name="match", model=references.hide_at(("match", "encoder"), match.encoder),
                identity=as_stored(describe_speaker_encoder(match.encoder, match.allow_targets), "match"),
                comparisons=list(certify_encoder(match.encoder, devices, match.allow_targets)),
            )
        )  # fmt: skip
    found = versions("torch", "torchaudio", "nemo_toolkit", "transformers")
    named = ["cpu" if device == "cpu" else f"{device}: {check_device(device)}" for device in devices]
    certificate = Certificate(devices=named, versions=found, models=models)
    path = RunDir(Path(config.run_dir)).certificate
    with disk_errors(path.parent):
        require_writable(path.parent)
        remove_asides(path.parent, {path.name, PROBE})
        write_atomic(path, msgspec.json.format(msgspec.json.encode(certificate), indent=2) + b"\n")
    return path, certificate
