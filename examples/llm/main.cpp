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
  if (std::ferror(stdin) != 0) throw Error("the standard input cannot be read");
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
  if (int64_t(count) > llm::kMostTexts) throw Error(file, ": more than ", llm::kMostTexts, " prompts, ", count);
  return out;
}

// Adds an option that is a number from `least` to `most`.
template <class T, class To>
CLI::Option* number(CLI::App& command, const char* name, To& to, T least, T most, const char* what) {
  const CLI::Range range(least, most);
  const auto check = [range](std::string& text) {  // CLI::Range alone would say that "5x" is not in range
    double x = 0;
    return CLI::detail::lexical_cast(text, x) ? range(text) : llm::shown(text) + " is no number";
  };
  return command.add_option(name, to, what)->check(CLI::Validator(check, range.get_description()));
}

void add_model(CLI::App& command, Settings& s) {
  command.add_option("-m,--model", s.directory, "a Hugging Face directory")->required();
  command.add_option("-d,--device", s.device, "auto, cpu or gpu");
  number(command, "-t,--threads", s.threads, 0, 1024, "of the CPU; 0: one for each core that it may use");
  command.add_option("-w,--weights", s.weights,
                     "stored (or the nearest that the device has), fp32, fp16, bf16, fp8, int8 or int4; embeddings and "
                     "head stay at 16 bits or more");
  command.add_option("--inputs", s.inputs,
                     "of products with the weights, where a prompt has many tokens: auto (the type of the "
                     "activations), or int8 or fp8 with --weights of that type, which is faster on GPUs with sm_90 and "
                     "a little coarser");
  command.add_option("--cache", s.cache, "of keys and values: auto, fp32, fp16, bf16, fp8 or int8");
  number(command, "-c,--context", s.context, 0, 1 << 30, "tokens; 0: as many as the model takes and as fit");
  number(command, "--page", s.page, 0, 1 << 30, "positions in a page of the cache; 0: one page to a text");
  number(command, "--chunk", s.chunk, 0, 1 << 20,
         "tokens of a prompt that are computed together; 0: 512 on the CPU, 2048 on the GPU");
  command.add_flag("--batch-invariant", s.batch_invariant,
                   "a text has the same bits alone and beside any others, at some cost in speed");
  command.add_flag("--json", s.json, "print JSON");
  command.add_flag("-q,--quiet", s.quiet, "nothing but the text");
}

void add_choice(CLI::App& command, Settings& s) {
  number(command, "--temperature", s.temperature, 0.0, 100.0,
         "0: always the most likely token; by default what generation_config.json says, or 1 with --top-k, --top-p or "
         "--min-p");
  number(command, "--top-k", s.top_k, 0, 1 << 24, "of so many tokens; 0: of all");
  number(command, "--top-p", s.top_p, 0.0, 1.0, "of the most likely tokens that together have this share");
  number(command, "--min-p", s.min_p, 0.0, 1.0, "of those with this share of the most likely one's");
  command.add_option("--repetition-penalty", s.repetition_penalty, "for tokens that the text has already");
}

// CLI11 turns numbers that are too large into the largest one.
void add_seed(CLI::App& command, Settings& s, const char* what) {
  const auto check = [](const std::string& seed) {
    errno = 0;
    std::strtoull(seed.c_str(), nullptr, 0);
    const bool right = std::isdigit(static_cast<unsigned char>(seed[0])) != 0 && errno == 0;
    return std::string(right ? "" : "a seed is a number from 0 to 2^64 - 1");
  };
  command.add_option("--seed", s.seed, what)->check(check, "");
}

void add_sampling(CLI::App& command, Settings& s) {
  number(command, "-n,--tokens", s.most, -1, 1 << 30, "at most so many new tokens; -1: until the text ends");
  add_choice(command, s);
  add_seed(command, s,
           "for the same text again; printed with the speed. Of several texts each has the seed of the one before it "
           "and 1");
  command.add_option("--stop", s.stops, "a string that ends the text, as it is; may be given again")
      ->allow_extra_args(false)
      ->default_str("");
  number(command, "--lookup", s.lookup, int64_t(0), llm::kRing - 1,
         "guess so many tokens at once from what the text has already: the same text, sooner if it repeats itself");
  command.add_flag("--ignore-eos", s.ignore_eos, "go on where the model would end");
}

void add_sinks(CLI::App& command, Settings& s) {
  number(command, "--sinks", s.sinks, 0, 1 << 30,
         "go on when the context is full: keep so many first tokens, 4 say, and forget the oldest others; not unless "
         "given")
      ->default_str("");
}

void add_texts(CLI::App& command, int64_t& texts) {
  number(command, "--texts", texts, int64_t(1), llm::kMostTexts, "decoded together");
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
  CLI::App& command = *app.add_subcommand("generate", "goes on with a text");
  add_model(command, g.settings), add_sampling(command, g.settings);
  CLI::Option* const prompt = command.add_option(
      "-p,--prompt,prompt", g.prompt, "the text; - reads it from the standard input, without a newline at its end");
  command
      .add_option("-f,--prompts", g.file,
                  "a file with a prompt in each line that is not empty, or -; all of them are decoded together")
      ->excludes(prompt);
  command.add_flag("!--no-echo", g.settings.echo, "print what is new, without the prompt");
  add_sinks(command, g.settings);
  command.callback([&] { g.code = llm::generate(g.settings, prompts_of(g.prompt, g.file)); });
}

void add_chat(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand(
      "chat", "talks: a message from each line of the input, and an answer to it; /help tells more");
  add_model(command, g.settings), add_sampling(command, g.settings), add_sinks(command, g.settings);
  CLI::Option* const system = command.add_option("-s,--system", g.chat.system, "what the model is told about its part");
  command.add_option("-l,--load", g.chat.load, "go on with messages that /save has written")->excludes(system);
  command.add_option("--template", g.settings.chat_template,
                     "a name of one of the model's templates, or a file with one");
  command
      .add_option(
          "--template-set", g.settings.template_variables,
          "NAME=VALUE: a variable of the template, enable_thinking=false say: true, false, null, a whole number "
          "or a text; may be given again")
      ->allow_extra_args(false)
      ->default_str("");
  command.callback([&] { g.code = llm::chat(g.settings, g.chat, std::cin, stdout), check_input(); });
}

void add_info(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand("info", "what a model is, and the memory that it will take");
  add_model(command, g.settings);
  add_texts(command, g.texts);
  command.callback([&] { g.code = llm::info(g.settings, g.texts); });
}

void add_perplexity(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand("perplexity", "how well a model foresees a text");
  add_model(command, g.settings);
  command.add_option("-f,--file,file", g.file, "the text; - reads it from the standard input")->required();
  CLI::Option* const stride =
      number(command, "--stride", g.stride, 0, 1 << 30, "tokens from one window to the next; 0: half of the context");
  command
      .add_flag("--halves", g.halves,
                "as llama.cpp counts: windows side by side, each with its own BOS, of which the second halves count")
      ->excludes(stride);
  command.callback([&] { g.code = llm::perplexity(g.settings, {g.file, text_of(g.file)}, g.stride, g.halves); });
}

void add_bench(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand("bench", "how fast a model is, beside how fast its memory can be read");
  add_model(command, g.settings);
  number(command, "--contexts", g.contexts, 0, 1 << 24, "tokens before those that are decoded, 0,4096 say")
      ->delimiter(',');
  number(command, "--prompt-tokens", g.tokens, 0, 1 << 24, "of a prompt that is measured as well; 0: none");
  number(command, "--steps", g.steps, 1, 1 << 20, "to be measured at each context");
  add_texts(command, g.texts);
  command.footer(
      "The next token is the most likely one, whatever generation_config.json says, unless an option says otherwise.");
  add_choice(command, g.settings);
  command.add_option("--compare", g.before,
                     "a file with what an earlier run printed with --json: prints how many times as fast this one is, "
                     "and ends with 1 if anything is slower by more than 5 %");
  command.callback([&] {
    g.code = llm::bench(g.settings, g.contexts, g.tokens, g.steps, g.texts,
                        g.before.empty() ? std::optional<llm::Json>() : llm::read_json(g.before));
  });
}

void add_passkey(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand("passkey", "whether a model finds a number in a long text");
  add_model(command, g.settings);
  number(command, "--length", g.length, 0, 1 << 24, "tokens of the text; 0: the context");
  command.add_option("--depth", g.depth, "where in the text: 0 at its beginning, 1 at its end");
  add_seed(command, g.settings, "which number");
  command.callback([&] { g.code = llm::passkey(g.settings, g.length, g.depth); });
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Runs transformers from Hugging Face directories, on the GPU or the CPU.");
  app.require_subcommand(1);
  app.option_defaults()->always_capture_default();
  app.set_version_flag("--version", llm::concat("llm, of kernels ", KERNELS_VERSION_MAJOR, ".", KERNELS_VERSION_MINOR,
                                                ".", KERNELS_VERSION_PATCH));
  app.footer("llm COMMAND --help has the options of a command.");
  Given g;
  for (const auto add : {add_generate, add_chat, add_info, add_perplexity, add_bench, add_passkey}) add(app, g);
  try {
    try {
      // CLI11 would answer an unknown command only with the message that a command is missing.
      const auto is_named = [&](const CLI::App* command) { return command->check_name(argv[1]); };
      if (argc > 1 && argv[1][0] != '-' && app.get_subcommands(is_named).empty())
        throw CLI::ValidationError(llm::shown(argv[1]), "is no command; --help lists them");
      app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
      g.code = app.exit(e);
    }
    llm::put(stdout, "");
    return g.code;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr,
                 "error: there is no memory left: a smaller --context takes less, and so do fewer or shorter texts\n");
    return 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", llm::shown(e.what(), 600).c_str());
    return 1;
  }
}
