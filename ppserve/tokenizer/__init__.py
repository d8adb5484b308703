"""Text to token ids and back. Never a request. The only room that imports tiktoken and tokenizers.

load_tokenizer(path)         what lies beside the weights, as a Tokenizer; an empty one when nothing does
read_chat_format(path)       its chat template and what that calls its special tokens
Tokenizer                    encode, decode, the bytes of each token
Detokenizer                  one per stream: whole characters, stop strings across token boundaries
Piece                        the text that one token adds to a stream
"""

from ppserve.tokenizer.chat_format import ChatFormat, read_chat_format
from ppserve.tokenizer.detokenizer import Detokenizer, Piece
from ppserve.tokenizer.loading import load_tokenizer
from ppserve.tokenizer.tokenizer import Tokenizer, no_tokenizer

__all__ = ["ChatFormat", "Detokenizer", "Piece", "Tokenizer", "load_tokenizer", "no_tokenizer", "read_chat_format"]
