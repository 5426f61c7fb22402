"""A built-in step for ``tune-batch`` with NeMo models: one training step on a batch built from its input schema.

The method is that of NeMo's OOMptimizer (``scripts/speech_recognition/oomptimizer.py``): a model's
``oomptimizer_schema`` lists the input tensors of its training step. It states the neural type of each tensor, and
whether the tensor is as long as the input or the output.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from lightning.pytorch import LightningModule, Trainer
from nemo.core.classes import ModelPT
from nemo.core.neural_types import AudioSignal, LabelsType, LengthsType, MaskType
from nemo.utils import logging as nemo_logging
from omegaconf import DictConfig, OmegaConf, open_dict

from sharmill.errors import ConfigError, SharmillError, one_line, refuse
from sharmill.models.memory import is_out_of_memory
from sharmill.training.nemo.settings import read_yaml, resolve
from sharmill.training.tokenizers import load_callable

# Training steps compute word error rates every ``log_every_n_steps`` steps; this large interval disables the
# computation.
_NEVER: Final = 10**9
_DATA: Final = ("train_ds", "validation_ds", "test_ds")


class NemoStep:
    """A training step of a NeMo model, called as described in ``sharmill.training.buckets.batch_size``.

    Args:
        module_name: full name of the model's class.
        config_path: YAML file with the model's configuration under ``model``.
        pretrained_name: a .nemo file, or a name that NeMo can download; used instead of ``config_path``.
        tokens_per_second: text tokens per second, for one-dimensional bins.
        seconds_per_frame: duration of a frame for bins in tokens; None for bins in seconds.
        in_total: one-dimensional bins count text tokens and frames together.
        precision: ``bf16`` or ``fp32``.

    Raises:
        ConfigError: the class, file or model does not exist, or the model has no input schema.
    """

    def __init__(
        self,
        *,
        module_name: str | None = None,
        config_path: str | None = None,
        pretrained_name: str | None = None,
        tokens_per_second: float = 12.0,
        seconds_per_frame: float | None = None,
        in_total: bool = False,
        precision: str = "fp32",
    ) -> None:
        self._name = module_name or str(pretrained_name)
        try:
            with nemo_logging.temp_verbosity(logging.ERROR):
                self._model = _make_model(module_name, config_path, pretrained_name)
        except SharmillError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if isinstance(error, SystemError):
                # C extensions raise SystemError if they cannot allocate memory.
                raise MemoryError(one_line(error)) from error
            raise ConfigError(
                f"cannot create {self._name} from {config_path or pretrained_name}: {one_line(error)}", code="bad_model"
            ) from error
        self._schema = self._read_schema()
        rate = getattr(self._model, "sampling_rate", None)
        for key in ("preprocessor.sample_rate", "sample_rate"):
            rate = rate or OmegaConf.select(self._model.cfg, key)  # type: ignore[arg-type]
        refuse((not rate, f"{self._name} has no sample_rate in its configuration: add it"), code="bad_model")
        self._rate = int(rate or 0)
        self._tokens_per_second = tokens_per_second
        self._seconds_per_frame = seconds_per_frame
        self._in_total = in_total
        self._autocast = precision == "bf16"
        self._optimizer: torch.optim.Optimizer | None = None
        trainer = Trainer(barebones=True, accelerator="cpu")
        trainer.log_every_n_steps = _NEVER  # type: ignore[attr-defined]
        self._model.trainer = trainer

    def _read_schema(self) -> dict[str, Any]:
        kind = type(self._model)
        refuse(
            (not hasattr(kind, "oomptimizer_schema"),
             f"{kind.__name__} has no oomptimizer_schema, which describes the inputs of its training step: write your "
             "own step, and pass it with --step"),
            code="bad_model",
        )  # fmt: skip
        letters = getattr(getattr(self._model, "decoder", None), "vocabulary", None)
        if not hasattr(self._model, "tokenizer") and letters is not None:
            # The schema reads the tokenizer's vocabulary size, but character-based recognizers have no tokenizer.
            self._model.tokenizer = SimpleNamespace(vocab_size=len(letters))  # type: ignore[assignment]
        return self._model.oomptimizer_schema  # type: ignore[return-value]

    def __call__(self, batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
        """Run one training step (forward, backward, optimizer) on a synthetic batch."""
        if self._optimizer is None:
            self._model.to(device).train()
            self._optimizer = _make_optimizer(self._model)
            # Training steps log the learning rate of the trainer's optimizer.
            self._model.trainer.optimizers = [self._optimizer]
        self._optimizer.zero_grad(set_to_none=True)
        frame = self._seconds_per_frame
        if num_tokens is None and frame is not None and self._in_total:
            length /= 1 + self._tokens_per_second * frame
        seconds = length if frame is None else length * frame
        if num_tokens is None:
            num_tokens = math.ceil(seconds * self._tokens_per_second)
        sizes = {"input": max(1, round(seconds * self._rate)), "output": max(1, num_tokens)}
        inputs, kind = self._schema["inputs"], self._schema["cls"]
        values = [self._make_tensor(one, batch_size, sizes).to(device) for one in inputs]
        # The inputs have no names if the batch is a tuple.
        named = {one.get("name"): value for one, value in zip(inputs, values, strict=True)}
        batch: Any = tuple(values) if kind is tuple else kind(**named)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=self._autocast):
            output: Any = self._model.training_step(batch, 0)
        (output["loss"] if isinstance(output, Mapping) else output).backward()
        self._optimizer.step()

    def _make_tensor(self, item: Mapping[str, Any], batch_size: int, sizes: Mapping[str, int]) -> torch.Tensor:
        if item["type"] == "dummy":
            return torch.zeros(batch_size, dtype=torch.int64)
        kind, size = item["type"].elements_type, sizes[item["seq_length"]]
        if isinstance(kind, AudioSignal):
            return torch.randn(batch_size, size)
        if isinstance(kind, LengthsType):
            return torch.full((batch_size,), size)
        if isinstance(kind, MaskType):
            return torch.ones(batch_size, size, dtype=torch.bool)
        if isinstance(kind, LabelsType):
            labels = torch.randint(0, item["vocab_size"], (batch_size, size))
            if (tag := getattr(self._model, "audio_locator_tag_id", None)) is not None:
                # The model replaces one audio locator token per example with the audio of that example.
                labels[labels == tag] = 0
                labels[:, 0] = tag
            return labels
        raise ConfigError(
            f"{self._name} takes {type(kind).__name__}, for which sharmill cannot build a batch: write your own step, "
            "and pass it with --step",
            code="bad_model",
        )


def _make_model(module_name: str | None, config_path: str | None, pretrained_name: str | None) -> LightningModule:
    model_class: Any = None if module_name is None else load_callable(module_name, "model")
    refuse(
        (module_name is not None and LightningModule not in getattr(model_class, "__mro__", ()),
         f"--module-name: {module_name} is not a model class: give the full name, such as "
         "nemo.collections.asr.models.EncDecCTCModel"),
        code="bad_callable",
    )  # fmt: skip
    if pretrained_name is not None and pretrained_name.endswith(".nemo"):
        refuse(
            (not Path(pretrained_name).is_file(), f"the file {pretrained_name} does not exist"), code="missing_input"
        )
        # A .nemo file records its class, so the base class can restore it.
        return (model_class or ModelPT).restore_from(pretrained_name, map_location="cpu")
    if pretrained_name is not None:
        from nemo.collections.asr.models import ASRModel

        try:
            return (model_class or ASRModel).from_pretrained(pretrained_name)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                f"the model {pretrained_name} is not a .nemo file and cannot be downloaded: {one_line(error)}",
                code="unreachable_model",
            ) from error
    config: Any = read_yaml(str(config_path))
    has_model = isinstance(config, DictConfig) and isinstance(config.get("model"), DictConfig)
    refuse((not has_model, f"{config_path} has no section model: add it"), code="missing_key")
    config = OmegaConf.create(resolve(config, str(config_path)))
    with open_dict(config.model):
        for key in _DATA:
            config.model.pop(key, None)
    if issubclass(model_class, ModelPT):
        return model_class(cfg=config.model)
    return model_class(OmegaConf.to_container(config.model))


def _make_optimizer(model: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the model's configuration without its learning rate schedule, or AdamW by default."""
    if isinstance(model, ModelPT):
        settings: Any = OmegaConf.to_container(
            model.cfg.get("optim") or OmegaConf.create({"name": "adamw", "lr": 1e-3})
        )
        model.setup_optimization({key: value for key, value in settings.items() if key != "sched"})
        return model._optimizer
    configured = model.configure_optimizers()
    return configured["optimizer"] if isinstance(configured, dict) else configured
