"""Export of a dataset to another form, in units, so that it can be resumed.

A unit is complete when a record lists its files. The manifest is written last. ``sharmill.registry.EXPORTS`` lists the
forms. This module also defines the form ``nemo_codes``: a manifest and files of codes for each utterance, as NeMo's
MagpieTTSDataset reads them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

import msgspec

from sharmill.errors import ConfigError, DamagedShard, FatalError, refuse
from sharmill.files.atomic import (
    make_folder,
    open_atomic,
    open_folder_atomic,
    remove_at_once,
    remove_temp_files,
    write_atomic,
    write_new,
)
from sharmill.files.checksums import checksum
from sharmill.files.disk import PUT_BACK, disk_errors
from sharmill.files.locks import LOCK_NAME, FolderLock
from sharmill.files.stored import read_record
from sharmill.files.trust import require_trusted_owner
from sharmill.inspect.cuts import choose_codec
from sharmill.manifest import ALIGNMENT, CONTEXT_KEYS
from sharmill.registry import EXPORTS
from sharmill.shar.fields import CONTEXT_CODES, CUTS, TARGET_CODES
from sharmill.shar.index import audio_checksum, read_dataset, read_shards
from sharmill.shar.json_lines import read_json_lines
from sharmill.shar.reading.shard_source import open_shard_source

# The file that identifies the export in its folder, and the file of manifest lines in the folder of each shard.
EXPORT_FILE: Final = "export.json"
_LINES_FILE: Final = "lines.jsonl"
_SHARDS_FOLDER: Final = "shards"
# Records of complete units, with the checksums of their files by name.
_UNITS_FOLDER: Final = "units"
# Suffixes of keys whose values readers open as files; NeMo unpickles some of these files.
_FILE_KEYS: Final = ("_path", "_filepath", "_file", "_filename")


@dataclass(frozen=True)
class Exported:
    """A finished export: its manifest, and the number of cuts and seconds of target audio in it.

    ``manifest`` is the folder if there are several manifests. ``left_out`` describes the ``num_left_out`` cuts that are
    not exported.
    """

    manifest: Path
    num_cuts: int
    seconds: float
    num_left_out: int = 0
    left_out: str = ""


class Export(ABC):
    """A form to which a dataset can be exported. Its files are written in units. ``EXPORTS`` lists the forms.

    Attributes:
        version: a number that is increased whenever the files of this form change.
        options: the options of ``export_dataset`` that are arguments of this class.
        left_out: describes the cuts that are not exported, if there are any.
        folders: the folders in ``out`` in which files are published, besides ``out`` itself.
        identity: all values that the files depend on, except form and version.
        units: the parts of the work, in order.
    """

    version: ClassVar[int]
    options: ClassVar[tuple[str, ...]] = ()
    left_out: ClassVar[str] = ""
    folders: Sequence[str] = ()
    identity: dict[str, Any]
    units: Sequence[Any]

    def __init__(self, dataset: Path, out: Path) -> None:
        self.dataset, self.out = dataset, out
        self.record = read_dataset(dataset)
        self.shards = list(read_shards(dataset, self.record.num_shards))

    @abstractmethod
    def write(self, unit: Any) -> Iterable[Path]:
        """Publish the files of a unit, replacing any that an interrupted export has left, and return them."""

    @abstractmethod
    def finish(self) -> tuple[Path, int, float]:
        """Publish the manifest or manifests; return the path or folder, the number of cuts, and their total seconds."""

    @staticmethod
    def record_keys(custom: Any, new_names: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        """Return the keys and values of a record that may be in a manifest.

        Names of files are left out, since readers would open the files; so are the path, offset and duration of a
        context. Keys in ``new_names`` are renamed and kept.
        """
        keys = custom.items() if isinstance(custom, dict) else ()
        return {
            new_names.get(key, key): value
            for key, value in keys
            if key in new_names or not (key in CONTEXT_KEYS[:3] or key.endswith(_FILE_KEYS))
        }


def export_dataset(
    dataset: str | Path, form: str, out: str | Path, *,
    progress: Callable[[int, int], None] = lambda done, total: None, **options: Any,
) -> Exported:  # fmt: skip
    """Export a finished dataset to files in another form, resuming an interrupted export.

    Args:
        dataset: the dataset directory.
        form: a name in ``sharmill.registry.EXPORTS``.
        out: a new or empty folder, or a folder with the same export, complete or not.
        progress: called after each unit with the number of complete units and the total number.
        options: options of the form, or None for the default: ``codec`` (the codec to export) for nemo_codes;
            ``buckets``, ``min_duration`` and ``max_duration`` for nemo_tarred.

    Raises:
        ConfigError: the dataset, codec or form does not exist, an option is invalid, or ``out`` contains something
            else.
        DamagedShard: a shard is damaged; the units before it are complete.
        FatalError: the disk is full, or a file of an earlier export is damaged.

    Example:
        >>> export_dataset("data/speech", "nemo_codes", "data/speech_codes")  # doctest: +SKIP
    """
    out = Path(out).absolute()
    kind = EXPORTS.load_class(form)
    given = {name: value for name, value in options.items() if value is not None}
    others = sorted(given.keys() - set(kind.options))
    refuse((others, f"the form {form} has no option {', '.join(others)}: leave it out"), code="bad_usage")
    files: Export = kind(Path(dataset), out, **given)
    identity = {"export": form, "version": files.version, **files.identity}
    inside = out.resolve().is_relative_to(files.dataset.resolve())
    refuse((inside, f"{out} is inside the dataset: choose another folder"), code="bad_usage")
    folders = [out / name for name in (*files.folders, _UNITS_FOLDER)]
    _require_own(out, identity, folders)
    make_folder(out)
    with disk_errors(out, PUT_BACK), FolderLock(out):
        # Another process may have started an export in the meantime.
        _require_own(out, identity, folders)
        write_atomic(out / EXPORT_FILE, msgspec.json.encode(identity) + b"\n")
        for folder in (out, *folders):
            make_folder(folder)
            remove_temp_files(folder)
        for done, unit in enumerate(files.units, start=1):
            _write_unit(files, unit, out / _UNITS_FOLDER / f"{done - 1:06d}.json")
            progress(done, len(files.units))
        manifest, num_cuts, seconds = files.finish()
    return Exported(manifest, num_cuts, seconds, files.record.num_cuts - num_cuts, files.left_out)


def _write_unit(files: Export, unit: Any, record: Path) -> None:
    """Publish the files of a unit and then its record, unless they already exist.

    Raises:
        FatalError: a file differs from the record.
    """
    # A record that cannot be read lists nothing, so the unit is written again.
    with suppress(ConfigError):
        known = read_record(record, dict[str, str]) or {}
        found = {name: checksum(files.out / name) for name in known if (files.out / name).is_file()}
        for name in found:
            if found[name] != known[name]:
                raise FatalError(
                    f"{files.out / name} has changed since it was written: remove it, and run the same command again",
                    code="damaged_shard",
                )
        if found and found == known:
            return
    made = {path.relative_to(files.out).as_posix(): checksum(path) for path in files.write(unit)}
    write_atomic(record, msgspec.json.encode(made, order="sorted"))


def _require_own(out: Path, identity: dict[str, Any], folders: Sequence[Path]) -> None:
    """Raise ConfigError unless the folder ``out`` is missing or empty, or contains this export."""
    refuse((out.exists() and not out.is_dir(), f"{out} is a file: choose a folder"), code="bad_usage")
    require_trusted_owner(out, [out / EXPORT_FILE, *folders])
    own = (LOCK_NAME, f".{EXPORT_FILE}.")
    if not out.exists() or all(path.name.startswith(own) for path in out.iterdir()):
        return
    try:
        found = read_record(out / EXPORT_FILE, dict[str, Any])
    except ConfigError:
        found = None
    if found != identity:
        what = "an export of another dataset or version, of an earlier state, or with other options"
        raise ConfigError(
            f"{out} contains {what if found else 'other files'}: choose an empty folder, or remove this one",
            code="foreign_output",
        )


class NemoCodes(Export):
    """Codes as int32 tensors (codebooks, frames) in files for ``torch.load``, and a manifest for NeMo.

    A unit is a shard, whose files are in one folder. A line of the manifest has the record of the utterance: its text,
    speaker tag, language, and all other ``record_keys``.
    """

    version = 3
    options = ("codec",)
    left_out = "without codes"
    folders = (_SHARDS_FOLDER,)

    def __init__(self, dataset: Path, out: Path, codec: str | None = None) -> None:
        super().__init__(dataset, out)
        chosen = choose_codec(self.record, codec)
        self._fields = (TARGET_CODES, CONTEXT_CODES) if self.record.has_contexts else (TARGET_CODES,)
        self._source = open_shard_source(dataset, self._fields, chosen.name)
        made_of = [field.name for field in chosen.fields[: len(self.record.audio_fields)]]
        self.identity = {
            # The manifest contains absolute paths, so the files depend on the folder of the export.
            "place": str(out),
            "codec": chosen.name,
            "num_cuts": self.record.num_cuts,
            "content": audio_checksum(self.shards, (CUTS, *made_of)),
        }
        self.units = range(len(self.shards))

    def write(self, unit: int) -> Iterable[Path]:
        """Publish the folder of a shard, with the lines of its cuts; a cut without codes has the line ``null``."""
        final = self._folder(unit)
        require_trusted_owner(self.out, [final])
        unknown = [str(path) for path in final.glob("*") if path.suffix != ".pt" and path.name != _LINES_FILE]
        refuse((bool(unknown), f"{', '.join(unknown)} is not part of this export: move it away"), code="foreign_output")
        remove_at_once(final)
        opened = self._source.open(unit, 0)
        with open_folder_atomic(final) as folder:
            # An export ignores the positions of cuts, so pass arbitrary ones.
            cuts = (opened.read(number, (0, 0, 0, 0, number)) for number in range(self.shards[unit].count))
            rows = [
                None if cut is None else self._write_cut(cut, number, folder, final) for number, cut in enumerate(cuts)
            ]
            write_new(folder / _LINES_FILE, msgspec.json.Encoder().encode_lines(rows))
        return final.iterdir()

    def finish(self) -> tuple[Path, int, float]:
        """Publish the manifest with the lines of all shards; see ``Export.finish``."""
        path = self.out / "manifest.json"
        seconds, num_cuts = 0.0, 0
        with open_atomic(path) as stream:
            for unit in self.units:
                for line in read_json_lines(self._folder(unit) / _LINES_FILE):
                    if line == b"null":
                        continue
                    stream.write(line + b"\n")
                    num_cuts += 1
                    seconds += msgspec.json.decode(line)["duration"]
        return path, num_cuts, seconds

    def _folder(self, unit: int) -> Path:
        return self.out / _SHARDS_FOLDER / f"{self.shards[unit].index:06d}"

    def _write_cut(self, cut: Any, number: int, folder: Path, final: Path) -> dict[str, Any]:
        """Write ``<number>.target.pt`` and ``<number>.context.pt``, and return the line of the manifest.

        A cut without a context has no second file; NeMo then uses text as context.

        Args:
            cut: the lhotse cut with its codes.
            number: the index of the cut in its shard, from 0.
            folder: the folder to write into, which will be published as ``final``.

        Raises:
            DamagedShard: the cut has no codes, or does not have exactly one supervision with a text, which NeMo
                requires.
        """
        import torch

        from sharmill.training.codes import load_array

        if len(cut.supervisions) != 1 or cut.supervisions[0].text is None or not cut.has_custom(TARGET_CODES):
            raise DamagedShard(f"the cut {cut.id} does not have {TARGET_CODES} and one supervision with a text")
        supervision = cut.supervisions[0]
        paths = {}
        for field in filter(cut.has_custom, self._fields):
            role = field.removesuffix("_codes")
            name = f"{number:06d}.{role}.pt"
            torch.save(torch.from_numpy(load_array(cut, field)).to(torch.int32), folder / name)
            # NeMo reads absolute paths from these keys.
            paths[f"{role}_audio_codes_path"] = str(final / name)
        return {
            **self.record_keys(supervision.custom),
            "id": cut.id,
            "duration": cut.duration,
            "text": supervision.text,
            "speaker": supervision.speaker,
            "language": supervision.language,
            **({ALIGNMENT: supervision.alignment} if supervision.alignment else {}),
            **paths,
        }
