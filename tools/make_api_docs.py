"""Write docs/api.md from the comments of the proto.

    python tools/make_api_docs.py            # writes docs/api.md
    python tools/make_api_docs.py --check    # writes nothing; fails when it is out of date

Every service, method, message, field and value must have a comment.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = "ppserve/v1/generation.proto"
DOCS = ROOT / "docs" / "api.md"
NOTE = f"<!-- Made by tools/make_api_docs.py from protos/{PROTO}; edit that. -->"

# Field numbers of descriptor.proto, which paths of comments are made of.
SYNTAX, MESSAGE, SERVICE = 12, 4, 6
FIELD, NESTED_ENUM = 2, 4
VALUE, METHOD = 2, 2

_TYPES = {
    getattr(FieldDescriptorProto, name): name.removeprefix("TYPE_").lower()
    for name in FieldDescriptorProto.Type.keys()  # noqa: SIM118  an enum wrapper, not a dict
}


class Comments:
    """The comments of a file, by their path."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._locations = {tuple(location.path): location for location in file.source_code_info.location}

    def of(self, name: str, *path: int) -> str:
        """The comment of a thing. Raises SystemExit when it has none."""
        location = self._locations.get(path)
        text = location.leading_comments if location else ""
        if not text.strip():
            raise SystemExit(f"{name} has no comment")
        return _joined(text)

    def opening(self) -> str:
        """The comment that opens the file."""
        location = self._locations[(SYNTAX,)]
        return _joined("\n".join([*location.leading_detached_comments, location.leading_comments]))


def make() -> str:
    """The page as Markdown."""
    file = _described()
    comments = Comments(file)
    parts = [NOTE, "# The gRPC interface", comments.opening()]
    for number, service in enumerate(file.service):
        parts += _service(file.package, service, comments, (SERVICE, number))
    parts.append("## Messages")
    for number, message in enumerate(file.message_type):
        parts += _message(message, comments, (MESSAGE, number))
    return "\n\n".join(parts) + "\n"


def _described() -> FileDescriptorProto:
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "described"
        protos = ROOT / "protos"
        flags = [f"--proto_path={protos}", f"--descriptor_set_out={described}", "--include_source_info"]
        if protoc.main(["protoc", *flags, str(protos / PROTO)]) != 0:
            raise SystemExit("protoc failed")
        return FileDescriptorSet.FromString(described.read_bytes()).file[0]


def _service(
    package: str, service: ServiceDescriptorProto, comments: Comments, path: tuple[int, ...]
) -> Iterator[str]:
    yield f"## Service `{package}.{service.name}`"
    yield comments.of(service.name, *path)
    for number, method in enumerate(service.method):
        asked, given = _bare(method.input_type), _bare(method.output_type)
        answer = f"stream of {_link(given)}" if method.server_streaming else _link(given)
        yield f"### {method.name}\n\n{_link(asked)} → {answer}"
        yield comments.of(method.name, *path, METHOD, number)


def _message(message: DescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield f"### {message.name}"
    yield comments.of(message.name, *path)
    if message.field:
        rows = ["| field | type | |", "|---|---|---|"]
        for number, field in enumerate(message.field):
            text = comments.of(f"{message.name}.{field.name}", *path, FIELD, number)
            rows.append(f"| `{field.name}` = {field.number} | {_type(message, field)} | {_cell(text)} |")
        yield "\n".join(rows)
    for number, enum in enumerate(message.enum_type):
        yield from _enum(message.name, enum, comments, (*path, NESTED_ENUM, number))


def _enum(owner: str, enum: EnumDescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield f"#### {owner}.{enum.name}"
    yield comments.of(f"{owner}.{enum.name}", *path)
    rows = ["| value | |", "|---|---|"]
    for number, value in enumerate(enum.value):
        text = comments.of(value.name, *path, VALUE, number)
        rows.append(f"| `{value.name}` = {value.number} | {_cell(text)} |")
    yield "\n".join(rows)


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    entry = next((n for n in message.nested_type if field.type_name.endswith(f".{message.name}.{n.name}")), None)
    if entry is not None and entry.options.map_entry:
        return f"map from {_plain(entry.field[0])} to {_plain(entry.field[1])}"
    if field.proto3_optional:
        return f"optional {_plain(field)}"
    if field.HasField("oneof_index"):
        return f"{_plain(field)} (one of `{message.oneof_decl[field.oneof_index].name}`)"
    return f"repeated {_plain(field)}" if field.label == FieldDescriptorProto.LABEL_REPEATED else _plain(field)


def _plain(field: FieldDescriptorProto) -> str:
    return _link(_bare(field.type_name)) if field.type_name else _TYPES[field.type]


def _bare(type_name: str) -> str:
    return type_name.removeprefix(".ppserve.v1.")


def _link(name: str) -> str:
    return f"[{name}](#{name.lower().replace('.', '')})"


def _joined(comment: str) -> str:
    """Lines of a comment as paragraphs."""
    lines = (line.strip() for line in comment.strip().splitlines())
    return "\n".join(lines).strip()


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        DOCS.write_text(make())
    elif not DOCS.exists() or DOCS.read_text() != make():
        raise SystemExit("docs/api.md is out of date; run tools/make_api_docs.py")


if __name__ == "__main__":
    main()
