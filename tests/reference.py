"""A model to compare with: plain torch, no cache, no packing, one sequence at a time.

T tokens, D width, H heads, d head size, V real vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn.functional import layer_norm, linear, softmax

from ppserve.model.checkpoint import Checkpoint
from ppserve.model.checkpoint.families import tensor_shapes
from ppserve.model.stock import ACTIVATIONS


class Reference:
    """The model of a checkpoint in float32 (weights rounded to `dtype` first)."""

    def __init__(self, checkpoint: Checkpoint, dtype: str = "float32") -> None:
        self._checkpoint = checkpoint
        self._arch = checkpoint.architecture
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._shapes = tensor_shapes(self._arch)

    def _tensor(self, name: str) -> torch.Tensor | None:
        if name not in self._shapes:
            return None
        return self._checkpoint.tensor(name).to(self._dtype).float()

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias")
        if self._arch.family != "gpt2":
            assert weight is not None
            return weight * x * (x.square().mean(-1, keepdim=True) + self._arch.layer_norm_epsilon).rsqrt()
        return layer_norm(x, x.shape[-1:], weight, bias, self._arch.layer_norm_epsilon)

    def _heads(self, x_TD: torch.Tensor, name: str) -> list[torch.Tensor]:
        """Queries, keys and values, each (H, T, d), with as many heads of keys as of queries."""
        arch, count = self._arch, len(x_TD)
        if arch.family == "gpt2":
            qkv_T3Hd = self._linear(x_TD, f"{name}.c_attn").view(count, 3, arch.num_heads, -1)
            return list(qkv_T3Hd.permute(1, 2, 0, 3))
        each = {kind: self._linear(x_TD, f"{name}.{kind}").view(count, -1, arch.head_size) for kind in "qkv"}
        for kind in "qk":
            if arch.qk_norms:
                each[kind] = self._norm(each[kind], f"{name}.{kind}_norm")
            each[kind] = self._turned(each[kind]) if arch.rotary else each[kind]
        readers = {"q": 1, "k": arch.heads_per_kv_head, "v": arch.heads_per_kv_head}
        return [of.transpose(0, 1).repeat_interleave(readers[kind], dim=0) for kind, of in each.items()]

    def _turned(self, x_THd: torch.Tensor) -> torch.Tensor:
        assert self._arch.rotary is not None
        positions_T = torch.arange(len(x_THd), dtype=torch.float32)
        angles_T1h = torch.outer(positions_T, torch.tensor(self._arch.rotary.frequencies))[:, None]
        pairs = torch.complex(*x_THd.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles_T1h), angles_T1h)
        return torch.cat([pairs.real, pairs.imag], dim=-1) * self._arch.rotary.magnitude

    def _attend(self, x_TD: torch.Tensor, layer: int) -> torch.Tensor:
        count = len(x_TD)
        q_HTd, k_HTd, v_HTd = self._heads(x_TD, f"h.{layer}.attn")
        scores_HTT = q_HTd @ k_HTd.transpose(1, 2) * self._arch.attention_scale(layer)
        future_TT = torch.ones(count, count, dtype=torch.bool).triu(1)
        mixed_HTd = softmax(scores_HTT.masked_fill(future_TT, -torch.inf), dim=-1) @ v_HTd
        proj = "c_proj" if self._arch.family == "gpt2" else "o"
        return self._linear(mixed_HTd.transpose(0, 1).reshape(count, -1), f"h.{layer}.attn.{proj}")

    def _mlp(self, x_TD: torch.Tensor, name: str) -> torch.Tensor:
        activate = ACTIVATIONS[self._arch.activation]
        if self._arch.is_gated:
            inner = activate(self._linear(x_TD, f"{name}.gate")) * self._linear(x_TD, f"{name}.up")
            return self._linear(inner, f"{name}.down")
        return self._linear(activate(self._linear(x_TD, f"{name}.c_fc")), f"{name}.c_proj")

    @torch.inference_mode()
    def logits(self, token_ids: list[int] | tuple[int, ...]) -> torch.Tensor:
        """(T, V) float32 logits after each token."""
        wte, wpe = self._tensor("wte.weight"), self._tensor("wpe.weight")
        assert wte is not None
        x_TD = wte[list(token_ids)]
        if wpe is not None:
            x_TD = x_TD + wpe[: len(token_ids)]
        for layer in range(self._arch.num_layers):
            x_TD = x_TD + self._attend(self._norm(x_TD, f"h.{layer}.ln_1"), layer)
            x_TD = x_TD + self._mlp(self._norm(x_TD, f"h.{layer}.ln_2"), f"h.{layer}.mlp")
        head = self._tensor("lm_head.weight")
        assert head is not None
        return linear(self._norm(x_TD, "ln_f"), head)[:, : self._arch.vocab_size]

    def greedy(self, prompt_ids: tuple[int, ...], count: int) -> list[int]:
        """The `count` tokens that follow."""
        ids = list(prompt_ids)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt_ids) :]
