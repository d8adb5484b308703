"""A model to compare with: plain torch, no cache, no packing, one sequence at a time.

T tokens, D width, H heads, d head size, V real vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn.functional import layer_norm, linear, softmax

from ppserve.core.layers import AttentionSpec, LayerSpec, MLPSpec, NormSpec, Rotary
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.checkpoint.families import tensor_shapes
from ppserve.model.stock import ACTIVATIONS


def _rotated(x_THd: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    positions_T = torch.arange(len(x_THd), dtype=torch.float32)
    angles_T1h = torch.outer(positions_T, torch.tensor(rotary.frequencies))[:, None]
    pairs = torch.complex(*x_THd.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles_T1h), angles_T1h)
    return torch.cat([pairs.real, pairs.imag], dim=-1) * rotary.magnitude


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

    def _norm(self, x: torch.Tensor, name: str, spec: NormSpec | None) -> torch.Tensor:
        if spec is None:
            return x
        weight, bias = self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias")
        if spec.is_rms:
            assert weight is not None
            return weight * x * (x.square().mean(-1, keepdim=True) + spec.epsilon).rsqrt()
        return layer_norm(x, x.shape[-1:], weight, bias, spec.epsilon)

    def _heads(self, x_TD: torch.Tensor, name: str, spec: AttentionSpec) -> list[torch.Tensor]:
        """Queries, keys and values, each (H, T, d), with as many heads of keys as of queries."""
        count, size = len(x_TD), spec.head_size
        if f"{name}.qkv.weight" in self._shapes:
            qkv_T3Hd = self._linear(x_TD, f"{name}.qkv").view(count, 3, spec.num_heads, size)
            each = dict(zip("qkv", qkv_T3Hd.unbind(1), strict=True))
        else:
            each = {kind: self._linear(x_TD, f"{name}.{kind}").view(count, -1, size) for kind in "qkv"}
        for kind in "qk":
            each[kind] = self._norm(each[kind], f"{name}.{kind}_norm", spec.head_norm)
            each[kind] = _rotated(each[kind], spec.rotary) if spec.rotary else each[kind]
        copies = {"q": 1, "k": spec.queries_per_kv_head, "v": spec.queries_per_kv_head}
        return [of.transpose(0, 1).repeat_interleave(copies[kind], dim=0) for kind, of in each.items()]

    def _attend(self, x_TD: torch.Tensor, name: str, spec: AttentionSpec) -> torch.Tensor:
        count = len(x_TD)
        q_HTd, k_HTd, v_HTd = self._heads(x_TD, name, spec)
        scores_HTT = q_HTd @ k_HTd.transpose(1, 2) * spec.scale
        hidden_TT = torch.ones(count, count, dtype=torch.bool).triu(1)
        if spec.window is not None:
            hidden_TT |= torch.ones(count, count, dtype=torch.bool).tril(-spec.window)
        mixed_HTd = softmax(scores_HTT.masked_fill(hidden_TT, -torch.inf), dim=-1) @ v_HTd
        return self._linear(mixed_HTd.transpose(0, 1).reshape(count, -1), f"{name}.o")

    def _mlp(self, x_TD: torch.Tensor, name: str, spec: MLPSpec) -> torch.Tensor:
        activate, up = ACTIVATIONS[spec.activation], self._linear(x_TD, f"{name}.up")
        inner = activate(self._linear(x_TD, f"{name}.gate")) * up if spec.is_gated else activate(up)
        return self._linear(inner, f"{name}.down")

    def _layer(self, x_TD: torch.Tensor, name: str, spec: LayerSpec) -> torch.Tensor:
        added = self._attend(self._norm(x_TD, f"{name}.ln_1", spec.pre_norm), f"{name}.attn", spec.attention)
        x_TD = x_TD + spec.residual_multiplier * self._norm(added, f"{name}.post_ln_1", spec.post_norm)
        added = self._mlp(self._norm(x_TD, f"{name}.ln_2", spec.pre_norm), f"{name}.mlp", spec.mlp)
        return x_TD + spec.residual_multiplier * self._norm(added, f"{name}.post_ln_2", spec.post_norm)

    @torch.inference_mode()
    def logits(self, token_ids: list[int] | tuple[int, ...]) -> torch.Tensor:
        """(T, V) float32 logits after each token."""
        wte, wpe = self._tensor("wte.weight"), self._tensor("wpe.weight")
        assert wte is not None
        x_TD = wte[list(token_ids)]
        if wpe is not None:
            x_TD = x_TD + wpe[: len(token_ids)]
        x_TD = x_TD * self._arch.embedding_multiplier
        for number, layer in enumerate(self._arch.layers):
            x_TD = self._layer(x_TD, f"h.{number}", layer)
        head = self._tensor("lm_head.weight")
        assert head is not None
        return linear(self._norm(x_TD, "ln_f", self._arch.final_norm), head)[:, : self._arch.vocab_size]

    def greedy(self, prompt_ids: tuple[int, ...], count: int) -> list[int]:
        """The `count` tokens that follow."""
        ids = list(prompt_ids)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt_ids) :]
