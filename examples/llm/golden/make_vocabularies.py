#!/usr/bin/env python3
"""Makes vocabularies.json: hashes of what the original libraries make of texts with vocabularies that models are distributed with.

    python3 examples/llm/golden/make_vocabularies.py FOLDER examples/llm/golden

FOLDER has gpt2/vocab.json and merges.txt, llama2/tokenizer.model, mistral/tokenizer.model.v1 and .v3, which are not part of this
project. LLM_VOCABULARIES=FOLDER lets the tests compare. Needs tokenizers and sentencepiece.
"""
import json
import os
import sys

import sentencepiece
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from make_tokenizers import TEXTS, drawn, hashes, random_texts


def main():
    folder, out = sys.argv[1:]
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "../../../tests/llm/stories.txt")) as file:
        stories = file.read()
    texts = [text for text in TEXTS + random_texts() if "\0" not in text] + [stories]
    strings = drawn()

    def made(encode):
        return {"texts": hashes([encode(text) for text in texts])[0], "drawn": hashes([encode(text) for text in strings])}

    gpt2 = Tokenizer(models.BPE.from_file(f"{folder}/gpt2/vocab.json", f"{folder}/gpt2/merges.txt"))
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    gpt2.decoder = decoders.ByteLevel()
    result = {"made_with": f"tokenizers {tokenizers.__version__}, sentencepiece {sentencepiece.__version__}", "texts": texts[:-1],
              "vocabularies": {"gpt2": made(lambda text: gpt2.encode(text).ids)}}
    for name in ("llama2/tokenizer.model", "mistral/tokenizer.model.v1", "mistral/tokenizer.model.v3"):
        model = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/{name}")
        result["vocabularies"][name] = made(lambda text: [model.bos_id()] + model.encode(text))
    with open(os.path.join(out, "vocabularies.json"), "w") as file:
        json.dump(result, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
