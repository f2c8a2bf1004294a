// llm: runs transformers from Hugging Face directories. What it prints to stdout is text, or JSON; everything else goes
// to stderr.
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

// A directory, say, is no input, and nothing can be read of it.
void check_input() {
  if (std::ferror(stdin) != 0) throw Error("the standard input cannot be read");
}

// "-" is the standard input.
std::string text_of(const std::string& file) {
  if (file != "-") return llm::read_file(file);
  const std::string text(std::istreambuf_iterator<char>(std::cin), {});
  check_input();
  return text;
}

// One in each line of a file, whatever ends it; or one.
llm::Prompts prompts_of(const std::string& prompt, const std::string& file) {
  if (file.empty()) {
    std::string one = prompt == "-" ? text_of(prompt) : prompt;
    if (prompt == "-" && !one.empty() && one.back() == '\n') one.pop_back();  // which programs end what they print with
    return {{one}, {}};
  }
  std::string text = text_of(file);
  if (text.compare(0, 3, "\xef\xbb\xbf") == 0) text.erase(0, 3);  // which some editors begin files with
  llm::Prompts out;
  std::istringstream lines(text);
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    number += 1;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!line.empty()) out.texts.push_back(line), out.lines.push_back(number);
  }
  const size_t count = out.texts.size();
  if (count == 0) throw Error(file + ": no prompts");
  if (int64_t(count) > llm::kMostTexts)
    throw Error(file + ": more than " + std::to_string(llm::kMostTexts) + " prompts, " + std::to_string(count));
  return out;
}

// CLI::Range says of "5x", too, that it is not in range.
template <class T>
CLI::Validator within(T least, T most) {
  const CLI::Range range(least, most);
  const auto check = [range](std::string& text) {
    double number = 0;
    return CLI::detail::lexical_cast(text, number) ? range(text) : llm::shown(text) + " is no number";
  };
  return CLI::Validator(check, range.get_description());
}

void add_model(CLI::App& command, Settings& s) {
  command.add_option("-m,--model", s.directory, "a Hugging Face directory")->required();
  command.add_option("-d,--device", s.device, "auto, cpu or gpu")->capture_default_str();
  command.add_option("-t,--threads", s.threads, "of the CPU; 0: one for each core that it may use")
      ->capture_default_str()
      ->check(within(0, 1024));
  command
      .add_option("-w,--weights", s.weights,
                  "stored (or the nearest that the device has), fp32, fp16, bf16, fp8, int8 or int4; embeddings and "
                  "head stay at 16 bits or more")
      ->capture_default_str();
  command
      .add_option("--inputs", s.inputs,
                  "of products with the weights, where a prompt has many tokens: auto (the type of the activations), "
                  "or int8 or fp8 with --weights of that type, which is faster on GPUs with sm_90 and a little coarser")
      ->capture_default_str();
  command.add_option("--cache", s.cache, "of keys and values: auto, fp32, fp16, bf16, fp8 or int8")
      ->capture_default_str();
  command.add_option("-c,--context", s.context, "tokens; 0: as many as the model takes and as fit")
      ->capture_default_str()
      ->check(within(0, 1 << 30));
  command.add_option("--page", s.page, "positions in a page of the cache; 0: one page to a text")
      ->capture_default_str()
      ->check(within(0, 1 << 30));
  command
      .add_option("--chunk", s.chunk,
                  "tokens of a prompt that are computed together; 0: 512 on the CPU, 2048 on the GPU")
      ->capture_default_str()
      ->check(within(0, 1 << 20));
  command.add_flag("--batch-invariant", s.batch_invariant,
                   "a text has the same bits alone and beside any others, at some cost in speed");
  command.add_flag("--json", s.json, "print JSON");
  command.add_flag("-q,--quiet", s.quiet, "nothing but the text");
}

void add_choice(CLI::App& command, Settings& s) {
  command
      .add_option("--temperature", s.temperature,
                  "0: always the most likely token; by default what generation_config.json says, or 1 with --top-k, "
                  "--top-p or --min-p")
      ->check(within(0.0, 100.0));
  command.add_option("--top-k", s.top_k, "of so many tokens; 0: of all")->check(within(0, 1 << 24));
  command.add_option("--top-p", s.top_p, "of the most likely tokens that together have this share")
      ->check(within(0.0, 1.0));
  command.add_option("--min-p", s.min_p, "of those with this share of the most likely one's")->check(within(0.0, 1.0));
  command.add_option("--repetition-penalty", s.repetition_penalty, "for tokens that the text has already");
}

// CLI11 makes the largest number of those that are too large.
void add_seed(CLI::App& command, Settings& s, const char* what) {
  command.add_option("--seed", s.seed, what)
      ->check(
          [](const std::string& seed) {
            errno = 0;
            std::strtoull(seed.c_str(), nullptr, 0);
            const bool right = std::isdigit(static_cast<unsigned char>(seed[0])) != 0 && errno == 0;
            return std::string(right ? "" : "a seed is a number from 0 to 2^64 - 1");
          },
          "");
}

void add_sampling(CLI::App& command, Settings& s) {
  command.add_option("-n,--tokens", s.most, "at most so many new tokens; -1: until the text ends")
      ->capture_default_str()
      ->check(within(-1, 1 << 30));
  add_choice(command, s);
  add_seed(
      command, s,
      "for the same text again; printed with the speed. Of several texts each has the seed of the one before it and 1");
  command.add_option("--stop", s.stops, "a string that ends the text, as it is; may be given again")
      ->allow_extra_args(false);
  command
      .add_option(
          "--lookup", s.lookup,
          "guess so many tokens at once from what the text has already: the same text, sooner if it repeats itself")
      ->capture_default_str()
      ->check(within(0, 63));
  command.add_flag("--ignore-eos", s.ignore_eos, "go on where the model would end");
}

void add_sinks(CLI::App& command, Settings& s) {
  command
      .add_option("--sinks", s.sinks,
                  "go on when the context is full: keep so many first tokens, 4 say, and forget the oldest others; not "
                  "unless given")
      ->check(within(0, 1 << 30));
}

void add_texts(CLI::App& command, int64_t& texts) {
  command.add_option("--texts", texts, "decoded together")
      ->capture_default_str()
      ->check(within(int64_t(1), llm::kMostTexts));
}

// What the commands are told.
struct Given {
  Settings settings;
  llm::ChatOptions chat;
  std::string prompt, file, before;
  std::vector<int64_t> contexts{0};
  int64_t stride = 0, texts = 1, tokens = 0, steps = 128, length = 0;
  bool halves = false;
  double depth = 0.5;
};

CLI::App& add_generate(CLI::App& app, Given& g) {
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
  return command;
}

CLI::App& add_chat(CLI::App& app, Given& g) {
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
      ->allow_extra_args(false);
  return command;
}

CLI::App& add_info(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand("info", "what a model is, and the memory that it will take");
  add_model(command, g.settings);
  add_texts(command, g.texts);
  return command;
}

void add_perplexity(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand("perplexity", "how well a model foresees a text");
  add_model(command, g.settings);
  command.add_option("-f,--file,file", g.file, "the text; - reads it from the standard input")->required();
  CLI::Option* const stride =
      command.add_option("--stride", g.stride, "tokens from one window to the next; 0: half of the context")
          ->capture_default_str()
          ->check(within(0, 1 << 30));
  command
      .add_flag("--halves", g.halves,
                "as llama.cpp counts: windows side by side, each with its own BOS, of which the second halves count")
      ->excludes(stride);
}

CLI::App& add_bench(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand("bench", "how fast a model is, beside how fast its memory can be read");
  add_model(command, g.settings);
  command.add_option("--contexts", g.contexts, "tokens before those that are decoded, 0,4096 say")
      ->delimiter(',')
      ->capture_default_str()
      ->check(within(0, 1 << 24));
  command.add_option("--prompt-tokens", g.tokens, "of a prompt that is measured as well; 0: none")
      ->capture_default_str()
      ->check(within(0, 1 << 24));
  command.add_option("--steps", g.steps, "to be measured at each context")
      ->capture_default_str()
      ->check(within(1, 1 << 20));
  add_texts(command, g.texts);
  command.footer(
      "The next token is the most likely one, whatever generation_config.json says, unless an option says otherwise.");
  add_choice(command, g.settings);
  command.add_option("--compare", g.before,
                     "a file with what an earlier run printed with --json: prints how many times as fast this one is, "
                     "and ends with 1 if anything is slower by more than 5 %");
  return command;
}

CLI::App& add_passkey(CLI::App& app, Given& g) {
  CLI::App& command = *app.add_subcommand("passkey", "whether a model finds a number in a long text");
  add_model(command, g.settings);
  command.add_option("--length", g.length, "tokens of the text; 0: the context")
      ->capture_default_str()
      ->check(within(0, 1 << 24));
  command.add_option("--depth", g.depth, "where in the text: 0 at its beginning, 1 at its end")->capture_default_str();
  add_seed(command, g.settings, "which number");
  return command;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Runs transformers from Hugging Face directories, on the GPU or the CPU.");
  app.require_subcommand(1);
  app.set_version_flag("--version", "llm, of kernels " + std::to_string(KERNELS_VERSION_MAJOR) + "." +
                                        std::to_string(KERNELS_VERSION_MINOR) + "." +
                                        std::to_string(KERNELS_VERSION_PATCH));
  app.footer("llm COMMAND --help has the options of a command.");
  Given g;
  const CLI::App &generate = add_generate(app, g), &chat = add_chat(app, g), &info = add_info(app, g);
  add_perplexity(app, g);
  const CLI::App &bench = add_bench(app, g), &passkey = add_passkey(app, g);

  const auto parse = [&] {
    // Of a word that is none of the commands it would only be said that one is missing.
    const auto is_named = [&](const CLI::App* command) { return command->check_name(argv[1]); };
    if (argc > 1 && argv[1][0] != '-' && app.get_subcommands(is_named).empty())
      throw CLI::ValidationError(llm::shown(argv[1]), "is no command; --help lists them");
    app.parse(argc, argv);
  };
  const auto run = [&] {
    if (generate.parsed()) return llm::generate(g.settings, prompts_of(g.prompt, g.file));
    if (chat.parsed()) {
      const int code = llm::chat(g.settings, g.chat, std::cin, stdout);
      return check_input(), code;
    }
    if (info.parsed()) return llm::info(g.settings, g.texts);
    if (bench.parsed())
      return llm::bench(g.settings, g.contexts, g.tokens, g.steps, g.texts,
                        g.before.empty() ? std::optional<llm::Json>() : llm::read_json(g.before));
    if (passkey.parsed()) return llm::passkey(g.settings, g.length, g.depth);
    return llm::perplexity(g.settings, {g.file, text_of(g.file)}, g.stride, g.halves);
  };
  try {
    int code = 0;
    try {
      parse();
      code = run();
    } catch (const CLI::ParseError& e) {
      code = app.exit(e);
    }
    llm::put(stdout, "");
    return code;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr,
                 "error: there is no memory left: a smaller --context takes less, and so do fewer or shorter texts\n");
    return 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", llm::shown(e.what(), 600).c_str());
    return 1;
  }
}
