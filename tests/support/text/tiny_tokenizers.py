"""Tokenizers of the kinds that models use, trained in a moment, and a text in many scripts to try them on."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SENTENCES = [
    "The ship leaves at 10:45, not a minute later.",
    "Der Bäcker verkauft süße Brötchen.",
    "Où est passé le garçon naïf ?",
    "El niño comió piñas en el jardín.",
    "Não há pão nem maçãs à mesa.",
    "Città è più bella però.",
    "Wĳ eten ’s avonds vroeg.",
    "Žluťoučký kůň pije vodu.",
    "Zażółć gęślą jaźń.",
    "Árvíztűrő tükörfúrógép a polcon.",
    "Ștefan bea ceai în grădină.",
    "Çocuklar ığdır’da güneşi gördü.",
    "Στην πόλη βρέχει σήμερα.",
    "Кот спит на тёплой печи.",
    "Їжак їсть ґрунтові яблука.",
    "שלום לכל הילדים בגן.",
    "القطة نائمة على السرير.",
    "کتاب روی میز است.",
    "बच्चे बगीचे में खेलते हैं।",
    "বাংলা ভাষা মধুর।",
    "தமிழ் மொழி இனிது.",
    "ภาษาไทยไม่มีช่องว่าง",
    "ລາວ ແລະ ຂະແມ ភាសាខ្មែរ",
    "今天天气很好，我们去公园。",
    "図書館で静かに本を読む。",
    "오늘은 날씨가 좋습니다. 값싼 닭고기",
    "Tiếng Việt có nhiều dấu thanh.",
    "ქართული ენა ძველია.",
    "Հայերենը հին լեզու է։",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈 met 🤷🏽‍♀️ at 🇫🇷!",
    "e\u0301 and é, a\u0308 and ä, Z\u0351\u036b\u0343a",
    "def f(x):\n\treturn x ** 2  # 1234567890\n\n\n    ok",
    "  spaces   in    runs  \t\ttabs\r\nreturns ",
    "null\x00byte? \u200b zero width \ufeff mark \ufffd replaced",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: bytes written as letters, then BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES[:8], trainer)
    return tokenizer


def llama2() -> Tokenizer:
    """As Llama 2: SentencePiece's space mark, BPE, unknown characters as byte tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES[:6], trainer)
    return _without_special_bytes(tokenizer)


def unigram() -> Tokenizer:
    """As Gemma's and T5's kind: unigram pieces with a space mark and byte tokens."""
    pieces = [(text, 0.0) for text in (*SPECIAL, *BYTES)]
    letters = sorted({letter for sentence in SENTENCES[:10] for letter in sentence.replace(" ", "▁")})
    pieces += [(letter, -5.0) for letter in letters] + [("▁the", -3.0), ("▁sh", -3.5), ("ip", -3.6)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def _without_special_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer marks the byte tokens as special, which would hide them from decoding; models do not."""
    import json

    body = json.loads(tokenizer.to_str())
    body["added_tokens"] = [token for token in body["added_tokens"] if token["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(body))
