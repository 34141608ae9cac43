"""Small tokenizers of every kind of decoder, and strings of tokens that try them.

The vocabularies hold every byte in their own way, words in Latin and Chinese, marks, spaces and added tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvjax.models.tokenizer import Tokenizer as KvjaxTokenizer

WORDS = ["a", "b", "w", "hello", ".", ",", "'s", "n't", "do not", "中", "文字", "é", "€", "\ufffd", "don"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = "中文é€🙂"
TEXTS = ["hello a b.", "中文字 w", "naïve €5", "𝄞𝄞 a", "a do not 's", "  two  spaces ", "\ufffd b", "한국어", "🙂🙃"]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _vocab(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(dict.fromkeys(["<unk>", *tokens]))}


def _words(mark: str) -> list[str]:
    return [mark, 2 * mark, *WORDS, *(mark + word for word in WORDS)]


def _byte_level(add_prefix_space: bool = False) -> Tokenizer:
    """Each byte a token, words, and tokens that end inside characters or begin there."""
    own = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    words = [own.pre_tokenize_str(word)[0][0] for word in ["hello", " a", "中文", "é", "🙂"]]
    halves = [word[1:] + word[:-1] for word in words if len(word) > 1]
    backend = Tokenizer(models.BPE(_vocab(["", *pre_tokenizers.ByteLevel.alphabet(), *words, *halves]), []))
    backend.pre_tokenizer, backend.decoder = own, decoders.ByteLevel()
    return backend


def _byte_fallback(*more: Any) -> Tokenizer:
    """As the tokenizers of Llama 2 and Gemma."""
    model = models.BPE(_vocab([*_words("▁"), *BYTES]), [], unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([*LLAMA, *more])
    return backend


def _unigram(decoder: Any, prepend: str) -> Tokenizer:
    pieces = [(token, -1.0 - i) for i, token in enumerate(_vocab([*_words("▁"), *BYTES]))]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    backend.decoder = decoder
    return backend


def _word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(_vocab([*_words("##"), " a", "a ."]), unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return backend


def _listed(decoder: Any, tokens: list[str]) -> Tokenizer:
    """Words between spaces, each a token."""
    backend = Tokenizer(models.WordLevel(_vocab(tokens), "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        backend.decoder = decoder
    return backend


_MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": _byte_level,
    "byte level with a prefix space": lambda: _byte_level(add_prefix_space=True),
    "byte fallback (Llama 2)": lambda: _byte_fallback(decoders.Strip(" ", 1, 0)),
    "byte fallback (Gemma)": _byte_fallback,
    "WordPiece": _word_piece,
    "Unigram": lambda: _unigram(decoders.Metaspace(), "always"),
    "Unigram without a prefix space": lambda: _unigram(decoders.Metaspace(prepend_scheme="never"), "never"),
    "Unigram with byte fallback": lambda: _unigram(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), "always"
    ),
    "CTC": lambda: _listed(decoders.CTC(), [*WORDS, "<pad>", "|", "a|", "<pad>b"]),
    "BPE with a suffix": lambda: _listed(
        decoders.BPEDecoder(), [*WORDS, *(f"{word}</w>" for word in WORDS), "a</w>b", "a</w></w>", "</w>"]
    ),
    "no decoder": lambda: _listed(None, WORDS),
    "tokens without text": lambda: _listed(decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]), [*_words("▁"), ""]),
}
UNKNOWN: dict[str, Callable[[], Tokenizer]] = {
    "two spaces stripped": lambda: _byte_fallback(decoders.Strip(" ", 2, 0)),
    "a pattern over the whole text": lambda: _byte_fallback(decoders.Replace("a b", "c")),
}
STREAMED_KINDS = tuple(_MAKERS)
KINDS = (*STREAMED_KINDS, *UNKNOWN)


@functools.cache
def tokenizer_of(kind: str) -> KvjaxTokenizer:
    """With special tokens and with added ones that are none."""
    backend = (_MAKERS | UNKNOWN)[kind]()
    backend.add_special_tokens(["<s>", "</s>", AddedToken("<|mark|>", lstrip=True, rstrip=True)])
    backend.add_tokens(["<think>", " added ", "中国", "Ġplain", "end.", AddedToken("own", single_word=True)])
    return KvjaxTokenizer(backend)


def random_tokens(tokenizer: KvjaxTokenizer, rng: np.random.Generator, num_parts: int) -> list[int]:
    """Texts, random tokens, characters in bytes, added tokens, repeated or empty ones, ids that there are not."""
    size = tokenizer.vocab_size
    ids: list[int] = []
    for _ in range(num_parts):
        what = rng.integers(6)
        if what == 0:
            text = tokenizer.encode(str(rng.choice(TEXTS)))
            ids += text[rng.integers(len(text) or 1) :]
        elif what == 1:
            ids += rng.integers(size, size=rng.integers(1, 4)).tolist()
        elif what == 2:
            ids += _in_bytes(tokenizer, rng)
        elif what == 3:
            ids += rng.integers(size - 9, size + (rng.random() < 0.1), size=1).tolist()
        elif what == 4:
            ids += rng.integers(min(40, size), size=rng.integers(1, 4)).tolist()
        else:
            empty = tokenizer._backend.token_to_id("") if rng.random() < 0.5 else None
            ids += [int(rng.integers(size)) if empty is None else empty] * int(rng.integers(1, 12))
    return ids


def _in_bytes(tokenizer: KvjaxTokenizer, rng: np.random.Generator) -> list[int]:
    """Characters, each byte a token if there are such; sometimes a byte is missing or another token between."""
    tokens = _byte_tokens(tokenizer)
    text = "".join(rng.choice(list(CHARACTERS), size=rng.integers(1, 4)))
    ids = [tokens[byte] for byte in text.encode() if byte in tokens]
    if ids and rng.random() < 0.3:
        del ids[rng.integers(len(ids))]
    if ids and rng.random() < 0.3:
        ids.insert(int(rng.integers(len(ids))), int(rng.integers(tokenizer.vocab_size - 9, tokenizer.vocab_size)))
    return ids


@functools.cache
def _byte_tokens(tokenizer: KvjaxTokenizer) -> dict[int, int]:
    """Tokens of the bytes of `CHARACTERS`, where bytes are tokens."""
    named = tokenizer._backend.get_vocab()
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {}
    for character in CHARACTERS:
        for byte, mapped in zip(character.encode(), own.pre_tokenize_str(character)[0][0], strict=True):
            found[byte] = named.get(BYTES[byte], named.get(mapped))
    return {byte: token for byte, token in found.items() if token is not None}
