"""The types of ``input_cfg``, and the settings of NeMo's classic loaders in the form that its Lhotse loader reads.

``TYPES`` says what sharmill relies on of each type; NeMo passes over keys that it does not know. ``FATES`` says what
becomes of each classic key; the table in docs/training.md is made from it.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sharmill.errors import ConfigError, refuse
from sharmill.files.location import Location
from sharmill.registry import nearest
from sharmill.shar.index import open_directory

Settings = dict[str, Any]

log = logging.getLogger(__name__)

# The type of an entry of NeMo's whose examples our reader divides among ranks and workers.
DIVIDED: Final = "sharmill_divided"

# Seeds beside numbers: drawn by each rank, or for each worker from ``seed``.
SEEDS: Final = ("trng", "randomized")

# Keys that any entry can have. NeMo hands those of a group down to its entries.
OF_ENTRY: Final = (
    "type", "weight", "tags", "shuffle", "shard_seed", "force_finite", "force_map_dataset", "metadata_only",
    # These have no meaning for our datasets.
    "text_field", "lang_field", "max_open_streams", "audio_locator_tag", "token_equivalent_duration",
    "skip_missing_manifest_entries", "force_iterable_dataset", "reweight_temperature", "input_cfg", "slice_length",
)  # fmt: skip
_OF_CONVERTERS: Final = (
    "input_roles", "output_roles", "strip_timestamp_tokens", "move_agent_text_back_by",
    "filter_samples_starting_with_agent", "agent_roles", "user_roles", "target_agent_name", "target_user_name",
    "add_extra_end_silence", "extra_end_silence_range", "max_cer", "min_context_speaker_similarity", "target_speaker",
    "sample_rate",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EntryType:
    """A type of ``input_cfg``.

    Attributes:
        needs: the keys that it must have, itself or from the groups around it.
        takes: further keys.
        files: of a type that our reader divides among ranks and workers the keys that name its files, one of each for a
            shard. An example is a line of the first one, but of ``shar_path``.
        holds: ``cuts``, ``text`` or ``conversations``; nothing where it depends.
        is_stream: NeMo reads it as a stream wherever it lies; other types if they are tarred.
        is_marked: its examples say where they come from, and none is dropped.
    """

    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    holds: str = ""
    is_stream: bool = False
    is_marked: bool = True


_text = partial(EntryType, holds="text", is_stream=True)
_converter = partial(EntryType, needs=("input_cfg",), takes=_OF_CONVERTERS)
_TARRED: Final = ("manifest_filepath", "tarred_audio_filepaths")

# Types that other packages register are none of these.
TYPES: Final[dict[str, EntryType]] = {
    "sharmill": EntryType(
        needs=("dataset",), holds="cuts", is_stream=True,
        takes=("fields", "codec", "decode_threads", "sidecars", "on_damage", "max_damaged", "speaker_tags", "seed",
               "cache_dir", "cache_gib", "rank", "world_size", "whole_part"),
    ),
    DIVIDED: EntryType(is_stream=True),
    "group": EntryType(needs=("input_cfg",), holds="cuts"),
    "txt": _text(needs=("paths",), files=("paths",), takes=("language",)),
    "txt_jsonl": _text(needs=("paths",), files=("paths",), takes=("language",)),
    "txt_pair": _text(
        needs=("source_paths", "target_paths"), files=("source_paths", "target_paths"),
        takes=("source_language", "target_language", "questions_path", "questions_language"),
    ),
    "nemo_sft_jsonl": _text(needs=("paths",), files=("paths",), takes=("language",)),
    "tts_text": _text(needs=("manifest_filepath",), files=("manifest_filepath",), takes=("language",)),
    "multimodal_conversation": EntryType(
        needs=("manifest_filepath", "audio_locator_tag"), takes=("tarred_audio_filepaths",), files=_TARRED,
        holds="conversations", is_stream=True,
    ),
    "share_gpt": EntryType(
        needs=("manifest_filepath", "audio_locator_tag", "audio_placeholders"), files=_TARRED,
        takes=("tarred_audio_filepaths", "audio_root"), holds="conversations", is_stream=True,
    ),
    "share_gpt_webdataset": EntryType(
        needs=("data_dir", "audio_locator_tag"), takes=("audio_placeholders",), holds="conversations", is_stream=True
    ),
    "parquet": EntryType(
        needs=("manifest_filepath",), takes=("audio_field", "duration_field", "sampling_rate"), holds="cuts",
        is_stream=True,
    ),
    "nemo": EntryType(
        needs=("manifest_filepath",), takes=("tarred_audio_filepaths", "extra_fields", "passes"), files=_TARRED,
        holds="cuts",
    ),
    "nemo_tarred": EntryType(needs=_TARRED, takes=("extra_fields", "passes"), files=_TARRED, holds="cuts"),
    "lhotse": EntryType(takes=("cuts_path", "shar_path"), holds="cuts"),
    "lhotse_shar": EntryType(needs=("shar_path",), takes=("cuts_path", "passes"), files=("shar_path",), holds="cuts"),
    "lhotse_as_conversation": _converter(holds="conversations"),
    "sqa_as_conversation": _converter(holds="conversations"),
    "s2s_as_conversation": _converter(holds="conversations", is_marked=False),
    "lhotse_magpietts_data_as_continuation": _converter(is_marked=False),
    "s2s_duplex_overlap_as_s2s_duplex": _converter(is_marked=False),
    "s2s_duplex_reverse_role": _converter(),
}  # fmt: skip


def type_of(entry: Mapping[str, Any]) -> EntryType:
    """Return the type of an entry, or of a group; the settings of a sampler have that of another package."""
    return TYPES.get(str(entry.get("type")), EntryType())


def entry_directory(entry: Mapping[str, Any]) -> Location:
    """Return the directory of the dataset of an entry of ``type: sharmill``; raises as ``open_directory``."""
    return open_directory(entry["dataset"], entry.get("cache_dir"), entry.get("cache_gib", 100.0))


def check_entry(entry: Settings, handed_down: Settings) -> None:
    """Raise ConfigError for a key that NeMo would pass over, or that it needs and does not find.

    Args:
        entry: types that other packages register have keys of their own, which are not checked.
        handed_down: what the settings and groups around it say.
    """
    kind = str(entry.get("type"))
    if kind not in TYPES:
        return
    known = [*OF_ENTRY, *TYPES[kind].needs, *TYPES[kind].takes]
    subject = "a group" if kind == "group" else f"type {kind}"
    for key in entry:
        if key not in known:
            raise ConfigError(f"input_cfg: {subject} has no option {key!r}{nearest(key, known)}", code="unknown_key")
    for key in TYPES[kind].needs:
        if entry.get(key) is None and handed_down.get(key) is None:
            raise ConfigError(f"input_cfg: {subject} needs {key}", code="missing_key")
    tags, seed, weight = entry.get("speaker_tags", "kept"), entry.get("shard_seed", 0), entry.get("weight")
    refuse(
        (weight is not None and not (isinstance(weight, (int, float)) and 0 < weight < math.inf),
         f"input_cfg: weight is a number above 0, not {weight!r}"),
        (kind == "sharmill" and entry.get("slice_length") is not None,
         "slice_length is not for datasets of sharmill: their order is shuffled as a whole"),
        (tags not in ("kept", "nemo"), f"input_cfg: speaker_tags is kept or nemo, not {tags!r}"),
        (not isinstance(seed, int) and seed not in SEEDS,
         f"input_cfg: shard_seed is a number, trng or randomized, not {seed!r}"),
    )  # fmt: skip


_RENAMED: Final = {
    "shard_strategy": "tarred_shard_strategy", "tarred_audio_filepath": "tarred_audio_filepaths",
    "source_path": "source_paths", "target_path": "target_paths",
    "use_multimodal_dataloading": "use_multimodal_sampling",
}  # fmt: skip

# The use that is made of a key, in words for the documentation; they begin with "ignored" if it means nothing here.
FATES: Final[dict[str, str]] = {
    "use_multimodal_dataloading": "`use_multimodal_sampling`",
    "shard_strategy": "`tarred_shard_strategy`",
    "tarred_audio_filepath": "`tarred_audio_filepaths`, in an entry as well",
    "source_path": "`source_paths` of `txt_pair`",
    "target_path": "`target_paths` of `txt_pair`",
    "bucketing_batch_size": "`bucket_batch_size`, and `batch_size` is dropped; of a whole number n and k buckets "
    "[k·n, …, 2·n, n]; without `bucket_duration_bins`, the buckets are k equal ranges from `min_duration` to "
    "`max_duration`, k being the number of manifests in a list of lists, or else `num_buckets`; if it is not set, a "
    "list of lists has buckets of `batch_size`; ignored beside `batch_duration`, `batch_tokens` and "
    "`bucket_batch_size`, which size the batches",
    "bucketing_weights": "passes over each manifest in an epoch",
    "bucketing_strategy": "a list of lists of manifests without Lhotse's keys, or with `use_lhotse: false`: an epoch "
    "of each in turn, in an order that is fixed, or drawn by all ranks or each. Else the data are mixed by weight, and "
    "batches draw their buckets in step, or with `fully_randomized` and without `use_lhotse: true` apart",
    "tarred_shard_strategy": "`scatter`: `shard_seed: randomized`, `replicate`: `shard_seed: trng`, unless set",
    "use_semi_sorted_batching": "NeMo's sampler in map style; for streams `use_bucketing`, with 1 / "
    "`randomization_factor` buckets unless `num_buckets` is set",
    "randomization_factor": "see `use_semi_sorted_batching`",
    "min_tpt": "a fraction works as well",
    "min_tps": "a fraction works as well",
    "augmentor": "ignored: use the loader's own augmentations, such as `noise_path` and `perturb_speed`",
    "bos_id": "ignored: the tokenizer's",
    "blank_index": "ignored: the model's",
    "code_switched": "ignored: use `concatenate_samples`",
    "concat_sampling_probabilities": "ignored: use `weight` of entries",
    "concat_sampling_scale": "ignored: use `limit_train_batches` of the trainer",
    "concat_sampling_seed": "ignored: `seed`",
    "concat_sampling_technique": "ignored: use `weight` of entries",
    "concat_sampling_temperature": "ignored: use `reweight_temperature`",
    "concat_shuffle": "ignored: `shuffle` mixes all data",
    "defer_setup": "ignored: ranks wait for copies of data in stores where torch.distributed is initialized",
    "eos_id": "ignored: the tokenizer's",
    "int_values": "ignored: audio is floating-point",
    "is_code_switched": "ignored: use `concatenate_samples`",
    "is_concat": "ignored: use `weight` of entries",
    "is_tarred": "ignored: `tarred_audio_filepaths` says it",
    "labels": "ignored: the tokenizer's",
    "manifest_parse_func": "ignored: use `type` of an entry",
    "max_open_streams": "ignored: each entry has one file open at a time, and a limit would leave entries out",
    "max_utts": "ignored",
    "normalize": "ignored: texts are taken as they are",
    "normalize_transcripts": "ignored: texts are taken as they are",
    "pad_id": "ignored: the dataset class's",
    "parser": "ignored: texts are taken as they are",
    "return_sample_id": "ignored: cuts have ids",
    "semi_sort_sampler_seed": "ignored: `seed`",
    "shard_manifests": "ignored: manifests are read shard by shard",
    "shuffle_n": "ignored: `shuffle_buffer_size`",
    "tarred_audio_index_filepaths": "ignored: tars are read from their begin",
    "trim": "ignored: audio is taken as it is",
    "trim_silence": "ignored: audio is taken as it is",
    "unk_index": "ignored: the tokenizer's",
    "use_dali": "ignored: workers decode",
    "use_start_end_token": "ignored: the dataset class's",
}

_SIZES: Final = ("bucket_batch_size", "batch_duration", "batch_tokens")
# Keys by which NeMo's Lhotse loader makes batches, and its classic loaders do not.
_OF_LHOTSE: Final = (
    *_SIZES, "bucket_buffer_size", "bucket_duration_bins", "num_buckets", "num_cuts_for_bins_estimate",
    "quadratic_duration", "use_bucketing", "use_multimodal_sampling",
)  # fmt: skip

# Keys of settings that name data themselves, and the type of entry that is made of each; the first one counts.
_PATHS: Final = {
    "shar_path": "lhotse_shar", "cuts_path": "lhotse", "tarred_audio_filepaths": "nemo_tarred",
    "manifest_filepath": "nemo",
}  # fmt: skip


def translate(section: Settings) -> str | None:
    """Put the settings of one sampler into the form of NeMo's Lhotse loader.

    All data are entries of ``input_cfg`` then, each of one manifest. A warning names each key that is read as something
    else, and another one those that are ignored.

    Returns:
        The strategy by which the entries are to be taken one after the other, each with its ``batch_size``; None if
        they are mixed.

    Raises:
        ConfigError: a value that has no counterpart.
    """
    from nemo.collections.common.data.lhotse.cutset import count_input_cfg_levels

    _rename(section)
    depth = count_input_cfg_levels(section)
    if not depth and section.pop("reweight_temperature", None) is not None:
        log.warning("ignored: reweight_temperature, which is for the levels of input_cfg")
    temperature = section.get("reweight_temperature")
    refuse(
        (isinstance(temperature, list) and len(temperature) != depth,
         f"reweight_temperature is a number, or a number for each of {depth} levels of input_cfg, not {temperature!r}"),
    )  # fmt: skip
    in_turn = _translate_buckets(section, _as_entries(section))
    _translate_2d(section)
    strategy, seeds = section.pop("tarred_shard_strategy", None), {"scatter": "randomized", "replicate": "trng"}
    if strategy is not None:
        refuse((strategy not in [*seeds], f"tarred_shard_strategy is scatter or replicate, not {strategy!r}"))
        seed = section.setdefault("shard_seed", seeds[strategy])
        log.warning("tarred_shard_strategy: %s is read as shard_seed: %s", strategy, seed)
    entries = section.get("input_cfg")
    if isinstance(entries, list):
        section["input_cfg"] = [_translate_entry(entry) if isinstance(entry, dict) else entry for entry in entries]
    if isinstance(temperature, list):
        temperature += [1.0] * (count_input_cfg_levels(section) - depth)  # lists have become groups
    drop_ignored(section)
    return in_turn


def is_read_by_lhotse(section: Settings) -> bool:
    """Return True if a sampler's settings ask for Lhotse dataloading: by ``use_lhotse``, or else by a Lhotse key."""
    asked = section.get("use_lhotse")
    return any(map(section.get, _OF_LHOTSE)) if asked is None else bool(asked)


def drop_ignored(section: Settings) -> None:
    """Drop the classic keys that mean nothing here, and name them in one warning."""
    found = [key for key in section if FATES.get(key, "").startswith("ignored")]
    for key in found:
        del section[key]
    if found:
        log.warning("ignored: %s; docs/training.md says what to use instead", ", ".join(found))


def _rename(settings: Settings) -> None:
    for old, new in _RENAMED.items():
        if old in settings:
            refuse((new in settings, f"{old} and {new} are the same setting: keep one"))
            settings[new] = settings.pop(old)


def _translate_entry(entry: Settings) -> Settings:
    """Return an entry of ``input_cfg`` with NeMo's keys, or a group of entries where it names several manifests."""
    _rename(entry)
    drop_ignored(entry)
    kind = entry.get("type")
    if kind in ("txt", "txt_jsonl"):
        entry.setdefault("language", None)
    tag = entry.get("audio_locator_tag")
    if isinstance(tag, list) and len(tag) == 1:
        entry["audio_locator_tag"] = f"[{tag[0]}]"  # what YAML makes of [audio]
    if type_of(entry).needs == ("input_cfg",) and kind != "group" and entry.get("input_cfg") is None:
        _as_entries(entry)
        entry.setdefault("reweight_temperature", None)
    elif kind in ("nemo", "nemo_tarred", "lhotse", "lhotse_shar"):
        return _split_lists(entry, None)
    if isinstance(inner := entry.get("input_cfg"), list):
        entry["input_cfg"] = [_translate_entry(one) if isinstance(one, dict) else one for one in inner]
    return entry


def _as_entries(section: Settings) -> list[Settings]:
    """Make entries of the paths that settings name themselves.

    Returns:
        The entries of NeMo's buckets: of a list of manifests, each in a list of its own; else none.
    """
    weights = section.pop("bucketing_weights", None)
    paths = {key: section.pop(key) for key in _PATHS if section.get(key) is not None}
    by_entries = section.get("input_cfg") is not None
    kind, key = next(((kind, key) for key, kind in _PATHS.items() if key in paths), ("", ""))
    names = () if by_entries else type_of({"type": kind}).files or (key,)
    if unread := [name for name in paths if name not in names]:
        log.warning("%s is read, and %s is not", "input_cfg" if by_entries else key, ", ".join(unread))
    if by_entries or not paths:
        refuse(
            (weights is not None,
             f"bucketing_weights belong to a list of manifests, not {weights!r}; entries of input_cfg have a weight"),
        )  # fmt: skip
        return []
    if weights is not None:
        log.warning("bucketing_weights: %s are passes over each manifest in an epoch", weights)
    entry: Settings = {"type": kind} | {name: paths[name] for name in names if name in paths}
    for name, value in entry.items():
        if name in _TARRED and isinstance(value, str) and "," in value and "{" not in value:
            entry[name] = value.split(",")
    listed = entry.get("manifest_filepath")
    made = _split_lists(entry, weights)
    section["input_cfg"] = [made]
    bucketed = isinstance(listed, list) and all(isinstance(item, list) and len(item) == 1 for item in listed)
    return made.get("input_cfg", []) if bucketed else []


def _split_lists(entry: Settings, passes: Sequence[int] | None) -> Settings:
    """Return a group with an entry for each manifest of a list, weighted as NeMo does it: by utterances, or as said.

    Args:
        passes: how often each is read in an epoch.
    """
    key = "shar_path" if entry.get("shar_path") is not None else "manifest_filepath"
    listed = entry.get(key)
    if not isinstance(listed, list):
        return entry
    from nemo.collections.common.data.lhotse.nemo_adapters import expand_sharded_filepaths

    from sharmill.training.nemo.input_type import open_examples

    tars = entry.get("tarred_audio_filepaths")
    refuse(
        (tars is not None and (not isinstance(tars, list) or len(tars) != len(listed)),
         f"tarred_audio_filepaths has as many items as manifest_filepath, {len(listed)}, not {tars!r}"),
        (passes is not None and len(passes) != len(listed),
         f"bucketing_weights has as many numbers as there are manifests, {len(listed)}, not {passes!r}"),
        (not all(isinstance(one, int) and one > 0 for one in passes or ()),
         f"bucketing_weights are whole numbers above 0, the passes over each manifest, not {passes!r}"),
    )  # fmt: skip
    outer: Settings = {name: entry[name] for name in ("weight", "tags") if name in entry}
    inner = {name: value for name, value in entry.items() if name not in (key, "tarred_audio_filepaths", *outer)}
    made: list[Settings] = []
    for number, item in enumerate(listed):
        path, *weight = item if isinstance(item, list) else [item]
        weighted = len(weight) <= 1 and all(isinstance(one, (int, float)) for one in weight)
        refuse(
            (not isinstance(path, str) or not weighted,
             f"{key} is a path, or a list of paths or of [path, weight], not {item!r}"),
        )  # fmt: skip
        one = {**inner, key: path}
        if tars is not None:
            names = tars[number] if isinstance(tars[number], list) else [tars[number]]
            several = [tar for name in names for tar in expand_sharded_filepaths(name)]
            one["tarred_audio_filepaths"] = names[0] if len(names) == 1 else several
        # Utterances of a manifest, or cuts of a Shar.
        kind = "lhotse_shar" if key == "shar_path" else "nemo"
        own = weight[0] if weight else len(open_examples({"of_type": kind, key: path}))
        one["weight"] = own
        if passes is not None:
            one |= {"weight": own * passes[number], "passes": passes[number]}
        made.append(one)
    if len(made) == 1:
        del made[0]["weight"]
        return {**made[0], **outer}
    # NeMo weights a list as it is said, whatever the temperature of input_cfg.
    return {"type": "group", **outer, "reweight_temperature": None, "input_cfg": made}


def _translate_strategy(section: Settings, manifests: Sequence[Settings]) -> str | None:
    """Return the ``bucketing_strategy`` if NeMo's buckets are read in its order; say in one warning what it does.

    Raises:
        ConfigError: there is no such strategy.
    """
    strategy: str | None = section.pop("bucketing_strategy", None)
    refuse(
        (strategy not in (None, "fixed_order", "synced_randomized", "fully_randomized"),
         f"bucketing_strategy is fixed_order, synced_randomized or fully_randomized, not {strategy!r}"),
    )  # fmt: skip
    in_turn = bool(manifests) and not is_read_by_lhotse(section)
    told = "reads an epoch of one manifest after the other: use_lhotse: true mixes them by weight"
    if not in_turn:
        told = "has no effect"
        if strategy == "fully_randomized" and not section.get("use_lhotse"):
            section["bucketing_strategy"], told = strategy, "lets each rank draw buckets, if there are any, by itself"
        if manifests:
            told += ", and the manifests are mixed by weight: use_lhotse: false reads one after the other"
    if strategy is not None:
        log.warning("bucketing_strategy: %s %s", strategy, told)
    return strategy if in_turn else None


def _translate_buckets(section: Settings, manifests: Sequence[Settings]) -> str | None:
    """Make buckets of NeMo's Lhotse loader of the classic keys; return the strategy of buckets taken in turn.

    Args:
        manifests: the entries of NeMo's buckets, which Lhotse dataloading does not tell apart.
    """
    in_turn, sizes = _translate_strategy(section, manifests), section.pop("bucketing_batch_size", None)
    size, others = section.get("batch_size"), [key for key in _OF_LHOTSE if section.get(key)]
    if sizes is not None and in_turn is None and (used := [key for key in others if key in _SIZES]):
        log.warning("ignored: bucketing_batch_size, since %s sizes the batches", used[0])
        sizes = None
    elif manifests and in_turn is None and sizes is None and size and not others and not section.get("use_lhotse"):
        if math.isinf(section.get("max_duration") or math.inf):
            log.warning("batches mix the buckets of manifest_filepath: set max_duration, and they will not")
        else:
            sizes = [size] * len(manifests)
    if sizes is None:
        return in_turn
    count = len(section.get("bucket_duration_bins") or ()) or len(manifests) or section.get("num_buckets", 0)
    if isinstance(sizes, int):
        refuse((count < 1, f"bucketing_batch_size needs bucket_duration_bins or num_buckets, not {sizes!r}"))
        sizes = [sizes * (count - number) for number in range(count)]
    if in_turn is not None:
        refuse(
            (len(sizes) != len(manifests),
             f"bucketing_batch_size has as many numbers as there are manifests, {len(manifests)}, not {sizes!r}"),
        )  # fmt: skip
        for entry, size in zip(manifests, sizes, strict=True):
            entry["batch_size"] = size
        return in_turn
    if section.get("bucket_duration_bins") is None:
        longest: Any = section.get("max_duration")
        shortest = max(0.0, section.get("min_duration") or 0.0)
        refuse(
            (longest is None or math.isinf(longest),
             f"bucketing_batch_size needs bucket_duration_bins or max_duration, not {sizes!r}"),
        )  # fmt: skip
        step = (longest - shortest) / len(sizes)
        section["bucket_duration_bins"] = [round(shortest + step * (n + 1), 3) for n in range(len(sizes))]
    section |= {"bucket_batch_size": sizes, "num_buckets": len(sizes)}
    section.pop("batch_size", None)
    log.warning(
        "examples come in batches of %s from buckets of up to %s s, and longer ones never",
        section["bucket_batch_size"], section["bucket_duration_bins"],
    )  # fmt: skip
    return None


def _translate_2d(section: Settings) -> None:
    """Give buckets of two dimensions the batch sizes that a batch's duration or tokens allow at their bounds.

    lhotse cannot compare such buckets with a duration, and would do no more than this: count padded seconds.
    """
    bins = section.get("bucket_duration_bins")
    if not bins or not isinstance(bins[0], Sequence) or section.get("bucket_batch_size") is not None:
        return
    multimodal = section.get("use_multimodal_sampling", False)
    limit = section.get("batch_tokens" if multimodal else "batch_duration")
    quadratic = section.get("quadratic_factor" if multimodal else "quadratic_duration")
    refuse(
        (limit is None and section.get("batch_size") is None,
         "bucket_duration_bins of two dimensions need bucket_batch_size, which sharmill tune-batch finds, or "
         "batch_duration (batch_tokens with use_multimodal_sampling)"),
        code="missing_key",
    )  # fmt: skip
    sizes = []
    for bound in bins:
        length = sum(bound) if multimodal and section.get("measure_total_length", True) else bound[0]
        penalized = length + (length**2 / quadratic if quadratic else 0)
        most = math.inf if limit is None else max(1, int(limit / penalized))
        sizes.append(int(min(most, section.get("batch_size") or math.inf)))
    section |= {"bucket_batch_size": sizes, "num_buckets": len(bins)}
