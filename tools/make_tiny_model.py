"""Trains the built-in model and its vocabulary, from nothing but `tools/tiny_stories.py` and a seed.

    OMP_NUM_THREADS=1 python -m tools.make_tiny_model ppserve/assets/tiny          (about 20 minutes, one core)

Writes a Hugging Face GPT-2 directory: config.json, model.safetensors (bfloat16) and tokenizer.tiktoken.
With the same torch build on the same kind of processor the files come out identical.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import tiktoken
import torch
from safetensors.torch import save_file
from tiktoken_ext.openai_public import r50k_pat_str
from torch import Tensor, nn
from torch.nn import functional as F

from tools.byte_pairs import learn_ranks
from tools.make_random_gpt2 import END_OF_TEXT, gpt2_config
from tools.tiny_stories import story


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the built-in model: eight layers, so that every number of stages from 1 to 8 has a layer each."""

    num_layers: int = 8
    width: int = 160
    num_heads: int = 5
    max_positions: int = 1024
    num_ranks: int = 1279


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training: its share of all steps, and how many positions a window of text has in it."""

    share: float
    window: int


PHASES = (Phase(share=0.85, window=256), Phase(share=0.15, window=1024))
TOKENS_PER_STEP = 2048
MATRIX_LEARNING_RATE = 1e-2
OTHER_LEARNING_RATE = 5e-3
NOISE_SHARE = 0.15
NO_TARGET = -100


class Conv1D(nn.Module):
    """A linear layer whose weight is stored (in, out), as GPT-2 checkpoints have it."""

    def __init__(self, num_in: int, num_out: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_in, num_out) * std)
        self.bias = nn.Parameter(torch.zeros(num_out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.c_attn = Conv1D(shape.width, 3 * shape.width)
        self.c_proj = Conv1D(shape.width, shape.width, 0.02 / math.sqrt(2 * shape.num_layers))

    def forward(self, x_NTD: Tensor) -> Tensor:
        n, t, d = x_NTD.shape
        q, k, v = (part.view(n, t, self.num_heads, -1).transpose(1, 2) for part in self.c_attn(x_NTD).split(d, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(n, t, d))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc = Conv1D(shape.width, 4 * shape.width)
        self.c_proj = Conv1D(4 * shape.width, shape.width, 0.02 / math.sqrt(2 * shape.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(shape.width), Attention(shape)
        self.ln_2, self.mlp = nn.LayerNorm(shape.width), MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def sinusoids(num_positions: int, width: int) -> Tensor:
    """Waves of many lengths, (positions, width): from the start, near positions look alike."""
    wavelengths = torch.logspace(0, 3, width // 2)
    angles = torch.arange(num_positions)[:, None] / wavelengths
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class GPT2(nn.Module):
    """A plain GPT-2 for training; parameter names are those of Hugging Face checkpoints."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.num_ranks + 1, shape.width)
        self.wpe = nn.Embedding(shape.max_positions, shape.width)
        self.h = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.ln_f = nn.LayerNorm(shape.width)
        nn.init.normal_(self.wte.weight, std=0.02)
        with torch.no_grad():
            self.wpe.weight.copy_(0.1 * sinusoids(shape.max_positions, shape.width))

    def forward(self, ids_NT: Tensor, first_position: int = 0) -> Tensor:
        """Logits (N, T, V) of ids at consecutive positions from `first_position` on."""
        positions_T = torch.arange(first_position, first_position + ids_NT.shape[1])
        x = self.wte(ids_NT) + self.wpe(positions_T)
        for layer in self.h:
            x = layer(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def learn_vocabulary(shape: Shape, seed: int) -> tiktoken.Encoding:
    """Byte pairs of 4,000 stories, as an encoding with `<|endoftext|>` after the last rank."""
    rng = random.Random(seed)
    text = "\n".join(story(rng) for _ in range(4_000))
    ranks = learn_ranks(text, r50k_pat_str, shape.num_ranks)
    if len(ranks) < shape.num_ranks:
        raise ValueError(f"the stories hold only {len(ranks)} ranks, fewer than {shape.num_ranks}")
    return tiktoken.Encoding(
        "tiny", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: shape.num_ranks}
    )


class Corpus:
    """Endless token ids of fresh stories, each followed by `<|endoftext|>`.

    noise_share: how many stories follow a few random tokens and a newline. The noise itself is no target, so a
    prompt about anything else still leads into a story.
    """

    def __init__(self, encoding: tiktoken.Encoding, seed: int, noise_share: float) -> None:
        self._encoding = encoding
        self._rng = random.Random(seed)
        self._noise_share = noise_share

    def windows(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Ids and what follows each of them, both (count, length); every window begins where a story begins."""
        windows = [self._window(length + 1) for _ in range(count)]
        ids = torch.tensor([ids[:-1] for ids, _ in windows])
        return ids, torch.tensor([targets[1:] for _, targets in windows])

    def _window(self, length: int) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        targets: list[int] = []
        while len(ids) < length:
            text = story(self._rng)
            if self._rng.random() < self._noise_share:
                noise = [self._rng.randrange(self._encoding.eot_token) for _ in range(self._rng.randint(1, 12))]
                ids += noise
                targets += [NO_TARGET] * len(noise)
                text = "\n" + text
            told = [*self._encoding.encode_ordinary(text), self._encoding.eot_token]
            ids += told
            targets += told
        return ids[:length], targets[:length]


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal (Keller Jordan et al., github.com/KellerJordan/Muon), for the layers' matrices.

    With it and `sinusoids` the loss after 60 steps was what AdamW alone had reached after 100. torch's own Muon
    works in bfloat16, which CPUs without bfloat16 units only emulate.
    """

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        super().__init__(matrices, {"lr": 0.0, "momentum": 0.95, "weight_decay": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalise(weight.grad.lerp(momentum, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))


def orthogonalise(matrix: Tensor) -> Tensor:
    """The nearest matrix whose singular values are all about one: five Newton-Schulz steps of degree five."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def make_optimizers(model: GPT2) -> dict[float, torch.optim.Optimizer]:
    """Peak learning rate -> optimizer."""
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    others = [p for p in model.h.parameters() if p.ndim != 2]
    others += [*model.wte.parameters(), *model.wpe.parameters(), *model.ln_f.parameters()]
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return {MATRIX_LEARNING_RATE: Muon(matrices), OTHER_LEARNING_RATE: adamw}


def schedule(progress: float) -> float:
    """Share of the peak learning rate: linear warm-up over 3% of the run, then a cosine to 5%."""
    return min(1.0, progress / 0.03) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: GPT2, corpus: Corpus, num_steps: int, seed: int) -> None:
    """Short windows at positions drawn from the whole context first, whole contexts at the end."""
    optimizers = make_optimizers(model)
    rng = random.Random(seed)
    started, max_positions = time.monotonic(), model.wpe.num_embeddings
    lengths = [phase.window for phase in PHASES for _ in range(round(phase.share * num_steps))]
    for step, length in enumerate(lengths):
        ids_NT, targets_NT = corpus.windows(TOKENS_PER_STEP // length, length)
        first = rng.choice((0, rng.randrange(max_positions - length + 1)))
        loss = F.cross_entropy(model(ids_NT, first).flatten(0, 1), targets_NT.flatten(), ignore_index=NO_TARGET)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for peak, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = peak * schedule(step / len(lengths))
            optimizer.step()
        if step % 20 == 0 or step == len(lengths) - 1:
            seconds = time.monotonic() - started
            print(f"step {step} of {len(lengths)}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)


@torch.no_grad()
def held_out_loss(model: GPT2, corpus: Corpus) -> float:
    """Mean loss in nats per token over 16 windows of the whole context."""
    ids_NT, targets_NT = corpus.windows(16, model.wpe.num_embeddings)
    pairs = zip(ids_NT, targets_NT, strict=True)
    losses = [F.cross_entropy(model(ids_T[None])[0], targets_T).item() for ids_T, targets_T in pairs]
    return sum(losses) / len(losses)


@torch.no_grad()
def sample(model: GPT2, encoding: tiktoken.Encoding, prompt: str, temperature: float) -> str:
    """A continuation up to the end of the text; temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(0)
    ids = encoding.encode_ordinary(prompt)
    while len(ids) < 250 and ids[-1] != encoding.eot_token:
        logits_V = model(torch.tensor([ids]))[0, -1]
        if temperature:
            ids.append(int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)))
        else:
            ids.append(int(logits_V.argmax()))
    return encoding.decode(ids)


def save(model: GPT2, shape: Shape, encoding: tiktoken.Encoding, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config = gpt2_config(
        num_layers=shape.num_layers,
        width=shape.width,
        num_heads=shape.num_heads,
        max_positions=shape.max_positions,
        vocab_size=encoding.n_vocab,
        dtype="bfloat16",
    )
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    ranks = [base64.b64encode(encoding.decode_single_token_bytes(i)).decode() for i in range(shape.num_ranks)]
    lines = (f"{token} {rank}\n" for rank, token in enumerate(ranks))
    (directory / "tokenizer.tiktoken").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    shape = Shape()
    encoding = learn_vocabulary(shape, arguments.seed)
    model = GPT2(shape)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {encoding.n_vocab} tokens", flush=True)
    train(model, Corpus(encoding, arguments.seed + 1, NOISE_SHARE), arguments.steps, arguments.seed)
    held_out = Corpus(encoding, arguments.seed + 2, noise_share=0.0)
    print(f"held-out loss {held_out_loss(model, held_out):.4f} nats per token")
    save(model, shape, encoding, arguments.directory)
    for prompt in ("Once upon a time", "The pipeline", "One morning", "Hello, world!"):
        for temperature in (0.0, 0.8):
            print(f"--- temperature {temperature}\n{sample(model, encoding, prompt, temperature)}")


if __name__ == "__main__":
    main()
