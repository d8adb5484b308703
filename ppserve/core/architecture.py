"""The shape of a model and of its stages: what a checkpoint's config says, and the sizes that follow from it.

A layer is one block of the transformer: two sublayers, its attention and its MLP. T positions, D width, H heads,
L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ppserve.core.layers import LayerSpec, NormSpec, Rotary
from ppserve.errors import ConfigError

# No model is taken for real beyond this, whatever a file says.
MAX_LAYERS = 4096
MAX_POSITIONS = 1 << 20
"""The most positions of a context. A model may have more."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model, resolved: its layers, what is before and behind them, and the sizes that all of them share."""

    layers: tuple[LayerSpec, ...]
    width: int
    max_positions: int
    vocab_size: int
    """Real tokens; ids at or above it are never drawn."""
    padded_vocab_size: int
    """Rows of the embedding as stored."""
    final_norm: NormSpec
    """The norm before the LM head."""
    family: str
    """Whose tensors these are: a key of `model.checkpoint.families.FAMILIES`."""
    model_type: str
    """What Hugging Face calls this kind of model in its config.json; `model_class`: its class in transformers."""
    model_class: str
    has_learned_positions: bool = False
    """Whether each position has a learned vector that is added to the token's."""
    embedding_multiplier: float = 1.0
    """What the embeddings are multiplied with before the first layer."""
    tied_embeddings: bool = True
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a text; the first is *the* end of text."""
    begins_with_end: bool = False
    """Whether the end of text also begins one."""

    @property
    def eos_id(self) -> int | None:
        return self.eos_ids[0] if self.eos_ids else None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Heads of queries, equally many in every layer (`checkpoint.settings.settled`)."""
        return self.layers[0].attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].attention.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.layers[0].attention.head_size

    @property
    def queries_per_kv_head(self) -> int:
        return self.layers[0].attention.queries_per_kv_head

    @property
    def inner_width(self) -> int:
        """Features between the matrices of the widest MLP."""
        return max(layer.mlp.inner_width for layer in self.layers)

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The rotary positions that its layers have, each once. A layer's is found by its index here."""
        found = (layer.attention.rotary for layer in self.layers)
        return tuple(dict.fromkeys(rotary for rotary in found if rotary is not None))

    def with_layers(self, change: Callable[[LayerSpec], LayerSpec]) -> Architecture:
        """Return the model with each layer changed. Layers that were one object are one object again."""
        changed = {layer: change(layer) for layer in dict.fromkeys(self.layers)}
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))

    @property
    def num_params(self) -> int:
        """Parameters of the whole model: a tied embedding counts once, however many stages hold a copy."""
        copied = self.vocab_size * self.width if self.tied_embeddings else 0
        return stage_params(self, StageLayout(0, 1, 0, 2 * self.num_layers)) - copied

    def context(self, asked: int | None) -> int:
        """The most tokens of prompt and answer together. Raises ConfigError for more than the model has."""
        if asked is not None and asked > self.max_positions:
            own = f"model's {self.max_positions} positions"
            own = own if self.max_positions < MAX_POSITIONS else f"{MAX_POSITIONS} positions that are served"
            raise ConfigError("--max-model-len", f"{asked} is beyond the {own}")
        return asked or self.max_positions


@dataclass(frozen=True, slots=True)
class Split:
    """How many sublayers each stage has. Text counts layers: an attention or an MLP alone is half of one."""

    sublayers: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Split:
        """Read layers per stage, `9,3` or `7.5,4.5`. Raises ValueError."""
        try:
            counts = [2 * float(part) for part in text.split(",")]
        except ValueError:
            counts = []
        if not counts or not all(map(float.is_integer, counts)):
            raise ValueError(f"{text!r} is not a list of layers per stage such as 9,3 or 7.5,4.5")
        return cls(tuple(map(int, counts)))

    def __str__(self) -> str:
        return ",".join(f"{count / 2:g}" for count in self.sublayers)


@dataclass(frozen=True, slots=True)
class Cut:
    """Consecutive heads or outputs of a matrix, shared out among the tensor ranks of a stage."""

    widths: tuple[int, ...]
    """How many each rank has."""
    rank: int

    def times(self, factor: int) -> Cut:
        """Return this cut in smaller units, `factor` of which make one of its own."""
        return Cut(tuple(width * factor for width in self.widths), self.rank)

    @property
    def size(self) -> int:
        return sum(self.widths)

    @property
    def width(self) -> int:
        """This rank's own."""
        return self.widths[self.rank]

    @property
    def own(self) -> slice:
        first = sum(self.widths[: self.rank])
        return slice(first, first + self.width)


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Which part of the model a rank owns, in sublayers: layer k's attention is number 2k, its MLP 2k + 1.

    A stage may begin with an MLP whose attention the stage before computes: hidden states cross either way.
    The first stage also embeds; the last also holds the final norm and the head.
    """

    stage: int
    num_stages: int
    first_sublayer: int
    num_sublayers: int
    tensor: int = 0
    """The rank's number among those that share the stage.
    Each of them has some heads of every attention, and some outputs of every other matrix."""
    num_tensor: int = 1

    @property
    def place(self) -> int:
        """The rank's number in its replica: in order of stages, then of tensor ranks."""
        return self.stage * self.num_tensor + self.tensor

    @property
    def num_places(self) -> int:
        return self.num_stages * self.num_tensor

    def cut(self, size: int) -> Cut:
        """Share out `size` outputs among the tensor ranks as evenly as possible; the first ranks have one more."""
        each, left = divmod(size, self.num_tensor)
        return Cut(tuple(each + 1 if rank < left else each for rank in range(self.num_tensor)), self.tensor)

    def kv_heads(self, arch: Architecture) -> Cut:
        """The heads of keys and values of every attention."""
        return self.cut(arch.num_kv_heads)

    def heads(self, arch: Architecture) -> Cut:
        """The heads of queries: those that read the rank's own keys and values."""
        return self.kv_heads(arch).times(arch.queries_per_kv_head)

    def kv_bytes_per_token(self, arch: Architecture, element_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes of keys and values that one token occupies on this rank: of its own heads, each with its
        scale."""
        of_head = arch.head_size * element_bytes + scale_bytes
        return 2 * len(self.attentions) * self.kv_heads(arch).width * of_head

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def sublayers(self) -> range:
        return range(self.first_sublayer, self.first_sublayer + self.num_sublayers)

    @property
    def attentions(self) -> range:
        """Layers whose attention is here, and with it their keys and values."""
        return range((self.sublayers.start + 1) // 2, (self.sublayers.stop + 1) // 2)

    @property
    def mlps(self) -> range:
        """Layers whose MLP is here."""
        return range(self.sublayers.start // 2, self.sublayers.stop // 2)

    @property
    def layers(self) -> range:
        """Layers of which any part is here."""
        return range(self.mlps.start, self.attentions.stop)

    @property
    def span(self) -> str:
        """The stage's layers for people: `0-6`; `0-7a` ends with the attention of layer 7, `7m-11` begins with its
        MLP."""
        layers = self.layers
        first = f"{layers.start}{'m' if self.attentions.start > layers.start else ''}"
        last = f"{layers.stop - 1}{'a' if self.mlps.stop < layers.stop else ''}"
        return first if first == last else f"{first}-{last}"


def stage_layouts(split: Split) -> tuple[StageLayout, ...]:
    counts = split.sublayers
    return tuple(StageLayout(i, len(counts), sum(counts[:i]), count) for i, count in enumerate(counts))


def attention_matrices(arch: Architecture, layer: LayerSpec, layout: StageLayout) -> list[tuple[int, int]]:
    """Return the outputs and inputs of an attention's two matrices, as a rank holds them. The first is that of
    queries, keys and values."""
    spec = layer.attention
    kv_heads = layout.cut(spec.num_kv_heads)
    num_heads = kv_heads.times(spec.queries_per_kv_head).width + 2 * kv_heads.width
    qkv = (num_heads * spec.head_size, arch.width)
    return [qkv, (layout.cut(arch.width).width, spec.num_heads * spec.head_size)]


def mlp_matrices(arch: Architecture, layer: LayerSpec, layout: StageLayout) -> list[tuple[int, int]]:
    """Return the outputs and inputs of an MLP's first matrix and of its last, as a rank holds them, for one
    expert."""
    spec = layer.mlp
    inner = layout.cut(spec.inner_width).width
    return [(2 * inner if spec.is_gated else inner, arch.width), (layout.cut(arch.width).width, spec.inner_width)]


def _attention_params(arch: Architecture, layer: LayerSpec, layout: StageLayout) -> int:
    spec = layer.attention
    (qkv, inputs), (outputs, heads_inputs) = attention_matrices(arch, layer, layout)
    matrices = _linear_params(qkv, inputs, spec.has_qkv_biases)
    matrices += _linear_params(outputs, heads_inputs, spec.has_output_bias)
    head_norms = 2 * spec.head_norm.num_params(spec.head_size) if spec.head_norm is not None else 0
    sinks = spec.num_heads if spec.has_sinks else 0
    return matrices + head_norms + sinks + layer.num_norm_params(arch.width)


def _mlp_params(arch: Architecture, layer: LayerSpec, layout: StageLayout, *, is_read: bool) -> int:
    """Parameters of an MLP that a rank holds, or those that a row's computation reads."""
    spec, copies, router = layer.mlp, 1, 0
    if spec.experts is not None:
        copies = spec.experts.per_token if is_read else spec.experts.count
        router = spec.experts.count * arch.width
    one = sum(_linear_params(*matrix, spec.has_biases) for matrix in mlp_matrices(arch, layer, layout))
    return copies * one + router + layer.num_norm_params(arch.width)


def _linear_params(outputs: int, inputs: int, has_biases: bool) -> int:
    return outputs * (inputs + 1 if has_biases else inputs)


def sublayer_params(arch: Architecture, layout: StageLayout, *, is_read: bool = False) -> int:
    """Count the parameters that a rank holds of its sublayers: its outputs of every matrix, and all of the norms.

    is_read: count only those that a decode step of one row reads. They are fewer where there are experts.
    """
    attentions = (_attention_params(arch, arch.layers[i], layout) for i in layout.attentions)
    mlps = (_mlp_params(arch, arch.layers[i], layout, is_read=is_read) for i in layout.mlps)
    return sum(attentions) + sum(mlps)


def stage_params(arch: Architecture, layout: StageLayout) -> int:
    """Count the parameters that a rank holds, with its own copy of a tied embedding. Rows of padding count in the
    embedding, not in the head."""
    learned_positions = arch.max_positions if arch.has_learned_positions else 0
    num_params = sublayer_params(arch, layout)
    if layout.is_first:
        num_params += (arch.padded_vocab_size + learned_positions) * layout.cut(arch.width).width
    if layout.is_last:
        num_params += layout.cut(arch.vocab_size).width * arch.width + arch.final_norm.num_params(arch.width)
    return num_params
