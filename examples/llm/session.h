// A model with all that belongs to it, and texts that grow: what the commands share.
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

// What the command line says about the model.
struct Settings {
  std::string directory, device = "auto", weights = "stored", inputs = "auto", cache = "auto";
  int threads = 0;
  int64_t context = 0, page = 0, chunk = 0;
  bool batch_invariant = false, json = false, quiet = false;
  // Sampling, where given; otherwise as generation_config.json says.
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<int64_t> top_k;
  std::optional<uint64_t> seed;
  // Whether an option says how the next token is chosen.
  bool chooses() const { return temperature || top_p || min_p || repetition_penalty || top_k; }
  int64_t most = -1;  // tokens to generate; -1: until the end of the text or of the context
  std::vector<std::string> stops;
  bool echo = true;  // generate prints the prompt as well
  bool ignore_eos = false;
  std::string chat_template;                    // a name or a file
  std::vector<std::string> template_variables;  // NAME=VALUE
  int64_t sinks =
      -1;  // texts go on when the context is full: so many first tokens are kept, and of the others the last
  int64_t lookup = 0;  // tokens that are guessed in a step

  // A line on the error output, unless it is to be quiet.
  template <class... Parts>
  void say(const Parts&... parts) const {
    if (!quiet) std::fputs((concat(parts...) + "\n").c_str(), stderr);
  }
};

// Whether Ctrl-C was pressed. Pressed more than so many times, from this call on, it ends the program.
bool interrupted();
void catch_interrupts(int times = 1);

// Guesses: what came behind the latest of the places where the last tokens stood before, where most of them did, of up
// to four, and two at least. Behind the end of the text the guesses themselves go on: it may go around in a circle.
std::vector<int32_t> lookup(const std::vector<int32_t>& ids, int64_t most);

// A line on stderr, where that is a terminal and not to be quiet, that says how much of something is done. It is erased
// in the end.
class ProgressLine {
 public:
  ProgressLine(const Settings& settings, const char* what, double after);  // nothing before so many seconds
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

// The stop strings of a text that comes in pieces: what may be the beginning of one is held back. Of several the one
// that is complete first counts, of those the one that began first, so that it does not matter where the pieces are
// cut.
class Stops {
 public:
  explicit Stops(const std::vector<std::string>& stops) : stops_(&stops) {}
  // Returns what can be printed; `found`: a stop is complete, and nothing follows.
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

  // A text that is being written.
  struct Text {
    Tokenizer::Ids ids;
    int64_t prompt = 0;            // of them
    int64_t read = 0;              // of them, which are in the cache
    std::string written;           // what came behind the prompt
    const char* finish = nullptr;  // "stop", "length", "interrupted"
  };
  struct Times {
    double prompt_seconds = 0, decode_seconds = 0;
    int64_t prompt_tokens = 0, steps = 0, decoded = 0;
    double speed() const { return decode_seconds > 0 ? double(decoded) / decode_seconds : 0; }  // tokens/s
  };
  // Writes on in as many texts as there are prompts; print gets what is new of each. `known`: tokens of a single text
  // that the cache has, if the next call is to go on with what it has then; otherwise -1.
  using Print = std::function<void(size_t text, const std::string& more)>;
  std::vector<Text> generate(const std::vector<Tokenizer::Ids>& prompts, const Print& print, Times& times,
                             int64_t known = -1);
  // As generate() does: that they can be read. lines: where they stand in a file, if they do.
  void check(const std::vector<Tokenizer::Ids>& prompts, const std::vector<int64_t>& lines = {}) const;

  const Settings& settings;
  Json generation;  // generation_config.json
  Config config;
  std::optional<Weights> weights;
  std::optional<Tokenizer> tokenizer;
  std::unique_ptr<Device> device;
  std::optional<Model> model;
  std::optional<Format> format;  // how to chat, or
  std::string why_no_format;
  std::vector<int32_t> stops;        // tokens that end a text
  std::vector<int32_t> asked_stops;  // those that --stop names, whose text is never seen where they are special
  Choice choice;                     // how the next token is chosen
  uint64_t seed = 0;
  int64_t tokens() const;  // how many the model and its tokenizer both have

  // The model, for so many texts; before that only what describes it is there. Texts whose angles depend on their
  // length are written one after the other.
  void load(int64_t sequences);
  ModelOptions options(int64_t sequences) const;
  Json about() const;  // what JSON says of every run: the device, and the context of those that there could be
  void say_changes(const Plan& plan) const;  // which weights become another type, unless --quiet

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
