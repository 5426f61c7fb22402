"""Errors by scope: one record, one unit, or the whole run.

This module is the only place that lists the reason codes of rejects and the error codes.
"""

import copyreg
import logging
import re
from collections.abc import Iterable
from typing import Any, ClassVar, Final

REASONS: Final[dict[str, str]] = {
    "skipped": "the record is marked with _skipme",
    "malformed": "the record is not a JSON object of the expected types",
    "missing_field": "a required field is missing",
    "bad_speaker": "the speaker is missing, its tag cannot be parsed, or the record gives no group key",
    "empty_text": "text and normalized_text are both empty",
    "filtered": "the record does not satisfy a filter of the configuration",
    "too_short": "the utterance is shorter than min_duration",
    "too_long": "the utterance is longer than max_duration",
    "too_long_for_device": "the utterance alone does not fit into the memory of the device",
    "missing_audio": "the audio file does not exist",
    "unreadable_audio": "the audio file cannot be decoded",
    "ambiguous_audio": "the archive has several files with this name",
    "empty_audio": "the audio has no samples",
    "non_finite_audio": "the audio has NaN or infinite samples",
    "silent_audio": "the loudest sample of the audio is below -60 dB of full scale",
    "no_speech": "no speech was found in the recording",
    "over_full_scale": "the loudest sample of the audio is more than 24 dB above full scale, as in integers as floats",
    "changed_audio": "the audio file has changed since an earlier stage read it",
    "duration_mismatch": "the duration in the manifest or in the file header disagrees with the audio",
    "unsupported_rate": "the audio cannot be resampled to, or stored at, the requested sampling rate",
    "unsupported_channels": "the audio has several channels and none is chosen, or lacks the chosen channel",
    "outside_root": "the audio path is outside the audio root, or is a command",
    "unsupported_cut": "the cut is mixed, padded, modified by a transform, or has several speakers",
    "overlapped_speech": "another speaker talks during the segment, and overlapped speech is excluded",
    "duplicate_id": "the same segment occurs more than once in the input",
    "already_there": "the dataset to append to already contains this record, or a cut with this id",
    "single_utterance_speaker": "no other utterance has the same group key",
    "wrong_voice": "the clip sounds like another speaker group than its own",
    "mixed_voices": "the clip has two voices",
    "no_similar_context": "no candidate in the group is similar enough",
    "only_copies": "all context candidates are copies of the utterance",
    "no_long_context": "no other utterance of the group satisfies the limits for contexts",
    "bad_context": "the context given in the record is unusable or outside the limits",
    "bad_codes": "the codec returns values that are not finite or outside its codebook, or a wrong number of frames",
}

# Remedies by reason: how to correct or accept the rejected records.
REMEDIES: Final[dict[str, str]] = {
    "skipped": "remove _skipme from the records that you want to keep",
    "malformed": "correct these lines or files; the detail of each reject explains the problem",
    "missing_field": "add the missing field to each record, or keep speech without text: prepare.require_text=false",
    "bad_speaker": "choose another speaker_key, such as speaker; set speaker of the source to a template like "
    "{path[0]}; find speakers by voice: voices.labels=find; or omit contexts: match=null",
    "empty_text": "add the text, or keep speech without text: prepare.require_text=false",
    "filtered": "loosen prepare.filters",
    "too_short": "lower prepare.min_duration",
    "too_long": "raise prepare.max_duration, or set it to null",
    "too_long_for_device": "match on devices with more memory, or lower prepare.max_duration",
    "missing_audio": "correct audio_root in sources: it is the folder that audio_filepath is relative to",
    "unreadable_audio": "copy these files again, or convert them to WAV or FLAC",
    "ambiguous_audio": "rebuild the archives with unique file names",
    "empty_audio": "copy these files again, or remove the records",
    "non_finite_audio": "create these files again",
    "silent_audio": "copy these files again, or remove the records",
    "no_speech": "lower --min-segment, or remove these recordings",
    "over_full_scale": "set float_scale of the source to its files' full-scale value: 32768 for floats with "
    "16-bit values, 8388608 for 24 bits, 2147483648 for 32 bits",
    "changed_audio": "restore the audio, or start over from prepare with --restart",
    "duration_mismatch": "correct duration and offset in the manifest, or raise prepare.duration_tolerance; copy or "
    "convert files whose headers are wrong",
    "unsupported_rate": "set write.sampling_rate to a common rate",
    "unsupported_channels": "set channel of the source to a number or to downmix",
    "outside_root": "set audio_root in sources to the folder or URL that contains all audio",
    "unsupported_cut": "save the audio of such cuts as files; to separate speakers, set split: true in the source",
    "overlapped_speech": "to keep such segments, set overlap: keep in the source",
    "duplicate_id": "remove duplicate records",
    "already_there": "nothing to do: only new records are appended",
    "single_utterance_speaker": "choose a coarser speaker_key, so that groups have more than one utterance",
    "wrong_voice": "listen to the examples, then correct the labels, or keep the clips with voices.action=report",
    "mixed_voices": "cut the clip where the voice changes, or keep it with voices.action=report",
    "no_similar_context": "check the speaker labels, then set match.min_similarity to the threshold that sharmill "
    "calibrate recommends",
    "only_copies": "give each speaker more than one recording, or remove the copies",
    "no_long_context": "lower match.min_duration",
    "bad_context": "correct the keys context_audio_..., loosen the limits of match, or set match.contexts to choose",
    "bad_codes": "the cuts are kept without these codes; try encode.precision=fp32 or another codec",
}

# Reasons that may be caused by a node that cannot see the input, rather than by the record.
REASONS_OF_NODES: Final = frozenset({"missing_audio"})

# Reasons that do not indicate a problem with the input, so they do not count towards max_reject_fraction.
HARMLESS_REASONS: Final = frozenset({"already_there"})

# A code identifies a kind of error, independently of the wording; tests and callers compare codes.
CODES: Final[dict[str, str]] = {
    # Configuration
    "bad_config_file": "a YAML file cannot be read, or is not a mapping of a reasonable size",
    "bad_config_value": "a configuration value has the wrong type or is out of range",
    "missing_key": "a configuration key without a default is missing",
    "unknown_key": "a configuration key does not exist",
    "unknown_stage": "a stage does not exist",
    # Reading and training
    "bad_callable": "module:callable cannot be imported, or is not callable",
    "bad_layout": "the files of a folder do not form shards, or two files claim the same place",
    "bad_tokenizer": "a tokenizer cannot be loaded, or returns no ids for a text",
    "inexact_state": "consumed cuts cannot be counted, so no exact state of the data can be saved",
    "needs_dataset": "the loader has no default dataset class for its data",
    "out_of_memory": "a batch of a model, or even the smallest batch of a training step, does not fit into memory",
    "process_ended": "a worker process ended unexpectedly",
    "split_wrong": "ranks or workers would get cuts twice or not at all with these settings",
    "step_failed": "a training step took too long, or failed for a reason other than memory",
    "too_few_cuts": "a reader gets no cuts, or fewer than necessary",
    "unknown_codec": "a dataset does not have this codec, or has several codecs and none is chosen",
    "unknown_cut": "a dataset does not have this cut",
    "unknown_field": "a dataset does not have this field",
    "unknown_shard": "a dataset does not have this shard",
    "unsupported_system": "this machine lacks a required command or kernel function",
    "wrong_state": "a saved state is incomplete, damaged, or belongs to another dataset, order or loader",
    # Command line
    "bad_usage": "a command has invalid or mutually exclusive arguments or options",
    "no_run_dir": "a folder is not a run directory",
    # Inputs
    "bad_manifest": "a manifest or another input of a source cannot be parsed",
    "changed_input": "an input has changed since the plan was made",
    "missing_input": "a file or folder named in the configuration does not exist or cannot be read",
    "stage_not_run": "a stage whose output is needed has not been run",
    # Names, models and packages
    "bad_codes": "a codec returned codes of a wrong shape or outside its codebook",
    "bad_model": "a model's file or weights are unusable, or do not match its name",
    "bad_plugin": "an extension from another package or python:module:Class violates its contract",
    "no_decoder": "a codec cannot decode codes to audio",
    "missing_package": "a required package is not installed",
    "unknown_name": "no implementation has this name",
    "untrusted_model": "a model is not loaded, because it refers to unknown code or is named only by a dataset",
    "unreachable_model": "a model is neither on this machine nor downloadable",
    # Datasets
    "bad_codec": "a codec is unusable, or its properties are unknown or contradictory",
    "bad_findings": "a validation report is invalid, belongs to another dataset, or lists nothing to rebuild",
    "damaged_shard": "a file of a dataset is damaged",
    "duplicate_cut": "a cut id occurs more than once in a dataset",
    "foreign_output": "an output folder contains files of other origin",
    "no_dataset": "a folder is not a finished dataset",
    "no_speaker": "a cut has no speaker although one is needed",
    "too_few_speakers": "a dataset has too few speakers or speaker groups for a split by speaker",
    "unsupported_format": "the stored audio format is not supported by the output",
    "unlike_datasets": "datasets have different fields, codecs, audio formats or limits, so they cannot be combined",
    "wrong_version": "a file has a format version that this version of sharmill cannot read",
    # Runs and their directories
    "accounts": "the numbers of records of a stage or dataset do not add up",
    "changed_plan": "a stage was started with different settings, input or versions",
    "reserved": "another run is working on the same fields of a dataset",
    "damaged_run_dir": "a file of the run directory is damaged",
    "device_failed": "a rank cannot use its device: too old, missing, broken, or out of memory",
    "disk": "a file or folder cannot be read or written: full, read-only, no permission, or failing",
    "locked": "another process is working in the same folder",
    "no_ranks": "ranks cannot be started, or end before their first unit",
    "other_device": "a rank's device is of a different kind than the device on which the stage was started",
    "setup_failed": "a rank cannot load the models or data of a stage",
    "superseded_plan": "a rank works on a plan that another process has replaced or finished",
    "too_many_rejects": "more records were rejected than max_reject_fraction allows",
    "units_failed": "units failed permanently",
    # Clusters
    "cancelled": "a user cancelled the run, or another run replaced it",
    "jobs_elsewhere": "the run of a dataset waits for jobs on another cluster",
    "jobs_gone": "the jobs of a dataset ended before its work was finished",
    "jobs_in_queue": "jobs of the dataset are still in the queue",
    "jobs_refused": "the scheduler rejected a job",
    "no_cluster": "no SLURM or Ray cluster is available",
    "silent_cluster": "the scheduler does not respond",
    "unlike_nodes": "a node differs from the driver's node: other versions, or folders that it cannot see",
    # Everything else
    "unspecified": "an error without a code of its own",
}


# Parts of a URL that may be secret: user, password and query (which may be a signature). Messages of urllib3 contain
# URLs without the host, such as "url: /path?query".
_SECRETS: Final = re.compile(r"(://|\burl: (?=/))(?:[^/?#\s]*@)?((?:(?!://)[^\s?])*)(\?\S*[^\s'\")>\]}.,;:])?")


def hide_secrets(text: str) -> str:
    """Return a text for display, with passwords and queries removed from its URLs.

    >>> hide_secrets("https://me:secret@host/a.wav?token=1 is not there")
    'https://host/a.wav?... is not there'
    >>> hide_secrets("(https://host/it's/a?sig=ab'cd&tok=1): https://host/a,https://me:secret@host/b")
    "(https://host/it's/a?...): https://host/a,https://host/b"
    """
    return _SECRETS.sub(lambda found: f"{found[1]}{found[2]}{'?...' if found[3] else ''}", text)


class SharmillError(Exception):
    """Base class of all errors that sharmill raises on purpose; the message is one line for the user.

    Args:
        message: the problem and its remedy.
        code: a key of ``CODES``; the default of the class if omitted.
        details: further lines that are shown below the message. Line breaks inside the message or a detail do not start
            a new line.
    """

    default_code: ClassVar[str] = "unspecified"
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, *, code: str | None = None, details: Iterable[str] = ()) -> None:
        code = code or self.default_code
        assert code in CODES, f"unknown error code {code!r}"
        self.lines = tuple(map(hide_secrets, (message, *details)))
        super().__init__("\n  ".join(self.lines))
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling must not call the class, since a subclass may take other arguments.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(SharmillError):
    """Error in the configuration or on the command line; nothing is run."""

    exit_status = 2


def refuse(*problems: tuple[object, str], code: str = "bad_config_value") -> None:
    """Raise ConfigError for the first problem that exists.

    Args:
        problems: pairs (condition, message); the condition is true if the problem exists.
    """
    for exists, problem in problems:
        if exists:
            raise ConfigError(problem, code=code)


class RejectRecord(SharmillError):
    """Error in one record, which is rejected; other records are not affected.

    Args:
        reason: a key of ``REASONS``.
        detail: one sentence about the problem of this record.
    """

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, f"unknown reason code {reason!r}"
        super().__init__(detail)
        self.reason = reason
        self.detail = self.lines[0]

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def refuse_record(*problems: tuple[object, str, str]) -> None:
    """Raise RejectRecord for the first problem that exists.

    Args:
        problems: triples (condition, reason, detail); the condition is true if the problem exists.
    """
    for exists, reason, detail in problems:
        if exists:
            raise RejectRecord(reason, detail)


class UnitFailed(SharmillError):
    """Error of one unit, which is retried and finally reported; other units are not affected."""


class FatalError(SharmillError):
    """Error that stops a stage with exit status 1, such as a full disk, a read-only folder or inconsistent counts."""


class DeviceError(FatalError):
    """Error of a rank's device or node, which is no longer used; ranks on other devices continue.

    Args:
        place: description of the host, and of the device if only the device is affected.
    """

    default_code = "device_failed"

    def __init__(self, message: str, *, place: str = "", code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.place = place


_FURTHER_LINE: Final = re.compile(r"\n(?!  |\n|$)")
# Error messages of CUDA, its driver and its libraries: an AcceleratorError since torch 2.8, a RuntimeError before.
_DEVICE_MESSAGES: Final = re.compile(
    r"(CUDA|HIP)( driver)? error|cuDNN error|cuFFT error|CU(DNN|BLAS|SOLVER|SPARSE)_STATUS_"
)
# cuDNN, cuFFT and oneDNN raise these errors if there is too little memory for a workspace or for code, but also if they
# have no implementation for the device.
_MEMORY_OR_LIBRARY_MESSAGES: Final = (
    "nable to find an engine",
    "nable to find a valid cuDNN algorithm",
    "CUFFT_INTERNAL_ERROR",
    "could not create a primitive",
    "could not execute a primitive",
)
# Messages about a lack of memory. A device remains usable after them, so they are not device errors. The second part
# lists messages about the memory of the CPU.
_MEMORY_MESSAGES: Final = (
    # CUDA and its driver, HIP, Triton, NCCL.
    "out of memory",
    # cuBLAS, cuDNN, cuFFT, cuSOLVER, cuSPARSE.
    "_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
    *_MEMORY_OR_LIBRARY_MESSAGES,
    # The CPU: torch, C++, the system's loader and kernel.
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "failed to map segment from shared object",
    "cannot map zero-fill pages",
    "Cannot allocate memory",
    "could not create a memory",
)


def one_line(error: BaseException, limit: int | None = 200) -> str:
    """Return the message of an error, or the name of its type if it has none, as one line of limited length."""
    return (" ".join(str(error).split()) or type(error).__name__)[:limit]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 unit``, ``2 units``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """Return text that is safe to print and log, although it may contain names from untrusted files.

    Control characters, which could move the cursor, rename the window or hide text, are replaced. All lines but the
    first are indented, so that a name with a line break cannot pass for a separate line.
    """
    shown = "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
    return _FURTHER_LINE.sub("\n  ", shown)


def printable_line(text: str) -> str:
    """Return text that is safe to print, on one line; see ``printable``."""
    return printable(text.replace("\n", " "))


class PrintableFormatter(logging.Formatter):
    """Formatter that prints each log message on one line without control characters, followed by its traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def describe_error(error: SharmillError) -> str:
    """Return an error for display: its message and its details, one per line."""
    return "\n  ".join(map(printable_line, error.lines))


def mentions_memory(text: str) -> bool:
    """Return True if a message or the output of a process reports a lack of memory."""
    return any(message in text for message in _MEMORY_MESSAGES)


def other_reason(error: BaseException | None) -> str:
    """Return the end of a sentence that names another possible cause of a memory error; "" if there is none."""
    while error is not None:
        if any(message in str(error) for message in _MEMORY_OR_LIBRARY_MESSAGES):
            return (
                "; the same message appears if torch, its libraries and the driver are incompatible, which fails at "
                "any length"
            )
        error = error.__cause__
    return ""


def is_device_error(error: BaseException) -> bool:
    """Return True if an exception or one of its causes is a GPU error other than a lack of memory.

    Most GPU errors are sticky: the device cannot be used any more in this process.

    >>> is_device_error(RuntimeError("CUDA error: device-side assert triggered"))
    True
    >>> is_device_error(RuntimeError("CUDA error: out of memory"))
    False
    """
    own: BaseException | None = error
    while own is not None:
        # The class is compared by name, to avoid an import of torch.
        of_torch = any(kind.__name__ == "AcceleratorError" for kind in type(own).__mro__)
        mentions_device = isinstance(own, RuntimeError) and _DEVICE_MESSAGES.search(str(own)) is not None
        if (of_torch or mentions_device) and not mentions_memory(str(own)):
            return True
        own = own.__cause__ or (None if own.__suppress_context__ else own.__context__)
    return False


class DamagedShard(SharmillError):
    """A dataset file is damaged; the message names the file and the place."""

    default_code = "damaged_shard"
