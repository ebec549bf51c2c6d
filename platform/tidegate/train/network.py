"""The network as a rank holds it: drawn block by block, made tensor parallel, set to recompute, compiled, split."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from diffusers.models.transformers.transformer_krea2 import (
    Krea2Attention,
    Krea2TextFusionBlock,
    Krea2Transformer2DModel,
    Krea2TransformerBlock,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tidegate.train.config import Precision, RunConfig
from tidegate.train.float8 import check, to_float8
from tidegate.train.model import seeded
from tidegate.train.parallel import World
from tidegate.train.recompute import compute_again
from tidegate.train.stages import Stage


def grown(config: RunConfig, stage: Stage, world: World) -> Krea2Transformer2DModel:
    """This rank's part of the network with the run's fresh weights, ready for `stage`. All ranks call it together.

    The order is that of torchtitan: tensor parallel, 8 bits, recompute, compile, FSDP.

    Raises:
        ConfigError: this machine has no 8-bit products.
    """
    # FSDP warns of changing its output in place, which nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    check(stage.float8, world.device)
    policy = mixed(stage.precision)

    def ready(part: nn.Module) -> None:
        part.to(world.device)
        for block in part.modules():
            if isinstance(block, Krea2TransformerBlock | Krea2TextFusionBlock) and world.tensor_mesh is not None:
                make_tensor_parallel(block, world.tensor_mesh)
        if isinstance(part, Krea2TransformerBlock):
            to_float8(part, stage.float8)
            compute_again(part, stage.activation_checkpointing)
            if config.compile != "none":
                # Not of the module: FSDP's hooks stay outside.
                part.forward = torch.compile(part.forward, backend=config.compile, fullgraph=True)
            if config.parallel.per_block:
                fully_shard(part, mesh=world.data_mesh, mp_policy=policy)

    network = seeded(config.model, config.seed, ready)
    fully_shard(network, mesh=world.data_mesh, mp_policy=policy)
    if stage.precision == "bfloat16":
        network.register_forward_pre_hook(_cast_inputs)
        network.register_forward_hook(_cast_output)
    return network


def _cast_inputs(network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tokens, states, *exact = inputs
    return tokens.to(torch.bfloat16), states.to(torch.bfloat16), *exact


def _cast_output(network: nn.Module, inputs: object, output: tuple[Tensor]) -> tuple[Tensor]:
    return (output[0].float(),)


def mixed(precision: Precision) -> MixedPrecisionPolicy:
    """Weights are gathered in `precision` and gradients summed in float32. Inputs are cast by hooks of our own: FSDP
    would cast times and positions as well, which the network wants exact. A norm's weights are gathered like all
    others; its arithmetic is float32 (`Krea2RMSNorm`)."""
    if precision == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def make_tensor_parallel(block: nn.Module, mesh: DeviceMesh) -> None:
    """Split a block's heads and its hidden feed-forward features over `mesh`, as Megatron does: one sum over its ranks
    after attention and one after the feed-forward."""
    plan: dict[str, ParallelStyle] = {
        # Marked as the same on all ranks once, so that the backward pass sums over ranks once, not for each product.
        "attn": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "ff": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "attn.to_q": ColwiseParallel(),
        "attn.to_k": ColwiseParallel(),
        "attn.to_v": ColwiseParallel(),
        "attn.to_gate": ColwiseParallel(),
        "attn.to_out.0": RowwiseParallel(),
        # Each rank normalises its own heads, (B, L, heads, head_dim): the weight's gradient is summed over ranks.
        "attn.norm_q": SequenceParallel(sequence_dim=2, use_local_output=True),
        "attn.norm_k": SequenceParallel(sequence_dim=2, use_local_output=True),
        "ff.gate": ColwiseParallel(),
        "ff.up": ColwiseParallel(),
        "ff.down": RowwiseParallel(),
    }
    parallelize_module(block, mesh, plan)
    attention: Any = block.attn
    assert isinstance(attention, Krea2Attention)
    attention.num_heads //= mesh.size()
    attention.num_kv_heads //= mesh.size()
