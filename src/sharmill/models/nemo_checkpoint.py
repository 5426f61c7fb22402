"""Loading of NeMo models without its log, with errors that a user can act on. NeMo is imported inside the functions."""

from __future__ import annotations

import difflib
import logging
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from sharmill.errors import ConfigError
from sharmill.models.family import size_of
from sharmill.models.hub import require_on_hub, require_reachable
from sharmill.models.nemo_config import read_nemo_config
from sharmill.models.tensors import limited_layers, loading
from sharmill.registry import require_package

if TYPE_CHECKING:
    from nemo.core import ModelPT
    from torch import nn

    from sharmill.models.nemo import NemoModel

# What a damaged checkpoint or a failed download raises; anything else is a fault of ours and is shown as it is.
_LOADING_ERRORS = (
    AttributeError,
    EOFError,
    KeyError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    tarfile.TarError,
)


def _loading_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HfHubHTTPError
    from hydra.errors import HydraException

    # The hub's client lets the errors of its HTTP library through, and that library changes with its version.
    return (*_LOADING_ERRORS, HydraException, *HfHubHTTPError.__bases__)


@contextmanager
def quiet_nemo() -> Iterator[None]:
    """Silence NeMo, whose errors are raised as well as logged; also around its first import.

    Raises:
        ConfigError: if NeMo is not installed.
    """
    require_package("nemo")
    telemetry = logging.getLogger("nv_one_logger")
    level = telemetry.level
    telemetry.setLevel(logging.ERROR)
    try:
        from nemo.utils import logging as nemo_logging

        with nemo_logging.temp_verbosity(logging.CRITICAL):
            yield
    finally:
        telemetry.setLevel(level)


@contextmanager
def _filters_of_archives() -> Iterator[None]:
    """Let NeMo unpack with ``filter="data"`` where Python is older than 3.11.4, as Debian 12's, and knows no filters.

    NeMo itself refuses links and names that lead out; of the rest only files and folders are unpacked here.
    """
    if hasattr(tarfile, "data_filter"):
        yield
        return
    original = tarfile.TarFile.extract

    def extract(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, filter: str) -> None:
        if not (member.isreg() or member.isdir()):
            raise tarfile.ExtractError(f"{member.name} is neither a file nor a folder")
        original(archive, member, path, set_attrs=False)

    tarfile.TarFile.extract = extract  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        tarfile.TarFile.extract = original  # type: ignore[method-assign]


def restore_model(model: NemoModel, path: Path | None, parts: tuple[str, ...], optional: tuple[str, ...] = ()) -> Any:
    """Load a NeMo model on the CPU, frozen and in evaluation mode.

    Args:
        model: a model of one of NeMo's families.
        path: its .nemo file; None for the name of a pretrained model.
        parts: the submodules that are used; all their weights must be in the checkpoint. (NeMo's codec lets weights
            be absent, and would go on with random ones.)
        optional: names of submodules that are None in the model if weights of theirs are absent.

    Raises:
        ConfigError: if the file is no checkpoint of this class or the pretrained model cannot be fetched.
    """
    with quiet_nemo():
        model_class = model.find_class()
    with loading(model.name, _loading_errors), quiet_nemo(), _filters_of_archives(), torch.random.fork_rng(devices=[]):
        # A model draws its first weights before it gets those of the checkpoint: hence the fork.
        restored = _restore(model_class, model, path, parts, optional)
    if not isinstance(restored, model_class):
        raise ConfigError(
            f"{model.name} is a {type(restored).__name__}, not a {model_class.__name__}: use another model",
            code="bad_model",
        )
    restored.freeze()
    return restored.eval()


def _restore(
    model_class: type[ModelPT], model: NemoModel, path: Path | None, parts: tuple[str, ...], optional: tuple[str, ...]
) -> ModelPT:
    from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
    from omegaconf import OmegaConf

    class StrictConnector(SaveRestoreConnector):
        def load_config_and_state_dict(
            self, calling_cls: type[ModelPT], restore_path: str, override_config_path: object = None, *rest: Any
        ) -> Any:
            # Only what was checked is used, whatever else of that name is in the archive.
            source = Path(self.model_extracted_dir or restore_path)
            config = read_nemo_config(source, model.allow_targets)
            with limited_layers(model.name, size_of(source)):
                return super().load_config_and_state_dict(calling_cls, restore_path, OmegaConf.create(config), *rest)

        def load_instance_with_state_dict(
            self, instance: nn.Module, state_dict: Mapping[str, Any], strict: bool
        ) -> None:
            wanted = {key for key in instance.state_dict() if key.startswith(parts)}
            if missing := sorted(wanted - state_dict.keys()):
                raise ConfigError(
                    f"{model.name} lacks {len(missing)} weights, the first is {missing[0]}: it is not whole",
                    code="bad_model",
                )
            super().load_instance_with_state_dict(instance, state_dict, strict)
            for part in optional:
                if any(key.startswith(f"{part}.") for key in instance.state_dict().keys() - state_dict.keys()):
                    setattr(instance, part, None)

    options = {"map_location": torch.device("cpu"), "save_restore_connector": StrictConnector()}
    if path is not None:
        return model_class.restore_from(str(path), **options)
    require_pretrained(model)
    return model_class.from_pretrained(model.target, **options)


def require_pretrained(model: NemoModel) -> None:
    """Raise ConfigError unless a pretrained model is on this machine or can be asked for.

    A "/" in its name stands for the hub. NeMo is imported for NeMo's own names alone.
    """
    advice = "download the .nemo file elsewhere and give nemo:/path/model.nemo"
    if "/" in model.target:
        require_on_hub(model.target, f"{PurePosixPath(model.target).name}.nemo", model.name, advice)
        return
    with quiet_nemo():
        from nemo.utils.data_utils import resolve_cache_dir

        location = _pretrained_location(model.find_class(), model.target)
        filename = PurePosixPath(location).name
        if not any((resolve_cache_dir() / filename.removesuffix(".nemo")).glob(f"*/{filename}")):
            require_reachable(location, model.name, advice)


def _pretrained_location(model_class: type[ModelPT], name: str) -> str:
    """Return the address that one of NeMo's own models comes from.

    Raises:
        ConfigError: NeMo does not know the name.
    """
    known = {info.pretrained_model_name: str(info.location) for info in model_class.list_available_models() or ()}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    raise ConfigError(f"NeMo has no pretrained {model_class.__name__} {name!r}: {hint}", code="unknown_name")
