"""Export of a dataset, shard by shard: each folder of a shard is published as a whole, the manifest last.

``sharmill.registry.EXPORTS`` names the forms. That of sharmill itself, ``nemo_codes``, is a manifest with a file of
codes per utterance, as NeMo's MagpieTTSDataset reads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from sharmill.errors import ConfigError, DamagedShard, FatalError
from sharmill.files.locks import LOCK_NAME, FolderLock
from sharmill.files.storage import (
    disk_errors,
    make_folder,
    open_atomic,
    open_folder_atomic,
    read_record,
    refuse_strangers,
    remove_asides,
    write_atomic,
)
from sharmill.inspect.cuts import choose_codec
from sharmill.manifest import CONTEXT_KEYS
from sharmill.registry import EXPORTS
from sharmill.shar.items import read_json_lines
from sharmill.shar.layout import (
    CONTEXT_CODES,
    CUTS,
    TARGET_CODES,
    CodecRecord,
    DatasetRecord,
    ShardRecord,
    audio_checksum,
    read_dataset,
    read_shards,
)
from sharmill.shar.reading.shard_source import open_shard_source

# The record of what a folder is an export of, and within the folder of each shard the lines of its manifest.
EXPORT_FILE: Final = "export.json"
_LINES_FILE: Final = "lines.jsonl"
_SHARDS_FOLDER: Final = "shards"


class Export(Protocol):
    """One form of files that a dataset can be exported to; ``sharmill.registry.EXPORTS`` lists them.

    Attributes:
        version: a number that is raised whenever the files of this form change.
        manifest: the name of the file that lists all cuts.
        fields: of the cuts, those that are read.
    """

    version: int
    manifest: str
    fields: tuple[str, ...]

    def __init__(self, record: DatasetRecord, codec: CodecRecord) -> None: ...

    def write_cut(self, cut: Any, number: int, folder: Path, final: Path) -> dict[str, Any]:
        """Write the files of a cut into ``folder``, which will be published as ``final``; return its line.

        Args:
            cut: the lhotse cut with the fields.
            number: of the cut in its shard, from 0.
        """


@dataclass(frozen=True)
class Exported:
    """A finished export: its manifest, and how many cuts and seconds of target audio that lists.

    ``num_left_out`` are the cuts for which the codec gave no codes.
    """

    manifest: Path
    num_cuts: int
    seconds: float
    num_left_out: int = 0


def export_dataset(
    dataset: str | Path, form: str, out: str | Path, *, codec: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:  # fmt: skip
    """Write a finished dataset as files of another form; an export that was interrupted goes on.

    Args:
        dataset: the dataset directory.
        form: a name of ``sharmill.registry.EXPORTS``.
        out: a new or empty folder, or one with the same export, finished or not.
        codec: whose codes, where there are several.
        progress: called after each shard with the number of shards that are done, and of all.

    Raises:
        ConfigError: there is no such dataset, codec or form, or ``out`` holds something else.
        DamagedShard: a shard is damaged; the shards before it are done.
        FatalError: the disk is full, or the numbers of cuts do not add up.

    Example:
        >>> export_dataset("data/speech", "nemo_codes", "data/speech_codes")  # doctest: +SKIP
    """
    dataset, out = Path(dataset), Path(out).absolute()
    record = read_dataset(dataset)
    chosen = choose_codec(record, codec)
    files: Export = EXPORTS.load(form)(record, chosen)
    made_of = [field.name for field in chosen.fields[: len(record.audio_fields)]]
    shards = list(read_shards(dataset, record.num_shards))
    identity = {
        "export": form,
        "version": files.version,
        "place": str(out),
        "codec": chosen.name,
        "num_cuts": record.num_cuts,
        "content": audio_checksum(shards, (CUTS, *made_of)),
    }
    if out.resolve().is_relative_to(dataset.resolve()):
        raise ConfigError(f"{out} lies in the dataset itself: choose another place", code="bad_usage")
    _require_own(out, identity)
    make_folder(out)
    with disk_errors(out), FolderLock(out):
        # Another process may have begun an export meanwhile.
        _require_own(out, identity)
        write_atomic(out / EXPORT_FILE, msgspec.json.encode(identity) + b"\n")
        folder = out / _SHARDS_FOLDER
        make_folder(folder)
        remove_asides(out)
        remove_asides(folder)
        source = open_shard_source(dataset, files.fields, chosen.name)
        for done, shard in enumerate(shards):
            final = folder / f"{shard.index:06d}"
            if not final.is_dir():
                opened = source.open(done, 0)
                with open_folder_atomic(final) as aside:
                    # Their positions in an order of cuts, which an export has no use for, are made up.
                    cuts = (opened.read(number, (0, 0, 0, 0, number)) for number in range(shard.count))
                    rows = [
                        None if cut is None else files.write_cut(cut, number, aside, final)
                        for number, cut in enumerate(cuts)
                    ]
                    (aside / _LINES_FILE).write_bytes(msgspec.json.Encoder().encode_lines(rows))
            progress(done + 1, len(shards))
        return _write_manifest(out / files.manifest, folder, shards)


def _require_own(out: Path, identity: dict[str, Any]) -> None:
    """Raise ConfigError unless a folder is missing, empty, or holds this export."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: name a folder", code="bad_usage")
    refuse_strangers(out, [out / EXPORT_FILE, out / _SHARDS_FOLDER])
    own = (LOCK_NAME, f".{EXPORT_FILE}.")
    if not out.exists() or all(path.name.startswith(own) for path in out.iterdir()):
        return
    try:
        found = read_record(out / EXPORT_FILE, dict[str, Any])
    except ConfigError:
        found = None
    if found != identity:
        what = (
            "files of something else" if found is None else "the export of another dataset, or an earlier state of it"
        )
        raise ConfigError(f"{out} has {what}: name an empty folder, or remove it", code="foreign_output")


def _write_manifest(path: Path, folder: Path, shards: Sequence[ShardRecord]) -> Exported:
    """Put the lines of all shards together, and check that there is one for each cut; null where it is left out."""
    seconds, num_left_out = 0.0, 0
    with open_atomic(path) as stream:
        for shard in shards:
            made = folder / f"{shard.index:06d}"
            lines = read_json_lines(made / _LINES_FILE)
            if len(lines) != shard.count:
                raise FatalError(
                    f"{made} has {len(lines)} cuts of {shard.count}: remove this folder and run the same command again",
                    code="accounts",
                )
            for line in lines:
                if line == b"null":
                    num_left_out += 1
                    continue
                stream.write(line + b"\n")
                seconds += msgspec.json.decode(line)["duration"]
    return Exported(path, sum(shard.count for shard in shards) - num_left_out, seconds, num_left_out)


class NemoCodes:
    """Codes as int32 tensors (codebooks, frames) in files that ``torch.load`` reads, and a manifest of NeMo's.

    A line has the record of the utterance: its text keys, tag, language, and all other keys. Keys that end in ``_path``
    or ``_filepath`` are left out, since NeMo opens what they name, and unpickles files of codes.
    """

    version = 2
    manifest = "manifest.json"

    def __init__(self, record: DatasetRecord, codec: CodecRecord) -> None:
        self.fields = (TARGET_CODES, CONTEXT_CODES) if record.has_contexts else (TARGET_CODES,)

    def write_cut(self, cut: Any, number: int, folder: Path, final: Path) -> dict[str, Any]:
        """Write ``<number>.target.pt`` and ``<number>.context.pt``, and return the line of the manifest.

        A cut without a context has no second file: NeMo takes a text in its place.

        Raises:
            DamagedShard: the cut has no codes, or not one supervision with a text, as NeMo wants of every line.
        """
        import torch

        from sharmill.training.codes import load_array

        if len(cut.supervisions) != 1 or cut.supervisions[0].text is None or not cut.has_custom(TARGET_CODES):
            raise DamagedShard(f"the cut {cut.id} does not have {TARGET_CODES} and one supervision with a text")
        supervision = cut.supervisions[0]
        # Of a context, its offset and duration go with its path.
        record = {
            key: value for key, value in (supervision.custom or {}).items()
            if key not in CONTEXT_KEYS[:3] and not key.endswith(("_path", "_filepath"))
        }  # fmt: skip
        paths = {}
        for field in filter(cut.has_custom, self.fields):
            role = field.removesuffix("_codes")
            name = f"{number:06d}.{role}.pt"
            torch.save(torch.from_numpy(load_array(cut, field)).to(torch.int32), folder / name)
            # NeMo's keys, which hold absolute paths.
            paths[f"{role}_audio_codes_path"] = str(final / name)
        return {
            **record,
            "id": cut.id,
            "duration": cut.duration,
            "text": supervision.text,
            "speaker": supervision.speaker,
            "language": supervision.language,
            **paths,
        }
