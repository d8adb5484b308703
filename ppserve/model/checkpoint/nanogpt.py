"""nanoGPT's `ckpt.pt`: model_args and a state dict, beside an optimizer state that is never read.

Linears are (out, in), the head is tied, GELU is the exact one, layer norm's epsilon is 1e-5, and with
`bias=False` there is no bias anywhere, layer norms included. (Layout: karpathy/nanoGPT, train.py, model.py.)
"""

from __future__ import annotations

from pathlib import Path

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.fields import LIMITS, Fields, check_heads, ending_id
from ppserve.model.checkpoint.files import shown
from ppserve.model.checkpoint.names import LAYER_NAME, tensor_shapes
from ppserve.model.checkpoint.stored import Located, StoredCheckpoint
from ppserve.model.checkpoint.torch_bin import TorchFile, load_objects
from ppserve.model.checkpoint.vocabulary import GPT2_VOCABULARY, real_vocabulary

KNOWN_ARGS = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
END_OF_TEXT = 50256


def open_nanogpt(path: Path) -> StoredCheckpoint:
    """Open a ckpt.pt. Raises CheckpointError."""
    objects = load_objects(path)
    if not isinstance(objects, dict) or not {"model", "model_args"} <= objects.keys():
        raise CheckpointError(path, "holds no model_args and model: not a checkpoint of nanoGPT")
    arch = _architecture(path, objects["model_args"])
    file = TorchFile(path, objects["model"], field="model")
    return StoredCheckpoint(path, arch, _locate(arch, file))


def _architecture(path: Path, model_args: object) -> Architecture:
    if not isinstance(model_args, dict):
        raise CheckpointError(path, f"is a {type(model_args).__name__}, not a dict", field="model_args")
    fields = Fields(path, {f"model_args.{name}": value for name, value in model_args.items()})
    for name in model_args:
        if name not in KNOWN_ARGS:
            raise fields.error(f"model_args.{name}", "is unknown and may change what is computed")
    width = fields.integer("model_args.n_embd", limit=LIMITS["width"])
    num_rows = fields.integer("model_args.vocab_size", limit=LIMITS["vocabulary"])
    vocab_size = real_vocabulary(path.parent, num_rows, END_OF_TEXT)
    end_of_text = ending_id(END_OF_TEXT, vocab_size) if vocab_size == GPT2_VOCABULARY else None
    arch = Architecture(
        num_layers=fields.integer("model_args.n_layer", limit=LIMITS["layers"]),
        width=width,
        num_heads=fields.integer("model_args.n_head", limit=width),
        max_positions=fields.integer("model_args.block_size", limit=LIMITS["positions"]),
        vocab_size=vocab_size,
        padded_vocab_size=num_rows,
        inner_width=4 * width,
        activation="gelu",
        biases=fields.boolean("model_args.bias", default=True),
        eos_id=end_of_text,
        bos_id=end_of_text,
    )
    check_heads(arch, fields, "model_args.n_head")
    return arch


def _locate(arch: Architecture, file: TorchFile) -> dict[str, Located]:
    """Canonical names to places, without what torch.compile and DistributedDataParallel put in front."""
    expected = tensor_shapes(arch)
    located: dict[str, Located] = {}
    for stored_name in file.tensors:
        name = stored_name
        for prefix in ("module.", "_orig_mod.", "module.", "transformer."):
            name = name.removeprefix(prefix)
        match = LAYER_NAME.fullmatch(name)
        if match and match[2] == "attn.bias":  # the causal mask, a buffer in files of older torch
            continue
        if name not in expected:
            raise CheckpointError(file.path, "is no tensor of a nanoGPT with these model_args", shown(stored_name))
        if name in located:
            raise CheckpointError(file.path, f"is given twice: also as {located[name].name}", shown(stored_name))
        located[name] = Located(file, stored_name)
    embedding, head = located.get("wte.weight"), located.get("lm_head.weight")
    if embedding is None:
        return located
    if head is not None and not (file.same_place(embedding.name, head.name) or embedding.equals(head)):
        raise CheckpointError(file.path, "differs from the embedding, to which nanoGPT ties it", head.name)
    return located | {"lm_head.weight": embedding}
