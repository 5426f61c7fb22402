"""``sharmill decode``: the codes of a cut as audio."""

from __future__ import annotations

from pathlib import Path

import click

from sharmill.cli.console import json_option, make_console, plain, print_json
from sharmill.cli.exit_status import OK
from sharmill.errors import ConfigError


@click.command()
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option("--cut", "cut_id", required=True, metavar="ID", help="The id of the cut.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE.wav",
              help="File to write: .wav, .flac, .mp3 or .opus.")  # fmt: skip
@click.option("--codec", help="Whose codes, where there are several.")
@click.option("--context", is_flag=True, help="Decode the codes of the context instead of those of the target.")
@click.option("--codec-model", metavar="CODEC=MODEL",
              help="Model of the codec, where it is not one that sharmill brings.")  # fmt: skip
@json_option
def decode(
    dataset: Path, cut_id: str, output: Path, codec: str | None, context: bool, codec_model: str | None, as_json: bool
) -> int:  # fmt: skip
    """Turn the codes of a cut into audio that can be listened to."""
    from sharmill.inspect.export import choose_codec, decode_stored_codes, export_audio, load_decoder
    from sharmill.inspect.stored import find_cut
    from sharmill.shar.index import read_dataset

    described = read_dataset(dataset)
    record = choose_codec(described, codec)
    name, separator, model = (codec_model or "").partition("=")
    if codec_model is not None and (name != record.name or not separator or not model):
        raise ConfigError(f"--codec-model {codec_model}: write {record.name}=MODEL", code="bad_usage")
    stored, decoder = find_cut(dataset, cut_id), load_decoder(record, model or None)
    samples, rate = decode_stored_codes(stored, described, record, decoder, context=context)
    export_audio(output, samples, rate)
    console = make_console()
    if not record.trained:
        console.print(plain(f"the codec {record.name} is untrained: its codes mean nothing", style="yellow"))
    console.print(plain(f"wrote {output}: {len(samples) / rate:.3f} s at {rate} Hz"), soft_wrap=True)
    if as_json:
        values = {"file": str(output), "codec": record.name, "trained": record.trained}
        print_json({**values, "num_samples": len(samples), "sampling_rate": rate})
    return OK
