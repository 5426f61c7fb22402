"""Registries of implementations: stages, executors, sources, models, forms of export, and sections of the report.

A name in a configuration is one of three kinds:

- one of sharmill's own, listed below;
- an entry point that an installed package declares in the group of the registry, such as ``sharmill.stages`` or
  ``sharmill.codecs``; it does not replace a name of sharmill's own;
- ``python:package.module:Class``, anything that can be imported.

An implementation is imported when it is asked for, and no sooner. The contracts that implementations meet are in
``sharmill.engine.stage``, ``sharmill.executors.local``, ``sharmill.sources``, ``sharmill.models`` and
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
    """Have modules that the user names be found where the user stands, too: last, so that they replace no other."""
    if (folder := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(folder)


@dataclass(frozen=True)
class Registry:
    """The implementations of one kind of thing, by name.

    Args:
        kind: what they are, for messages, such as ``codec``.
        group: the group of the entry points with which other packages add theirs.
        own: sharmill's own: name -> ``module:attribute``.
        base: the class that implementations derive from, as ``module:attribute``; nothing where they are no classes.
    """

    kind: str
    group: str
    own: Mapping[str, str]
    base: str = ""

    def names(self) -> list[str]:
        """Return all names: sharmill's own, then those of other installed packages, sorted."""
        return [*self.own, *sorted({entry.name for entry in entry_points(group=self.group)} - self.own.keys())]

    @staticmethod
    def split(text: str) -> tuple[str, str]:
        """Return the name of an implementation and the target after it, "" if there is none.

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
        """Return where an implementation is; its module is not imported.

        Raises:
            ConfigError: there is none of this name (``unknown_name``), or two packages declare it (``bad_plugin``).
        """
        if name in self.own:
            return EntryPoint(name, self.own[name], self.group)
        if _IMPORTABLE.fullmatch(name):
            return EntryPoint(name, name.removeprefix("python:"), self.group)
        found = {entry.value: entry for entry in entry_points(group=self.group, name=name)}
        if len(found) > 1:
            raise ConfigError(
                f"{' and '.join(sorted(found))} are both declared as the {self.kind} {name!r}: uninstall "
                "one of the packages, or write python:package.module:Class",
                code="bad_plugin",
            )
        if not found:
            names, this = self.names(), f"{self.kind} {name!r}"
            hint = nearest(name.lower(), names, otherwise="")
            raise ConfigError(
                f"there is no {this}: valid are {', '.join(names)} and python:package.module:Class{hint}",
                code="unknown_name",
            )
        return next(iter(found.values()))

    def load(self, name: str) -> Any:
        """Import and return the implementation of a name.

        Raises:
            ConfigError: there is none (``unknown_name``), it cannot be imported (``missing_package``), or its module
                has no such attribute (``bad_plugin``).
        """
        entry = self.find(name)
        if name.startswith("python:"):
            add_current_folder()
        try:
            return entry.load()
        except ImportError as error:
            raise ConfigError(
                f"the {self.kind} {name!r} cannot be imported: {describe_import_error(error)}; or put the folder that "
                "it is in on PYTHONPATH",
                code="missing_package",
            ) from error
        except Exception as error:  # a module of another package may do anything
            raise ConfigError(
                f"the {self.kind} {name!r} cannot be imported: {type(error).__name__}: {one_line(error)}",
                code="bad_plugin",
            ) from error

    def load_class(self, name: str) -> Any:
        """Import and return the class of a name.

        Raises:
            ConfigError: as of ``load``, or it is not derived from the base (``bad_plugin``).
        """
        found, (module, base) = self.load(name), self.base.split(":")
        is_derived = isinstance(found, type) and issubclass(found, getattr(importlib.import_module(module), base))
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        refuse(
            (not is_derived, f"the {self.kind} {name!r} is no class derived from {module}.{base}"),
            (missing, f"the {self.kind} {name!r} has no {' and no '.join(missing)}"),
            code="bad_plugin",
        )
        return found

    def can_load(self, name: str) -> bool:
        """Return True if there is a usable class of a name; it is imported."""
        try:
            self.load_class(name)
        except ConfigError:
            return False
        return True

    def version(self, name: str) -> str:
        """Return the version of the package that brings an implementation, or the checksum of its file.

        "" for sharmill's own.
        """
        entry = self.find(name)
        if name in self.own:
            return ""
        if entry.dist is not None:
            return f"{entry.dist.name} {entry.dist.version}"
        from sharmill.files.checksums import checksum

        spec = importlib.util.find_spec(entry.module)
        return checksum(Path(spec.origin)) if spec is not None and spec.origin else ""


def nearest(name: str, valid: list[str], otherwise: str | None = None) -> str:
    """Return the end of a sentence about a name that is not valid: the name probably meant, or else all valid ones.

    ``otherwise`` is said instead where there are too many for a line.

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
        "match": "sharmill.match.stage:MatchStage",
        "write": "sharmill.write.stage:WriteStage",
        "encode": "sharmill.encode.stage:EncodeStage",
        "validate": "sharmill.validate.stage:ValidateStage",
    },
    base="sharmill.engine.stage:Stage",
)
# Further rounds of steps, which users meet under the name of the step alone.
ROUNDS: Final = Registry(
    "round of a stage",
    "",
    {
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
)
CODECS: Final = Registry(
    "codec",
    "sharmill.codecs",
    {
        "builtin": "sharmill.models.families:BuiltinCodec",
        "nemo": "sharmill.models.families:NemoCodec",
        "transformers": "sharmill.models.families:TransformersCodec",
    },
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
        "pilot": "sharmill.pilot.page:PILOT",
        "voices": "sharmill.report.contents:VOICES",
        "codes": "sharmill.report.contents:CODES",
        "work": "sharmill.report.contents:WORK",
        "card": "sharmill.report.contents:CARD",
    },
)


# The extras that bring optional packages, by the names of their modules and of the packages themselves.
_EXTRAS: Final = {
    "av": "formats", "espeakng_loader": "demo", "nemo": "nemo", "nemo_toolkit": "nemo", "peft": "speechlm2",
    "prometheus_client": "prometheus", "pyarrow": "parquet", "ray": "ray", "resemblyzer": "resemblyzer",
    "submitit": "slurm", "tensorboard": "nemo", "transformers": "transformers", "wandb": "nemo",
}  # fmt: skip


def require_package(package: str) -> None:
    """Raise ConfigError if an optional package is absent, naming the extra that brings it; import nothing."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(describe_missing(package), code="missing_package")


def describe_missing(module: str, otherwise: str = "install it where the ranks run") -> str:
    """Return a sentence about a module that is not there, with the extra that brings its package.

    ``otherwise`` says what to do where no extra does.

    >>> describe_missing("nemo.collections")
    "the package nemo is not installed: run pip install 'sharmill[nemo]'"
    """
    package = module.partition(".")[0]
    extra = _EXTRAS.get(package)
    return f"the package {package} is not installed: " + (
        f"run pip install 'sharmill[{extra}]'" if extra else otherwise
    )


def describe_import_error(error: ImportError) -> str:
    """Return a sentence about a module that is not there, or that is there and cannot be loaded."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return describe_missing(error.name)
    remedy = (
        "this process may use too little memory for it: raise its limit (ulimit -v, or that of the job)"
        if mentions_memory(str(error))
        else "install its package again"
    )
    return f"a module cannot be loaded: {one_line(error)}; {remedy}"
