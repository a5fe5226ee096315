"""What single tokens stand for, as bytes: a token may hold half a character. Used by logprobs."""

import re

import tokenizers

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Undoes what the two families of vocabularies do to bytes."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in str(tokenizer.decoder)
        self._added = {
            token_id: token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }

    def of(self, token_id: int) -> bytes:
        """Empty where the model's vocabulary is larger than the tokenizer's."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id) or ""
        if self._is_byte_level:
            return bytes(_BYTE_OF[char] for char in piece)
        fallback = _BYTE_FALLBACK.fullmatch(piece)
        if fallback:
            return bytes([int(fallback[1], 16)])
        return piece.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write printable bytes as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _byte_alphabet()
