"""Registries of implementations: stages, executors, sources, models, scorers, export formats, report sections.

A name in a configuration is one of three kinds:

- a built-in name, listed below;
- an entry point that an installed package declares in the group of the registry, such as ``sharmill.stages`` or
  ``sharmill.codecs``; it cannot replace a built-in name;
- ``python:package.module:Class``, any importable object.

Implementations are imported on demand. Their contracts are defined in ``sharmill.engine.stage``,
``sharmill.executors.local``, ``sharmill.sources``, ``sharmill.models``, ``sharmill.scores.scorer`` and
``sharmill.export.run``.
"""

import difflib
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final

from sharmill.errors import ConfigError, mentions_memory, one_line, refuse

_IMPORTABLE: Final = re.compile(r"python:[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def add_current_folder() -> None:
    """Add the current folder to the end of the module search path, where its modules do not shadow others."""
    if (folder := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(folder)


@dataclass(frozen=True)
class Registry:
    """Implementations of one kind, by name.

    Args:
        kind: the kind in words for messages, such as ``codec``.
        group: the entry point group in which other packages declare implementations.
        own: built-in implementations: name -> ``module:attribute``.
        base: the base class of implementations, as ``module:attribute``; empty if they are not classes.
    """

    kind: str
    group: str
    own: Mapping[str, str]
    base: str = ""

    def names(self) -> list[str]:
        """Return all names: built-in names, then the sorted names from other installed packages."""
        return [*self.own, *sorted({entry.name for entry in entry_points(group=self.group)} - self.own.keys())]

    @staticmethod
    def split(text: str) -> tuple[str, str]:
        """Split a string into the name of an implementation and its target, which may be "".

        >>> CODECS.split("nemo:/models/codec.nemo")
        ('nemo', '/models/codec.nemo')
        >>> CODECS.split("python:my_package.codecs:MyCodec:small")
        ('python:my_package.codecs:MyCodec', 'small')
        """
        if text.startswith("python:"):
            parts = text.split(":", 3)
            return ":".join(parts[:3]), "".join(parts[3:])
        name, _, target = text.partition(":")
        return name, target

    def find(self, name: str) -> EntryPoint:
        """Return the entry point of an implementation without importing its module.

        Raises:
            ConfigError: the name does not exist (``unknown_name``), or two packages declare it (``bad_plugin``).
        """
        if name in self.own:
            return EntryPoint(name, self.own[name], self.group)
        if _IMPORTABLE.fullmatch(name):
            return EntryPoint(name, name.removeprefix("python:"), self.group)
        found = {entry.value: entry for entry in entry_points(group=self.group, name=name)}
        if len(found) > 1:
            raise ConfigError(
                f"{' and '.join(sorted(found))} are both declared as the {self.kind} {name!r}: uninstall "
                "one of the packages, or use python:package.module:Class",
                code="bad_plugin",
            )
        if not found:
            names, this = self.names(), f"{self.kind} {name!r}"
            hint = nearest(name.lower(), names, otherwise="")
            raise ConfigError(
                f"unknown {this}: use one of {', '.join(names)} or python:package.module:Class{hint}",
                code="unknown_name",
            )
        return next(iter(found.values()))

    def load(self, name: str) -> Any:
        """Import and return an implementation.

        Raises:
            ConfigError: the name does not exist (``unknown_name``), the module cannot be imported
                (``missing_package``), or the module does not have the attribute (``bad_plugin``).
        """
        entry = self.find(name)
        if name.startswith("python:"):
            add_current_folder()
        try:
            return entry.load()
        except ImportError as error:
            raise ConfigError(
                f"the {self.kind} {name!r} cannot be imported: {describe_import_error(error)}; if the module "
                "is your own, add its folder to PYTHONPATH",
                code="missing_package",
            ) from error
        except Exception as error:  # a module of another package may raise any exception
            raise ConfigError(
                f"the {self.kind} {name!r} cannot be imported: {type(error).__name__}: {one_line(error)}",
                code="bad_plugin",
            ) from error

    def load_class(self, name: str) -> Any:
        """Import and return an implementation that must be a class.

        Raises:
            ConfigError: as for ``load``, or the class is not derived from the base class (``bad_plugin``).
        """
        found, (module, base) = self.load(name), self.base.split(":")
        is_derived = isinstance(found, type) and issubclass(found, getattr(importlib.import_module(module), base))
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        refuse(
            (not is_derived, f"the {self.kind} {name!r} must be a class derived from {module}.{base}"),
            (missing, f"the {self.kind} {name!r} does not define {' and '.join(missing)}: add it to the class"),
            code="bad_plugin",
        )
        return found

    def can_load(self, name: str) -> bool:
        """Return True if a class can be imported and is usable."""
        try:
            self.load_class(name)
        except ConfigError:
            return False
        return True

    def version(self, name: str) -> str:
        """Return the version of the package of an implementation, or the checksum of its file; "" if it is built in."""
        entry = self.find(name)
        if name in self.own:
            return ""
        if entry.dist is not None:
            return f"{entry.dist.name} {entry.dist.version}"
        from sharmill.files.checksums import checksum

        spec = importlib.util.find_spec(entry.module)
        return checksum(Path(spec.origin)) if spec is not None and spec.origin else ""


def nearest(name: str, valid: list[str], otherwise: str | None = None) -> str:
    """Return the end of a sentence about an invalid name: the most similar valid name, or a list of all valid names.

    Args:
        otherwise: text to return instead of the list.

    >>> nearest("shufle", ["manifest", "shuffle"])
    "; did you mean 'shuffle'?"
    """
    close = difflib.get_close_matches(name, valid, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; the valid names are {', '.join(valid)}" if otherwise is None else otherwise


STAGES: Final = Registry(
    "stage",
    "sharmill.stages",
    {
        "prepare": "sharmill.prepare.stage:PrepareStage",
        "voices": "sharmill.voices.stage:VoicesStage",
        "match": "sharmill.match.stage:MatchStage",
        "write": "sharmill.write.stage:WriteStage",
        "encode": "sharmill.encode.stage:EncodeStage",
        "scores": "sharmill.scores.stage:ScoresStage",
        "validate": "sharmill.validate.stage:ValidateStage",
    },
    base="sharmill.engine.stage:Stage",
)
# Further rounds of stages; users see only the name of the stage.
ROUNDS: Final = Registry(
    "round of a stage",
    "",
    {
        "voices.embed": "sharmill.voices.embed:EmbedStage",
        "voices.cluster": "sharmill.voices.cluster:ClusterStage",
        "encode.segments": "sharmill.encode.survey:SurveyStage",
        "encode.shards": "sharmill.encode.stage:ShardsStage",
    },
    base="sharmill.engine.stage:Stage",
)
EXECUTORS: Final = Registry(
    "executor",
    "sharmill.executors",
    {"local": "sharmill.executors.local:LocalExecutor", "ray": "sharmill.executors.ray:RayExecutor"},
    base="sharmill.executors.local:ConfiguredExecutor",
)
DEFAULT_EXECUTOR: Final = "local"
STAGE_ALIASES: Final = {"stage1": "match", "stage2": "write", "stage3": "encode"}
SOURCES: Final = Registry(
    "source",
    "sharmill.sources",
    {
        "nemo": "sharmill.sources.nemo:NemoSource",
        "nemo_tarred": "sharmill.sources.tars:NemoTarredSource",
        "webdataset": "sharmill.sources.tars:WebDatasetSource",
        "wenet": "sharmill.sources.tars:WenetSource",
        "lhotse": "sharmill.sources.lhotse:LhotseSource",
        "kaldi": "sharmill.sources.kaldi:KaldiSource",
        "annotated": "sharmill.sources.annotated:AnnotatedSource",
        "table": "sharmill.sources.table:TableSource",
        "folder": "sharmill.sources.folder:FolderSource",
        "lhotse_shar": "sharmill.sources.lhotse_shar:LhotseSharSource",
        "parquet": "sharmill.sources.parquet:ParquetSource",
    },
    base="sharmill.sources:Source",
)
ENCODERS: Final = Registry(
    "speaker encoder",
    "sharmill.encoders",
    {"resemblyzer": "sharmill.models.families:Resemblyzer", "nemo": "sharmill.models.families:NemoEncoder"},
    base="sharmill.models:ModelFamily",
)
CODECS: Final = Registry(
    "codec",
    "sharmill.codecs",
    {
        "builtin": "sharmill.models.families:BuiltinCodec",
        "nemo": "sharmill.models.families:NemoCodec",
        "transformers": "sharmill.models.families:TransformersCodec",
    },
    base="sharmill.models:ModelFamily",
)
SCORERS: Final = Registry(
    "scorer",
    "sharmill.scorers",
    {
        "signal": "sharmill.scores.families:Signal",
        "text": "sharmill.scores.families:Text",
        "speech": "sharmill.scores.families:Speech",
        "dnsmos": "sharmill.scores.families:Dnsmos",
        "mos": "sharmill.scores.families:Mos",
        "squim": "sharmill.scores.families:Squim",
        "utmos": "sharmill.scores.families:Utmos",
        "cer": "sharmill.scores.families:Cer",
    },
    base="sharmill.scores.scorer:Scorer",
)
EXPORTS: Final = Registry(
    "form of export",
    "sharmill.exports",
    {"nemo_codes": "sharmill.export.run:NemoCodes", "nemo_tarred": "sharmill.export.nemo_tarred:NemoTarred"},
    base="sharmill.export.run:Export",
)
SECTIONS: Final = Registry(
    "section of the report",
    "sharmill.sections",
    {
        "funnel": "sharmill.report.contents:FUNNEL",
        "listening": "sharmill.report.listening:LISTENING",
        "contents": "sharmill.report.contents:CONTENTS",
        "scores": "sharmill.report.scores:SCORES",
        "pilot": "sharmill.pilot.page:PILOT",
        "labels": "sharmill.report.labels:LABELS",
        "voices": "sharmill.report.contents:VOICES",
        "codes": "sharmill.report.contents:CODES",
        "work": "sharmill.report.contents:WORK",
        "card": "sharmill.report.contents:CARD",
    },
)


# Extras that install optional packages, by the names of modules or packages.
_EXTRAS: Final = {
    "av": "formats", "distillmos": "scores", "espeakng_loader": "demo", "nemo": "nemo", "nemo_toolkit": "nemo",
    "onnxruntime": "scores", "peft": "speechlm2", "prometheus_client": "prometheus", "pyarrow": "parquet", "ray": "ray",
    "resemblyzer": "resemblyzer", "silero-vad": "vad", "silero_vad": "vad", "speechmos": "scores", "submitit": "slurm",
    "tensorboard": "nemo", "transformers": "transformers", "wandb": "nemo",
}  # fmt: skip


def require_package(package: str) -> None:
    """Raise ConfigError with the extra to install if an optional package is missing; the package is not imported."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(describe_missing(package), code="missing_package")


def describe_missing(module: str, otherwise: str = "install it where the ranks run") -> str:
    """Return a message that names a missing module and the extra that installs it.

    Args:
        otherwise: advice if no extra installs the module.

    >>> describe_missing("nemo.collections")
    "the package nemo is not installed: run pip install 'sharmill[nemo]'"
    """
    package = module.partition(".")[0]
    extra = _EXTRAS.get(package)
    return f"the package {package} is not installed: " + (
        f"run pip install 'sharmill[{extra}]'" if extra else otherwise
    )


def describe_import_error(error: ImportError) -> str:
    """Return a message about a module that is missing or cannot be loaded."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return describe_missing(error.name)
    remedy = (
        "the memory limit of this process is too low: raise it (ulimit -v, or the memory of the job)"
        if mentions_memory(str(error))
        else "reinstall its package"
    )
    return f"a module cannot be loaded: {one_line(error)}; {remedy}"
