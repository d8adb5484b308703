"""Text to token ids and back. Never a request. The only room that imports tiktoken and tokenizers.

load_tokenizer(path)         a model's Tokenizer, from a file beside the weights; an empty one if there is none
read_chat_format(path)       a model's chat template, and the names that it has for special tokens
Tokenizer                    encode, decode, the bytes of each token
Detokenizer                  decodes one stream: whole characters, stop strings across token boundaries
Piece                        the text that one token adds to a stream
"""

from ppserve.tokenizer.chat_format import ChatFormat, read_chat_format
from ppserve.tokenizer.detokenizer import Detokenizer, Piece
from ppserve.tokenizer.loading import load_tokenizer
from ppserve.tokenizer.tokenizer import Tokenizer, no_tokenizer

__all__ = ["ChatFormat", "Detokenizer", "Piece", "Tokenizer", "load_tokenizer", "no_tokenizer", "read_chat_format"]
