// A session: a model with its tokenizer, chat format and sampling options, and the generation of texts. The commands
// share it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "format.h"
#include "model.h"
#include "tokenizer/tokenizer.h"

namespace llm {

// The options of the command line.
struct Settings {
  std::string directory, device = "auto", weights = "stored", inputs = "auto", cache = "auto";
  int threads = 0;
  int64_t context = 0, page = 0, chunk = 0;
  bool batch_invariant = false, json = false, quiet = false;
  // Sampling. An option that is not given has the value of generation_config.json.
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<int64_t> top_k;
  std::optional<uint64_t> seed;
  // Whether a sampling option is given.
  bool chooses() const { return temperature || top_p || min_p || repetition_penalty || top_k; }
  int64_t most = -1;  // tokens to generate at most; -1: until the text or the context ends
  std::vector<std::string> stops;
  bool echo = true;  // generate prints the prompt as well
  bool ignore_eos = false;
  std::string chat_template;                    // a name or a file
  std::vector<std::string> template_variables;  // NAME=VALUE
  int64_t sinks = -1;  // >= 0: texts continue when the context is full, and this many first tokens are kept
  int64_t lookup = 0;  // tokens that a step guesses at most

  // Writes a line to stderr, unless --quiet is given.
  template <class... Parts>
  void say(const Parts&... parts) const {
    if (!quiet) std::fputs((concat(parts...) + "\n").c_str(), stderr);
  }
};

// interrupted: whether Ctrl-C was pressed. catch_interrupts: counts from this call on, and pressing Ctrl-C more than
// `times` times ends the program.
bool interrupted();
void catch_interrupts(int times = 1);

// Guesses of up to `most` next tokens (prompt lookup): the tokens that followed an earlier occurrence of the last
// tokens, of two at least and four at most. The longest match counts, and of equal ones the latest. Where the text
// ends, the guesses repeat themselves, since it may go around in a circle.
std::vector<int32_t> lookup(const std::vector<int32_t>& ids, int64_t most);

// A line on stderr that says how much of something is done, and is erased in the end. There is none if stderr is not a
// terminal, or with --quiet.
class ProgressLine {
 public:
  ProgressLine(const Settings& settings, const char* what, double after);  // not shown before this many seconds
  static bool can_show(const Settings& settings);
  ~ProgressLine() { erase(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  void show(double share);
  void erase();

 private:
  const std::string what_;
  const bool shows_;
  bool is_there_ = false;
  double next_;  // when it is written again
};

// Finds stop strings in a text that comes in pieces. A possible beginning of one is held back. Of several stop strings
// the one that ends first counts, and of those the one that begins first, so that it does not matter where the pieces
// are cut.
class Stops {
 public:
  explicit Stops(const std::vector<std::string>& stops) : stops_(&stops) {}
  // Returns what can be printed. found: a stop string is complete, and the text ends before it.
  std::string add(const std::string& text, bool& found);
  std::string rest() { return take(held_.size()); }  // at the end of the text

 private:
  std::string take(size_t n);
  const std::vector<std::string>* stops_;
  std::string held_;
};

class Session {
 public:
  explicit Session(const Settings& settings);

  // A text that is being generated.
  struct Text {
    Tokenizer::Ids ids;
    int64_t prompt = 0;            // how many of them are the prompt
    int64_t read = 0;              // how many of them are in the cache
    std::string written;           // the text after the prompt
    const char* finish = nullptr;  // "stop", "length", "interrupted"
  };
  struct Times {
    double prompt_seconds = 0, decode_seconds = 0;
    // firsts: the first new token of each text, which prompt_seconds include; decoded: all new tokens.
    int64_t prompt_tokens = 0, steps = 0, decoded = 0, firsts = 0;
    // ", N tokens/s" of those behind the first ones, if there are any.
    std::string speed() const {
      return decoded > firsts ? ", " + fixed(double(decoded - firsts) / decode_seconds, 1) + " tokens/s" : "";
    }
  };
  // Continues all prompts; print gets what is new of each text. known: of a single text whose cache the next call will
  // use again, how many tokens the cache has already; otherwise -1.
  using Print = std::function<void(size_t text, const std::string& more)>;
  std::vector<Text> generate(const std::vector<Tokenizer::Ids>& prompts, const Print& print, Times& times,
                             int64_t known = -1);
  // Checks that prompts can be read, as generate() does. lines: their line numbers in a file, for the message.
  void check(const std::vector<Tokenizer::Ids>& prompts, const std::vector<int64_t>& lines = {}) const;

  const Settings& settings;
  Json generation;  // generation_config.json
  Config config;
  std::optional<Weights> weights;
  std::optional<Tokenizer> tokenizer;
  std::unique_ptr<Device> device;
  std::optional<Model> model;
  std::optional<Format> format;  // the chat format, or
  std::string why_no_format;
  std::vector<int32_t> stops;        // tokens that end a text
  std::vector<int32_t> asked_stops;  // those that --stop names; special tokens have no text in which it could be found
  Choice choice;                     // how the next token is sampled
  uint64_t seed = 0;
  int64_t tokens() const;  // how many tokens both model and tokenizer have

  // Loads the model for this many texts; the constructor only reads what describes it. Texts whose angles depend on
  // their length are generated one after the other.
  void load(int64_t sequences);
  ModelOptions options(int64_t sequences) const;
  Json about() const;  // what the JSON of every run says: the device, the context, and the positions of the model
  void say_changes(const Plan& plan) const;  // which weights are converted, unless --quiet

 private:
  void find_stops();
  void read_sampling();
  void say_unread(const char* file, const std::vector<std::string>& fields) const;
  void choose_device();
};

double seconds_now();
// -log(softmax(logits)[id])
double negative_log_likelihood(const float* logits, int64_t count, int32_t id);

}  // namespace llm
