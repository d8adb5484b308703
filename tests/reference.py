"""A GPT-2 to compare with: plain torch, no cache, no packing, one sequence at a time.

T tokens, D width, H heads, d head size, V real vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn.functional import layer_norm, linear, softmax

from ppserve.model.checkpoint import Checkpoint
from ppserve.model.stock import ACTIVATIONS


class Reference:
    """The model of a checkpoint in float32 (weights rounded to `dtype` first)."""

    def __init__(self, checkpoint: Checkpoint, dtype: str = "float32") -> None:
        self._checkpoint = checkpoint
        self._arch = checkpoint.architecture
        self._dtype: torch.dtype = getattr(torch, dtype)

    def _tensor(self, name: str) -> torch.Tensor | None:
        if name.endswith(".bias") and not self._arch.biases:
            return None
        return self._checkpoint.tensor(name).to(self._dtype).float()

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias")
        return layer_norm(x, x.shape[-1:], weight, bias, self._arch.layer_norm_epsilon)

    def _attend(self, x_TD: torch.Tensor, layer: int) -> torch.Tensor:
        count = len(x_TD)
        qkv = self._linear(x_TD, f"h.{layer}.attn.c_attn").view(count, 3, self._arch.num_heads, -1)
        q_HTd, k_HTd, v_HTd = qkv.permute(1, 2, 0, 3)
        scores_HTT = q_HTd @ k_HTd.transpose(1, 2) * self._arch.attention_scale(layer)
        future_TT = torch.ones(count, count, dtype=torch.bool).triu(1)
        mixed_HTd = softmax(scores_HTT.masked_fill(future_TT, -torch.inf), dim=-1) @ v_HTd
        return self._linear(mixed_HTd.transpose(0, 1).reshape(count, -1), f"h.{layer}.attn.c_proj")

    @torch.inference_mode()
    def logits(self, token_ids: list[int] | tuple[int, ...]) -> torch.Tensor:
        """(T, V) float32 logits after each token."""
        wte, wpe = self._tensor("wte.weight"), self._tensor("wpe.weight")
        assert wte is not None
        assert wpe is not None
        x_TD = wte[list(token_ids)] + wpe[: len(token_ids)]
        activate = ACTIVATIONS[self._arch.activation]
        for layer in range(self._arch.num_layers):
            x_TD = x_TD + self._attend(self._norm(x_TD, f"h.{layer}.ln_1"), layer)
            inner = activate(self._linear(self._norm(x_TD, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc"))
            x_TD = x_TD + self._linear(inner, f"h.{layer}.mlp.c_proj")
        head = self._tensor("lm_head.weight")
        assert head is not None
        return linear(self._norm(x_TD, "ln_f"), head)[:, : self._arch.vocab_size]

    def greedy(self, prompt_ids: tuple[int, ...], count: int) -> list[int]:
        """The `count` tokens that follow."""
        ids = list(prompt_ids)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt_ids) :]
