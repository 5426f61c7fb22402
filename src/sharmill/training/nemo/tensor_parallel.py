"""Tensor parallelism for NeMo's SALM by Hugging Face's plan; importing this module gives it to the class.

The plan of NeMo 3.0.0 does not fit the layers of transformers 5. Hugging Face has one for each architecture of LLMs.
"""

import re

from nemo.collections.speechlm2 import SALM
from peft import PeftModel
from torch.distributed.fsdp import fully_shard
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from sharmill.errors import refuse

_configure_model = SALM.configure_model


def divide_llm(model: SALM) -> None:
    """Divide the LLM's layers along ``tensor_parallel``, and what is left of the model along ``data_parallel``.

    Raises:
        ConfigError: the LLM cannot be divided so.
    """
    mesh, llm = model.device_mesh, model.llm
    num_ranks = 1 if mesh is None else mesh["tensor_parallel"].size()
    if num_ranks == 1:
        _configure_model(model)
        return
    config = llm.config
    what = f"tensor_parallel_size: {num_ranks} ranks cannot share the LLM of type {config.model_type}"
    heads = [config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)]
    refuse(
        (isinstance(llm, PeftModel), f"{what} with model.lora: set tensor_parallel_size: 1, or leave out model.lora"),
        (not llm.tp_plan, f"{what}, for which transformers has no plan: set tensor_parallel_size: 1"),
        (any(number % num_ranks for number in heads),
         f"{what}, which has {heads[0]} attention heads and {heads[1]} for keys and values: choose a divisor of both"),
        code="split_wrong",
    )  # fmt: skip
    plan = dict(llm.tp_plan)
    if llm.lm_head.weight is model.embed_tokens.weight:
        plan.pop("lm_head", None)  # the embedding is not divided
    rules = {name: re.sub(r"\.\d+\.", ".*.", name) for name, _ in llm.named_modules()}
    styles = {name: plan[rule] for name, rule in rules.items() if rule in plan}
    styles |= {
        f"{name}.{parameter}": style
        for name, style in styles.items()
        for parameter, _ in llm.get_submodule(name).named_parameters(recurse=False)
    }
    apply_tensor_parallelism(llm, mesh["tensor_parallel"], styles)
    if mesh["data_parallel"].size() > 1:
        for module in (*llm.model.layers, model.embed_tokens, llm.lm_head, llm, model.perception):
            fully_shard(module, mesh=mesh["data_parallel"])


SALM.configure_model = divide_llm
