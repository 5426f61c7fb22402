"""The training loader: NeMo's, over our datasets and whatever else NeMo reads. NeMo makes the batches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from sharmill.errors import ConfigError
from sharmill.training.nemo.loader_settings import Settings, prepare_settings, sections_of, sources_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import Dataset


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
    """The loader that NeMo's ``get_lhotse_dataloader_from_config`` makes, with ``type: sharmill`` in ``input_cfg``.

    Args:
        cfg: NeMo's settings (``LhotseDataLoadingConfig``), plain or of OmegaConf. It is not changed.
        rank: the data-parallel rank: ranks that work on the same batch (tensor or context parallel) give the same.
        world_size: how many data-parallel ranks there are.
        tokenizer: any callable from text to token ids; with ``prompt_format``, a tokenizer of NeMo.
        dataset: makes a batch of a CutSet: ``dataset[cuts]``. Default: a ``ContextSpeechDataset`` for the codec of the
            entries of type sharmill, which must agree; audio then has the codec's rate, if ``sample_rate`` is not set.
        device_mesh: with axes ``cp`` or ``tp``: only the first rank along them reads, and the others get its batches.
        resumable: returns a StatefulDataLoader: its ``state_dict()``s of all ranks, put together by
            ``merge_data_states``, are a ``state``. For streaming without end in one order for all ranks.
        state: where to go on, with the same entries of type sharmill, seed and shard seeds, on any number of ranks and
            workers: each of their cuts that passes the filters comes once per epoch. Other data begin anew.

    Raises:
        ConfigError: an unknown key, or settings under which ranks would get samples twice or not at all.

    Example:
        >>> settings = OmegaConf.load("configs/training/tts.yaml")  # doctest: +SKIP
        >>> loader = get_dataloader(settings.train_ds, rank=0, world_size=1, tokenizer=my_tokenizer)  # doctest: +SKIP
        >>> batch = next(iter(loader))  # doctest: +SKIP
    """
    from lhotse.dataset import IterableDatasetWrapper
    from nemo.collections.common.data.lhotse.broadcasting import BroadcastingDataLoader, is_dp_source_rank
    from nemo.collections.common.data.lhotse.dataloader import get_lhotse_dataloader_from_config

    from sharmill.training.nemo.input_type import collected
    from sharmill.training.nemo.reporting_filter import report_dropped
    from sharmill.training.nemo.resumable import CountingDataset, count_only_marked, mark_consumed, with_state

    settings = prepare_settings(cfg, rank, world_size)
    prompted = any(section.get("prompt_format") is not None for section in sections_of(settings))
    if prompted and not hasattr(tokenizer, "text_to_ids"):
        raise ConfigError("prompt_format needs a tokenizer of NeMo, one with text_to_ids")
    if dataset is None:
        dataset = _default_dataset(settings, tokenizer)
    source = None
    if is_dp_source_rank(device_mesh):
        with collected() as ours:
            counting = CountingDataset(dataset, ours) if resumable else dataset
            source = get_lhotse_dataloader_from_config(settings, rank, world_size, counting, tokenizer)
        for one in ours:
            one.restart()
        sampler = source.dataset.sampler if isinstance(source.dataset, IterableDatasetWrapper) else source.sampler
        report_dropped(sampler, partial(mark_consumed, ours) if resumable else None)
        if resumable:
            count_only_marked(sections_of(settings), ours)
            source = with_state(source, ours, state)
    return source if device_mesh is None else BroadcastingDataLoader(source, device_mesh)


def _default_dataset(settings: Settings, tokenizer: Any) -> Dataset[Any]:
    """The dataset class for the codec of all sources, at whose rate audio is loaded."""
    from sharmill.training.dataset import CodecForm, ContextSpeechDataset

    forms = set()
    for source in sources_of(settings):
        if source.get("type") != "sharmill":
            raise ConfigError(f"data of type {source.get('type')} need a dataset= that makes batches of them")
        forms.add(CodecForm.of_dataset(source["dataset"], source.get("codec")))
    if len(forms) > 1:
        raise ConfigError("the datasets have codecs of different forms: give dataset=")
    (form,) = forms
    for section in sections_of(settings):
        section.setdefault("sample_rate", form.sampling_rate)
    return ContextSpeechDataset(form, tokenizer)
