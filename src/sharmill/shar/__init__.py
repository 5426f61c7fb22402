"""Shar datasets: the layout on disk, writing, and reading by ``open_shar``."""

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
    """Open the cuts of a dataset, which are read lazily and a few shards at a time.

    Args:
        dataset: a finished dataset directory, which is read through its index without listing folders; or its URL, as
            text: ``https://``, ``s3://``, ``gs://`` or ``ais://``; or a folder with shards by lhotse's ``to_shar`` or
            the published context-Shar scripts, in the order of their numbers.
        fields: which of ``target_audio``, ``context_audio``, ``target_codes``, ``context_codes`` and what else the
            dataset has (in others' shards: of the fields there) to attach to the cuts; default: all that there are. The
            files of the others are not opened. A field is named by its attribute of a cut, such as ``target_codes``,
            or where several have it, by its folder, such as ``codes_mimi/target_codes``. A cut for which the codec gave
            no codes is left out if they are among the fields, and counted in ``num_left_out`` of the ``SharReader``.
        codec: whose codes, where there are several.
        shuffle: False: the order of the dataset. True: an order that follows from ``seed`` and the number of the epoch
            alone. Shards are permuted, and the cuts of every ``mix_shards`` consecutive ones are mixed. "global": all
            cuts are mixed, each order as likely as another; each is read by itself, by the index files that
            ``write_sidecars`` makes.
        seed: of the shuffling.
        mix_shards: shards that are open at once and mixed, with ``shuffle``.
        block_size: consecutive cuts of a shard, at most, that stay together when the order is divided among ranks and
            workers; by default whole shards, or less where there are few: then a dataset of fewer cuts than 4096 is
            divided cut by cut. With ``shuffle`` each epoch is divided anew.
        rank: this process among those that share the cuts.
        world_size: their number.
        split_by_worker: within a worker of a torch DataLoader, take this worker's part of the rank's cuts.
            False: each worker reads all cuts of the rank.
        infinite: one epoch after another, without end; else one epoch for each iteration, the next one each time.
        tail: what to do where ranks and workers would get different numbers of cuts in an epoch. ``keep`` leaves it
            so; ``drop`` ends all at the smallest number, ``pad`` goes on to the largest with the first cuts of the
            epoch's order once more, marked by ``cut.shar_padding = True``.
        decode_threads: threads that decode the chosen audio ahead, in order. The cuts then hold decoded samples, and
            ``load_audio()`` and the like decode nothing; FLAC takes 60 % of lhotse's time. 0: audio is decoded
            where it is loaded.
        decode_prefetch: cuts that may be decoded ahead of the one in use; by default 4 for each thread, at least 1.
        sidecars: the folder of the index files, with ``shuffle="global"``; by default the dataset directory.
        on_damage: "skip" leaves out cuts whose shard is damaged, with a warning for each, and counts them in the state;
            with ``tail="keep"`` only, since parts may then have different numbers of cuts.
            What is loaded later, such as audio without ``decode_threads``, raises where it is loaded all the same.
        max_damaged: cuts that each part may skip, over all epochs, before the damage is raised after all; 100 if None.
        cache_dir: of a URL, the folder that shards are copied to ahead of their use, which all processes of a node
            share; by default ``~/.cache/sharmill``. A copy has the checksum that the index says, or is damage.
        cache_gib: the size of that folder in GiB. What was unused for longest is removed, but no shard that is open.

    Returns:
        A lazy CutSet. With ``target_audio``, that audio is attached as ``recording`` too (unless others' shards have a
        ``recording`` themselves), so that ``load_audio()`` works; without, ``recording`` only tells where the audio
        came from. ``load_target_codes()`` of a truncated cut has its frames only; ``load_context_audio()`` and
        ``load_context_codes()`` always have the whole context.
        Every cut has its position in the order as ``cut.shar_position``. The iterable in the CutSet, its ``data``, is a
        ``SharReader``, with ``state_dict()`` and ``load_state_dict()``: see there.

    Raises:
        ConfigError: there is no dataset, not this field or codec in it, or an option makes no sense.
        DamagedShard: while iterating, where a file is not as it should be and is not skipped.
        OSError: a server cannot be reached, also while iterating.

    Example:
        >>> for cut in open_shar("data/librispeech", ["target_codes", "context_codes"]):  # doctest: +SKIP
        ...     cut.load_target_codes(), cut.load_context_codes()
    """
    from lhotse import CutSet

    from sharmill.shar.index import open_directory
    from sharmill.shar.reading.epoch_reader import ReadOptions
    from sharmill.shar.reading.iteration import SharReader
    from sharmill.shar.reading.shard_source import open_shard_source

    refuse((sidecars is not None and shuffle != "global", f'sidecars are read with shuffle="global", not {shuffle!r}'))
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
    source = open_shard_source(directory, fields, codec, folder if shuffle == "global" else None)
    return CutSet(SharReader(source, options))
