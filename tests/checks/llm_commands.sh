#!/usr/bin/env bash
# llm_commands.sh LLM MODEL: each command of the program llm, on the CPU, with the bundled model, as a user would type it: what it prints, and
# with which code it ends.
set -uo pipefail
llm=$1 model=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
checked=0 failures=0
# run COMMAND ARGUMENTS...: to $work/out and $work/err; its code in $code.
run() {
  local command=$1
  shift
  "$llm" "$command" -d cpu -m "$model" "$@" > "$work/out" 2> "$work/err" < /dev/null
  code=$?
}
expect() {  # expect WHAT COMMAND...
  local what=$1
  shift
  checked=$((checked + 1))
  "$@" && return
  echo "$what: code $code"
  head -c 1000 "$work/out" "$work/err"
  failures=$((failures + 1))
}
ends_with() { [[ $code -eq $1 ]]; }
prints() { grep -qE -- "$1" "$work/out"; }
says() { grep -qE -- "$1" "$work/err"; }
# One line on the error output that says why, and nothing on the other.
refuses() { ends_with 1 && [[ $(grep -c '^error: ' "$work/err") -eq 1 && ! -s $work/out ]] && says "$1"; }
same() { cmp -s "$1" "$2"; }

begin='Once upon a time'
run generate --temperature 0 -n 20 -q "$begin"
expect 'a story' ends_with 0
expect 'a story' prints '^Once upon a time, there was a little girl'
expect 'quiet' test ! -s "$work/err"
cp "$work/out" "$work/story"
echo -n "$begin" | "$llm" generate -d cpu -m "$model" --temperature 0 -n 20 -q - > "$work/piped"
expect 'a prompt from the standard input' same "$work/story" "$work/piped"
echo "$begin" | "$llm" generate -d cpu -m "$model" --temperature 0 -n 20 -q -p - > "$work/piped"
expect 'a prompt from the standard input, with a newline' same "$work/story" "$work/piped"
printf '{%% for m in messages %%}{{ m.content }}\n{%% endfor %%}' > "$work/template"
for command in 'generate -' 'generate -f -' 'perplexity -' "chat --template $work/template"; do
  read -ra arguments <<< "$command"
  "$llm" "${arguments[@]}" -d cpu -m "$model" -q < "$work" > "$work/out" 2> "$work/err"
  code=$?
  expect "$command of a directory" refuses 'cannot read the standard input'
done
"$llm" frob > "$work/out" 2> "$work/err"
code=$?
expect 'a command that is none' says 'frob: unknown command'
for option in --help --version 'generate --help'; do
  read -ra arguments <<< "$option"
  "$llm" "${arguments[@]}" > /dev/full 2> "$work/err"
  code=$?
  : > "$work/out"
  expect "$option to an output that is full" refuses 'cannot write to the standard output'
done
for more in '--lookup 4' '--page 16' '--chunk 2' '--threads 1' '-p' '--sinks 4 --context 64' '--cache fp32'; do
  read -ra arguments <<< "$more"
  run generate --temperature 0 -n 20 -q "${arguments[@]}" "$begin"
  expect "the same story with $more" same "$work/story" "$work/out"
done
for type in fp32 bf16 fp8 int8 int4; do
  run generate --temperature 0 -n 8 -q --weights $type "$begin"
  expect "weights of $type" prints '^Once upon a time, there was a'
done
for type in fp8 int8; do
  run perplexity -q --weights $type --inputs $type "$(dirname "${BASH_SOURCE[0]}")/../llm/stories.txt"
  expect "inputs of $type" prints '^perplexity [1-9][0-9]?\.'
done
for type in bf16 fp8 int8; do
  run generate --temperature 0 -n 8 -q --cache $type "$begin"
  expect "keys and values of $type" prints '^Once upon a time, there was a'
done
run generate --temperature 0 -n 20 -q --stop girl "$begin"
expect 'a string that ends the text' test "$(cat "$work/out")" = 'Once upon a time, there was a little '
run generate --seed 7 -n 30 -q "$begin"
expect 'a seed' prints "^$begin."
cp "$work/out" "$work/once"
run generate --seed 7 -n 30 -q "$begin"
expect 'the same seed, the same text' same "$work/once" "$work/out"
printf '%s\n%s\n' "$begin" "$begin" > "$work/two"
run generate --seed 7 --top-k 50 -n 12 --json -f "$work/two"
second=$(grep -o '"seed":8,"text":"[^"]*"' "$work/out")
run generate --seed 8 --top-k 50 -n 12 --json "$begin"
expect 'the seed of the second text' test -n "$second"
expect 'the text of the second seed' grep -qF -- "$second" "$work/out"
for seed in 99999999999999999999 18446744073709551616 -1 x; do
  run generate --seed $seed -n 1 -q "$begin"
  expect "the seed $seed" says 'not an integer from 0 to 2\^64 - 1'
done
run generate --seed 18446744073709551615 -n 1 -q "$begin"
expect 'the largest seed' ends_with 0
run generate --temperature 0 -n 8 --json "$begin"
expect 'JSON' prints '"decoded_tokens":8,.*"finish_reason":"length".*"prompt":"Once upon a time"'
printf '%s\nOne day\nTom and Sue\n' "$begin" > "$work/prompts"
run generate --temperature 0 -n 12 --json -f "$work/prompts"
cp "$work/out" "$work/together"
while read -r prompt; do
  run generate --temperature 0 -n 12 --json "$prompt"
  text=$(grep -o '"text":".*"' "$work/out")
  expect "$prompt, alone" test -n "$text"
  expect "$prompt, with others and alone" grep -qF -- "$text" "$work/together"
done < "$work/prompts"

run generate --temperature 0 -n 20 -q --no-echo "$begin"
expect 'without the prompt' prints '^, there was a little girl'
printf '\xef\xbb\xbf%s\r\n\r\nOne day\r\n' "$begin" | "$llm" generate -d cpu -m "$model" --temperature 0 -n 12 -q -f - > "$work/out"
expect 'prompts with other ends of lines' test "$(tr -cd '\r\357\273\277' < "$work/out" | wc -c)" -eq 0
expect 'prompts with other ends of lines' prints "^$begin, there"
run generate --temperature 0 -n 12 -q -f <(printf '%s\n' "$begin")
expect 'prompts from a pipe' prints "^$begin, there"
run generate --temperature 0 -n 8 -q --json '<|endoftext|>One'
expect 'a text that begins with BOS' prints '"prompt_ids":\[0,[1-9]'
for options in '--seed 1 --top-k 20' '--seed 2 --top-k 20' '--temperature 0 --top-k 20'; do
  read -ra arguments <<< "$options"
  run generate -n 30 -q "${arguments[@]}" "$begin"
  mv "$work/out" "$work/drawn ${options// /_}"
done
expect 'some of the likely tokens are drawn' test "$(cksum "$work"/drawn* | cut -d' ' -f1 | sort -u | wc -l)" -eq 3
"$llm" generate -d cpu -m "$model" -n 4 -q "$begin" > /dev/full 2> "$work/err"
code=$?
: > "$work/out"
expect 'an output that is full' refuses 'cannot write to the standard output'
endless=(timeout 60 "$llm" generate -d cpu -m "$model" --temperature 0 --ignore-eos --sinks 4 "$begin")
"${endless[@]}" > /dev/full 2> "$work/err"
code=$?
expect 'an endless text to an output that is full' refuses 'cannot write to the standard output'
(
  trap '' PIPE
  "${endless[@]}" 2> "$work/err" | true
  exit "${PIPESTATUS[0]}"
)
code=$?
expect 'an endless text to a pipe that is closed' refuses 'cannot write to the standard output'
run generate -f "$work/prompts" -p x
expect 'a prompt and prompts' test "$code" -ne 0
for wrong in '--temperature nan' '--weights foo' '--cache stored' '--inputs int8' '--inputs fp16' '--weights int8 --inputs fp8' \
             '--batch-invariant --weights int8 --inputs int8' '--batch-invariant --lookup 4'; do
  read -ra arguments <<< "$wrong"
  run generate -n 4 "${arguments[@]}" "$begin"
  expect "$wrong" refuses .
done
run generate -n 4 --stop '' "$begin"
expect 'an empty string to stop at' refuses 'stop: the string is empty'
run generate -n 4 --json --stop $'\xc3' "$begin"
expect 'a stop of half a character' refuses 'stop: .* is not UTF-8'
run generate -n 4 --context 5 'Once upon a time there was a little girl'
expect 'a prompt that is too long' refuses 'the prompt has [0-9]+ tokens, but the context is 5; try a larger --context'
printf '\nOne\n\nOnce upon a time there was a little girl\n' > "$work/long"
run generate -n 1 --context 5 -f "$work/long"
expect 'a prompt of several that is too long' refuses 'the prompt in line 4 has [0-9]+ tokens'
for wrong in '-n 5x' '--temperature warm' '--context 1e'; do
  read -ra arguments <<< "$wrong"
  run generate "${arguments[@]}" "$begin"
  expect "$wrong" says "${arguments[1]} is not a number"
done

# Ctrl-C ends the text, and the program with it.
rm "$work/out"
"$llm" generate -d cpu -m "$model" --temperature 0 --ignore-eos --sinks 4 -n 100000000 "$begin" > "$work/out" 2> "$work/err" &
process=$!
until [[ -s $work/out ]] || ! kill -0 $process 2> /dev/null; do sleep 0.02; done
kill -INT $process
wait $process
code=$?
expect 'Ctrl-C' ends_with 0
expect 'Ctrl-C' says 'tokens/s'

run info
expect 'info' prints '^memory .* MB weights .* MB KV cache \(512 tokens\), .* MB free$'
expect 'info' prints '^positions  512, RoPE default, theta 10000$'
expect 'info' prints '^layers     full attention, output head tied to the embedding$'
run info --json --weights int8
expect 'info in JSON' prints '"architecture":"llama".*"ropes":\[\{"factor":1\.0,"original":512\.0,.*"tied":true,"vocabulary":2048,"window":0'
run info --texts 8
expect 'info of several texts' prints 'KV cache \(8 x 512 tokens\)'
run info --context 1000000000
expect 'info of what does not fit' refuses 'does not fit into memory: .* KV cache .* free'

# With as much memory as `ulimit -v` says: what is planned has room. (A program with a sanitizer does not start so.)
yes "$begin" | head -n 1000 > "$work/many"
limited() {  # limited KILOBYTES COMMAND ARGUMENTS...
  (ulimit -v "$1" && exec "$llm" "$2" -d cpu -m "$model" "${@:3}" > "$work/out" 2> "$work/err")
  code=$?
}
if (ulimit -v 400000 && "$llm" --version) > /dev/null 2>&1; then
  for kilobytes in 160000 180000 200000 250000 400000; do
    limited $kilobytes generate -n 2 --json -f "$work/many"
    [[ $code -eq 1 ]] && grep -q '^error: \(the model does not fit\|.* the context is\)' "$work/err" && code=0
    expect "1000 texts in $kilobytes KB" ends_with 0
  done
  expect 'a context that has no room' says '^context reduced from 512 to [0-9]+ tokens to fit into memory; --context'
  expect 'a context that has no room' prints '"context":[0-9]{1,2},.*"positions":512'
  limited 200000 perplexity - < <(head -c 300000000 /dev/zero)
  expect 'a text that has no room' refuses 'out of memory; try a smaller --context'
fi

head -c 1500 "$(dirname "${BASH_SOURCE[0]}")/../llm/stories.txt" > "$work/text"
run perplexity -q --json "$work/text"
expect 'perplexity' prints '"bits_per_byte":(0\.[0-9]+|1\.0[0-9]*),.*"device":"CPU.*"scored_tokens":[1-9][0-9]+'
run perplexity -q --context 64 --stride 16 "$work/text"
expect 'perplexity of windows' prints 'context 64, stride 16'
run perplexity -q --context 64 --halves "$work/text"
expect 'perplexity of second halves' prints 'scored [0-9]+ tokens .* in second halves, context 64, stride 64, BOS in each window'
run perplexity -q --context 1 "$work/text"
expect 'perplexity of windows of one token' refuses 'needs at least 2'
run perplexity -q --context 2 --halves "$work/text"
expect 'perplexity of halves of two tokens' refuses 'needs at least 3'
"$llm" perplexity -d cpu -m "$model" -q --context 64 --stride 16 - < "$work/text" > "$work/out" 2> "$work/err"
expect 'perplexity of the standard input' prints 'context 64, stride 16'
run perplexity -q --context 64 --stride 16 <(cat "$work/text")
expect 'perplexity of a pipe' prints 'context 64, stride 16'
echo '<|endoftext|>' > "$work/special"
run perplexity -q --json "$work/special"
expect 'perplexity of what looks like a special token' prints '"scored_tokens":([3-9]|[1-9][0-9])'
run perplexity "$work/none"
expect 'perplexity of no file' refuses 'none'

# So small a model does not find it; but it has to be asked, and one that does not find it ends with 1.
run passkey --length 5000 -q
expect 'passkey beyond the context' refuses 'try a larger --context'
run passkey --length 150 --seed 3 -q --json
expect 'passkey in JSON' prints '"context":512,.*"device":"CPU.*"positions":512'
run passkey --length 450 -q --json
expect 'passkey of a length' prints '"tokens":4(3[0-9]|4[0-9]|50)'
run passkey --length 150 --seed 3 -q
expect 'passkey' ends_with 1
expect 'passkey' prints '^not found: pass key [0-9]+, prompt [0-9]+ tokens'
for depth in nan 1.5 -0.5; do
  run passkey --length 150 --depth $depth -q
  expect "passkey at the depth $depth" refuses 'depth: .* is not between 0 and 1'
done
cp -r "$model" "$work/of_nan"
size=$(stat -c %s "$work/of_nan/model.safetensors")
head -c 256 /dev/zero | tr '\0' '\377' | dd of="$work/of_nan/model.safetensors" bs=1 seek=$((size - 256)) conv=notrunc status=none
"$llm" bench -d cpu -m "$work/of_nan" --steps 4 --json -q > "$work/out" 2> "$work/err"
code=$?
expect 'bench of logits that are NaN' refuses 'are not finite: the model has overflowed'
run generate -p Once -n 1 --seed 1
expect 'the speed of the tokens behind the first, if there are any' says 'output: 1 tokens; '
run bench --steps 4 --contexts 0,100 --prompt-tokens 64 --texts 2 --json
expect 'bench' prints '"context":100,.*"share_of_reading":[0-9.]+,.*"texts":2'
sed -E 's/"tokens_per_s":[0-9.]+/"tokens_per_s":1e-3/g' "$work/out" > "$work/slow"
sed -E 's/"tokens_per_s":[0-9.]+/"tokens_per_s":1e9/g' "$work/out" > "$work/fast"
run bench --steps 4 --contexts 100 --texts 2 --compare "$work/slow"
expect 'faster than before' ends_with 0
expect 'faster than before' prints '^decode at context 100: [0-9.]+x the earlier speed'
run bench --steps 4 --contexts 100 --texts 2 --compare "$work/fast"
expect 'slower than before' ends_with 1
run bench --steps 4 --contexts 100 --compare "$work/fast"
expect 'another number of texts' says 'texts differs: 2 in the file, 1 now'
for more in '--cache int8' '--weights int8'; do
  read -ra arguments <<< "$more"
  run bench --steps 4 --contexts 100 --texts 2 "${arguments[@]}" --compare "$work/fast"
  read -ra name <<< "${more#--}"
  expect "$more, compared" refuses "$name differs"
done
run bench --steps 4 --contexts 100 --texts 2 --top-k 40 --json
expect 'bench that draws' prints '"draws":true'
run bench --steps 4 --contexts 100 --texts 2 --temperature 0.8 --compare "$work/fast"
expect 'a run that did not draw' says 'one run samples'
run bench --steps 4 --contexts 50 --texts 2 --compare "$work/fast"
expect 'a context that was not measured' says 'the file has no result for decode at context 50'
run bench --steps 4 --context 64 --contexts 3000
expect 'bench with too small a context' refuses 'at least 3021 tokens'

printf '%s\n/save %s\n/reset\nOne day\n' "$begin" "$work/saved" > "$work/lines"
"$llm" chat -d cpu -m "$model" --template "$work/template" --temperature 0 -n 12 < "$work/lines" > "$work/out" 2> "$work/err"
code=$?
expect 'chat' ends_with 0
expect 'chat' test "$(wc -l < "$work/out")" -ge 2
printf '/\xff\n/%s\nOne day\n/quit\n' "$(printf 'x\xc3\xa9%.0s' {1..60})" > "$work/lines"
"$llm" chat -d cpu -m "$model" --template "$work/template" --json -n 4 < "$work/lines" > "$work/out" 2> "$work/err"
expect 'a chat with commands of any bytes' test "$(grep -c '"error"' "$work/out")" -eq 2
expect 'a chat with commands of any bytes' prints '"device":"CPU.*"finish_reason":.*"seed":[0-9]'
printf '%s\n' "$begin" "$begin" > "$work/lines"
for more in '' '--json -n 4'; do
  timeout 60 "$llm" chat -d cpu -m "$model" --template "$work/template" --ignore-eos --sinks 4 $more < "$work/lines" > /dev/full 2> "$work/err"
  code=$?
  : > "$work/out"
  expect "a chat with an output that is full $more" refuses 'cannot write to the standard output'
done
expect 'a saved chat' grep -q '"role": "assistant"' "$work/saved"
# A file stays as it is where the new one cannot be written, and keeps its permissions; what is no file is written to.
chmod 600 "$work/saved"
ln -s saved "$work/link"
for at in link saved none/saved; do printf '/save %s\n' "$work/$at"; done > "$work/lines"
printf '/save\n/load\n/save /dev/full\n' >> "$work/lines"
"$llm" chat -d cpu -m "$model" --template "$work/template" -s 'system' < "$work/lines" > "$work/out" 2> "$work/err"
expect 'saving without a file' says '^error: /save: no file name; usage: /save FILE$'
expect 'loading without a file' says '^error: /load: no file name; usage: /load FILE$'
expect 'saving to nowhere' says '^error: cannot write .*none/saved$'
expect 'saving to what is full' says '^error: cannot write /dev/full$'
expect 'a chat saved again' grep -q '"role": "system"' "$work/saved"
expect 'a chat saved again' test "$(stat -c %a "$work/saved")" = 600 -a -L "$work/link" -a -c /dev/full
(ulimit -f 0; trap '' XFSZ; exec "$llm" chat -d cpu -m "$model" --template "$work/template") < <(echo "/save $work/saved") 2>&1 | cat > "$work/err"
expect 'saving without room' says '^error: cannot write .*/saved$'
expect 'a chat that could not be saved' test -s "$work/saved" -a "$(find "$work" -name 'saved*' | wc -l)" -eq 1
printf '{%% if mood is defined %%}{{ raise_exception("in a mood of " + mood) }}{%% endif %%}{{ messages[0].content }}' > "$work/moody"
printf '%s\n' "$begin" > "$work/lines"
"$llm" chat -d cpu -m "$model" --template "$work/moody" --template-set mood=calm -n 1 < "$work/lines" > "$work/out" 2> "$work/err"
expect 'a variable of a template' says 'in a mood of calm'
run chat --template "$work/moody" --template-set mood
expect 'a variable without a value' refuses 'template-set: mood is not NAME=VALUE'
run chat < /dev/null
expect 'chat without a template' refuses 'no chat template; set one with --template'

# The model with other files beside it.
mkdir "$work/beside"
ln -s "$(realpath "$model")"/* "$work/beside"
model=$work/beside
beside() {  # beside FILE TEXT: that file of the model, as long as there is no other one
  rm -f "$model/$1"
  echo "$2" > "$model/$1"
}
beside tokenizer_config.json '{"eos_token": "<none>"}'
run generate --temperature 0 -n 2 "$begin"
expect 'an eos_token that is none' says '^tokenizer_config.json: eos_token: <none> is not in the vocabulary$'
beside tokenizer_config.json '{"eos_token": "<|endoftext|>"}'
beside generation_config.json '{"do_sample": false, "no_repeat_ngram_size": 3, "num_beams": 1, "use_cache": true, "suppress_tokens": [5]}'
run generate -n 2 "$begin"
expect 'fields of generation_config.json that nobody reads' says '^generation_config.json: ignored: no_repeat_ngram_size, suppress_tokens$'
beside generation_config.json '{"max_new_tokens": 1, "presence_penalty": 1, "no_repeat_ngram_size": 1, "top_n_sigma": 1.0, "forced_bos_token_id": 0,
  "length_penalty": 1.0, "num_beams": 1, "typical_p": 1, "eta_cutoff": 0.0, "min_length": 0, "early_stopping": false, "bad_words_ids": null}'
run generate -n 2 "$begin"
expect 'such fields whose values are 0 or 1' says ': ignored: forced_bos_token_id, max_new_tokens, no_repeat_ngram_size, presence_penalty, top_n_sigma$'
# A tokenizer that ends texts as well, or only that.
for begins in true false; do
  beside tokenizer_config.json '{"tokenizer_class": "LlamaTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
    "add_bos_token": '$begins', "add_eos_token": true}'
  run perplexity -q --context 64 --halves "$work/text"
  if $begins; then bos='BOS in each window'; else bos='no BOS'; fi
  expect "perplexity with EOS, $bos" prints "stride 64, $bos"
done
beside tokenizer_config.json '{"tokenizer_class": "LlamaTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "add_eos_token": true}'
run generate --temperature 0 -n 2 -q --json '<|endoftext|>One'
expect 'a text that begins with BOS and ends with EOS' prints '"prompt_ids":\[0,[1-9][0-9,]*,0\]'

# The model as one with windows and a scaled rotation.
beside config.json "$(sed -E 's/"model_type": "llama"/"model_type": "mistral", "sliding_window": 100, "wobble": null, "rope_scaling": {"rope_type": "yarn", "factor": 4}/' \
  "$work/beside/config.json")"
run info
expect 'info of windows' prints '^layers     sliding window of 100 tokens in 5 of 5 layers, output head tied to the embedding$'
expect 'info of a scaled rotation' prints ', RoPE yarn, theta 10000, factor 4, original context 512$'
expect 'fields that are null, or off' test "$(grep -c '^config.json' "$work/err")" -eq 0

for template in '' '"chat_template": " "' '"chat_template": 5'; do
  beside tokenizer_config.json "{$template}"
  run chat
  expect "the template $template" refuses "$(case $template in *5) echo 'chat_template: not a string' ;; *\ \") echo 'template is empty' ;; *) echo 'no chat template' ;; esac)"
done
rm "$model/model.safetensors" "$model/tokenizer_config.json"
run generate x
expect 'no weights' refuses 'no model.safetensors or model.safetensors.index.json$'
for shard in model-00001-of-00002 weights; do
  : > "$model/$shard.safetensors"
  run generate x
  expect "$shard.safetensors alone" refuses 'model.safetensors.index.json; found model-00001-of-00002.safetensors'
done

model=$work/nothing
run generate x
expect 'no model' refuses 'nothing/config.json'
run generate --temperature -1 x
expect 'an option out of its range' test "$code" -ne 0
expect 'an option out of its range' says 'temperature: .*-1 not in range'

echo "$checked checked, $failures failures"
[[ $failures -eq 0 ]]
