"""Tensor parallelism for NeMo's SALM and DuplexS2SModel using Hugging Face's plans; importing this module enables it.

The plans in NeMo 3.0.0 do not match the layers of transformers 5. Hugging Face has a plan for each LLM architecture.
"""

import re
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, Final

import torch
from nemo.collections.speechlm2 import SALM, DuplexS2SModel
from nemo.collections.speechlm2.models import duplex_s2s_model
from peft import PeftModel
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from sharmill.errors import refuse

_CONFIGURE: Final = {kind: kind.configure_model for kind in (SALM, DuplexS2SModel)}


def divide_llm(model: SALM | DuplexS2SModel) -> None:
    """Shard the LLM's layers along ``tensor_parallel`` and the rest of the model along ``data_parallel``.

    Raises:
        ConfigError: the LLM cannot be sharded over this number of ranks.
    """
    mesh = model.device_mesh
    if _is_divided(model):
        _divide_layers(model.llm, mesh["tensor_parallel"], model.embed_tokens)
        # With this mesh, NeMo shards the rest of the model as if there were no tensor parallelism.
        model._device_mesh = {
            "tensor_parallel": SimpleNamespace(size=lambda: 1),
            "data_parallel": mesh["data_parallel"],
        }
    next(configure for kind, configure in _CONFIGURE.items() if isinstance(model, kind))(model)
    model._device_mesh = mesh


def clip_gradients(
    model: SALM | DuplexS2SModel,
    optimizer: Any,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    """Clip gradients by their total norm; torch cannot do this if only some gradients are sharded among ranks."""
    if not _is_divided(model) or not gradient_clip_val or gradient_clip_algorithm == "value":
        model.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )
        return
    by_mesh = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_mesh[getattr(parameter.grad, "device_mesh", None)].append(parameter)
    norms = [get_total_norm([one.grad for one in some], foreach=False) for some in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    for some in by_mesh.values():
        clip_grads_with_norm_(some, gradient_clip_val, total, foreach=False)


def _is_divided(model: SALM | DuplexS2SModel) -> bool:
    return model.device_mesh is not None and model.device_mesh["tensor_parallel"].size() > 1


def _divide_layers(llm: Any, mesh: DeviceMesh, embedding: torch.nn.Embedding) -> None:
    num_ranks, config = mesh.size(), llm.config
    what = f"tensor_parallel_size: {num_ranks} ranks cannot share the LLM of type {config.model_type}"
    heads = [config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)]
    refuse(
        (isinstance(llm, PeftModel), f"{what} with model.lora: set tensor_parallel_size: 1, or remove model.lora"),
        (not llm.tp_plan, f"{what}, for which transformers has no plan: set tensor_parallel_size: 1"),
        (any(number % num_ranks for number in heads),
         f"{what}, which has {heads[0]} attention heads and {heads[1]} key-value heads: choose a divisor of both"),
        code="split_wrong",
    )  # fmt: skip
    plan = dict(llm.tp_plan)
    if hasattr(llm, "lm_head") and llm.lm_head.weight is embedding.weight:
        plan.pop("lm_head", None)  # the output layer shares the weights of the embedding, which is not sharded
    rules = {name: re.sub(r"\.\d+\.", ".*.", name) for name, _ in llm.named_modules()}
    styles = {name: plan[rule] for name, rule in rules.items() if rule in plan}
    styles |= {
        f"{name}.{parameter}": style
        for name, style in styles.items()
        for parameter, _ in llm.get_submodule(name).named_parameters(recurse=False)
    }
    apply_tensor_parallelism(llm, mesh, styles)


def refuse_adapters(model: DuplexS2SModel) -> None:
    """Raise ConfigError if adapters are requested, because NeMo 3.0.0 can only add them to the LLM of a SALM."""
    unsupported = "model.lora: NeMo 3.0.0 cannot add adapters to the LLM of a DuplexS2SModel; remove model.lora"
    refuse((model.cfg.get("lora") is not None, unsupported))


duplex_s2s_model.maybe_install_lora = refuse_adapters
for _kind in _CONFIGURE:
    _kind.configure_model, _kind.configure_gradient_clipping = divide_llm, clip_gradients
