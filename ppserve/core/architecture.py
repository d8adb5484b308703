"""The shape of a model and of its stages: what a checkpoint's config says, and the sizes that follow from it.

A layer is one block of the transformer: two sublayers, its attention and its MLP. T positions, D width, H heads,
L layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppserve.errors import ConfigError

# No model is taken for real beyond this, whatever a file says.
MAX_LAYERS = 4096
MAX_POSITIONS = 1 << 20
"""The most positions of a context. A model may have more."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions: at position p, pair i of a head's features is turned by the angle p * frequencies[i].

    frequencies: float32 numbers, one for each half of a head's features.
    magnitude: what queries and keys are multiplied with.
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model, resolved: what arithmetic needs is not None, or a property says what None means.

    The defaults are those of a GPT-2.
    """

    num_layers: int
    width: int
    num_heads: int
    """Heads of queries."""
    max_positions: int
    vocab_size: int
    """Real tokens; ids at or above it are never drawn."""
    padded_vocab_size: int
    """Rows of the embedding as stored."""
    inner_width: int
    activation: str = "gelu_new"
    """A key of `model.stock.ACTIVATIONS` (Hugging Face's names)."""
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tied_embeddings: bool = True
    biases: bool = True
    """Whether linears and layer norms have biases (nanoGPT's `bias`)."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a text; the first is *the* end of text."""
    family: str = "gpt2"
    """Whose tensors and layers these are: a key of `model.checkpoint.families.FAMILIES`."""
    kv_heads: int | None = None
    """Heads of keys and values, each read by as many heads of queries; None: as many as of queries."""
    head_width: int | None = None
    """Features of a head; None: the heads share the width."""
    rotary: Rotary | None = None
    """None: positions are learned."""
    is_gated: bool = False
    """Whether the MLP multiplies what it activates with as many outputs that it does not."""
    qkv_biases: bool = False
    """Whether queries, keys and values have biases, where nothing else has."""
    qk_norms: bool = False
    """Whether each head's queries and keys are normed."""
    is_windowed: bool = False
    """Whether a sliding window sets `max_positions`."""

    @property
    def eos_id(self) -> int | None:
        return self.eos_ids[0] if self.eos_ids else None

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.num_heads

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    def attention_scale(self, layer: int) -> float:
        """The factor on Q·K of layer `layer` (global index, not the stage's)."""
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @property
    def norm_params(self) -> int:
        return self.width * (1 + self.biases)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model: a tied embedding counts once, however many stages hold a copy."""
        copied = self.vocab_size * self.width if self.tied_embeddings else 0
        return stage_params(self, StageLayout(0, 1, 0, 2 * self.num_layers)) - copied

    def context(self, asked: int | None) -> int:
        """The most tokens of prompt and answer together. Raises ConfigError for more than the model has."""
        if asked is not None and asked > self.max_positions:
            own = f"model's {'sliding_window of ' * self.is_windowed}{self.max_positions} positions"
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
        """This cut in smaller units: each of its things consists of `factor` of them."""
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
    """Which of the ranks that share the stage.
    Each has some heads of every attention, and some outputs of every other matrix."""
    num_tensor: int = 1

    @property
    def place(self) -> int:
        """Among the ranks of its replica: in order of stages, then of tensor ranks."""
        return self.stage * self.num_tensor + self.tensor

    @property
    def num_places(self) -> int:
        return self.num_stages * self.num_tensor

    def cut(self, size: int) -> Cut:
        """`size` outputs among the tensor ranks: as evenly as they go, the first ranks have one more."""
        each, left = divmod(size, self.num_tensor)
        return Cut(tuple(each + (rank < left) for rank in range(self.num_tensor)), self.tensor)

    def kv_heads(self, arch: Architecture) -> Cut:
        """The heads of keys and values of every attention."""
        return self.cut(arch.num_kv_heads)

    def heads(self, arch: Architecture) -> Cut:
        """The heads of queries: those that read the rank's own keys and values."""
        return self.kv_heads(arch).times(arch.heads_per_kv_head)

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
        """For people: `0-6`; `0-7a` ends with the attention of layer 7, `7m-11` begins with its MLP."""
        layers = self.layers
        first = f"{layers.start}{'m' if self.attentions.start > layers.start else ''}"
        last = f"{layers.stop - 1}{'a' if self.mlps.stop < layers.stop else ''}"
        return first if first == last else f"{first}-{last}"


def stage_layouts(split: Split) -> tuple[StageLayout, ...]:
    counts = split.sublayers
    return tuple(StageLayout(i, len(counts), sum(counts[:i]), count) for i, count in enumerate(counts))


def matrices(arch: Architecture, layout: StageLayout) -> list[tuple[int, int]]:
    """Outputs and inputs of a layer's four matrices, as a rank holds them: of queries, keys and values; the
    attention's last; the MLP's first; its last."""
    width, inner = layout.cut(arch.width).width, layout.cut(arch.inner_width).width
    qkv = (layout.heads(arch).width + 2 * layout.kv_heads(arch).width) * arch.head_size
    attention = [(qkv, arch.width), (width, arch.num_heads * arch.head_size)]
    return [*attention, ((1 + arch.is_gated) * inner, arch.width), (width, arch.inner_width)]


def sublayer_params(arch: Architecture, layout: StageLayout) -> int:
    """Parameters of its sublayers that a rank holds: own outputs of every matrix, and all of the norms."""
    has_bias = (arch.biases or arch.qkv_biases, arch.biases, arch.biases, arch.biases)
    pairs = zip(matrices(arch, layout), has_bias, strict=True)
    qkv, proj, expand, contract = (outputs * (inputs + bias) for (outputs, inputs), bias in pairs)
    attention = qkv + proj + arch.norm_params + 2 * arch.head_size * arch.qk_norms
    return len(layout.attentions) * attention + len(layout.mlps) * (expand + contract + arch.norm_params)


def stage_params(arch: Architecture, layout: StageLayout) -> int:
    """Parameters that a rank holds, its own copy of a tied embedding included; of padding, the embedding's."""
    learned_positions = arch.max_positions if arch.rotary is None else 0
    embedding = (arch.padded_vocab_size + learned_positions) * layout.cut(arch.width).width
    head = layout.cut(arch.vocab_size).width * arch.width + arch.norm_params
    return sublayer_params(arch, layout) + layout.is_first * embedding + layout.is_last * head
