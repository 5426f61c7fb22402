"""The training loader: NeMo's loader with sharmill's readers, which divide data among ranks and have exact states.

NeMo's samplers cannot save their positions, but need not do so: sharmill's readers resume after the last consumed
example, so examples that samplers had buffered are read again. After a resume, buckets and the mixing of datasets start
over with new seeds; buckets first deliver the examples left over from earlier epochs.

With ``canonical: N``, an epoch is divided into N fixed parts, each with batches of its own. Each of W ranks has N / W
parts and delivers their batches in turn. Thus N / W batches of every rank form one global step, which is the same for
every W. All random choices depend only on the number of the part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from lhotse.dataset import IterableDatasetWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.errors import ConfigError, refuse
from sharmill.registry import require_package
from sharmill.shar.fields import CONTEXT_AUDIO, CONTEXT_CODES
from sharmill.shar.index import read_dataset
from sharmill.shar.reading.loading import dataset_states, load_states, share_tensors
from sharmill.shar.reading.state import merge_states
from sharmill.training.codes import CodecForm
from sharmill.training.nemo.entries import Settings, entry_directory, is_divided, is_divisible, type_of
from sharmill.training.nemo.partition import PartitionedCuts, collect_sources, mark_consumed
from sharmill.training.nemo.samplers import ManifestBucket, SamplerOptions, SequentialBuckets
from sharmill.training.nemo.settings import (
    check_tokenizer,
    entries_of,
    loader_schema,
    prepare_settings,
    resolve_settings,
    sections_of,
    sources_of,
    tag_names,
)
from sharmill.training.speech_text import ContextSpeechDataset

# Settings that split examples, or that change the order in which examples are read relative to each other.
_INEXACT = (
    "perturb_speed", "cut_into_windows_duration", "cut_text_into_windows_tokens", "concurrent_bucketing", "noise_path",
)  # fmt: skip
# This number is added to the seeds after each resume. It is far from the multiples of 100 that lhotse adds for ranks
# and workers.
_SEEDS_PER_RESUME: Final = 1_000_003


def merge_data_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of the loaders of all data-parallel ranks into one, for any number of ranks and workers.

    Args:
        states: the ``state_dict()`` of every rank's loader, which ``get_dataloader`` created with ``resumable=True``.
            Ranks that only receive the batches of another rank have empty states, which are ignored.

    Returns:
        The ``state`` for ``get_dataloader(..., state=...)``, which needs the same entries in the same order.

    Raises:
        ConfigError: the state of a rank is missing, or these are not states of such a loader.
    """
    found = [one for state in states if state for one in dataset_states(state)]
    workers = [part for one in found for part in one.get("parts", [one])]
    counts = {len(worker.get("readers", ())) for worker in workers}
    refuse(
        (len(counts) != 1 or counts == {0},
         "these are not the states of one loader of get_dataloader(..., resumable=True)"),
        code="wrong_state",
    )  # fmt: skip
    merged = [merge_states([worker["readers"][i] for worker in workers]) for i in range(counts.pop())]
    return {"readers": merged, "resumes": max(worker.get("resumes", 0) for worker in workers)}


def _require_exact(sections: Sequence[Settings], *, in_turn: bool) -> None:
    """Raise ConfigError if the settings do not allow an exact state.

    Args:
        in_turn: manifests are read one after the other, one epoch of each at a time.
    """
    for section in sections:
        sources = sources_of(section)
        inexact = [key for key in (*_INEXACT, *["drop_last"] * in_turn) if section.get(key)]
        unmarked = [entry["type"] for entry in entries_of(section) if not type_of(entry).is_marked]
        whole = [entry["type"] for entry in sources if is_divisible(entry)]
        others = [str(entry.get("type")) for entry in sources if not is_divided(entry)]
        refuse(
            (inexact,
             f"resumable=True cannot be combined with {', '.join(inexact)}, under which consumed examples cannot be "
             "counted: remove one of them"),
            (unmarked,
             f"resumable=True: type {', '.join(unmarked)} does not record the origin of its examples, so consumed "
             "examples cannot be counted: remove these entries, or set resumable=False"),
            (whole,
             f"resumable=True needs data of type {', '.join(whole)} as a stream: set force_iterable_dataset: true"),
            (others,
             f"resumable=True: data of type {', '.join(others)} cannot be resumed: remove pipes, slice_length, "
             "extra_fields and types that sharmill does not divide"),
            code="inexact_state",
        )  # fmt: skip


class CountingDataset(torch.utils.data.Dataset):
    """A wrapper of a dataset class that also marks the examples of each batch as consumed in their sources."""

    def __init__(self, dataset: Dataset[Any], sources: Sequence[PartitionedCuts]) -> None:
        self._dataset, self._sources = dataset, sources

    def __getitem__(self, examples: Any) -> Any:
        for example in examples if self._sources else ():
            mark_consumed(self._sources, example)
        return share_tensors(self._dataset[examples])


class ResumableBatches(torch.utils.data.IterableDataset):
    """Iterable over the batches of all parts in turn; its state consists of the states of the parts' readers.

    Args:
        parts: NeMo's batches of each part, and the sources of these batches. A single part is divided among the workers
            by its readers; several parts are distributed over the workers.
        resumes: number of times that the training was resumed.
    """

    def __init__(self, parts: Sequence[tuple[IterableDatasetWrapper, list[PartitionedCuts]]], resumes: int) -> None:
        self._parts, self._resumes = parts, resumes

    def __iter__(self) -> Iterator[Any]:
        running = [iter(batches) for batches, _ in self._own_parts()]
        while True:
            for batches in running:
                yield next(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this worker's parts."""
        states = [[source.reader.state_dict() for source in sources] for _, sources in self._own_parts()]
        return {"parts": [{"readers": readers, "resumes": self._resumes} for readers in states]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of this worker's parts, before iterating."""
        for (_, sources), known in zip(self._own_parts(), state.get("parts", [state]), strict=True):
            load_states([source.reader for source in sources], known)

    def _own_parts(self) -> Sequence[tuple[IterableDatasetWrapper, list[PartitionedCuts]]]:
        """Return the parts of this worker.

        If there are several parts, each of n workers has every n-th part, so that the loader delivers the batches of
        all parts in order.
        """
        info = torch.utils.data.get_worker_info()
        return self._parts if info is None or len(self._parts) == 1 else self._parts[info.id :: info.num_workers]


def get_dataloader(
    cfg: Mapping[str, Any],
    rank: int,
    world_size: int,
    tokenizer: Any = None,
    *,
    dataset: Dataset[Any] | None = None,
    device_mesh: DeviceMesh | None = None,
    resumable: bool = False,
    state: Mapping[str, Any] | None = None,
) -> Any:
    """Return the loader of NeMo's ``get_lhotse_dataloader_from_config``, with ``type: sharmill`` in ``input_cfg``.

    Args:
        cfg: NeMo's settings (``LhotseDataLoadingConfig``), a plain mapping or OmegaConf; not modified. With
            ``canonical: N``, the global batches are the same on any number of ranks that divides N.
        rank: the data-parallel rank; the same for all ranks that work on one batch (tensor or context parallel).
        world_size: number of data-parallel ranks.
        tokenizer: any callable that returns the token ids of a text; with ``prompt_format``, a tokenizer of NeMo.
        dataset: turns a CutSet into a batch: ``dataset[cuts]``. The default is a ``ContextSpeechDataset`` for the codec
            of the entries of type sharmill, which must all have the same codec. It loads audio at the codec's rate;
            without a codec, at ``sample_rate`` or, if that is not set, at the rate of the datasets.
        device_mesh: if it has axes ``cp`` or ``tp``, only the first rank along these axes reads batches, and it
            broadcasts them to the other ranks.
        resumable: return a StatefulDataLoader, and prepare the data for exact states. Use this option for infinite
            streams in the same order on all ranks. ``merge_data_states`` combines the ``state_dict()`` of all ranks.
        state: merged state to resume from, on any number of ranks and workers. Entries, seed and shard seeds must be
            the same. Each example that passes the filters is delivered once per epoch.

    Raises:
        ConfigError: NeMo is not installed, a key is unknown, or some examples would go to several ranks or to none.

    Example:
        >>> settings = OmegaConf.load("configs/training/tts.yaml")  # doctest: +SKIP
        >>> loader = get_dataloader(settings.train_ds, rank=0, world_size=1, tokenizer=my_tokenizer)  # doctest: +SKIP
        >>> batch = next(iter(loader))  # doctest: +SKIP
    """
    require_package("nemo")
    from nemo.collections.common.data.lhotse.broadcasting import BroadcastingDataLoader, is_dp_source_rank

    from sharmill.training.nemo.examples import copy_audio

    settings = resolve_settings(cfg)
    num_workers, count = settings.get("num_workers") or 0, settings.pop("canonical", None)
    parts = [(rank, world_size)]
    if count is not None:
        _check_canonical(count, world_size, num_workers)
        parts = [(part, count) for part in range(rank * count // world_size, (rank + 1) * count // world_size)]
        # If NeMo's loader has no workers, its random draws depend only on the number of the part.
        settings["num_workers"] = 0
    source, resumable = None, resumable or count is not None
    resumes = 0 if state is None else int(state.get("resumes", 0)) + 1
    batches = []
    for part, num_parts in parts:
        prepared = prepare_settings(settings, part, num_parts)
        check_tokenizer(sections_of(prepared), tokenizer)
        if part == parts[0][0]:
            copy_audio(sources_of(prepared))
        made = _default_dataset(prepared, tokenizer) if dataset is None else dataset
        # If the seeds stayed the same, samplers and the mixing of datasets would repeat their first draws after each
        # resume, and datasets would deviate from their weights. The seeds of the readers, which are in their entries,
        # do not change.
        for key in ("seed", "shard_seed"):
            if isinstance(prepared[key], int):
                prepared[key] += _SEEDS_PER_RESUME * resumes
        if count is not None:
            for entry in sources_of(prepared):
                entry["whole_part"] = True
            for section in sections_of(prepared):  # synchronized buckets would depend on the number of the worker
                section["bucketing_strategy"] = "fully_randomized"
        if is_dp_source_rank(device_mesh):
            source, ours = _make_loader(prepared, part, num_parts, made, tokenizer, resumable=resumable)
            batches.append((source.dataset, ours))
            if resumable and state is not None:
                load_states([cuts.reader for cuts in ours], state)
    if source is not None and resumable:
        source = StatefulDataLoader(
            ResumableBatches(batches, resumes),
            batch_size=None,
            num_workers=num_workers,
            pin_memory=source.pin_memory,
            worker_init_fn=source.worker_init_fn if count is None else None,
            persistent_workers=num_workers > 0,
        )
    return source if device_mesh is None else BroadcastingDataLoader(source, device_mesh)


def _make_loader(
    settings: Settings, rank: int, world_size: int, dataset: Dataset[Any], tokenizer: Any, *, resumable: bool
) -> tuple[DataLoader[Any], list[PartitionedCuts]]:
    """Return NeMo's loader for prepared settings, and the divided sources that it reads."""
    from nemo.collections.common.data.lhotse.dataloader import get_lhotse_dataloader_from_config

    import sharmill.training.nemo.input_type  # noqa: F401  registers types
    from sharmill.training.nemo.examples import check_files

    for entry in sources_of(settings):
        if not is_divided(entry):
            check_files(str(entry.get("type")), entry)
    seed, sections = settings["seed"], sections_of(settings)
    options = [SamplerOptions.take(section, tokenizer, rank, world_size) for section in sections]
    in_turn = settings.pop("bucketing_strategy", None)  # set only if manifests are read in turn
    with collect_sources() as ours:
        counting = CountingDataset(dataset, ours if resumable else ())
        try:
            source = get_lhotse_dataloader_from_config(settings, rank, world_size, counting, tokenizer)
        except AssertionError as error:  # NeMo and lhotse check settings with assertions
            raise ConfigError(f"NeMo's loader rejects the settings: {error}", code="bad_config_value") from error
        except KeyError as error:  # NeMo assigns the records of a shared manifest to tars by their shard_id
            raise ConfigError(
                f"a record of the data has no {error}: give each tar its own manifest, or each record a shard_id",
                code="bad_manifest",
            ) from error
    sampler = source.dataset.sampler if isinstance(source.dataset, IterableDatasetWrapper) else source.sampler
    samplers = getattr(sampler, "samplers", [sampler])
    for one, own in zip(samplers, options, strict=True):
        own.adapt(one, seed, partial(mark_consumed, ours) if resumable else None)
    if in_turn is not None:
        passes = [entry.get("passes", 1) for entry in sources_of(settings)]
        buckets = [ManifestBucket(*parts) for parts in zip(samplers, ours, passes, strict=True)]
        seeds = {"synced_randomized": "", "fully_randomized": f"{seed} {rank}"}
        finite = settings.get("force_finite", False)
        single = any(getattr(one.constraint, "max_cuts", None) == 1 for one in samplers)
        refuse(
            (finite and single and world_size > 1 and in_turn != "fully_randomized",
             f"bucketing_strategy: {in_turn} with force_finite: true splits batches so that all ranks have the same "
             "number: set batch_size (bucketing_batch_size) to at least 2")
        )  # fmt: skip
        source.dataset.sampler = SequentialBuckets(buckets, seeds.get(in_turn), finite=finite)
    if resumable:
        _require_exact(sections, in_turn=in_turn is not None)
        for cuts in ours:
            cuts.count_only_marked()
    return source, ours


def _default_dataset(settings: Settings, tokenizer: Any) -> Dataset[Any]:
    """Return a ``ContextSpeechDataset`` for the codec of all sources or, if they have no codec, for audio.

    If ``sample_rate`` is not set, it is set to the rate of the batches' audio.
    """
    sources, sections = sources_of(settings), sections_of(settings)
    others = [str(source.get("of_type", source.get("type"))) for source in sources if source.get("type") != "sharmill"]
    refuse(
        (others, f"data of type {', '.join(others)} need a dataset= that batches them: pass a SpeechTextDataset or "
                 "your own class"),
        code="needs_dataset",
    )  # fmt: skip
    directories = [entry_directory(source) for source in sources]
    records = [read_dataset(directory) for directory in directories]
    coded = [
        CodecForm.of_dataset(directory, source.get("codec"))
        for source, record, directory in zip(sources, records, directories, strict=True)
        if record.codecs or source.get("codec") is not None
    ]
    with_context = {
        any(field.endswith((CONTEXT_AUDIO, CONTEXT_CODES)) for field in source.get("fields") or record.fields)
        for source, record in zip(sources, records, strict=True)
    }
    asked = {section["sample_rate"] for section in sections if section.get("sample_rate") is not None}
    refuse(
        (len(set(coded)) > 1 or 0 < len(coded) < len(sources),
         "the datasets have codecs of different forms, or some have no codec: pass dataset="),
        (len(with_context) > 1, "some of the datasets have contexts and others have none: pass dataset="),
        (len(asked) > 1 and not coded, "the samplers have different values of sample_rate: pass dataset="),
        code="needs_dataset",
    )  # fmt: skip
    # If there are no codes, the rate is taken from the settings, then the datasets, then NeMo's default.
    rates = asked or {record.sampling_rate for record in records}
    rate = (rates.pop() if len(rates) == 1 else None) or loader_schema().sample_rate
    if coded:
        rate = coded[0].sampling_rate
    for section in sections:
        section.setdefault("sample_rate", rate)
    return ContextSpeechDataset(
        coded[0] if coded else None,
        tokenizer,
        context=with_context.pop(),
        tags=tag_names(settings),
        sampling_rate=int(rate),
    )


def _check_canonical(count: Any, world_size: int, num_workers: int) -> None:
    """Raise ConfigError if ``count`` parts cannot be divided evenly among the ranks and their workers."""
    refuse((not isinstance(count, int) or count < 1, f"canonical must be a number of parts, not {count!r}"))
    readers = world_size * max(1, num_workers)
    allowed = [str(number) for number in range(1, count + 1) if count % number == 0]
    refuse(
        (str(readers) not in allowed,
         f"canonical: {count} cannot be divided among {readers} readers ({world_size} ranks x {max(1, num_workers)} "
         f"workers): their number must be one of {', '.join(allowed)}"),
        code="split_wrong",
    )  # fmt: skip
