"""What a layer of a model computes: its attention, its MLP, the norms around them, and their multipliers.

A layer is two lines, in which a norm that the layer does not have changes nothing:

    x = x + residual_multiplier * post_norm(attention(pre_norm(x)))
    x = x + residual_multiplier * post_norm(mlp(pre_norm(x)))

D width of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions: at position p, pair i of a head's features is rotated by the angle p * frequencies[i].

    frequencies: float32 numbers, one for each half of a head's features.
    magnitude: the factor by which queries and keys are multiplied.
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm of the hidden states, or of each head's features."""

    epsilon: float
    is_rms: bool = False
    """Whether the norm leaves the mean where it is."""
    has_bias: bool = False

    def num_params(self, size: int) -> int:
        """Return how many parameters the norm of `size` numbers has."""
        return 2 * size if self.has_bias else size


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """An attention: its heads, what it sees, and how its scores are made."""

    num_heads: int
    """Heads of queries."""
    num_kv_heads: int
    """Heads of keys and values. Each of them is read by the same number of heads of queries."""
    head_size: int
    """Features of a head."""
    scale: float
    """The factor on Q·K."""
    rotary: Rotary | None = None
    """How queries and keys are rotated by their positions; None where they are not."""
    window: int | None = None
    """How many positions a row sees: its own and the last ones before it. None: it sees all before it."""
    has_sinks: bool = False
    """Whether each head has an attention sink: a learned score that takes part in the softmax and has no value."""
    head_norm: NormSpec | None = None
    """The norm of each head's queries and keys before they are rotated."""
    has_qkv_biases: bool = False
    has_output_bias: bool = False

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs of which a router chooses a few for each row."""

    count: int
    per_token: int
    """How many of them compute a row."""


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """An MLP: dense, gated, or several of these as experts."""

    inner_width: int
    """The features between its matrices; where there are experts, those of one."""
    activation: str
    """A key of `model.stock.ACTIVATIONS`, which has Hugging Face's names."""
    is_gated: bool = False
    """Whether the activated outputs are multiplied with as many outputs that are not activated."""
    has_biases: bool = False
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer of a model. Layers that are equal share one object."""

    attention: AttentionSpec
    mlp: MLPSpec
    pre_norm: NormSpec | None
    """The norm before each of the two sublayers."""
    post_norm: NormSpec | None = None
    """The norm of each one's result before that is added to the hidden states."""
    residual_multiplier: float = 1.0
    """The factor of each one's result before that is added."""

    def num_norm_params(self, width: int) -> int:
        """Return how many parameters the norms around one of its sublayers have."""
        return sum(norm.num_params(width) for norm in (self.pre_norm, self.post_norm) if norm is not None)
