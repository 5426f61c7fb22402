"""Errors, by what they end: one record, one unit, or the run.

The reason codes of rejects and the codes of errors are listed here and nowhere else.
"""

import copyreg
import logging
import re
from collections.abc import Iterable
from typing import Any, ClassVar, Final

REASONS: Final[dict[str, str]] = {
    "skipped": "the record is marked with _skipme",
    "malformed": "the record is not a JSON object of the expected types",
    "missing_field": "a required field is absent",
    "bad_speaker": "there is no speaker, its tag cannot be parsed, or no group key can be made from the record",
    "empty_text": "neither text nor normalized_text has any text",
    "filtered": "a filter of the configuration does not hold",
    "too_short": "the utterance is shorter than min_duration",
    "too_long": "the utterance is longer than max_duration",
    "too_long_for_device": "the memory of the device does not suffice for the utterance by itself",
    "missing_audio": "the audio file does not exist",
    "unreadable_audio": "the audio file cannot be decoded",
    "ambiguous_audio": "the archive has several files of the name",
    "empty_audio": "the audio has no samples",
    "non_finite_audio": "the audio has NaN or infinite samples",
    "silent_audio": "the loudest sample of the audio is below -60 dB of full scale",
    "over_full_scale": "the loudest sample of the audio is more than 24 dB above full scale, as in floats of integers",
    "changed_audio": "the audio file is not the one that an earlier stage has read",
    "duration_mismatch": "the manifest or the header of the file disagrees with the audio about the duration",
    "unsupported_rate": "the sampling rate cannot be resampled or stored as asked",
    "unsupported_channels": "the audio has several channels and none is chosen, or not the one that is asked for",
    "outside_root": "the audio path leaves the audio root, or names a command, or a URL that is not below it",
    "unsupported_cut": "the cut is mixed, padded, changed by a transform, or has several speakers",
    "overlapped_speech": "another speaker speaks during the segment, and overlapped speech is not wanted",
    "duplicate_id": "the same segment occurs more than once in the input",
    "already_there": "the dataset that is appended to has this record, or a cut of this id",
    "single_utterance_speaker": "no other utterance has the same group key",
    "no_similar_context": "no candidate of the group is similar enough",
    "only_copies": "all that could be the context is a copy of the utterance",
    "no_long_context": "no other utterance of the group satisfies the limits on a context",
    "bad_context": "the context that the record brings cannot be used, or is outside the limits",
    "bad_codes": "the codec gives values that are not finite, outside its codebook or of a wrong number of frames",
}

# By reason: what mends records that are rejected for it, or lets them through.
REMEDIES: Final[dict[str, str]] = {
    "skipped": "remove _skipme from the records that are wanted",
    "malformed": "correct these lines or files; the detail of each says what is wrong with it",
    "missing_field": "give each record what is missing; prepare.require_text=false keeps speech without text",
    "bad_speaker": "set speaker of the source to a template such as {path[0]}, choose another speaker_key, correct the "
    "speakers or the paths, or make a dataset without contexts (match=null)",
    "empty_text": "prepare.require_text=false keeps speech without text",
    "filtered": "loosen prepare.filters",
    "too_short": "lower prepare.min_duration",
    "too_long": "raise prepare.max_duration, or set it to null",
    "too_long_for_device": "match on devices with more memory, or lower prepare.max_duration",
    "missing_audio": "correct audio_root in sources: it is the folder that audio_filepath is relative to",
    "unreadable_audio": "copy these files again, or convert them to WAV or FLAC",
    "ambiguous_audio": "make the archives anew, each file with a name of its own",
    "empty_audio": "copy these files again, or remove the records",
    "non_finite_audio": "make these files anew",
    "silent_audio": "copy these files again, or remove the records",
    "over_full_scale": "set float_scale of the source to what is full scale in its files: 32768 where floats hold the "
    "values of 16 bits, 8388608 of 24, 2147483648 of 32",
    "changed_audio": "restore the audio, or begin anew from prepare with --restart",
    "duration_mismatch": "correct duration and offset in the manifest, or raise prepare.duration_tolerance; copy or "
    "convert files whose headers are wrong",
    "unsupported_rate": "set write.sampling_rate to a common rate",
    "unsupported_channels": "set channel of the source to a number or to downmix",
    "outside_root": "set audio_root in sources to the folder, or the URL, that holds all of the audio",
    "unsupported_cut": "store the audio of such cuts as files; split: true of the source takes speakers apart",
    "overlapped_speech": "overlap: keep of the source keeps such segments",
    "duplicate_id": "remove records that are there twice",
    "already_there": "nothing: only new records are appended",
    "single_utterance_speaker": "choose a coarser speaker_key, so that groups have more than one utterance",
    "no_similar_context": "check that the speakers are right, then set match.min_similarity to the threshold that "
    "sharmill calibrate finds",
    "only_copies": "give each speaker more than one recording, or remove the copies",
    "no_long_context": "lower match.min_duration",
    "bad_context": "correct the keys context_audio_..., loosen the limits of match, or set match.contexts to choose",
    "bad_codes": "the cuts stay without these codes; encode.precision=fp32, or another codec, may give some",
}

# Reasons that may lie with the node, which does not see the input, and not with the record.
REASONS_OF_NODES: Final = frozenset({"missing_audio"})

# Reasons that say nothing about the input: they do not count for max_reject_fraction.
HARMLESS_REASONS: Final = frozenset({"already_there"})

# One code names one kind of mistake or fault, whatever the sentence says; tests and callers compare codes.
CODES: Final[dict[str, str]] = {
    # Configuration
    "bad_config_file": "a YAML file cannot be read, or is not a mapping of a reasonable size",
    "bad_config_value": "a value of a configuration has the wrong type or is out of range",
    "missing_key": "a key of a configuration that has no default is missing",
    "unknown_key": "a configuration has a key that does not exist",
    "unknown_stage": "there is no stage of this name",
    # Reading and training
    "bad_callable": "module:callable names nothing that can be imported and called",
    "bad_layout": "the files of a folder do not make up shards, or two of them claim to be the same",
    "bad_tokenizer": "a tokenizer cannot be loaded, or does not give ids for this text",
    "inexact_state": "consumed cuts cannot be counted, so that no exact state of the data is possible",
    "needs_dataset": "the loader's data fit no dataset class that it could make itself",
    "out_of_memory": "a batch of a model, or not even the smallest one of a training step, fits in memory",
    "process_ended": "a worker process ended by itself",
    "split_wrong": "ranks or workers would get cuts twice or not at all under these settings",
    "step_failed": "a training step failed for another reason than memory, or took too long",
    "too_few_cuts": "no cut is left for a reader, or fewer than what is asked for needs",
    "unknown_codec": "a dataset has no such codec, or several to choose from",
    "unknown_cut": "a dataset has no such cut",
    "unknown_field": "a dataset has no such field",
    "unknown_shard": "a dataset has no such shard",
    "unsupported_system": "this machine lacks a command, or its kernel a function, that is needed",
    "wrong_state": "a saved state is incomplete, damaged, or of another dataset, order or loader",
    # Command line
    "bad_usage": "a command has arguments or options that it does not take, or that exclude each other",
    "no_run_dir": "a folder is not a run directory",
    # Inputs
    "bad_manifest": "a manifest or another input of a source cannot be read as what it should be",
    "changed_input": "an input is no longer what the plan was made from",
    "missing_input": "a file or folder that the configuration names is not there, or cannot be read",
    "stage_not_run": "the stage whose output is read has not been run",
    # Names, models and packages
    "bad_codes": "a codec gave codes of a wrong shape or outside its codebook",
    "bad_model": "a model's file or weights cannot be used, or it is not what its name promises",
    "bad_plugin": "what another package or python:module:Class offers does not keep to the contract",
    "no_decoder": "a codec cannot turn codes into audio",
    "missing_package": "a package that is needed is not installed",
    "unknown_name": "no implementation has this name",
    "untrusted_model": "a model names code that is not known, or only a dataset names the model; it is not loaded",
    "unreachable_model": "a model is neither on this machine nor can it be fetched",
    # Datasets
    "bad_codec": "a codec cannot be used, or its facts are unknown or contradict each other",
    "bad_findings": "a report of findings is none, is of another dataset, or names nothing that can be done again",
    "damaged_shard": "a file of a dataset is not as it should be",
    "duplicate_cut": "a cut id occurs more than once in what is to be one dataset",
    "foreign_output": "a folder that is to be written has files that are not this run's",
    "no_dataset": "there is no finished dataset",
    "no_speaker": "a cut has no speaker where one is needed",
    "too_few_speakers": "a dataset has too few speakers, or groups of them, to be split by speaker",
    "unsupported_format": "audio is stored in a format that what is to be written cannot have",
    "unlike_datasets": "datasets differ in what one dataset has in common: fields, codecs, audio format, limits",
    "wrong_version": "a file has another format version than this sharmill reads",
    # Runs and their directories
    "accounts": "the numbers of records of a stage or a dataset do not add up",
    "changed_plan": "a stage was begun with other settings, input or versions than these",
    "reserved": "another run is at work on the same fields of a dataset",
    "damaged_run_dir": "a file of the run directory cannot be understood",
    "device_failed": "a rank cannot use its device: too old, not there, broken, or without memory",
    "disk": "a file or folder cannot be read or written: full, read-only, not permitted, or failing",
    "locked": "another process is at work in the same folder",
    "no_ranks": "ranks cannot be started, or end before they have begun a unit",
    "other_device": "a rank's device is of another kind than the one that the stage was begun on",
    "setup_failed": "a rank cannot load what the stage needs",
    "superseded_plan": "a rank works for a plan that has been replaced or finished by another process",
    "too_many_rejects": "more records are rejected than max_reject_fraction allows",
    "units_failed": "units failed for good",
    # Clusters
    "cancelled": "a user has cancelled the run, or another one has taken its place",
    "jobs_elsewhere": "the run of a dataset waits for jobs of another cluster",
    "jobs_gone": "the jobs of a dataset have ended before the work did",
    "jobs_in_queue": "jobs of the dataset are still in the queue",
    "jobs_refused": "the scheduler does not accept a job",
    "no_cluster": "there is no SLURM or no Ray cluster here",
    "silent_cluster": "the scheduler does not answer",
    "unlike_nodes": "a node differs from the driver's: another version, or folders that it does not see",
    # Everything else
    "unspecified": "an error without a code of its own",
}


# The user and password in a URL, and its query, which may be a signature; urllib3 names the end of a URL alone.
_SECRETS: Final = re.compile(r"(://|\burl: (?=/))(?:[^/?#\s]*@)?((?:(?!://)[^\s?])*)(\?\S*[^\s'\")>\]}.,;:])?")


def hide_secrets(text: str) -> str:
    """Return a text as it may be shown: its URLs without passwords and queries.

    >>> hide_secrets("https://me:secret@host/a.wav?token=1 is not there")
    'https://host/a.wav?... is not there'
    >>> hide_secrets("(https://host/it's/a?sig=ab'cd&tok=1): https://host/a,https://me:secret@host/b")
    "(https://host/it's/a?...): https://host/a,https://host/b"
    """
    return _SECRETS.sub(lambda found: f"{found[1]}{found[2]}{'?...' if found[3] else ''}", text)


class SharmillError(Exception):
    """Base of all errors that sharmill raises on purpose; the message is one line for the user.

    Args:
        message: what is wrong and what to do about it.
        code: a key of ``CODES``; by default that of the class.
        details: further lines, which are shown below it; a line break in one of all these is no line of its own.
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
        # As it is, whatever arguments the class takes.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(SharmillError):
    """The configuration or the command line is wrong: nothing runs."""

    exit_status = 2


def refuse(*problems: tuple[object, str], code: str = "bad_config_value") -> None:
    """Raise ConfigError for the first problem, a condition and a sentence, of which the condition is true."""
    for is_there, problem in problems:
        if is_there:
            raise ConfigError(problem, code=code)


class RejectRecord(SharmillError):
    """This record cannot be used; the others go on.

    Args:
        reason: a key of ``REASONS``.
        detail: one sentence that says what was found in this record.
    """

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, f"unknown reason code {reason!r}"
        super().__init__(detail)
        self.reason = reason
        self.detail = self.lines[0]

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def refuse_record(*problems: tuple[object, str, str]) -> None:
    """Raise RejectRecord for the first problem, a condition, reason and detail, of which the condition is true."""
    for is_there, reason, detail in problems:
        if is_there:
            raise RejectRecord(reason, detail)


class UnitFailed(SharmillError):
    """This unit cannot be completed; it is retried, then reported, and the others go on."""


class FatalError(SharmillError):
    """The stage cannot go on (disk full, read-only folder, accounts that do not add up): exit status 1."""


class DeviceError(FatalError):
    """The device of one rank, or its node, cannot be used: it is given up, and the ranks on others go on.

    Args:
        place: the host, and the device where it is about that, in words.
    """

    default_code = "device_failed"

    def __init__(self, message: str, *, place: str = "", code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.place = place


_FURTHER_LINE: Final = re.compile(r"\n(?!  |\n|$)")
# Sentences of CUDA, its driver and its libraries; since torch 2.8 in an AcceleratorError, before in a RuntimeError.
_OF_DEVICE: Final = re.compile(r"(CUDA|HIP)( driver)? error|cuDNN error|cuFFT error|CU(DNN|BLAS|SOLVER|SPARSE)_STATUS_")
# cuDNN finds no algorithm whose workspace fits, cuFFT no place for its own, and oneDNN none for its code: each says the
# same where it has nothing that computes this on the device.
_OF_MEMORY_OR_LIBRARIES: Final = (
    "nable to find an engine",
    "nable to find a valid cuDNN algorithm",
    "CUFFT_INTERNAL_ERROR",
    "could not create a primitive",
    "could not execute a primitive",
)
# Messages that say that memory is short. A device works on after them, so that none is an error of a device; those of
# the second part never come from one.
_OF_MEMORY: Final = (
    # CUDA, HIP, its driver, Triton, NCCL: all in their own sentence.
    "out of memory",
    # cuBLAS, cuDNN, cuFFT, cuSOLVER, cuSPARSE.
    "_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
    *_OF_MEMORY_OR_LIBRARIES,
    # The CPU: torch, C++ on its way down, the system's loader and kernel.
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "failed to map segment from shared object",
    "cannot map zero-fill pages",
    "Cannot allocate memory",
    "could not create a memory",
)


def one_line(error: BaseException, limit: int | None = 200) -> str:
    """Return the message of an error as one line, cut to a number of characters; its type's name if it has none."""
    return (" ".join(str(error).split()) or type(error).__name__)[:limit]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 unit``, ``2 units``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """Return text as it may be shown or logged: names in it come from manifests, datasets and folders of others.

    It has no control characters, which could move the cursor, rename the window or hide text. Its further lines are
    indented, so that no name with a line break in it makes up a line of its own.
    """
    shown = "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
    return _FURTHER_LINE.sub("\n  ", shown)


def printable_line(text: str) -> str:
    """Return text as ``printable`` does, with spaces for line breaks."""
    return printable(text.replace("\n", " "))


class PrintableFormatter(logging.Formatter):
    """Log records without control characters, each message on one line; a traceback follows on its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def describe_error(error: SharmillError) -> str:
    """Return an error as it is shown: its line, and the further ones that it was made with."""
    return "\n  ".join(map(printable_line, error.lines))


def mentions_memory(text: str) -> bool:
    """Return True if a message, or the last output of a process, says that memory was lacking."""
    return any(message in text for message in _OF_MEMORY)


def other_reason(error: BaseException | None) -> str:
    """Return, as the end of a sentence, what an error of memory may be about instead; "" where it is about memory."""
    while error is not None:
        if any(message in str(error) for message in _OF_MEMORY_OR_LIBRARIES):
            return (
                "; or the libraries here cannot compute it at any length, and say so in the same words: then the "
                "versions of torch, its libraries and the driver do not fit"
            )
        error = error.__cause__
    return ""


def is_device_error(error: BaseException) -> bool:
    """Return True if an exception, or what it came from, is an error of a GPU other than a lack of its memory.

    Most of them are sticky: nothing works any more on that device in this process.

    >>> is_device_error(RuntimeError("CUDA error: device-side assert triggered"))
    True
    >>> is_device_error(RuntimeError("CUDA error: out of memory"))
    False
    """
    own: BaseException | None = error
    while own is not None:
        # torch is not imported for this: without it there is no such error.
        of_torch = any(kind.__name__ == "AcceleratorError" for kind in type(own).__mro__)
        said = isinstance(own, RuntimeError) and _OF_DEVICE.search(str(own)) is not None
        if (of_torch or said) and not mentions_memory(str(own)):
            return True
        own = own.__cause__ or (None if own.__suppress_context__ else own.__context__)
    return False


class DamagedShard(SharmillError):
    """A file of a dataset is not what it should be; the message names the file and the place."""

    default_code = "damaged_shard"
