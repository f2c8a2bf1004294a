#!/usr/bin/env python3
"""Makes tokenizers.json: small tokenizers of every kind, and what the original libraries make of difficult texts.

    python3 examples/llm/golden/make_tokenizers.py examples/llm/golden
    python3 examples/llm/golden/make_tokenizers.py examples/llm/golden FOLDER

Needs tokenizers and sentencepiece. The tokenizers are trained on the texts themselves, with the rules of GPT-2, Llama 3, Qwen 2, SmolLM,
and of Llama 2 and Mistral in both of their forms.

With FOLDER makes vocabularies.json instead: hashes of what the libraries make of texts with vocabularies that models are distributed
with, which are not part of this project: gpt2/vocab.json and merges.txt, llama2/tokenizer.model, mistral/tokenizer.model.v1 and .v3.
LLM_VOCABULARIES=FOLDER lets the tests compare.
"""
import base64
import io
import json
import os
import random
import sys

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

TEXTS = [
    "", " ", "  ", "Hello world", " Hello world", "Hello  world ", "hello\nworld", "a\r\n\r\n  b\n\n\nc", "\t\ttabs\tand spaces   \n", "It's they'RE we'Ll I'D o'clock 'twas 's 'S",
    "1234567890 1 22 333 4444 3.14159 1,000,000 ½ ⅷ ٣٤٥ १२३", "x=y+z; if (a[0] != b->c) { return -1; } // ok\n", "!!!???...---===", "日本語のテキスト、そして漢字。", "Ελληνικά и русский, עברית العربية हिन्दी ไทย",
    "émigré e\u0301migre\u0301 Å A\u030a ﬁ ﬀ", "😀😃 👨‍👩‍👧‍👦 🇩🇪 ☃\ufe0f", "zero\u200bwidth\u200djoin \u00a0nbsp\u3000wide \u180emongol \u2028line \x85next", "ſ 'ſ ſharp", "\u0000nul \u0007bell \x1b[0m", "\ufffd \ufeffbom",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "     lots      of       spaces        ", "\n\n\n\n\n", " \n \n ", "CamelCaseWordsAndSNAKE_CASE and kebab-case", "http://example.com/a?b=c&d=%20#e", "don't, can't, won't",
    "The quick brown fox jumps over the lazy dog. The dog did not mind.", "한국어 텍스트", "𝒳𝓎 𐍈 \U0010fffd", "<0x41> ▁ ▁▁under _ __", "mixed日本English語123abc",
]
ADDED = ["<|end|>", "<|im_start|>", "<tool>", "[PAD]", "extra"]


def corpus():
    return [text for text in TEXTS if text] * 2 + ["the cat and the dog went to the house and then to the other house"] * 4


def trained(normalizer, pre_tokenizer, decoder, pieces=320, **model):
    fallback = model.get("byte_fallback", False)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if fallback else None, **model))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] if fallback else []
    alphabet = [] if fallback else pre_tokenizers.ByteLevel.alphabet()
    texts = [text for text in corpus() if not fallback or text.isascii()]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=pieces + len(special), special_tokens=special, initial_alphabet=alphabet, show_progress=False))
    if fallback:  # bytes are pieces, not added tokens
        made = json.loads(tokenizer.to_str())
        made["added_tokens"] = [token for token in made["added_tokens"] if not token["content"].startswith("<0x")]
        tokenizer = Tokenizer.from_str(json.dumps(made))
    return tokenizer


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def begins(tokenizer, token):
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))])


def make_all():
    byte_level = decoders.ByteLevel()
    pieces = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    unstripped = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    out = {
        "gpt2": trained(None, pre_tokenizers.ByteLevel(add_prefix_space=False), byte_level),
        "gpt2_prefix": trained(None, pre_tokenizers.ByteLevel(add_prefix_space=True), byte_level),
        "llama3": trained(None, split(LLAMA3), byte_level, ignore_merges=True),
        "qwen2": trained(normalizers.NFC(), split(QWEN2), byte_level),
        "smollm": trained(None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]), byte_level),
        "llama2": trained(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None, pieces, byte_fallback=True, fuse_unk=True),
        "metaspace": trained(None, pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False), pieces, byte_fallback=True, fuse_unk=True),
        "gemma": trained(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), unstripped, byte_fallback=True, fuse_unk=True),
    }
    for name, tokenizer in out.items():
        tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False), AddedToken("<|im_start|>", special=True, normalized=False, rstrip=True),
                                      AddedToken("[PAD]", special=True, normalized=False, lstrip=True)])
        tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False), AddedToken("extra", special=False, normalized=True, single_word=True)])
        begins(tokenizer, "<|end|>" if name != "llama2" else "<s>")
    return out


def texts_with_added():
    around = ["", " ", "\n", "x", "  "]
    return [a + token + b for token in ADDED for a in around for b in around] + ["a<|end|><|end|>b", "extras extra,extra extra_ <tool>extra<tool>", "<|im_start|>\n\n user [PAD]  [PAD]"]


def random_texts(count=60):
    rng = random.Random(1)
    pools = ["abcdefghij ABC'", " \t\n\r\u00a0\u3000", "0123456789", ".,;:!?-_()[]{}<>|/\\\"'`~@#$%^&*+=", "äöüßéèñçåøÆœ", "日本語漢字かなカナ한국어", "абвгдеЖЗИ αβγδ", "\u0301\u0308\u0327\u20dd", "😀🚀☃🇩🇪👩\u200d\u2764\ufe0f", "𝒳𐍈\U0001f9ff"]
    return ["".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 40))) for _ in range(count)]


# The code points of random strings. All were assigned long ago, so that the Unicode version of a library does not matter.
POOLS = [[0x20, 0x7e], [0x61, 0x7a], [0x20, 0x20], [0x27, 0x27], [0x09, 0x0d], [0x30, 0x39], [0x21, 0x2f], [0xa0, 0xff], [0x100, 0x17f], [0x300, 0x33f], [0x391, 0x3a1], [0x410, 0x44f], [0x5d0, 0x5ea], [0x621, 0x63a],
         [0x905, 0x939], [0xe01, 0xe2e], [0xac00, 0xd7a3], [0x1100, 0x1112], [0x1161, 0x1175], [0x3041, 0x3096], [0x4e00, 0x9fa5], [0x2000, 0x200f], [0x2028, 0x202f], [0x2600, 0x26ff], [0x2160, 0x217f], [0xff01, 0xff5e],
         [0x1f600, 0x1f640], [0x1d400, 0x1d454]]
STRINGS, BLOCK = 100000, 1000


def drawn():
    """Random strings, which the tests draw as well (splitmix64)."""
    mask, state = 2**64 - 1, 0

    def bits():
        nonlocal state
        state = x = (state + 0x9e3779b97f4a7c15) & mask
        x = ((x ^ (x >> 30)) * 0xbf58476d1ce4e5b9) & mask
        x = ((x ^ (x >> 27)) * 0x94d049bb133111eb) & mask
        return x ^ (x >> 31)

    out = []
    for _ in range(STRINGS):
        text = ""
        for _ in range(bits() % 24 + 1):
            low, high = POOLS[bits() % len(POOLS)]
            text += chr(low + bits() % (high - low + 1))
        out.append(text)
    return out


def hashes(lists):
    """A number for each block of lists of ids: FNV-1a of the ids and of -1 behind each list."""
    out = []
    for begin in range(0, len(lists), BLOCK):
        h = 14695981039346656037
        for ids in lists[begin:begin + BLOCK]:
            for value in [*ids, 2**32 - 1]:
                h = (h ^ value) * 1099511628211 & (2**64 - 1)
        out.append(f"{h:016x}")
    return out


def of_vocabularies(folder, golden):
    with open(os.path.join(golden, "../../../tests/llm/stories.txt")) as file:
        stories = file.read()
    texts, strings = [text for text in TEXTS + random_texts() if "\0" not in text], drawn()

    def made(encode):
        return {"texts": hashes([encode(text) for text in [*texts, stories]])[0], "drawn": hashes([encode(text) for text in strings])}

    gpt2 = Tokenizer(models.BPE.from_file(f"{folder}/gpt2/vocab.json", f"{folder}/gpt2/merges.txt"))
    gpt2.pre_tokenizer, gpt2.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    out = {"gpt2": made(lambda text: gpt2.encode(text).ids)}
    for name in ("llama2/tokenizer.model", "mistral/tokenizer.model.v1", "mistral/tokenizer.model.v3"):
        model = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/{name}")
        out[name] = made(lambda text: [model.bos_id()] + model.encode(text))
    return {"texts": texts, "vocabularies": out}


def of_small_tokenizers():
    strings = drawn()
    everything = TEXTS + texts_with_added() + random_texts()
    result = {"texts": everything, "drawn": {"pools": POOLS, "block": BLOCK}, "tokenizers": {}}
    for name, tokenizer in make_all().items():
        ids = [tokenizer.encode(text).ids for text in everything]
        result["tokenizers"][name] = {"json": json.loads(tokenizer.to_str()), "ids": ids, "drawn": hashes([x.ids for x in tokenizer.encode_batch(strings)]), "decoded": [tokenizer.decode(x, skip_special_tokens=True) for x in ids]}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in corpus() if "\0" not in text]), model_writer=model, vocab_size=420, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, character_coverage=0.98, user_defined_symbols=["<tool>"], minloglevel=2)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    plain = [text for text in TEXTS + random_texts() if "\0" not in text]
    result["sentencepiece"] = {"model": base64.b64encode(model.getvalue()).decode(), "texts": plain, "ids": [[oracle.bos_id()] + oracle.encode(text) for text in plain],
                               "drawn": hashes([[oracle.bos_id()] + oracle.encode(text) for text in strings])}
    return result


def main():
    golden, folder = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    result = of_small_tokenizers() if folder is None else of_vocabularies(folder, golden)
    made_with = f"tokenizers {tokenizers.__version__}, sentencepiece {sentencepiece.__version__}"
    with open(os.path.join(golden, "tokenizers.json" if folder is None else "vocabularies.json"), "w") as file:
        json.dump({"made_with": made_with, **result}, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
