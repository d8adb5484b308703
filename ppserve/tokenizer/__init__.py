"""Text to token ids and back. Never a request. The only room that imports tiktoken and tokenizers.

load_tokenizer(path)         what lies beside the weights, as a Tokenizer; None when nothing does
Tokenizer                    encode, decode, the bytes of each token
Detokenizer                  one per stream: whole characters, stop strings across token boundaries
Piece                        the text that one token adds to a stream
"""

from ppserve.tokenizer.detokenizer import Detokenizer, Piece
from ppserve.tokenizer.loading import load_tokenizer
from ppserve.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Piece", "Tokenizer", "load_tokenizer"]
