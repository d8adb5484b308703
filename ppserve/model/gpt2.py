"""One stage of a GPT-2: the whole model, or the same class with parts missing.

T rows (tokens of all slices, packed), D width, E = 3D, F inner width, V vocabulary, R rows read out.

Arithmetic: on the CPU everything between two cache or weight accesses is float32, whatever the dtype;
`bfloat16` says how weights, keys and values are stored, and the hidden states are rounded to it after every
attention and every MLP, so that where the stages are cut changes nothing. Where oneDNN's bfloat16 kernels are
used (CPUs with AVX-512 BF16 or AMX) every linear layer also rounds its inputs, its bias and its outputs, logits
included, to bfloat16. On CUDA everything runs in the dtype itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import layer_norm

from ppserve.core.architecture import StageLayout, stage_params
from ppserve.core.plan import Drawn, Scored, StepPlan
from ppserve.errors import CheckpointError, ConfigError
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.cpu.activations import TORCH as ACTIVATIONS
from ppserve.model.cpu.activations import activation_for
from ppserve.model.cpu.attention import Attention, BlockAttention, TorchAttention
from ppserve.model.cpu.kv_cache import KVCache
from ppserve.model.cpu.linear import Linear, make_linear
from ppserve.model.cpu.threads import Threads
from ppserve.model.inputs import StepInputs
from ppserve.model.sampling import read_logits

Progress = Callable[[int, int], None]

_READ_ROWS_AT_ONCE = 64
"""Rows of logits in memory at a time: 64 rows of GPT-2's vocabulary are 13 MB."""


class LayerNorm:
    def __init__(self, weight_D: torch.Tensor, bias_D: torch.Tensor | None, epsilon: float) -> None:
        self._weight_D, self._bias_D, self._epsilon = weight_D, bias_D, epsilon

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return layer_norm(x_TD, self._weight_D.shape, self._weight_D, self._bias_D, self._epsilon)


class Embedding:
    """Token plus position."""

    def __init__(self, read: _Reader) -> None:
        self._tokens_VD = read.stored("wte.weight")
        self._positions_PD = read.stored("wpe.weight")

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        return self._tokens_VD[inputs.token_ids_T].add_(self._positions_PD[inputs.positions_T])


class SelfAttention:
    """The first sublayer of block `layer`; `own` is where the stage's cache keeps its keys and values."""

    def __init__(self, read: _Reader, layer: int, own: int, attention: Attention) -> None:
        self._own = own
        self.scale = read.arch.attention_scale(layer)
        self.attention = attention
        self._norm = read.norm(f"h.{layer}.ln_1")
        self._qkv, self._proj = read.linear(f"h.{layer}.attn.c_attn"), read.linear(f"h.{layer}.attn.c_proj")
        self.linears = (self._qkv, self._proj)

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
        qkv_TE = self._qkv(self._norm(x_TD))
        return x_TD + self._proj(self.attention(qkv_TE, cache, self._own, inputs, self.scale))


class MLP:
    """The second sublayer of block `layer`."""

    def __init__(self, read: _Reader, layer: int) -> None:
        self._norm = read.norm(f"h.{layer}.ln_2")
        self._expand, self._contract = read.linear(f"h.{layer}.mlp.c_fc"), read.linear(f"h.{layer}.mlp.c_proj")
        self._activate = activation_for(read.arch.activation, read.device)
        self.linears = (self._expand, self._contract)

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
        return x_TD + self._contract(self._activate(self._expand(self._norm(x_TD))))


class Head:
    """Final norm and logits. Rows of the padded vocabulary are dropped: their ids can never be drawn."""

    def __init__(self, read: _Reader) -> None:
        self._ln_f = read.norm("ln_f")
        self.linear = read.linear("lm_head", rows=read.arch.vocab_size)

    def __call__(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """(R, D) → float32 logits (R, V)."""
        return self.linear(self._ln_f(hidden_RD)).float()


class GPT2Stage:
    """The sublayers of `layout`, the embeddings on the first stage, the head on the last.

    dtype: as asked for. device: where it runs. num_params, weight_bytes: what it holds.
    """

    def __init__(self, read: _Reader, layout: StageLayout, attention: Attention) -> None:
        self.arch, self.layout = read.arch, layout
        self.device, self.dtype = read.device, read.dtype
        self.compute_dtype = read.compute_dtype
        # The head before all else: the largest matrix is twice in memory while it is being packed.
        self.head = Head(read) if layout.is_last else None
        self._embed = Embedding(read) if layout.is_first else None
        self.sublayers = [_sublayer(read, layout, number, attention) for number in layout.sublayers]
        self.num_params, self.weight_bytes = read.num_params, read.weight_bytes

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        layout: StageLayout,
        dtype: str,
        device: torch.device,
        progress: Progress = lambda done, total: None,
        *,
        attention: str = "auto",
    ) -> GPT2Stage:
        """Read this stage's tensors, one at a time, and pack them.

        attention: `kernel` (CPU), `torch` (anywhere) or `auto`. progress: called with bytes done and in
        all. Raises ConfigError for a dtype the device cannot do, CheckpointError for an unknown activation.
        """
        if dtype == "float16" and device.type == "cpu":
            raise ConfigError("--dtype", "float16 needs a GPU; on the CPU use bfloat16 or float32")
        arch = checkpoint.architecture
        if arch.activation not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise CheckpointError(checkpoint.path, f"unknown activation {arch.activation!r} (known: {known})")
        threads = Threads(torch.get_num_threads() if device.type == "cpu" else 1)
        use_kernel = attention == "kernel" or (attention == "auto" and device.type == "cpu")
        attend: Attention = TorchAttention(arch.num_heads)
        if use_kernel:
            attend = BlockAttention(arch.num_heads, threads)
        with torch.inference_mode():
            return cls(_Reader(checkpoint, layout, dtype, device, threads, progress), layout, attend)

    @property
    def attentions(self) -> list[SelfAttention]:
        return [sublayer for sublayer in self.sublayers if isinstance(sublayer, SelfAttention)]

    @property
    def mlps(self) -> list[MLP]:
        return [sublayer for sublayer in self.sublayers if isinstance(sublayer, MLP)]

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, hidden_TD: torch.Tensor | None, cache: KVCache) -> torch.Tensor:
        """(T, D) hidden states in the stage's dtype after this stage's sublayers. hidden_TD: those of the
        stage before, None on the first. Writes the rows' keys and values to `cache`."""
        assert (hidden_TD is None) == self.layout.is_first
        assert inputs.highest_block < cache.num_blocks, "a plan names a block that the cache does not have"
        cache.reach(inputs.highest_block)
        cache.copy(inputs.copies)
        x_TD = hidden_TD if self._embed is None else self._embed(inputs)
        assert x_TD is not None
        assert x_TD.shape == (inputs.num_rows, self.arch.width)
        for sublayer in self.sublayers:
            x_TD = sublayer(x_TD.to(self.compute_dtype), inputs, cache).to(self.dtype)
        return x_TD

    @torch.inference_mode()
    def read_out(
        self, plan: StepPlan, inputs: StepInputs, hidden_TD: torch.Tensor
    ) -> tuple[tuple[Drawn, ...], tuple[Scored, ...]]:
        """Draw and score what the plan asks for; no row, no head. Last stage only."""
        assert self.head is not None, "only the last stage reads out"
        return read_logits(plan, self._logits(inputs, hidden_TD))

    def _logits(self, inputs: StepInputs, hidden_TD: torch.Tensor):  # type: ignore[no-untyped-def]
        """Logits of the rows to read out, a few at a time."""
        assert self.head is not None
        for begin in range(0, len(inputs.read_rows), _READ_ROWS_AT_ONCE):
            rows = torch.from_numpy(inputs.read_rows[begin : begin + _READ_ROWS_AT_ONCE]).to(self.device)
            yield self.head(hidden_TD[rows].to(self.compute_dtype))


def _sublayer(read: _Reader, layout: StageLayout, number: int, attention: Attention) -> SelfAttention | MLP:
    layer, is_mlp = divmod(number, 2)
    return MLP(read, layer) if is_mlp else SelfAttention(read, layer, layer - layout.attentions.start, attention)


class _Reader:
    """Takes tensors from a checkpoint in the form the stage keeps them, and counts them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: StageLayout,
        dtype: str,
        device: torch.device,
        threads: Threads,
        progress: Progress,
    ) -> None:
        self.arch, self.device = checkpoint.architecture, device
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.compute_dtype = torch.float32 if device.type == "cpu" else self.dtype
        self.num_params = self.weight_bytes = 0
        self._checkpoint = checkpoint
        self._threads = threads
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = stage_params(self.arch, layout) * getattr(torch, checkpoint.stored_dtype).itemsize

    def stored(self, name: str) -> torch.Tensor:
        """A tensor in the stage's dtype, on its device."""
        tensor = self._tensor(name).to(self.device)
        self.weight_bytes += tensor.nbytes
        return tensor

    def norm(self, name: str) -> LayerNorm:
        weight = self.stored(f"{name}.weight").to(self.compute_dtype)
        return LayerNorm(weight, self._bias(name), self.arch.layer_norm_epsilon)

    def linear(self, name: str, rows: int | None = None) -> Linear:
        """A linear layer; `rows`: only the first so many outputs."""
        bias = None if name == "lm_head" else self._bias(name)
        linear = make_linear(self._tensor(f"{name}.weight")[:rows], bias, self.device, self._threads)
        self.weight_bytes += linear.num_bytes
        return linear

    def _bias(self, name: str) -> torch.Tensor | None:
        return self.stored(f"{name}.bias").to(self.compute_dtype) if self.arch.biases else None

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name)
        self.num_params += tensor.numel()
        self._done_bytes += tensor.nbytes
        self._progress(self._done_bytes, max(self._done_bytes, self._total_bytes))
        return tensor.to(self.dtype)
