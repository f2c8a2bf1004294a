// llm: runs language models from Hugging Face directories. Text or JSON goes to stdout, everything else to stderr.
#include <kernels/core/macros.h>
#include <CLI/CLI.hpp>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <new>

#include "chat.h"
#include "commands.h"

namespace {

using llm::Error;
using llm::Settings;

// Throws if the standard input cannot be read, because it is a directory, for example.
void check_input() {
  if (std::ferror(stdin) != 0) throw Error("cannot read the standard input");
}

// The contents of a file; "-" is the standard input.
std::string text_of(const std::string& file) {
  if (file != "-") return llm::read_file(file);
  const std::string text(std::istreambuf_iterator<char>(std::cin), {});
  check_input();
  return text;
}

// The prompts in the lines of a file, with any line ends; or without a file the one prompt.
llm::Prompts prompts_of(const std::string& prompt, const std::string& file) {
  if (file.empty()) {
    std::string one = prompt == "-" ? text_of(prompt) : prompt;
    if (prompt == "-" && !one.empty() && one.back() == '\n') one.pop_back();  // most programs end their output with one
    return {{one}, {}};
  }
  std::string text = text_of(file);
  if (text.compare(0, 3, "\xef\xbb\xbf") == 0) text.erase(0, 3);  // a byte order mark
  llm::Prompts out;
  std::istringstream lines(text);
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    number += 1;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!line.empty()) out.texts.push_back(line), out.lines.push_back(number);
  }
  const size_t count = out.texts.size();
  if (count == 0) throw Error(file, ": no prompts");
  if (int64_t(count) > llm::kMostTexts) throw Error(file, ": ", count, " prompts, at most ", llm::kMostTexts);
  return out;
}

// Adds an option that is a number from `least` to `most`.
template <class T, class To>
CLI::Option* number(CLI::App& command, const char* name, To& to, T least, T most, const char* what) {
  const CLI::Range range(least, most);
  const auto check = [range](std::string& text) {  // CLI::Range alone would say that "5x" is not in range
    double x = 0;
    return CLI::detail::lexical_cast(text, x) ? range(text) : llm::shown(text) + " is not a number";
  };
  return command.add_option(name, to, what)->check(CLI::Validator(check, range.get_description()));
}

void add_model(CLI::App& command, Settings& s) {
  command.add_option("-m,--model", s.directory, "directory of the model, in Hugging Face format")->required();
  command.add_option("-d,--device", s.device, "auto (the GPU if there is one), cpu or gpu");
  number(command, "-t,--threads", s.threads, 0, 1024, "CPU threads; 0: one per available core");
  command.add_option("-w,--weights", s.weights,
                     "type of the weights, converted or quantized at load: stored (as in the file, or the nearest "
                     "supported type), fp32, fp16, bf16, fp8, int8 or int4; embeddings and output head keep 16 bits or "
                     "more");
  command.add_option("--inputs", s.inputs,
                     "type of the activations in large matrix products (long prompts, large batches): auto (not "
                     "quantized), or int8 or fp8 with --weights of the same type: faster on GPUs with sm_90, slightly "
                     "less accurate");
  command.add_option("--cache", s.cache,
                     "type of the KV cache: auto (that of the embedding), fp32, fp16, bf16, fp8 or int8");
  number(command, "-c,--context", s.context, 0, 1 << 30,
         "context: maximum tokens of a sequence, prompt included; 0: what the model was trained for, or less if memory "
         "is short");
  number(command, "--page", s.page, 0, 1 << 30, "tokens per page of the KV cache; 0: one page per sequence");
  number(command, "--chunk", s.chunk, 0, 1 << 20,
         "prompt tokens computed at a time (chunked prefill); 0: 2048 on a GPU, 512 on the CPU");
  command.add_flag("--batch-invariant", s.batch_invariant,
                   "the output of a sequence does not depend on the rest of the batch, bit for bit; slower");
  command.add_flag("--json", s.json, "print JSON to stdout");
  command.add_flag("-q,--quiet", s.quiet, "print only errors to stderr");
}

void add_choice(CLI::App& command, Settings& s) {
  number(command, "--temperature", s.temperature, 0.0, 100.0,
         "sampling temperature, 0: greedy; default: that of generation_config.json (or 1) if it has do_sample or "
         "--top-k, --top-p or --min-p is given, else 0");
  number(command, "--top-k", s.top_k, 0, 1 << 24,
         "sample from the K most likely tokens, 0: all; default: as in generation_config.json, else 0");
  number(command, "--top-p", s.top_p, 0.0, 1.0,
         "sample from the most likely tokens whose probabilities add up to P, 1: all; default: as in "
         "generation_config.json, else 1");
  number(command, "--min-p", s.min_p, 0.0, 1.0,
         "sample from tokens with at least P times the probability of the most likely one, 0: all; default: as in "
         "generation_config.json, else 0");
  command.add_option(
      "--repetition-penalty", s.repetition_penalty,
      "penalty for tokens that the prompt or the output already has, 1e-6 to 1e6, 1: none; default: as in "
      "generation_config.json, else 1");
}

// CLI11 turns numbers that are too large into the largest one.
void add_seed(CLI::App& command, Settings& s, const char* what) {
  const auto check = [](const std::string& seed) {
    errno = 0;
    std::strtoull(seed.c_str(), nullptr, 0);
    const bool right = std::isdigit(static_cast<unsigned char>(seed[0])) != 0 && errno == 0;
    return std::string(right ? "" : "the seed is not an integer from 0 to 2^64 - 1");
  };
  command.add_option("--seed", s.seed, what)->check(check, "");
}

void add_sampling(CLI::App& command, Settings& s) {
  number(command, "-n,--tokens", s.most, -1, 1 << 30,
         "maximum number of new tokens; -1: until an EOS token or a full context");
  add_choice(command, s);
  add_seed(command, s,
           "seed of the sampling; default: random, and printed with the speed; sequence i of a batch has seed + i");
  command.add_option("--stop", s.stops, "stop string, not part of the output; repeatable")
      ->allow_extra_args(false)
      ->default_str("");
  number(command, "--lookup", s.lookup, int64_t(0), llm::kRing - 1,
         "prompt lookup decoding: up to N draft tokens per step, copied from the prompt and the output; 0: off");
  command.add_flag("--ignore-eos", s.ignore_eos, "continue after EOS tokens");
}

void add_sinks(CLI::App& command, Settings& s) {
  number(command, "--sinks", s.sinks, 0, 1 << 30,
         "when the context is full, keep the first N tokens (attention sinks, usually 4) and drop the oldest of the "
         "others; default: stop")
      ->default_str("");
}

void add_texts(CLI::App& command, int64_t& texts) {
  number(command, "--texts", texts, int64_t(1), llm::kMostTexts, "batch size: sequences decoded together");
}

// The options of all commands, and the exit code.
struct Given {
  Settings settings;
  llm::ChatOptions chat;
  std::string prompt, file, before;
  std::vector<int64_t> contexts{0};
  int64_t stride = 0, texts = 1, tokens = 0, steps = 128, length = 0;
  bool halves = false;
  double depth = 0.5;
  int code = 0;  // the exit code
};

void add_generate(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand("generate", "continues a prompt, or a batch of prompts");
  add_model(command, g.settings), add_sampling(command, g.settings);
  CLI::Option* const prompt =
      command.add_option("-p,--prompt,prompt", g.prompt, "the prompt; -: the standard input, without its last newline");
  command
      .add_option("-f,--prompts", g.file,
                  "file with one prompt per line (-: the standard input), decoded as a batch; empty lines are skipped")
      ->excludes(prompt);
  command.add_flag("!--no-echo", g.settings.echo, "print the output without the prompt");
  add_sinks(command, g.settings);
  command.callback([&] { g.code = llm::generate(g.settings, prompts_of(g.prompt, g.file)); });
}

void add_chat(CLI::App& app, Given& g) {
  CLI::App& command =
      *app.add_subcommand("chat", "answers messages, one per line of the standard input; /help lists the commands");
  add_model(command, g.settings), add_sampling(command, g.settings), add_sinks(command, g.settings);
  CLI::Option* const system = command.add_option("-s,--system", g.chat.system, "system prompt");
  command.add_option("-l,--load", g.chat.load, "continue a conversation that /save wrote")->excludes(system);
  command.add_option("--template", g.settings.chat_template,
                     "chat template: the name of one of the model's, or a file");
  command
      .add_option(
          "--template-set", g.settings.template_variables,
          "NAME=VALUE: variable of the chat template, such as enable_thinking=false; the value is true, false, null, "
          "an integer or a string; repeatable")
      ->allow_extra_args(false)
      ->default_str("");
  command.callback([&] { g.code = llm::chat(g.settings, g.chat, std::cin, stdout), check_input(); });
}

void add_info(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand("info", "prints the architecture and the memory plan; loads no weights");
  add_model(command, g.settings);
  add_texts(command, g.texts);
  command.callback([&] { g.code = llm::info(g.settings, g.texts); });
}

void add_perplexity(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand("perplexity", "computes the perplexity of a text file");
  add_model(command, g.settings);
  command.add_option("-f,--file,file", g.file, "text file; -: the standard input")->required();
  CLI::Option* const stride = number(command, "--stride", g.stride, 0, 1 << 30,
                                     "tokens from one window's start to the next; 0: half of the context");
  command
      .add_flag("--halves", g.halves,
                "as llama.cpp counts: windows do not overlap, each begins with BOS, and only its second half is scored")
      ->excludes(stride);
  command.callback([&] { g.code = llm::perplexity(g.settings, g.file, text_of(g.file), g.stride, g.halves); });
}

void add_bench(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand(
      "bench", "measures tokens per second, and the share of memory bandwidth that decoding reaches");
  add_model(command, g.settings);
  number(command, "--contexts", g.contexts, 0, 1 << 24, "context lengths at which decoding is measured, such as 0,4096")
      ->delimiter(',');
  number(command, "--prompt-tokens", g.tokens, 0, 1 << 24, "length of a prompt that is measured, too; 0: none");
  number(command, "--steps", g.steps, 1, 1 << 20,
         "decoding steps after each context; --context must hold both and 17 more tokens");
  add_texts(command, g.texts);
  command.footer("Decoding is greedy unless a sampling option is given.");
  add_choice(command, g.settings);
  command.add_option("--compare", g.before,
                     "file with the --json output of an earlier run: prints the speed relative to it; the exit code is "
                     "1 if anything is more than 5 % slower");
  command.callback([&] {
    g.code = llm::bench(g.settings, g.contexts, g.tokens, g.steps, g.texts,
                        g.before.empty() ? std::optional<llm::Json>() : llm::read_json(g.before));
  });
}

void add_passkey(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand("passkey", "hides a number in a long prompt and asks the model for it");
  add_model(command, g.settings);
  number(command, "--length", g.length, 0, 1 << 24, "tokens of the prompt; 0: the context");
  command.add_option("--depth", g.depth, "place of the number in the prompt: 0 start, 1 end");
  add_seed(command, g.settings, "seed that chooses the number; default: random");
  command.callback([&] { g.code = llm::passkey(g.settings, g.length, g.depth); });
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Runs language models from Hugging Face directories on a GPU or the CPU.");
  app.require_subcommand(1);
  app.option_defaults()->always_capture_default();
  app.set_version_flag("--version", llm::concat("llm, of kernels ", KERNELS_VERSION_MAJOR, ".", KERNELS_VERSION_MINOR,
                                                ".", KERNELS_VERSION_PATCH));
  Given g;
  for (const auto add : {add_generate, add_chat, add_info, add_perplexity, add_bench, add_passkey}) add(app, g);
  app.footer("llm COMMAND --help lists the options of a command.");
  try {
    try {
      // CLI11 would answer an unknown command only with the message that a command is missing.
      const auto is_named = [&](const CLI::App* command) { return command->check_name(argv[1]); };
      if (argc > 1 && argv[1][0] != '-' && app.get_subcommands(is_named).empty())
        throw CLI::ValidationError(llm::shown(argv[1]), "unknown command; --help lists them");
      app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
      g.code = app.exit(e);
    }
    llm::put(stdout, "");
    return g.code;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "error: out of memory; try a smaller --context, shorter prompts or fewer of them\n");
    return 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", llm::shown(e.what(), 600).c_str());
    return 1;
  }
}
