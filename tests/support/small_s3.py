"""S3 tokenizers of few layers in place of the published ones: ``S3Codec`` as in examples/codecs/s3_codec.py.

A module of its own, because ranks have to see small models too: the package has their sizes and checksums in its code.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import onnx
import s3tokenizer
import torch
from onnx import helper, numpy_helper
from s3_codec import S3Codec

__all__ = ["S3Codec", "save"]

_SIZES = {"n_audio_state": 64, "n_audio_head": 1, "n_audio_layer": 2}
# Names of the published files, by which the package finds the weights: the numbers of v1_25hz and of v2 differ.
_NAMES = {
    "conv1.weight": ("encoders.conv1.weight", "onnx::Conv_2216"),
    "conv1.bias": ("encoders.conv1.bias", "onnx::Conv_2217"),
    "conv2.weight": ("encoders.conv2.weight", "onnx::Conv_2218"),
    "conv2.bias": ("encoders.conv2.bias", "onnx::Conv_2219"),
    "positional_embedding": ("encoders.positional_embedding", ""),
    "quantizer._codebook.project_down.weight": ("", "onnx::MatMul_2536"),
    "quantizer._codebook.project_down.bias": ("", "quantizer.project_in.bias"),
}

for _class in (s3tokenizer.S3Tokenizer, s3tokenizer.S3TokenizerV2):
    for _key, _value in _SIZES.items():
        setattr(_class.__init__.__defaults__[0], _key, _value)


def _trust_cache() -> Path:
    """Return the folder of the package's cache, with the models in it taken for the published ones."""
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "s3tokenizer"
    for path in folder.glob("*.onnx"):
        s3tokenizer._SHA256S[path.stem] = hashlib.sha256(path.read_bytes()).hexdigest()
    return folder


_trust_cache()


def save(name: str) -> Any:
    """Write the ONNX file of a model with seeded weights to the package's cache, and return the model."""
    version = 1 if "v2" in name else 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (s3tokenizer.S3TokenizerV2 if version else s3tokenizer.S3Tokenizer)(name).eval()
        if not version:
            model.quantizer.codebook.normal_(std=0.1)
    nodes, initializers = [], []
    for key, tensor in model.state_dict().items():
        own = key.removeprefix("encoder.")
        if own in _NAMES:
            node, weight = "", _NAMES[own][version]
        else:
            node, weight = _node(own, version), own
        # Matrices are stored for multiplication from the right.
        array = (tensor.t() if tensor.ndim == 2 and own != "positional_embedding" else tensor).contiguous().numpy()
        initializers.append(numpy_helper.from_array(array, weight))
        if node.endswith("LayerNormalization"):
            if key.endswith("weight"):
                inputs = ["x", weight, weight.replace("weight", "bias")]
                nodes.append(helper.make_node("LayerNormalization", inputs, [node], name=node))
        else:
            nodes.append(helper.make_node("Identity", ["x", weight], [weight + "/out"], name=node))
    graph = helper.make_graph(nodes, name, [], [], initializer=initializers)
    folder = _trust_cache()
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph), folder / f"{name}.onnx")
    _trust_cache()
    return model


def _node(key: str, version: int) -> str:
    """Return the name of the node that has a weight, as the exporter of torch names them."""
    *parts, kind = key.split(".")
    if key == "quantizer._codebook.embed":
        return "/quantizer/rq/model/layers.0/_codebook/Pow_1"
    layer = f"/blocks.{parts[1]}/" + "/".join(parts[2:])
    if parts[2] == "mlp":
        layer = f"/blocks.{parts[1]}/mlp/mlp.{parts[3]}"
    if parts[2].endswith("_ln"):
        if version:
            return f"{layer}/LayerNormalization"
        return f"{layer}/{'Mul' if kind == 'weight' else 'Add_1'}"
    if parts[-1] == "fsmn_block":
        return f"{layer}/Conv"
    return f"{layer}/{'MatMul' if kind == 'weight' else 'Add'}"
