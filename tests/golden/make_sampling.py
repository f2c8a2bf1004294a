#!/usr/bin/env python3
"""What Hugging Face's logits processors keep of a few rows, in the order in which generate() applies them, as sampling.h beside this file.

    pip install torch transformers
    python3 tests/golden/make_sampling.py > tests/golden/sampling.h

Logits are multiples of 1/1024, so that the text holds them exactly. Rows in which a sum of probabilities comes so close to a limit
that rounding decides are left out.
"""
import random

import torch
import transformers
from transformers import (LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor,
                          SuppressTokensLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper)

VOCABULARY = 120
# temperature, top_k, top_p, min_p, typical, repetition; 0 or 1: without
RULES = [
    (1.0, 0, 1.0, 0.0, 1.0, 1.0), (0.7, 20, 1.0, 0.0, 1.0, 1.0), (1.0, 0, 0.9, 0.0, 1.0, 1.0), (1.6, 0, 0.5, 0.0, 1.0, 1.0),
    (1.0, 0, 1.0, 0.05, 1.0, 1.0), (1.3, 0, 1.0, 0.2, 1.0, 1.0), (1.0, 0, 1.0, 0.0, 0.5, 1.0), (0.8, 0, 1.0, 0.0, 0.9, 1.0),
    (0.8, 50, 0.9, 0.0, 1.0, 1.0), (1.0, 0, 1.0, 0.0, 1.0, 1.3), (1.2, 40, 0.95, 0.01, 0.8, 1.2), (2.0, 100, 0.99, 0.001, 0.95, 0.8),
]


def processors(rule, bias, hidden):
    temperature, top_k, top_p, min_p, typical, repetition = rule
    chain = LogitsProcessorList()
    if bias:
        chain.append(SequenceBiasLogitsProcessor(sequence_bias=[[[token], value] for token, value in bias.items()]))
    if repetition != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(penalty=repetition))
    if hidden:
        chain.append(SuppressTokensLogitsProcessor(hidden))
    if temperature != 1.0:
        chain.append(TemperatureLogitsWarper(temperature))
    if top_k > 0:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        chain.append(MinPLogitsWarper(min_p))
    if typical < 1.0:
        chain.append(TypicalLogitsWarper(typical))
    return chain


def kept(rule, logits, previous, bias, hidden, dtype):
    scores = torch.tensor([logits], dtype=dtype) / 1024
    ids = torch.tensor([previous])
    return [i for i, x in enumerate(processors(rule, bias, hidden)(ids, scores)[0].tolist()) if x > float("-inf")]


def main():
    draw = random.Random(1)
    print("// Made by make_sampling.py with transformers %s: what Hugging Face's logits processors keep." % transformers.__version__)
    print("#pragma once\n\n#include <vector>\n\nnamespace test {\n")
    print("struct GoldenRow {\n  float temperature;\n  int top_k;\n  float top_p, min_p, typical, repetition;")
    print("  std::vector<int> logits, previous, biased, hidden, kept;  // logits and biases in units of 1/1024; biased: token, bias, ...\n};\n")
    print("inline std::vector<GoldenRow> golden_rows() {\n  return {")
    for number, rule in enumerate(RULES):
        for extras in (False, True):
            while True:
                width = draw.choice([1.5, 3.0])
                logits = random.Random(draw.random())
                logits = [round(1024 * width * logits.gauss(0, 1)) for _ in range(VOCABULARY)]
                previous = [draw.randrange(VOCABULARY) for _ in range(9)]
                bias = {draw.randrange(VOCABULARY): draw.randrange(-2048, 4096) / 1024 for _ in range(6)} if extras else {}
                hidden = sorted(draw.sample(range(VOCABULARY), 15)) if extras else []
                single = kept(rule, logits, previous, bias, hidden, torch.float32)
                if single == kept(rule, logits, previous, bias, hidden, torch.float64) and len(set(logits)) == VOCABULARY:
                    break
            numbers = lambda values: "{" + ", ".join(str(v) for v in values) + "}"
            flat = [v for token, value in bias.items() for v in (token, round(value * 1024))]
            print("      {%s,\n       %s,\n       %s, %s, %s,\n       %s}," % (
                ", ".join(str(v) + ("f" if isinstance(v, float) else "") for v in rule), numbers(logits), numbers(previous), numbers(flat), numbers(hidden), numbers(single)))
    print("  };\n}\n\n}  // namespace test")


if __name__ == "__main__":
    main()
