"""Recipes of corpora, run in a process of their own, which may import torch.

Recipes look for files, texts and speakers. lhotse downloads corpora if that is asked for.
"""

import importlib.util
import inspect
import io
import itertools
import logging
import multiprocessing
import socket
import sys
import zlib
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tarfile import TarError
from typing import Any, Final
from zipfile import BadZipFile

from sharmill.collect.corpora import Corpus, find_corpus
from sharmill.collect.own_recipes import forgive_headers
from sharmill.collect.splits import choose_splits, find_splits, write_split
from sharmill.errors import ConfigError, FatalError, one_line
from sharmill.files.disk import stopping_errors
from sharmill.files.host import new_process
from sharmill.registry import nearest

# Errors of recipes about files that are not as they expect them: they have no classes of their own for it.
_RECIPE_ERRORS: Final = (AssertionError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)
# Seconds without a byte after which a server of a corpus is given up.
_NETWORK_TIMEOUT: Final = 60.0
# Name of the file that has the warnings of a recipe.
RECIPE_LOG: Final = "recipe.log"


@dataclass(frozen=True)
class Found:
    """The result of a recipe.

    Attributes:
        dataset: the name of the dataset in speaker tags.
        defaults: keys of records that have none of their own.
        splits: by name, the keys of the source that reads the records; files by their names.
    """

    dataset: str
    defaults: dict[str, str]
    splits: dict[str, dict[str, str]]


def run_recipe(
    name: str, directory: Path, options: dict[str, Any], splits: tuple[str, ...], folder: Path, *,
    min_segment: float | None = None, download: bool = False,
) -> Found:  # fmt: skip
    """Run the recipe of a corpus in a process of its own.

    Args:
        name: of the corpus, as ``find_corpus`` takes it.
        directory: the folder of the corpus, or the one that it is downloaded into.
        options: further arguments of the recipe.
        splits: names or patterns of the splits that are wanted; none for all.
        folder: for manifests of the splits, in the order of paths, and the warnings of the recipe in ``RECIPE_LOG``.
        min_segment: join utterances until they last so many seconds.
        download: download the corpus first, or what is missing of it.

    Raises:
        ConfigError: the folder has not the form that the recipe expects, there is no such split, or lhotse does not
            download the corpus.
        FatalError: the process was killed, or the download has failed.
    """
    with new_process("forkserver") as pool:
        try:
            return pool.submit(_run_recipe, name, directory, options, splits, folder, min_segment, download).result()
        except BrokenProcessPool as error:
            raise FatalError(
                f"the recipe {name} was killed, as the kernel does when memory runs out; run the same command again, "
                "with more memory",
                code="process_ended",
            ) from error


def _run_recipe(
    name: str, directory: Path, options: dict[str, Any], splits: tuple[str, ...], folder: Path,
    min_segment: float | None, download: bool,
) -> Found:  # fmt: skip
    # Processes that a recipe starts have the reader of headers that is set in this one.
    multiprocessing.set_start_method("fork", force=True)
    # Recipes warn of what they leave out; their progress bars are for a terminal only.
    logging.basicConfig(filename=folder / RECIPE_LOG, encoding="utf-8", format="%(message)s", force=True)
    logging.captureWarnings(True)
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        corpus = find_corpus(name)
        try:
            parts = find_splits(
                _call_recipe(corpus, directory, options, folder / "recipe", splits if download else None)
            )
            chosen = choose_splits(sorted(parts), splits)
            written = {
                split: write_split(parts[split], folder / f"split-{n}", min_segment) for n, split in enumerate(chosen)
            }
        except ImportError as error:
            package = error.name or str(error)
            raise ConfigError(
                f"the recipe {corpus.recipe} needs the package {package}, which is not installed: pip install "
                f"{package}",
                code="missing_package",
            ) from error
        except _RECIPE_ERRORS as error:
            missing = "there is no " if isinstance(error, KeyError) else ""
            raise ConfigError(
                f"the recipe {corpus.recipe} cannot read {directory}: {missing}{one_line(error)}; name the folder that "
                "the corpus was unpacked into, as it was published",
                code="bad_manifest",
            ) from error
    defaults = {"speaker": corpus.speaker, "language": corpus.language}
    return Found(
        corpus.dataset,
        {key: value for key, value in defaults.items() if value is not None},
        {split: files for split, files in written.items() if files},
    )


def _call_recipe(
    corpus: Corpus, directory: Path, options: dict[str, Any], scratch: Path, downloads: tuple[str, ...] | None
) -> Any:
    """Return what the recipe makes; with ``downloads``, splits or none for all, of what is downloaded first."""
    recipe = corpus.read or _find_function("prepare", corpus.recipe)
    download = None if downloads is None else _find_function("download", corpus.recipe)
    if corpus.read is None:
        forgive_headers()
    parameters = _further_parameters(recipe)
    of_download = {} if download is None else _further_parameters(download)
    needed = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    given: dict[str, Any] = {"absolute_paths": True} if "absolute_paths" in parameters else {}
    given |= {"output_dir": scratch} if "output_dir" in needed else {}
    given |= {key: value for key, value in options.items() if key in parameters}
    hidden = ("output_dir", "absolute_paths", "num_jobs", "force_download")
    names = [name for name in parameters | of_download if name not in hidden]
    if unknown := [key for key in options if key not in names]:
        hint = nearest(unknown[0], names) if names else "; it takes none"
        raise ConfigError(f"{unknown[0]}: the recipe {corpus.recipe} has no such argument{hint}", code="bad_usage")
    if missing := [name for name in needed if name not in given]:
        raise ConfigError(
            f"the recipe {corpus.recipe} needs {', '.join(missing)}: give it as --recipe-option {missing[0]}=VALUE",
            code="bad_usage",
        )
    if download is not None and downloads is not None:
        chosen: dict[str, Any] = {"dataset_parts": choose_splits(corpus.parts, downloads)} if corpus.parts else {}
        chosen |= {key: value for key, value in options.items() if key in of_download}
        directory = _download(corpus, download, directory, chosen)
    adapted = corpus.adapt(directory) if corpus.adapt else {}
    return recipe(directory, **adapted | given)


def _find_function(kind: str, recipe: str) -> Callable[..., Any]:
    """Return lhotse's function ``prepare_RECIPE`` or ``download_RECIPE``."""
    name = f"{kind}_{recipe}"
    modules = [path for path in ("lhotse.recipes", f"lhotse.recipes.{recipe}") if importlib.util.find_spec(path)]
    for module in map(importlib.import_module, modules):
        if hasattr(module, name):
            return getattr(module, name)
    if kind == "download":
        raise ConfigError(
            f"lhotse does not download {recipe}: get the corpus from its publisher, and leave --download out",
            code="bad_usage",
        )
    raise ConfigError(f"lhotse's recipe {recipe} has no function {name}", code="unknown_name")


def _further_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a recipe's function behind the folder."""
    return dict(itertools.islice(inspect.signature(function).parameters.items(), 1, None))


def _download(corpus: Corpus, download: Callable[..., Any], directory: Path, options: dict[str, Any]) -> Path:
    """Download a corpus, or what an earlier call has left of it, and return its folder.

    lhotse continues an archive that is there, and marks what is unpacked as ``.completed``.

    Raises:
        FatalError: the network or the disk fails, or an archive is damaged.
    """
    socket.setdefaulttimeout(_NETWORK_TIMEOUT)
    try:
        with stopping_errors(directory):
            return Path(download(directory, **options)) / corpus.folder
    except (OSError, EOFError, HTTPException, TarError, BadZipFile, zlib.error) as error:
        raise FatalError(
            f"{corpus.recipe} is not downloaded to {directory}: {one_line(error)}; run the same command again, which "
            "goes on from here, and if an archive is damaged, remove it before",
            code="missing_input",
        ) from error
