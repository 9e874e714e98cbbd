"""The peers: the same decoder as a module, trained with the parallel parts that PyTorch itself has."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from sizes import BETAS, CLIP, DECAY, EPS, LEARNING_RATE, Size
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

ROPE_THETA, NORM_EPS = 10000.0, 1e-5


def rope_tables(seq: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, `[seq, head_dim]`."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(seq, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.roll(x, x.shape[-1] // 2, dims=-1) * sin


class Attention(nn.Module):
    def __init__(self, embed: int, heads: int):
        super().__init__()
        self.head_dim = embed // heads
        self.q = nn.Linear(embed, embed, bias=False)
        self.k = nn.Linear(embed, embed, bias=False)
        self.v = nn.Linear(embed, embed, bias=False)
        self.o = nn.Linear(embed, embed, bias=False)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = h.shape
        # -1: under tensor parallel a rank has some of the heads.
        q, k, v = (f(h).view(batch, seq, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    def __init__(self, embed: int, mlp: int):
        super().__init__()
        self.gate = nn.Linear(embed, mlp, bias=False)
        self.up = nn.Linear(embed, mlp, bias=False)
        self.down = nn.Linear(mlp, embed, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(h)) * self.up(h))


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.embed, eps=NORM_EPS)
        self.attention = Attention(size.embed, size.heads)
        self.mlp_norm = nn.RMSNorm(size.embed, eps=NORM_EPS)
        self.mlp = MLP(size.embed, size.mlp)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens to logits; its parameters have the names of the functional model's, with `.weight` behind."""

    def __init__(self, size: Size):
        super().__init__()
        self.seq, self.head_dim = size.seq, size.embed // size.heads
        self.embed = nn.Embedding(size.vocab, size.embed)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.embed, eps=NORM_EPS)
        self.head = nn.Linear(size.embed, size.vocab, bias=False)
        self.register_buffer("cos", torch.empty(self.seq, self.head_dim), persistent=False)
        self.register_buffer("sin", torch.empty(self.seq, self.head_dim), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))

    @torch.no_grad()
    def load(self, weights: str) -> None:
        """Makes room for this rank's parts on CPU, and fills them from the file, one tensor at a time."""
        self.to_empty(device="cpu")
        for table, values in zip((self.cos, self.sin), rope_tables(self.seq, self.head_dim), strict=True):
            table.copy_(values)
        with safe_open(weights, "pt") as file:
            for name, p in self.named_parameters():
                whole = file.get_tensor(name)
                if isinstance(p, DTensor):
                    whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
                p.copy_(whole)


def _tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """The plan that PyTorch's own tutorial on tensor parallel gives for this model."""
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)


def _fully_sharded(model: Decoder, mesh: DeviceMesh) -> None:
    """One call for each block and one for the root; blocks are freed after the forward and gathered again."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)


class Peer:
    """A model under one of PyTorch's own ways to be parallel, with its optimizer."""

    def __init__(self, row: str, axes: dict[str, int], size: Size, weights: str):
        sizes = tuple(axes.values())
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes)) if axes else None
        with torch.device("meta"):
            model = Decoder(size)
        self._split_vocab = "tp" in axes
        if self._split_vocab:
            _tensor_parallel(model, mesh["tp"])
        if row in ("fsdp", "hsdp", "fsdp_tp"):
            _fully_sharded(model, mesh["dp"] if row == "fsdp_tp" else mesh)
        model.load(weights)
        self.parameters = dict(model.named_parameters())
        self._model: nn.Module = model
        if row == "ddp":
            self._model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        elif row == "compiled":
            self._model.compile()
        decays = [p for p in self.parameters.values() if p.ndim >= 2]
        others = [p for p in self.parameters.values() if p.ndim < 2]
        groups = [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        # DTensors and plain tensors alike: the fused kernel is the fastest that AdamW has on CPU.
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)
        # Ranks that differ in a data axis have other sequences; those of a tp axis have the same.
        data = [a for a in axes if a != "tp"]
        self._part, self._parts = 0, 1
        for axis in data:
            self._part = self._part * axes[axis] + mesh.get_local_rank(axis)
            self._parts *= axes[axis]
        self._group = mesh["dp"].get_group() if row == "fsdp_tp" else None

    def shard(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's sequences."""
        return {k: v.chunk(self._parts)[self._part] for k, v in batch.items()}

    def step(self, batch: dict[str, Tensor]) -> tuple[float, float]:
        """Loss and gradient norm of one step."""
        with loss_parallel() if self._split_vocab else contextlib.nullcontext():
            logits = self._model(batch["tokens"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
            loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss, norm = _whole(loss.detach()), _whole(norm)
        if self._parts > 1:
            dist.all_reduce(loss, group=self._group)
        return loss.item() / self._parts, norm.item()

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Adam's first moment of each parameter, whole; every rank must ask."""
        for name, p in self.parameters.items():
            yield name, _whole(self.optimizer.state[p]["exp_avg"])


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x
