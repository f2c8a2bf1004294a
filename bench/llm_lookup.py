#!/usr/bin/env python3
"""What prompt lookup decoding (`llm generate --lookup`) gains where the output repeats itself, and costs where it does not.

    bench/llm_lookup.py --llm build/examples/llm/llm [--device gpu|cpu] [--models DIRECTORY] [--out FILE] [MODEL ...]

The greedy output of models with random weights whose layers add nothing (examples/llm/random_model.py) soon repeats itself, so that
nearly all draft tokens are accepted; sampled output does so only if the output head is tied to the embedding, and else there is nothing
to draft. The bundled model's story about what the prompt says lies between. Writes llm_lookup.json to bench/results/<gpu>.
"""
from llm import arguments, model_directory, run, save

PROMPT = "Once upon a time there was a little girl who lived near a forest with her mother. "
TEXTS = {"most likely tokens": ["--temperature", "0"], "drawn tokens": ["--temperature", "1", "--top-k", "0", "--top-p", "1"]}
GUESSES, TOKENS = (0, 3, 7, 15), 256


def main():
    parser = arguments(__doc__)
    parser.add_argument("cases", nargs="*", default=["mistral-7b-repeating", "llama-3.2-1b-repeating", "bundled"], metavar="MODEL")
    given = parser.parse_args()

    results, failed, device = [], [], None
    print(f"{'model':22} {'text':20} {'drafts':>7} {'tokens/s':>9} {'tok/step':>8} {'us/step':>10}  same text")
    for model in given.cases:
        for text, options in TEXTS.items():
            alone = None
            for guesses in GUESSES:
                out = run(given, model, ["generate", "--model", model_directory(model, given.models), "--device", given.device, "--context", "1024", "-p", PROMPT,
                                         "-n", str(TOKENS), "--ignore-eos", "--seed", "1", "--lookup", str(guesses), "--json", *options], failed)
                if out is None:
                    continue
                device, ids, steps, seconds = out["device"], out["texts"][0]["ids"], out["steps"], out["decode_seconds"]
                if guesses == 0:
                    alone = ids
                one = {"model": model, "text": text, "guesses": guesses, "tokens": len(ids), "steps": steps, "seconds": seconds,
                       "same_text": ids == alone}
                results.append(one)
                print(f"{model:22} {text:20} {guesses:7} {(len(ids) - 1) / seconds:9.1f} {(len(ids) - 1) / steps:8.2f} "
                      f"{1e6 * seconds / steps:10.1f}  {one['same_text']}", flush=True)
    save(given, "llm_lookup", device, results, failed)


if __name__ == "__main__":
    main()
