"""The shape of a GPT-2: what a checkpoint's config says, and the sizes that follow from it.

T positions, D width, H heads, L layers (blocks), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """A GPT-2 family model, resolved: nothing here is None that arithmetic needs.

    vocab_size: real tokens; ids at or above it are never drawn. padded_vocab_size: rows of the
    embedding as stored. activation: a key of `model.activations` (Hugging Face's names).
    biases: whether linears and layer norms have biases (nanoGPT's `bias`).
    """

    num_layers: int
    width: int
    num_heads: int
    max_positions: int
    vocab_size: int
    padded_vocab_size: int
    inner_width: int
    activation: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tied_embeddings: bool = True
    biases: bool = True
    eos_id: int | None = None
    bos_id: int | None = None

    @property
    def head_size(self) -> int:
        return self.width // self.num_heads

    def attention_scale(self, layer: int) -> float:
        """The factor on Q·K of block `layer` (global index, not the stage's)."""
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @property
    def block_params(self) -> int:
        """Parameters of one transformer block."""
        d, f = self.width, self.inner_width
        matrices = d * 3 * d + d * d + d * f + f * d
        return matrices + 2 * d + (2 * d + 3 * d + d + f + d if self.biases else 0)

    @property
    def embedding_params(self) -> int:
        """Token and position embeddings."""
        return (self.padded_vocab_size + self.max_positions) * self.width

    @property
    def head_params(self) -> int:
        """Final layer norm and the LM head (its own copy of the embedding when tied)."""
        return self.padded_vocab_size * self.width + self.width * (2 if self.biases else 1)

    def kv_bytes_per_token(self, num_layers: int, element_bytes: int) -> int:
        """Bytes of keys and values that one token occupies in `num_layers` blocks."""
        return 2 * num_layers * self.width * element_bytes


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Which blocks a stage owns: first_layer .. first_layer + num_layers of `total_layers`.

    The first stage also embeds; the last also holds the final norm and the head.
    """

    stage: int
    num_stages: int
    first_layer: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)


def stage_layouts(split: tuple[int, ...]) -> tuple[StageLayout, ...]:
    """Layouts of all stages for a split such as (9, 3)."""
    return tuple(StageLayout(i, len(split), sum(split[:i]), n) for i, n in enumerate(split))


def stage_params(arch: Architecture, layout: StageLayout) -> int:
    """Parameters that a stage holds."""
    count = layout.num_layers * arch.block_params
    if layout.is_first:
        count += arch.embedding_params
    if layout.is_last:
        count += arch.head_params
    return count
