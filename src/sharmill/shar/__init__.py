"""Shar datasets: their layout on disk, and functions to write and read them, such as ``open_shar``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sharmill.errors import refuse
from sharmill.files.location import Location
from sharmill.shar.reading.state import merge_states

if TYPE_CHECKING:
    from lhotse import CutSet

__all__ = ["merge_states", "open_shar"]


def open_shar(
    dataset: str | Location,
    fields: Sequence[str] | None = None,
    *,
    codec: str | None = None,
    where: str = "",
    shuffle: bool | Literal["global"] = False,
    seed: int = 0,
    mix_shards: int = 8,
    block_size: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    split_by_worker: bool = True,
    infinite: bool = False,
    tail: Literal["keep", "drop", "pad"] = "keep",
    decode_threads: int = 0,
    decode_prefetch: int | None = None,
    sidecars: str | Path | None = None,
    on_damage: Literal["raise", "skip"] = "raise",
    max_damaged: int | None = None,
    cache_dir: str | None = None,
    cache_gib: float = 100.0,
) -> "CutSet":
    """Open the cuts of a dataset for lazy reading, a few shards at a time.

    Args:
        dataset: a finished dataset directory, which is read through its index without listing folders; the URL of one,
            a string that begins with ``https://``, ``s3://``, ``gs://`` or ``ais://``; or a folder of shards written by
            lhotse's ``to_shar`` or by the published context-Shar scripts, which are read in numerical order.
        fields: the fields to attach to the cuts: ``target_audio``, ``context_audio``, ``target_codes``,
            ``context_codes`` and any others that the dataset or folder has; by default all of them. Files of other
            fields are not opened. Name a field by the attribute of a cut that it fills, such as ``target_codes``. If
            several fields fill the same attribute, use the name of the folder, such as ``codes_mimi/target_codes``. If
            codes are among the fields, cuts without codes are left out and counted in ``SharReader.num_left_out``.
        codec: the codec whose codes are read, if the dataset has several.
        where: conditions that cuts must meet, such as ``"dnsmos_ovrl > 3 and bandwidth >= 7.5"``: comparisons of
            columns of the dataset, or of ``duration`` (in seconds), with numbers or quoted strings. Cuts that do not
            meet them, or lack a value, are left out and counted in ``num_left_out``. The columns need not be among
            ``fields``.
        shuffle: False keeps the order of the dataset. True gives an order that depends only on ``seed`` and the epoch's
            number: shards are permuted, and the cuts of every ``mix_shards`` consecutive shards are mixed. "global"
            mixes all cuts, with every order equally likely. Each cut is then read separately, through the index files
            that ``write_sidecars`` writes.
        seed: seed of the shuffling.
        mix_shards: the number of shards that are open and mixed at a time if ``shuffle`` is True.
        block_size: the maximum number of consecutive cuts of a shard that stay together when the order is divided among
            ranks and workers. By default blocks are whole shards, or smaller if there are few shards: a dataset of
            fewer than 4096 cuts is divided cut by cut. With ``shuffle``, each epoch is divided differently.
        rank: the index of this process among the processes that share the cuts.
        world_size: the number of processes that share the cuts.
        split_by_worker: in a worker of a torch DataLoader, read only this worker's part of the rank's cuts. If False,
            each worker reads all cuts of the rank.
        infinite: iterate over one epoch after another without end. If False, each iteration is one epoch, beginning
            with the first.
        tail: what to do if ranks and workers get different numbers of cuts in an epoch. ``keep`` accepts the
            difference; ``drop`` ends all of them at the smallest number; ``pad`` extends all of them to the largest
            number by repeating cuts from the start of the epoch, marked by ``cut.shar_padding = True``.
        decode_threads: the number of threads that decode the chosen audio in advance. Cuts then hold decoded samples,
            so ``load_audio()`` and similar methods no longer decode. Decoding FLAC this way takes 60 % of lhotse's
            time. With 0, audio is decoded when it is loaded.
        decode_prefetch: the number of cuts that may be decoded ahead of the current one; by default 4 per thread, at
            least 1.
        sidecars: the folder of the index files, with ``shuffle="global"``; by default the dataset directory.
        on_damage: "skip" leaves out damaged cuts, logs a warning for each, and counts them in the state. It requires
            ``tail="keep"``, since ranks and workers may then get different numbers of cuts. Damage in data that is
            loaded later, such as audio without ``decode_threads``, still raises an error on loading.
        max_damaged: the number of damaged cuts that each part (a worker, or a rank without workers) may skip over all
            epochs; any further damage is raised. 100 if None.
        cache_dir: for a URL, the folder that shards are copied to before they are read. All processes of a node share
            it; by default ``~/.cache/sharmill``. A copy whose checksum differs from the index counts as damaged.
        cache_gib: the maximum size of that folder in GiB. The least recently used shards are removed first; open shards
            are never removed.

    Returns:
        A lazy CutSet. If ``target_audio`` is read, it is also attached as ``recording`` (unless another tool's shards
        have their own ``recording``), so that ``load_audio()`` works. Otherwise ``recording`` only names the origin of
        the audio. ``load_target_codes()`` of a truncated cut returns only the frames of that cut;
        ``load_context_audio()`` and ``load_context_codes()`` always return the whole context. ``cut.shar_position`` is
        the position of a cut in the order of all epochs. The attribute ``data`` of the CutSet is a ``SharReader`` with
        ``state_dict()`` and ``load_state_dict()``; see its documentation.

    Raises:
        ConfigError: the dataset does not exist or lacks a field, a column of ``where`` or the codec; or an option is
            invalid.
        DamagedShard: while iterating, if a file is damaged and not skipped.
        OSError: a server cannot be reached; may also be raised while iterating.

    Example:
        >>> for cut in open_shar("data/librispeech", ["target_codes", "context_codes"]):  # doctest: +SKIP
        ...     cut.load_target_codes(), cut.load_context_codes()
    """
    from lhotse import CutSet

    from sharmill.shar.index import open_directory
    from sharmill.shar.reading.epoch_reader import ReadOptions
    from sharmill.shar.reading.iteration import SharReader
    from sharmill.shar.reading.shard_source import open_shard_source

    refuse((sidecars is not None and shuffle != "global", f'sidecars requires shuffle="global", not {shuffle!r}'))
    options = ReadOptions(
        shuffle=shuffle,
        seed=seed,
        mix_shards=mix_shards,
        block_size=block_size,
        rank=rank,
        world_size=world_size,
        split_by_worker=split_by_worker,
        infinite=infinite,
        tail=tail,
        decode_threads=decode_threads,
        decode_prefetch=4 * decode_threads if decode_prefetch is None else decode_prefetch,
        on_damage=on_damage,
        max_damaged=max_damaged,
    )
    directory = open_directory(dataset, cache_dir, cache_gib)
    folder = directory if sidecars is None else Path(sidecars)
    source = open_shard_source(directory, fields, codec, folder if shuffle == "global" else None, where)
    return CutSet(SharReader(source, options))
