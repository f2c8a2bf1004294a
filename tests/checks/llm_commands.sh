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
for more in '--lookup 4' '--page 16' '--chunk 2' '--threads 1' '-p' '--sinks 4 --context 64' '--cache fp32'; do
  read -ra arguments <<< "$more"
  run generate --temperature 0 -n 20 -q "${arguments[@]}" "$begin"
  expect "the same story with $more" same "$work/story" "$work/out"
done
for type in fp32 bf16 fp8 int8 int4; do
  run generate --temperature 0 -n 8 -q --weights $type "$begin"
  expect "weights of $type" prints '^Once upon a time, there was a'
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
expect 'info' prints '^memory .* of weights .* of keys and values for 512 tokens.* are free'
run info --json --weights int8
expect 'info in JSON' prints '"architecture":"llama".*"vocabulary":2048'
run info --texts 8
expect 'info of several texts' prints 'for 512 tokens of each of 8 texts'
run info --context 1000000000
expect 'info of what does not fit' refuses 'does not fit: .* of keys and values .* are free'

head -c 1500 "$(dirname "${BASH_SOURCE[0]}")/../llm/stories.txt" > "$work/text"
run perplexity -q --json "$work/text"
expect 'perplexity' prints '"bits_per_byte":(0\.[0-9]+|1\.0[0-9]*),.*"scored_tokens":[1-9][0-9]+'
run perplexity -q --context 64 --stride 16 "$work/text"
expect 'perplexity of windows' prints 'context 64, stride 16'
run perplexity "$work/none"
expect 'perplexity of no file' refuses 'none'

# So small a model does not find it; but it has to be asked, and one that does not find it ends with 1.
run passkey --length 150 --seed 3 -q
expect 'passkey' ends_with 1
expect 'passkey' prints '^not found: [0-9]+ behind [0-9]+ tokens'
run bench --steps 4 --contexts 0,100 --prompt-tokens 64 --texts 2 --json
expect 'bench' prints '"context":100,.*"share_of_reading":[0-9.]+,.*"texts":2'

printf '{%% for m in messages %%}{{ m.content }}\n{%% endfor %%}' > "$work/template"
printf '%s\n/save %s\n/reset\nOne day\n' "$begin" "$work/saved" > "$work/lines"
"$llm" chat -d cpu -m "$model" --template "$work/template" --temperature 0 -n 12 < "$work/lines" > "$work/out" 2> "$work/err"
code=$?
expect 'chat' ends_with 0
expect 'chat' test "$(wc -l < "$work/out")" -ge 2
expect 'a saved chat' grep -q '"role": "assistant"' "$work/saved"
run chat < /dev/null
expect 'chat without a template' refuses 'no chat template: --template'

model=$work/nothing
run generate x
expect 'no model' refuses 'nothing/config.json'
run generate --temperature -1 x
expect 'an option out of its range' test "$code" -ne 0
expect 'an option out of its range' says 'temperature: .*-1 not in range'

echo "$checked checked, $failures failures"
[[ $failures -eq 0 ]]
