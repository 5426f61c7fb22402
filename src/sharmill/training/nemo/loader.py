"""The training loader: NeMo's, over our datasets and whatever else NeMo reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharmill.errors import ConfigError
from sharmill.registry import require_package
from sharmill.shar.layout import CONTEXT_AUDIO, CONTEXT_CODES
from sharmill.training.nemo.loader_settings import (
    DIVIDED,
    Settings,
    limit_filters,
    prepare_settings,
    resolve_settings,
    sections_of,
    sources_of,
    tag_names,
)
from sharmill.training.nemo.setting_values import check_files, check_tokenizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader, Dataset

    from sharmill.shar.index import DatasetRecord
    from sharmill.training.nemo.partition import PartitionedCuts


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
        cfg: NeMo's settings (``LhotseDataLoadingConfig``), plain or of OmegaConf. It is not changed. With
            ``canonical: N`` the global batches are the same on any number of ranks that divides N.
        rank: the data-parallel rank: ranks that work on the same batch (tensor or context parallel) give the same.
        world_size: how many data-parallel ranks there are.
        tokenizer: any callable from text to token ids; with ``prompt_format``, a tokenizer of NeMo.
        dataset: makes a batch of a CutSet: ``dataset[cuts]``. Default: a ``ContextSpeechDataset`` for the codec of the
            entries of type sharmill, which must agree. Audio has the codec's rate; where the entries have no codec it
            has ``sample_rate``, or if that is not set the datasets' own rate.
        device_mesh: with axes ``cp`` or ``tp``: only the first rank along them reads, and the others get its batches.
        resumable: returns a StatefulDataLoader: its ``state_dict()``s of all ranks, put together by
            ``merge_data_states``, are a ``state``. For streaming without end in one order for all ranks.
        state: where to go on, with the same entries, seed and shard seeds, on any number of ranks and workers: each
            example that passes the filters comes once per epoch.

    Raises:
        ConfigError: NeMo is not installed, a key is unknown, or ranks would get samples twice or not at all.

    Example:
        >>> settings = OmegaConf.load("configs/training/tts.yaml")  # doctest: +SKIP
        >>> loader = get_dataloader(settings.train_ds, rank=0, world_size=1, tokenizer=my_tokenizer)  # doctest: +SKIP
        >>> batch = next(iter(loader))  # doctest: +SKIP
    """
    require_package("nemo")
    from nemo.collections.common.data.lhotse.broadcasting import BroadcastingDataLoader, is_dp_source_rank

    from sharmill.training.nemo.resumable import vary_seeds, with_state

    if cfg.get("canonical") is not None:
        from sharmill.training.nemo.canonical import get_canonical_dataloader

        # Made on every rank, so that all of them see what is wrong with the settings.
        canonical = get_canonical_dataloader(cfg, rank, world_size, tokenizer, dataset, state)
        if device_mesh is None:
            return canonical
        return BroadcastingDataLoader(canonical if is_dp_source_rank(device_mesh) else None, device_mesh)
    settings = prepare_settings(cfg, rank, world_size)
    dataset = dataset_for(settings, tokenizer, dataset)
    resumes = 0 if state is None else vary_seeds(settings, state)
    source = None
    if is_dp_source_rank(device_mesh):
        source, ours = make_loader(cfg, settings, rank, world_size, dataset, tokenizer, resumable=resumable)
        if resumable:
            source = with_state(source, ours, state, resumes)
    return source if device_mesh is None else BroadcastingDataLoader(source, device_mesh)


def make_loader(
    cfg: Mapping[str, Any],
    settings: Settings,
    rank: int,
    world_size: int,
    dataset: Dataset[Any],
    tokenizer: Any,
    *,
    resumable: bool,
) -> tuple[DataLoader[Any], list[PartitionedCuts]]:
    """Return NeMo's loader for prepared settings, and the divided sources that it reads."""
    from lhotse.dataset import IterableDatasetWrapper
    from nemo.collections.common.data.lhotse.dataloader import get_lhotse_dataloader_from_config

    from sharmill.training.nemo.input_type import collected
    from sharmill.training.nemo.resumable import CountingDataset, count_only_marked, mark_consumed, report_dropped

    for entry in sources_of(settings):
        if entry.get("type") not in ("sharmill", DIVIDED):
            check_files(str(entry.get("type")), entry)
    with collected() as ours:
        counting = CountingDataset(dataset, ours) if resumable else dataset
        try:
            source = get_lhotse_dataloader_from_config(settings, rank, world_size, counting, tokenizer)
        except AssertionError as error:  # NeMo and lhotse assert what they want of settings
            raise ConfigError(f"NeMo's loader refuses the settings: {error}", code="bad_config_value") from error
    for cuts in ours:
        cuts.restart()
    sampler = source.dataset.sampler if isinstance(source.dataset, IterableDatasetWrapper) else source.sampler
    dropped = partial(mark_consumed, ours) if resumable else None
    for one, section in zip(getattr(sampler, "samplers", [sampler]), sections_of(resolve_settings(cfg)), strict=True):
        report_dropped(one, limit_filters(section) if tokenizer is not None else [], dropped)
        if section.get("bucketing_strategy") == "fully_randomized":
            one.sync_buckets = False
    if resumable:
        count_only_marked(sections_of(settings), ours)
    return source, ours


def dataset_for(settings: Settings, tokenizer: Any, dataset: Dataset[Any] | None) -> Dataset[Any]:
    """Return the dataset class, the one that is given or one that fits the entries; check the tokenizer."""
    check_tokenizer(sections_of(settings), tokenizer)
    return _default_dataset(settings, tokenizer) if dataset is None else dataset


def _default_dataset(settings: Settings, tokenizer: Any) -> Dataset[Any]:
    """Make the dataset class for the codec of all sources, or for audio where they have none.

    ``sample_rate`` becomes that of the batches' audio, where it is not set.
    """
    from sharmill.shar.index import read_dataset
    from sharmill.training.codes import CodecForm
    from sharmill.training.dataset import ContextSpeechDataset

    sources = sources_of(settings)
    if other := [source.get("of_type", source.get("type")) for source in sources if source.get("type") != "sharmill"]:
        raise ConfigError(
            f"data of type {other[0]} need a dataset= that makes batches of them: a SpeechTextDataset, or your own",
            code="needs_dataset",
        )
    records = [read_dataset(Path(source["dataset"])) for source in sources]
    coded = [
        CodecForm.of_dataset(source["dataset"], source.get("codec"))
        for source, record in zip(sources, records, strict=True)
        if record.codecs or source.get("codec") is not None
    ]
    if len(set(coded)) > 1 or 0 < len(coded) < len(sources):
        raise ConfigError("the datasets have codecs of different forms, or none: give dataset=", code="needs_dataset")
    with_context = {
        any(field.endswith((CONTEXT_AUDIO, CONTEXT_CODES)) for field in source.get("fields") or record.fields)
        for source, record in zip(sources, records, strict=True)
    }
    if len(with_context) > 1:
        raise ConfigError(
            "some of the datasets have contexts and others have none: give dataset=", code="needs_dataset"
        )
    rate = coded[0].sampling_rate if coded else _sample_rate(settings, records)
    for section in sections_of(settings):
        section.setdefault("sample_rate", rate)
    (context,) = with_context
    tags = tag_names(settings)
    if coded:
        return ContextSpeechDataset(coded[0], tokenizer, context=context, tags=tags)
    return ContextSpeechDataset(None, tokenizer, context=context, tags=tags, sampling_rate=rate)


def _sample_rate(settings: Settings, records: Sequence[DatasetRecord]) -> int:
    """Return the rate for audio of datasets without codes: that of the settings, or of the datasets, or NeMo's."""
    from nemo.collections.common.data.lhotse.dataloader import LhotseDataLoadingConfig

    asked = {section["sample_rate"] for section in sections_of(settings) if section.get("sample_rate") is not None}
    if len(asked) > 1:
        raise ConfigError("the samplers have different values of sample_rate: give dataset=", code="needs_dataset")
    if asked:
        return int(asked.pop())
    stored = {record.sampling_rate for record in records}
    rate = stored.pop() if len(stored) == 1 else None
    return rate or LhotseDataLoadingConfig.sample_rate
