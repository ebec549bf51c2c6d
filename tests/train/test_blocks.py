"""What a block can be told: keep less, compile, compute in 16 or 8 bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from ranks import group, losses, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from captioned import tiny_run
from tidegate.errors import ConfigError
from tidegate.train.config import Recompute, RunConfig
from tidegate.train.float8 import Product, check, to_float8
from tidegate.train.loop import run
from tidegate.train.model import positions, seeded, velocity
from tidegate.train.progress import NullProgress
from tidegate.train.recompute import compute_again

CONFIG = tiny_run()


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run_dir = tmp_path_factory.mktemp("plain")
    run(tiny_run(steps=6), data, run_dir, NullProgress())
    return losses(run_dir)


class Products(TorchDispatchMode):
    """Counts matrix products and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.products += func is torch.ops.aten.mm.default
        self.attentions += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def one_step(network: nn.Module) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    tokens, times = torch.randn(3, 4, 4, generator=draw), torch.rand(3, generator=draw)
    states, mask = torch.randn(3, 6, 1, 8, generator=draw), torch.ones(3, 6, dtype=torch.bool)
    guess = velocity(network, tokens, states, mask, times, positions(6, CONFIG.image))
    guess.square().mean().backward()
    return torch.stack([parameter.grad.norm() for parameter in network.parameters() if parameter.grad is not None])


@pytest.mark.parametrize(("mode", "products", "attentions"), [("none", 0, 0), ("selective", 4, 0), ("full", 8, 1)])
def test_what_is_computed_again(mode: Recompute, products: int, attentions: int) -> None:
    """Of the 8 products and 1 attention in each of two blocks; the gradients are the same."""
    usual = seeded(CONFIG.model, 3)
    with Products() as before:
        wanted = one_step(usual)
    network = seeded(CONFIG.model, 3)
    for block in network.transformer_blocks:
        compute_again(block, mode)
    with Products() as after:
        assert torch.equal(one_step(network), wanted)
    assert after.products - before.products == 2 * products
    assert after.attentions - before.attentions == 2 * attentions
    assert network.state_dict().keys() == usual.state_dict().keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective", "parallel": {"per_block": True}},
        {"micro_batch": 2},
    ],
    ids=["full", "selective-per-block", "micro"],
)
def test_the_losses_do_not_change(
    changes: dict[str, object], plain: dict[int, float], data: Path, tmp_path: Path
) -> None:
    run(tiny_run(steps=6, **changes), data, tmp_path, NullProgress())
    assert losses(tmp_path) == pytest.approx(plain, rel=1e-5)


def test_pieces_of_uneven_shares(plain: dict[int, float], data: Path, tmp_path: Path) -> None:
    """7 samples on 4 ranks, one at a time: the rank whose share is 1 computes a second one that counts for nothing.
    Two replicas of two shards, whose gradients meet once a step."""
    config = tiny_run(steps=6, micro_batch=1, parallel={"replicate": 2, "shard": 2})
    assert group(4, train, config, data, tmp_path, 0, {}) == [0] * 4
    assert losses(tmp_path) == pytest.approx(plain, rel=1e-4)


def test_sixteen_bits_learn_about_the_same(plain: dict[int, float], data: Path, tmp_path: Path) -> None:
    """On one rank and on two, per block; saved and exported weights stay float32."""
    config = tiny_run(steps=6, precision="bfloat16", activation_checkpointing="selective")
    run(config, data, tmp_path / "one", NullProgress())
    split = config.model_copy(update={"parallel": config.parallel.model_copy(update={"per_block": True})})
    assert group(2, train, split, data, tmp_path / "two", 0, {}) == [0, 0]
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert losses(folder) == pytest.approx(plain, rel=0.02)
        assert losses(folder) != plain


def compiled(rank: int, config: RunConfig, data: Path, run_dir: Path) -> None:
    run(config, data, run_dir, NullProgress())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    sys.exit(0 if graphs else 3)


def test_compiled_blocks(plain: dict[int, float], data: Path, tmp_path: Path) -> None:
    """With all that is put around a block: tensor peers and recompute inside the graph, FSDP's hooks outside. Inductor,
    which would compile C++ for half a minute, is left out."""
    config = tiny_run(
        steps=3,
        optimizer={"lr": 0.01, "warmup_steps": 2},
        compile="aot_eager",
        activation_checkpointing="selective",
        parallel={"tensor": 2, "per_block": True},
    )
    assert group(2, compiled, config, data, tmp_path) == [0, 0]
    assert losses(tmp_path) == pytest.approx({step: plain[step] for step in (1, 2, 3)}, rel=1e-4)


# 8 bits


def test_a_machine_without_8_bit_products_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"^float8: cpu has no 8-bit matrix products; .*\nhint: set float8 to `none`"):
        check("tensorwise", torch.device("cpu"))
    check("none", torch.device("cpu"))


def test_a_run_of_8_bits_does_not_start_here(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float8"):
        run(tiny_run(float8="rowwise"), data, tmp_path, NullProgress())


@pytest.mark.parametrize("by_row", [False, True], ids=["tensorwise", "rowwise"])
def test_8_bit_products_and_their_gradients(by_row: bool) -> None:
    """The same function that a GPU runs, on torch's own CPU kernel: within a few percent of the exact product. One row
    is a hundred times the others."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(32, 64, generator=draw), torch.randn(48, 64, generator=draw) / 8
    x[0] *= 100
    x.requires_grad_(True)
    weight.requires_grad_(True)
    out = Product.apply(x, weight, by_row)
    exact = x @ weight.t()
    small = slice(1, None)
    error = ((out - exact)[small].norm() / exact[small].norm()).item()
    assert error < (0.05 if by_row else 0.06)
    upstream = torch.randn(32, 48, generator=draw)
    ours = torch.autograd.grad(out, (x, weight), upstream)
    theirs = torch.autograd.grad(exact, (x, weight), upstream)
    for got, wanted in zip(ours, theirs, strict=True):
        assert got.dtype == wanted.dtype
        assert (got - wanted).norm() / wanted.norm() < 0.1


def test_only_layers_of_the_right_sizes_become_8_bits() -> None:
    block = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 20))
    to_float8(block, "tensorwise")
    assert "forward" in vars(block[0])
    assert "forward" not in vars(block[1])
    x = torch.randn(16, 32)
    assert torch.allclose(block[0](x), x @ block[0].weight.t(), atol=0.3)
    assert torch.equal(block[0](x[:5]), x[:5] @ block[0].weight.t()), "a number of rows that the hardware does not take"
