"""Running the recipe of a corpus, in a separate process since recipes may import torch.

A recipe finds the files, texts and speakers of a corpus. On request, lhotse downloads the corpus first.
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

# Errors that recipes raise for unexpected files, since they have no exception classes of their own.
_RECIPE_ERRORS: Final = (AssertionError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)
# Time in seconds after which a download fails if the server sends no data.
_NETWORK_TIMEOUT: Final = 60.0
# Name of the file with the warnings of a recipe.
RECIPE_LOG: Final = "recipe.log"


@dataclass(frozen=True)
class RecipeResult:
    """The result of a recipe.

    Attributes:
        dataset: name of the dataset in speaker tags.
        defaults: keys and values for records that lack the keys.
        splits: for each split, the names of its files, by the key of the source under which each is used, such as
            ``recordings``.
    """

    dataset: str
    defaults: dict[str, str]
    splits: dict[str, dict[str, str]]


def run_recipe(
    name: str, directory: Path, options: dict[str, Any], splits: tuple[str, ...], folder: Path, *,
    min_segment: float | None = None, download: bool = False,
) -> RecipeResult:  # fmt: skip
    """Run the recipe of a corpus in a separate process.

    Args:
        name: name of the corpus, as accepted by ``find_corpus``.
        directory: folder of the corpus, or folder to download it to.
        options: further arguments of the recipe.
        splits: names or patterns of the wanted splits; empty for all.
        folder: folder for the manifests of the splits, in which records are sorted by path, and for ``RECIPE_LOG``.
        min_segment: join utterances until they last this many seconds; None to leave them unchanged.
        download: download the corpus first, or the missing part of it.

    Raises:
        ConfigError: the folder does not have the layout that the recipe expects, a split does not exist, or lhotse
            cannot download the corpus.
        FatalError: the process was killed, or the download failed.
    """
    with new_process("forkserver") as pool:
        try:
            return pool.submit(_run_recipe, name, directory, options, splits, folder, min_segment, download).result()
        except BrokenProcessPool as error:
            raise FatalError(
                f"the recipe {name} was killed, probably because memory ran out; run the same command again "
                "with more memory",
                code="process_ended",
            ) from error


def _run_recipe(
    name: str, directory: Path, options: dict[str, Any], splits: tuple[str, ...], folder: Path,
    min_segment: float | None, download: bool,
) -> RecipeResult:  # fmt: skip
    # Processes that a recipe starts must be forked, to inherit the header reader that is installed in this process.
    multiprocessing.set_start_method("fork", force=True)
    # Recipes warn about files that they leave out; their progress bars are useful only in a terminal.
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
                f"the recipe {corpus.recipe} needs the package {package}, which is not installed; run pip "
                f"install {package}",
                code="missing_package",
            ) from error
        except _RECIPE_ERRORS as error:
            missing = "missing key " if isinstance(error, KeyError) else ""
            raise ConfigError(
                f"the recipe {corpus.recipe} cannot read {directory}: {missing}{one_line(error)}; name the folder of "
                "the unpacked corpus, with the layout in which it was published",
                code="bad_manifest",
            ) from error
    defaults = {"speaker": corpus.speaker, "language": corpus.language}
    return RecipeResult(
        corpus.dataset,
        {key: value for key, value in defaults.items() if value is not None},
        {split: files for split, files in written.items() if files},
    )


def _call_recipe(
    corpus: Corpus, directory: Path, options: dict[str, Any], scratch: Path, downloads: tuple[str, ...] | None
) -> Any:
    """Call a recipe, and return its result.

    Args:
        scratch: folder for files that the recipe writes.
        downloads: splits to download first, empty for all; None to download nothing.
    """
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
        hint = nearest(unknown[0], names) if names else "; it has no arguments"
        raise ConfigError(f"the recipe {corpus.recipe} has no argument {unknown[0]}{hint}", code="bad_usage")
    if missing := [name for name in needed if name not in given]:
        raise ConfigError(
            f"the recipe {corpus.recipe} needs {', '.join(missing)}; add --recipe-option {missing[0]}=VALUE",
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
            f"lhotse cannot download {recipe}; get the corpus from its publisher, and leave --download out",
            code="bad_usage",
        )
    raise ConfigError(f"lhotse's recipe {recipe} has no function {name}", code="unknown_name")


def _further_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a recipe's function except the first one, which is the folder."""
    return dict(itertools.islice(inspect.signature(function).parameters.items(), 1, None))


def _download(corpus: Corpus, download: Callable[..., Any], directory: Path, options: dict[str, Any]) -> Path:
    """Download a corpus, or resume its download, and return its folder.

    lhotse resumes partial archives, and marks unpacked parts with ``.completed``.

    Raises:
        FatalError: the network or disk failed, or an archive is damaged.
    """
    socket.setdefaulttimeout(_NETWORK_TIMEOUT)
    try:
        with stopping_errors(directory):
            return Path(download(directory, **options)) / corpus.folder
    except (OSError, EOFError, HTTPException, TarError, BadZipFile, zlib.error) as error:
        raise FatalError(
            f"the download of {corpus.recipe} to {directory} failed: {one_line(error)}; run the same command again "
            "to resume it; if an archive is damaged, remove it first",
            code="missing_input",
        ) from error
