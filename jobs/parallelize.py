"""The model of the training example over a device mesh: tensor and sequence parallelism, then FSDP2."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from speech_lm import SpeechLM
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from train_config import TrainConfig
from transformer import Transformer


def parallelize(model: SpeechLM, mesh: DeviceMesh, config: TrainConfig) -> None:
    """Divide a model, which is the same on all ranks: layers along ``tp``, and what is left of them along ``dp``.

    Gradients are added up along ``dp``, not averaged.
    """
    if config.tensor_parallel > 1:
        _divide_layers(model.transformer, mesh["tp"], config.sequence_parallel)
        # With it, norms over both axes take one reduction.
        mesh["dp", "tp"]._flatten()
    dtype = torch.bfloat16 if config.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    # What is together is gathered together: a block at a time, then embeddings and heads.
    for module in (*model.transformer.blocks, model):
        sharded = fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        # The other reductions that FSDP asks for are NCCL's alone.
        sharded.set_force_sum_reduction_for_comms(True)


def _divide_layers(transformer: Transformer, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Divide heads and the width of feed-forward layers; with sequence parallelism, positions between them too."""
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=between),
        "blocks.*.feed_forward.up": ColwiseParallel(input_layouts=between),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        transformer.position_multiple = mesh.size()
        plan |= {
            "blocks.0": PrepareModuleInput(
                input_layouts=(Replicate(), None), desired_input_layouts=(Shard(1), None), use_local_output=True
            ),
            "blocks.*.attention_norm": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "blocks.*.feed_forward_norm": SequenceParallel(),
            "norm": SequenceParallel(),
        }
    # All ranks have made the same weights: there is nothing to send.
    parallelize_module(transformer, mesh, plan, src_data_rank=None)
    if sequence_parallel:
        whole = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        parallelize_module(transformer.norm, mesh, whole)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale gradients so that their norm over the whole model is at most ``max_norm``.

    ``nn.utils.clip_grad_norm_`` takes parameters of one mesh, and those of layers that are divided along ``tp`` have
    another one than the rest.
    """
    by_mesh: dict[DeviceMesh, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            by_mesh[parameter.grad.device_mesh].append(parameter)
    norms = [
        nn.utils.get_total_norm([parameter.grad for parameter in group if parameter.grad is not None]).full_tensor()
        for group in by_mesh.values()
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
