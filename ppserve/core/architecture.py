"""The shape of a model and of its stages: what a checkpoint's config says, and the sizes that follow from it.

A layer is one block of the transformer. It has two sublayers: its attention and its MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ppserve.core.layers import LayerSpec, NormSpec, Rotary
from ppserve.errors import ConfigError

# A file that says that its model has more layers is refused.
MAX_LAYERS = 4096
MAX_POSITIONS = 1 << 20
"""The most positions that a context may have here. A model may have more."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model: its layers, what comes before and after them, and the sizes that all of them share. All defaults
    are resolved."""

    layers: tuple[LayerSpec, ...]
    width: int
    max_positions: int
    vocab_size: int
    """The number of real tokens. Ids from this number on are never drawn."""
    padded_vocab_size: int
    """The number of rows that the stored embedding has."""
    final_norm: NormSpec
    """The norm before the LM head."""
    family: str
    """The family, by which tensors are named: a key of `model.checkpoint.families.FAMILIES`."""
    model_type: str
    """The kind of model, as Hugging Face's config.json names it."""
    model_class: str
    """The model's class in transformers."""
    has_learned_positions: bool = False
    """Whether each position has a learned vector that is added to the token's."""
    embedding_multiplier: float = 1.0
    """The factor of the embeddings before the first layer."""
    tied_embeddings: bool = True
    """Whether the LM head's matrix is that of the embedding."""
    eos_ids: tuple[int, ...] = ()
    """The tokens that end a text. The first one is *the* end of text."""
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
        """The number of heads of queries. It is the same in every layer (`checked_architecture`)."""
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
        """The number of features between the matrices of the widest MLP."""
        return max(layer.mlp.inner_width for layer in self.layers)

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The kinds of rotary positions that the layers have, each once. Backends number them by their index
        here."""
        found = (layer.attention.rotary for layer in self.layers)
        return tuple(dict.fromkeys(rotary for rotary in found if rotary is not None))

    def with_layers(self, change: Callable[[LayerSpec], LayerSpec]) -> Architecture:
        """Return the model with each layer changed. Layers that shared one object share one object again."""
        changed = {layer: change(layer) for layer in dict.fromkeys(self.layers)}
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))

    @property
    def num_params(self) -> int:
        """The number of the model's parameters. A tied embedding counts once, however many stages hold a copy."""
        copied = self.vocab_size * self.width if self.tied_embeddings else 0
        return stage_params(self, StageLayout(0, 1, 0, 2 * self.num_layers)) - copied

    def context(self, asked: int | None) -> int:
        """Return the most tokens of prompt and answer together. asked: by the operator; None: all that the model
        has. Raises ConfigError if it is more than that."""
        if asked is not None and asked > self.max_positions:
            own = f"model's {self.max_positions} positions"
            own = own if self.max_positions < MAX_POSITIONS else f"{MAX_POSITIONS} positions that are served"
            raise ConfigError("--max-model-len", f"{asked} is beyond the {own}")
        return asked or self.max_positions


@dataclass(frozen=True, slots=True)
class Split:
    """How many sublayers each stage has. As text it counts layers: an attention or an MLP alone is half a
    layer."""

    sublayers: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Split:
        """Read the layers of each stage, as `9,3` or `7.5,4.5`. Raises ValueError."""
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
    """How the heads, or the outputs of a matrix, are divided among the tensor ranks of a stage. Each has
    consecutive ones."""

    widths: tuple[int, ...]
    """How many each rank has."""
    rank: int

    def times(self, factor: int) -> Cut:
        """Return the same division in smaller units, of which `factor` make one of this cut's."""
        return Cut(tuple(width * factor for width in self.widths), self.rank)

    @property
    def size(self) -> int:
        return sum(self.widths)

    @property
    def width(self) -> int:
        """How many this rank has."""
        return self.widths[self.rank]

    @property
    def own(self) -> slice:
        first = sum(self.widths[: self.rank])
        return slice(first, first + self.width)


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Which part of the model a rank has. Sublayers are numbered: layer k's attention is 2k, its MLP is 2k + 1.

    A stage may begin with an MLP whose attention the previous stage computes: hidden states are sent in either
    case. The first stage also has the embedding. The last one also has the final norm and the LM head.
    """

    stage: int
    num_stages: int
    first_sublayer: int
    num_sublayers: int
    tensor: int = 0
    """The rank's number among the tensor ranks of the stage. Each of these has some heads of every attention, and
    some outputs of every other matrix."""
    num_tensor: int = 1
    """The number of the stage's tensor ranks."""

    @property
    def place(self) -> int:
        """The rank's number in its replica: in order of stages, then of tensor ranks."""
        return self.stage * self.num_tensor + self.tensor

    @property
    def num_places(self) -> int:
        return self.num_stages * self.num_tensor

    def cut(self, size: int) -> Cut:
        """Divide `size` outputs among the tensor ranks as evenly as possible; the first ranks may have one
        more."""
        each, left = divmod(size, self.num_tensor)
        return Cut(tuple(each + 1 if rank < left else each for rank in range(self.num_tensor)), self.tensor)

    def kv_heads(self, arch: Architecture) -> Cut:
        """Return how the heads of keys and values are divided, in every attention."""
        return self.cut(arch.num_kv_heads)

    def heads(self, arch: Architecture) -> Cut:
        """Return how the heads of queries are divided: a rank has those that read its own keys and values."""
        return self.kv_heads(arch).times(arch.queries_per_kv_head)

    def kv_bytes_per_token(self, arch: Architecture, element_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes that one token's keys and values take on this rank, which has its own heads only.
        scale_bytes: those of the scale of one head's key or value."""
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
        """The layers whose attention, with its keys and values, is on this stage."""
        return range((self.sublayers.start + 1) // 2, (self.sublayers.stop + 1) // 2)

    @property
    def mlps(self) -> range:
        """The layers whose MLP is on this stage."""
        return range(self.sublayers.start // 2, self.sublayers.stop // 2)

    @property
    def layers(self) -> range:
        """The layers of which any part is on this stage."""
        return range(self.mlps.start, self.attentions.stop)

    @property
    def span(self) -> str:
        """The stage's layers in words for people: `0-6`; `0-7a`, which ends with the attention of layer 7;
        `7m-11`, which begins with the MLP of layer 7."""
        layers = self.layers
        first = f"{layers.start}{'m' if self.attentions.start > layers.start else ''}"
        last = f"{layers.stop - 1}{'a' if self.mlps.stop < layers.stop else ''}"
        return first if first == last else f"{first}-{last}"


def stage_layouts(split: Split) -> tuple[StageLayout, ...]:
    """Return the layout of each stage, without tensor ranks."""
    counts = split.sublayers
    return tuple(StageLayout(i, len(counts), sum(counts[:i]), count) for i, count in enumerate(counts))


def _attention_matrices(arch: Architecture, layer: LayerSpec, layout: StageLayout) -> list[tuple[int, int]]:
    """Return the numbers of outputs and inputs of an attention's two matrices, as a rank holds them. The first
    matrix is that of queries, keys and values."""
    spec = layer.attention
    kv_heads = layout.cut(spec.num_kv_heads)
    num_heads = kv_heads.times(spec.queries_per_kv_head).width + 2 * kv_heads.width
    qkv = (num_heads * spec.head_size, arch.width)
    return [qkv, (layout.cut(arch.width).width, spec.num_heads * spec.head_size)]


def _mlp_matrices(arch: Architecture, layer: LayerSpec, layout: StageLayout) -> list[tuple[int, int]]:
    """Return the numbers of outputs and inputs of an MLP's first matrix and of its last, as a rank holds them. If
    there are experts, they are those of one."""
    spec = layer.mlp
    inner = layout.cut(spec.inner_width).width
    return [(2 * inner if spec.is_gated else inner, arch.width), (layout.cut(arch.width).width, spec.inner_width)]


def sublayer_matrices(arch: Architecture, layout: StageLayout) -> list[tuple[int, int]]:
    """Return the outputs and inputs of every matrix that a rank holds of its sublayers, those of each expert too.
    A router's matrix is not among them."""
    matrices = [each for i in layout.attentions for each in _attention_matrices(arch, arch.layers[i], layout)]
    for i in layout.mlps:
        experts = arch.layers[i].mlp.experts
        copies = 1 if experts is None else experts.count
        matrices += copies * _mlp_matrices(arch, arch.layers[i], layout)
    return matrices


def _attention_params(arch: Architecture, layer: LayerSpec, layout: StageLayout) -> int:
    spec = layer.attention
    (qkv, inputs), (outputs, heads_inputs) = _attention_matrices(arch, layer, layout)
    matrices = _linear_params(qkv, inputs, spec.has_qkv_biases)
    matrices += _linear_params(outputs, heads_inputs, spec.has_output_bias)
    head_norms = 2 * spec.head_norm.num_params(spec.head_size) if spec.head_norm is not None else 0
    sinks = spec.num_heads if spec.has_sinks else 0
    return matrices + head_norms + sinks + layer.num_norm_params(arch.width)


def _mlp_params(arch: Architecture, layer: LayerSpec, layout: StageLayout, *, is_read: bool) -> int:
    """Count the parameters of an MLP that a rank holds, or those that the computation of one row reads."""
    spec, copies, router = layer.mlp, 1, 0
    if spec.experts is not None:
        copies = spec.experts.per_token if is_read else spec.experts.count
        router = spec.experts.count * arch.width
    one = sum(_linear_params(*matrix, spec.has_biases) for matrix in _mlp_matrices(arch, layer, layout))
    return copies * one + router + layer.num_norm_params(arch.width)


def _linear_params(outputs: int, inputs: int, has_biases: bool) -> int:
    return outputs * (inputs + 1 if has_biases else inputs)


def sublayer_params(arch: Architecture, layout: StageLayout, *, is_read: bool = False) -> int:
    """Count the parameters of a rank's sublayers: its outputs of every matrix, and all of the norms.

    is_read: count only the parameters that a decode step of one row reads. With experts these are fewer.
    """
    attentions = (_attention_params(arch, arch.layers[i], layout) for i in layout.attentions)
    mlps = (_mlp_params(arch, arch.layers[i], layout, is_read=is_read) for i in layout.mlps)
    return sum(attentions) + sum(mlps)


def stage_params(arch: Architecture, layout: StageLayout) -> int:
    """Count the parameters that a rank holds, with its own copy of a tied embedding. Rows of padding are counted
    in the embedding, and not in the LM head."""
    learned_positions = arch.max_positions if arch.has_learned_positions else 0
    num_params = sublayer_params(arch, layout)
    if layout.is_first:
        num_params += (arch.padded_vocab_size + learned_positions) * layout.cut(arch.width).width
    if layout.is_last:
        num_params += layout.cut(arch.vocab_size).width * arch.width + arch.final_norm.num_params(arch.width)
    return num_params
